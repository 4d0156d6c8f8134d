"""Declarations, bodies and costs that are refused, each with what to write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost, Details, Optional, Repeat
from te_fuser.ops.base import Gradient
from tests.fusions.declared import declared
from tests.fusions.registered import FREE, X
from tests.refused import refused
from tests.twins import assert_as_meant, sequential, tensor

NAN, INF = float("nan"), float("inf")


def test_a_pattern_that_can_never_match():
    with pytest.raises(ValueError, match=r"fusion 'mine': Linear is lowered .* name those instead"):
        te_fuser.fusion(forward=[ops.Linear, ops.GELU], name="mine")(lambda m, x: x)


def test_a_fusion_that_emits_too_little_for_every_backward():
    """It is left out, the plan names what is missing, and the model runs without it."""

    @te_fuser.fusion(forward=[ops.MatMul, ops.GELU], name="mine", cost=lambda m: fusions.Cost(seconds=0.0))
    def mine(m, x):
        raise AssertionError("must not run")

    model = sequential(ops.MatMul(8, 8), ops.GELU(), ops.MatMul(8, 8))
    (reason,) = (r.reason for r in model.plan(X).refusals if r.name == "mine")
    assert "mat_mul.output" in reason and "gives only" in reason
    assert_as_meant(model, X)


@pytest.mark.parametrize(
    "number", [{"seconds": NAN}, {"read": INF}, {"launches": -1}, {"efficiency": 0}, {"flops": "1"}]
)
@pytest.mark.parametrize("whole", [lambda c: c, lambda c: (c, fusions.Cost())])
def test_a_cost_that_nothing_takes(number, whole):
    """Of a fusion in one direction, and of one in both."""
    cost, (name, value) = whole(fusions.Cost(**number)), *number.items()
    given = {"cost": lambda m: cost, "name": "mine", "details": Details(registered=False)}
    if isinstance(cost, tuple):
        body = type("Body", (), {"forward": staticmethod(lambda m, x: x), "backward": staticmethod(lambda m, dy: dy)})
        mine = te_fuser.fusion(joint=[ops.GELU, ops.SiLU], reads=["input"], **given)(body)
    else:
        mine = te_fuser.fusion(forward=[ops.GELU, ops.SiLU], **given)(lambda m, x: x)
    model = sequential(ops.GELU(), ops.SiLU())
    with fusions.only(mine):
        refused(TypeError, [f"^fusion 'mine': its `cost` gives a Cost of {name}={value!r}"], lambda: model(X))


def test_costs_where_one_is_wanted():
    mine = te_fuser.fusion(
        forward=[ops.GELU, ops.SiLU],
        cost=lambda m: (fusions.Cost(), fusions.Cost()),
        name="mine",
        details=Details(registered=False),
    )(lambda m, x: x)
    with fusions.only(mine):
        refused(
            TypeError,
            ["fusion 'mine': its `cost` gives tuple, not a Cost"],
            lambda: sequential(ops.GELU(), ops.SiLU())(X),
        )


def test_a_fusion_that_gives_another_shape_than_its_ops():
    def lie(x, weight):
        return (x @ weight.t())[:, :4]

    declared = te_fuser.fusion(
        forward=[ops.MatMul],
        name="lie",
        details=Details(takes=("input", "0.weight")),
        cost=lambda m: fusions.Cost(seconds=0.0),
    )
    declared(lie)
    model = te_fuser.Sequential(ops.MatMul(8, 8), ops.GELU())
    words = r"^fusion 'lie' over op 0 \(MatMul '0'\): mat_mul.output is float32 \[6, 4\] cpu, the plan says float32"
    with pytest.raises(ValueError, match=words):
        model(X.detach().float())


DECLARED_WRONG = {
    "no_pattern": ({}, "exactly one of forward=, backward=, joint=, got none"),
    "two_patterns": ({"forward": [ops.GELU], "backward": [ops.GELU]}, r"got \['forward', 'backward'\]"),
    "joint_function": (
        {"joint": [ops.GELU]},
        "'mine': a joint fusion is a class with static methods forward and backward",
    ),
    "reads_in_forward": (
        {"forward": [ops.GELU], "reads": ["input"]},
        "a forward fusion has no reads; that is for backward, joint",
    ),
    "emits_in_backward": ({"backward": [ops.GELU], "emits": ["0.output"]}, "a backward fusion has no emits"),
    "saves_in_forward": ({"forward": [ops.GELU], "saves": ["a"]}, "a forward fusion has no saves; that is for joint"),
    "sums_in_forward": ({"forward": [ops.GELU], "sums": ["0.bias"]}, "a forward fusion has no sums; that is"),
    "sums_of_plain_function": (
        {"backward": [ops.Bias], "takes": ["dy"], "sums": ["0.bias"]},
        r"sums are left by m.later, which a plain function of tensors \(takes, gradients\) has not",
    ),
    "sums_from_the_end": (
        {"backward": [ops.Bias], "sums": ["-1.bias"]},
        "sums are gradients of the match's parameters, as in '0.bias'; got '-1.bias'",
    ),
    "emits_a_word": ({"forward": [ops.GELU], "emits": ["mean"]}, "emits names values inside the match, .*got 'mean'"),
    "emits_beyond_its_pattern": (
        {"forward": [ops.MatMul, fusions.Optional(ops.Bias), fusions.OneOf(ops.GELU, ops.ReLU)], "emits": ["3.output"]},
        r"fusion 'mine': emits '3.output', and its pattern has at most 3 ops, counted from 0",
    ),
    "a_node_that_waits": (
        {"backward": [ops.GELU], "gradients": [Gradient(("input",), (), "start", wait="end")]},
        "a node of a fusion is one step of its backward: only an op's gradient may start something",
    ),
    "a_node_that_is_delayed": (
        {"backward": [ops.GELU], "gradients": [Gradient(("input",), (), "input_gradient", delayed=True)]},
        "only an op's gradient may start something and wait for it later, or be delayed",
    ),
    "reads_a_word": (
        {"backward": [ops.GELU], "reads": ["inpt"]},
        r"fusion 'mine': reads 'inpt', which is none of its names \('input', 'output', '0.weight'\)",
    ),
    "takes_beyond_its_pattern": (
        {"forward": [ops.MatMul], "takes": ["input", "1.weight"]},
        "fusion 'mine': takes '1.weight', and its pattern has at most 1 ops",
    ),
    "takes_of_backward": ({"forward": [ops.GELU], "takes": ["dy"]}, "takes 'dy', which is none of its names"),
    "takes_what_it_does_not_read": (
        {"backward": [ops.GELU], "takes": ["dy", "input"]},
        r"takes 'input', which is none of its names \('dy', '0.weight'\); name it in reads",
    ),
    "gives_without_takes": (
        {"backward": [ops.Bias], "gives": ["input", "0.bias"]},
        "gives names what a plain function of tensors returns: name its arguments in takes",
    ),
    "gradients_of_a_function": (
        {"backward": [ops.GELU], "gradients": [Gradient(("input",), (), "apart")]},
        "it decorates a class with a static method 'apart', as its gradients say",
    ),
    "saved_bytes_in_forward": ({"forward": [ops.GELU], "saved_bytes": dict}, "a forward fusion has no saved_bytes"),
    "name_taken": (
        {"forward": [ops.GELU], "name": "matmul_bias"},
        r"'matmul_bias' is registered; unregister\('matmul_bias'\)",
    ),
    "name_of_the_kernel": ({"forward": [ops.GELU], "name": "stretch"}, "a fusion named 'stretch' is registered"),
}


@pytest.mark.parametrize("name", DECLARED_WRONG)
def test_wrong_declarations(name):
    options, words = DECLARED_WRONG[name]
    with pytest.raises(ValueError, match=words):
        declared(**{"name": "mine", **options})(lambda m, x: x)


@pytest.mark.parametrize(
    ("options", "body", "words"),
    [
        ({"when": True}, len, "fusion: when is a function of the match, got True; write a lambda"),
        ({"cost": Cost(seconds=1.0)}, len, r"fusion: cost is a function of the match, got Cost\(read"),
        ({"choose": 3, "takes": ["input"]}, len, "fusion: choose is a function of the match, got 3"),
        ({"details": {"registered": False}}, len, r"details is fusions.Details\(...\), got {'registered': False}"),
        ({"forward": ops.GELU}, len, r"a pattern is a list of kinds of ops, got .*GELU.*; write \[...\] around it"),
        ({"name": 3}, len, "a fusion has a name: give a text as name=, or a function or class to decorate, got 3"),
        ({}, None, "fusion 'mine': a forward fusion decorates a function, got None"),
        ({}, dict, "fusion 'mine': a forward fusion decorates a function, got <class 'dict'>"),
    ],
)
def test_declarations_of_another_type(options, body, words):
    declare = te_fuser.fusion if "details" in options else declared
    with pytest.raises(TypeError, match=words):
        declare(**{"forward": [ops.GELU], "name": "mine", **options})(body)


def test_gradients_of_another_type():
    with pytest.raises(TypeError, match=r"gradients are ops.base.Gradient\(produces, reads, method\), got \['input'\]"):
        declared(backward=[ops.GELU], gradients=["input"])


def test_windows_of_another_type():
    with pytest.raises(
        ValueError, match="forward_ops is a number of ops of a joint fusion, or a slice of them, got '1'"
    ):
        declared(joint=[ops.GELU], forward_ops="1")


def test_how_many_ops_is_not_known_of_repeated_parts_and_fused_operations():
    for part in (fusions.Repeat(ops.GELU), ops.FusedOperation, fusions.OneOf(ops.GELU, ops.FusedOperation)):
        te_fuser.fusion(forward=[ops.MatMul, part], emits=["5.output"], name="mine", details=Details(registered=False))(
            lambda m, x: x
        )


@pytest.mark.parametrize(
    ("cost", "error", "words"),
    [
        (lambda m: 3.0, TypeError, r"fusion 'mine': its `cost` gives float, not a Cost; write Cost\(seconds=3.0\)"),
        (lambda m: "1 us", TypeError, r"fusion 'mine': its `cost` gives str, not a Cost; write fusions.Cost"),
        (lambda m: m.rows, RuntimeError, "fusion 'mine': its `cost` failed, AttributeError"),
    ],
)
def test_a_cost_that_is_none(cost, error, words):
    mine = te_fuser.fusion(forward=[ops.GELU], name="mine", cost=cost, details=Details(registered=False))(
        lambda m, x: x
    )
    with fusions.only(mine), pytest.raises(error, match=words):
        te_fuser.Sequential(ops.GELU()).plan(X)


@pytest.mark.parametrize(
    ("choose", "error", "words"),
    [
        (lambda m, method: 3, TypeError, "fusion 'mine': its `choose` gives 3, not a function or a Body of one"),
        (lambda m, method: fusions.Body(None), TypeError, "fusion 'mine': its `choose` gives None"),
        (lambda m, method: {}[method], RuntimeError, r"fusion 'mine': its `choose` failed, KeyError\('forward'\)"),
    ],
)
def test_a_choice_that_is_none(choose, error, words):
    mine = declared(forward=[ops.GELU], name="mine", takes=["input"], choose=choose, registered=False, **FREE)(F.gelu)
    with fusions.only(mine), pytest.raises(error, match=words):
        te_fuser.Sequential(ops.GELU())(X)


def test_what_runs_may_be_chosen_for_each_match_and_direction():
    """Where nothing is chosen, the declared body runs."""
    asked = []

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def forward(self, m, x):
            return self.factor * F.silu(x)

        def backward(self, m, dy):
            return torch.ops.aten.silu_backward(self.factor * dy, m["input"])

    def choose(m, method):
        asked.append((m.x.features, method))
        return getattr(Scaled(m.x.features), method) if m.x.features > 4 or method == "forward" else None

    class Both:
        forward, backward = None, staticmethod(lambda m, dy: 0 * dy)

    Both.forward = staticmethod(lambda m, x: pytest.fail("its forward was chosen"))
    mine = declared(joint=[ops.SiLU], name="mine", reads=["input"], choose=choose, registered=False, **FREE)(Both)
    for features, slope in ((8, 8), (4, 0)):
        model, x = te_fuser.Sequential(ops.SiLU()), tensor(3, features)
        with fusions.only(mine):
            y = model(x)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        leaf = x.detach().requires_grad_()
        want = F.silu(leaf)
        torch.testing.assert_close(y, features * want)
        torch.testing.assert_close(dx, slope * torch.autograd.grad(want.sum(), leaf)[0])
    assert set(asked) == {(n, method) for n in (8, 4) for method in ("forward", "backward")}


def test_one_name_for_a_sequence_of_names():
    with pytest.raises(TypeError, match=r"emits is a sequence of names, got '0.output'; write \('0.output',\)"):
        te_fuser.fusion(forward=[ops.GELU], emits="0.output")


def test_the_name_is_the_functions_unless_given():
    @te_fuser.fusion(forward=[ops.MatMul, Optional(ops.Bias), Repeat(ops.GELU)], details=Details(registered=False))
    def my_fusion(m, x):
        """What it does."""

    assert my_fusion.name == "my_fusion" and my_fusion.doc == "What it does."
    assert repr(my_fusion) == "<fusion 'my_fusion' forward: MatMul, [Bias], GELU x 1+>"
    assert "my_fusion" not in fusions.names()
    fusions.register(my_fusion)
    assert fusions.get("my_fusion") is my_fusion and fusions.names()[-1] == "my_fusion"
    assert fusions.unregister("my_fusion") is my_fusion


def test_unknown_names():
    for call in (
        fusions.get,
        fusions.unregister,
        lambda n: fusions.disabled(n).__enter__(),
        lambda n: fusions.only(n).__enter__(),
    ):
        with pytest.raises(KeyError, match="no fusion 'none' .registered: .*matmul_bias"):
            call("none")
