"""Declaring, registering and scoping fusions: each direction fires, is right, says why not, and can be taken back."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost, Details, OneOf, Optional, Repeat
from te_fuser.ops.base import Gradient
from tests.fusions.declared import declared
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(6, 8)
FREE = {"cost": lambda m: Cost(seconds=0.0)}  # so that a fusion wins wherever it fits


def mlp(**options):
    return sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU("none"), ops.Linear(16, 8), **options)


def steps(model, direction, x=X, **arguments):
    return [s.name for s in getattr(model.plan(x, **arguments), direction)]


def reasons(model, name, x=X, **arguments):
    return [r.reason for r in model.plan(x, **arguments).refusals if r.name == name]


@pytest.fixture(autouse=True)
def registry():
    """Whatever a test registers is gone after it."""
    before = set(fusions.names())
    yield
    for name in set(fusions.names()) - before:
        fusions.unregister(name)
    assert set(fusions.names()) == before


# ----------------------------------------------------------------------------------- the three directions


def declare_forward(**options):
    @declared(forward=[ops.MatMul, ops.Bias, ops.GELU], emits=["1.output"], name="mine", **{**FREE, **options})
    def linear_gelu(m, x):
        """Two ops and an activation in one call."""
        before = F.linear(x, m[0].weight, m[1].bias)
        m.emit("1.output", before)
        return F.gelu(before, approximate=m[2].approximate)

    return linear_gelu


def declare_backward(**options):
    @te_fuser.fusion(
        backward=[ops.MatMul, ops.Bias, ops.GELU],
        reads=["input", "0.weight", "1.output"],
        name="mine",
        **{**FREE, **options},
    )
    def linear_gelu_backward(m, dy):
        before = m["1.output"].detach().requires_grad_()
        with torch.enable_grad():
            d = torch.autograd.grad(F.gelu(before, approximate=m[2].approximate), before, dy)[0]
        made = {}
        if m.needs("0.weight"):
            made["0.weight"] = d.t() @ m["input"]
        if m.needs("1.bias"):
            made["1.bias"] = d.sum(0)
        return (d @ m["0.weight"] if m.needs("input") else None), made

    return linear_gelu_backward


def declare_joint(**options):
    @te_fuser.fusion(joint=[ops.Bias, ops.GELU], saves=["slope"], name="mine", **{**FREE, **options})
    class BiasGelu:
        """Keeps the slope, and nothing else, for its own backward."""

        @staticmethod
        def forward(m, x):
            before = (x + m[0].bias).detach().requires_grad_()
            with torch.enable_grad():
                y = F.gelu(before, approximate=m[1].approximate)
                m.emit("slope", torch.autograd.grad(y.sum(), before)[0])
            return y.detach()

        @staticmethod
        def backward(m, dy):
            d = dy * m["slope"]
            return d, {"0.bias": d.sum(0)}

    return BiasGelu


DIRECTIONS = {
    "forward": (declare_forward, ["mine"], []),
    "backward": (declare_backward, [], ["mine"]),
    "joint": (declare_joint, ["mine"], ["mine"]),
}


@pytest.mark.parametrize("frozen", [(), ("1.weight",), ("1.bias", "0.weight", "0.bias"), ("1.weight", "1.bias")])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_users_fusion_fires_and_is_right(name, frozen):
    declare, forward, backward = DIRECTIONS[name]
    model = mlp()
    for parameter in frozen:
        model.get_parameter(parameter).requires_grad_(False)
    want = assert_as_meant(model, X)
    entry = declare()
    assert [n for n in steps(model, "forward") if n == "mine"] == forward
    assert [n for n in steps(model, "backward") if n == "mine"] == backward
    torch.testing.assert_close(assert_as_meant(model, X), want)
    assert_as_meant(model, X.detach())
    with torch.no_grad():
        torch.testing.assert_close(model(X), want[0])
    fusions.unregister(entry)
    assert "mine" not in steps(model, "forward") + steps(model, "backward")
    assert_as_meant(model, X)


def test_a_forward_fusion_gives_what_backward_reads_and_only_then():
    declare_forward()
    model = mlp()
    names = {step.name: [name for name, _ in step.outputs] for step in model.plan(X).forward}
    assert names["mine"] == ["output", "1.output"]
    with torch.no_grad():
        names = {step.name: [name for name, _ in step.outputs] for step in model.plan(X).forward}
    assert names["mine"] == ["output"]


def test_what_a_joint_fusion_saves_is_kept():
    declare_joint()
    kept = [k.name for k in mlp().plan(X).kept]
    assert "mine: slope" in kept
    with torch.no_grad():
        assert not mlp().plan(X).kept


def test_a_fusion_of_ops_that_draw():
    seen = []

    @te_fuser.fusion(forward=[ops.Dropout, ops.Bias], name="mine", **FREE)
    def dropout_bias(m, x):
        seen.append(m.random(0))
        return m[0].op.reference(ops.base.OpCall(random=m.random(0)), x) + m[1].bias

    model = sequential(ops.GELU(), ops.Dropout(0.5), ops.Bias(8), ops.Linear(8, 8))
    assert "mine" in steps(model, "forward")
    assert_as_meant(model, X)
    assert seen


def test_an_op_that_draws_nothing_has_no_random_stream():
    @te_fuser.fusion(forward=[ops.Dropout, ops.GELU], name="mine", emits=["0.output"], **FREE)
    def mine(m, x):
        return m.random(0)

    with pytest.raises(KeyError, match=r"op 0 of the match draws nothing as it is now; ask m\[0\].op.draws\(\) first"):
        sequential(ops.Linear(8, 8), ops.Dropout(0.5), ops.GELU()).eval()(X)


def test_alternatives_optional_and_repeated_parts_fire():
    """One fusion for a product, a bias where there is one, and any run of two activations."""
    found = []

    def plain(m, x):
        found.append([m[k].op.kind.__name__ for k in range(len(m))])
        bias = m[1].bias if m[1].op.kind is ops.Bias else None
        x = F.linear(x, m[0].weight, bias)
        for k in range(2 if bias is not None else 1, len(m)):
            x = F.relu(x) if m[k].op.kind is ops.ReLU else F.silu(x)
        return x

    pattern = [ops.MatMul, Optional(ops.Bias), Repeat(OneOf(ops.ReLU, ops.SiLU))]
    te_fuser.fusion(forward=pattern, name="mine", **FREE)(plain)
    model = sequential(
        ops.Linear(8, 8), ops.SiLU(), ops.ReLU(), ops.Linear(8, 8, bias=False), ops.ReLU(), ops.Linear(8, 8)
    )
    with torch.no_grad():
        assert steps(model, "forward") == ["mine", "mine", "matmul_bias"]
        torch.testing.assert_close(model(X), model.reference(X))
    assert found == [["MatMul", "Bias", "SiLU", "ReLU"], ["MatMul", "ReLU"]]
    assert_as_meant(model, X)


def test_named_inputs_in_a_fusion():
    @te_fuser.fusion(joint=[ops.Bias, ops.Add], name="mine", **FREE)
    class BiasAdd:
        @staticmethod
        def forward(m, x):
            return x + m[0].bias + m["1.other"]

        @staticmethod
        def backward(m, dy):
            return dy, {"0.bias": dy.sum(0), "1.other": dy}

    model = sequential(ops.Linear(8, 8), ops.Add("c"), ops.GELU())
    assert steps(model, "forward", c=X)[1] == "mine" and "mine" in steps(model, "backward", c=X)
    assert_as_meant(model, X, c=tensor(6, 8, seed=3))
    assert_as_meant(model, X, c=tensor(6, 8, seed=3, grad=False))
    assert_as_meant(sequential(te_fuser.Residual(ops.Linear(8, 8))), X)


# -------------------------------------------------------------------------------------------- saying no


def test_conditions_answer_with_reasons():
    declare_forward(when=lambda m: m.dtype == torch.float32 or f"written for float32, got {m.dtype}")
    assert reasons(mlp(), "mine") == ["written for float32, got torch.float64"]
    assert "mine" not in steps(mlp(), "forward")
    model, x = mlp().float(), X.detach().float()
    assert reasons(model, "mine", x) == [] and "mine" in steps(model, "forward", x)


# what `when` answers -> the reason, None where it fits
ANSWERS = {
    "true": (True, None),
    "none": (None, None),
    "a_number": (1, None),
    "a_bool_of_torch": (torch.tensor(True), None),
    "false": (False, "its condition `when` said no"),
    "zero": (0, "its condition `when` said no"),
    "no_words": ("", "its condition `when` said no"),
    "a_reason": ("not today", "not today"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_a_condition(name):
    answer, reason = ANSWERS[name]
    declare_forward(when=lambda m: answer)
    assert reasons(mlp(), "mine") == ([] if reason is None else [reason])
    assert ("mine" in steps(mlp(), "forward")) == (reason is None)


def test_what_a_condition_sees():
    seen = []

    def when(m):
        seen.append(
            (
                len(m),
                m[0].out_features,
                tuple(m[0].weight.shape),
                m[2].approximate,
                m.x.shape,
                m.y.shape,
                m.dtype,
                m.device.type,
            )
        )
        return True

    declare_forward(when=when)
    mlp().plan(X)
    assert set(seen) == {(3, 16, (16, 8), "none", (6, 8), (6, 16), torch.float64, "cpu")}


def test_a_condition_that_fails_is_named():
    declare_forward(when=lambda m: m[0].no_such_thing > 0)
    with pytest.raises(RuntimeError, match="fusion 'mine': its condition `when` failed, AttributeError.*no_such_thing"):
        mlp()(X)


def test_a_fusion_that_emits_too_little():
    """Every backward here reads what the GELU reads; a fusion that keeps it cannot run, and the plan says so."""

    @te_fuser.fusion(forward=[ops.MatMul, ops.Bias, ops.GELU], name="mine", cost=lambda m: Cost(seconds=1e3))
    def linear_gelu(m, x):
        return F.gelu(F.linear(x, m[0].weight, m[1].bias))

    model = mlp()
    assert "mine" not in steps(model, "forward")
    (reason,) = reasons(model, "mine")
    assert "bias.output" in reason and "output" in reason
    assert_as_meant(model, X)
    with torch.no_grad():
        assert "gives only" not in " ".join(reasons(model, "mine"))


def test_a_fusion_that_emits_too_little_still_runs_where_backward_can_do_without():
    """The second round: forward chooses first, and backward computes again what it does not get."""

    @te_fuser.fusion(forward=[ops.Bias, ops.GELU, ops.Bias], name="mine", **FREE)
    def gelu_bias(m, x):
        return F.gelu(x + m[0].bias) + m[2].bias

    model = sequential(ops.Linear(8, 8), ops.GELU("none"), ops.Bias(8), ops.Linear(8, 8))
    assert "mine" in steps(model, "forward")
    assert_as_meant(model, X)


@pytest.mark.parametrize("declare", [declare_backward, declare_joint])
def test_what_is_read_outside_is_the_reason(declare):
    """The middle of the pattern is also the caller's, so a gradient comes to it from outside."""

    class Named(ops.Bias):
        kind = ops.Bias

        def named_outputs(self):
            return ("seen",)

        exports = True

    declare()
    model = sequential(ops.MatMul(8, 8), Named(8), ops.GELU("none"))
    assert "mine" in steps(sequential(ops.MatMul(8, 8), ops.Bias(8), ops.GELU("none")), "backward")
    assert "mine" not in steps(model, "backward", outputs=("seen",))
    assert any("is also read outside the pattern" in r for r in reasons(model, "mine", outputs=("seen",)))
    assert_as_meant(model, X, ("seen",))


def test_a_fusion_must_name_what_it_reads():
    declare_backward()

    @te_fuser.fusion(backward=[ops.Bias], reads=["0.wieght"], name="odd", **FREE)
    def odd(m, dy):
        return dy

    with pytest.raises(ValueError, match="fusion 'odd': '0.wieght' names nothing in its match; use \"input\""):
        mlp()(X)


def test_reading_what_is_not_declared():
    @te_fuser.fusion(backward=[ops.GELU], name="odd", **FREE)
    def odd(m, dy):
        return dy * m["input"]

    y = mlp()(X)
    with pytest.raises(KeyError, match="'input' is not declared in reads, emits or saves"):
        y.sum().backward()


# what is wrong -> the fusion's body, what it is declared with, the words
WRONG_BODIES = {
    "no_tensor": (lambda m, x: None, {}, TypeError, "fusion 'odd' over op 3 .*must return a tensor, got NoneType"),
    "not_emitted": (
        lambda m, x: F.gelu(x + m[0].bias),
        {"emits": ["0.output"]},
        RuntimeError,
        r"fusion 'odd' over op 2 .*, op 3 .* declares '0.output' but did not emit it",
    ),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_a_forward_that_breaks_its_word(name):
    body, options, error, words = WRONG_BODIES[name]
    pattern = [ops.Bias, ops.GELU] if options else [ops.GELU]
    te_fuser.fusion(forward=pattern, name="odd", **options, **FREE)(body)
    with pytest.raises(error, match=words):
        mlp()(X)


def test_a_backward_that_gives_too_little():
    @te_fuser.fusion(backward=[ops.Bias, ops.GELU], name="odd", **FREE)
    def odd(m, dy):
        return dy

    y = mlp()(X)
    with pytest.raises(RuntimeError, match=r"fusion 'odd' over op 2 .*: its backward gave no gradient for '0.bias'"):
        y.sum().backward()


# -------------------------------------------------------------------------------------------- declaring

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
        "a node of a fusion is one step: only an op's gradient may start something",
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


# -------------------------------------------------------------------------------------------- scopes


def test_disabled_is_scoped_and_reaches_models_that_ran():
    declare_forward()
    model = mlp()
    y = model(X)
    assert steps(model, "forward")[1] == "mine"
    with fusions.disabled("mine"):
        assert "mine" not in steps(model, "forward") and "matmul_bias" in steps(model, "forward")
        torch.testing.assert_close(assert_as_meant(model, X)[0], y.detach())
        with fusions.disabled("matmul_bias"):
            assert not {"mine", "matmul_bias"} & set(steps(model, "forward"))
        assert "matmul_bias" in steps(model, "forward")
    assert steps(model, "forward")[1] == "mine"


def test_only():
    declare_forward()
    model = mlp()
    with fusions.only("mine"):
        assert steps(model, "forward") == ["layer_norm_fwd", "mine", "mat_mul", "bias_fwd"]
        assert_as_meant(model, X)
        with fusions.only("matmul_bias"):
            assert "mine" not in steps(model, "forward")
    with fusions.only():
        assert len(steps(model, "forward")) == len(model.plan(X).graph.nodes)
        assert_as_meant(model, X)


def test_only_takes_a_fusion_that_is_not_registered():
    entry = declare_forward(registered=False)
    model = mlp()
    with fusions.only(entry):
        assert "mine" in steps(model, "forward")
        assert_as_meant(model, X)
    assert "mine" not in steps(model, "forward")


def test_without_stretches_every_row_op_is_a_step():
    model = sequential(ops.GELU(), ops.Bias(8), ops.SiLU(), ops.Linear(8, 8))
    with fusions.disabled("stretch"):
        assert steps(model, "forward")[:3] == ["gelu_fwd", "bias_fwd", "silu_fwd"]
        assert_as_meant(model, X)


def test_a_scope_ends_with_an_error():
    declare_forward()
    model = mlp()
    with contextlib.suppress(ZeroDivisionError), fusions.disabled("mine"):
        raise ZeroDivisionError
    assert "mine" in steps(model, "forward")


def test_scopes_are_of_one_thread():
    declare_forward()
    model, found = mlp(), {}
    inside, asked = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        found["other"] = "mine" in steps(model, "forward")
        asked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with fusions.disabled("mine"):
        inside.set()
        assert asked.wait(10)
        assert "mine" not in steps(model, "forward")
    thread.join()
    assert found == {"other": True}


def test_registering_reaches_models_that_ran():
    model = mlp()
    assert_as_meant(model, X)
    entry = declare_forward()
    ran = []
    fusions.unregister(entry)

    @te_fuser.fusion(forward=[ops.GELU], name="late", **FREE)
    def late(m, x):
        ran.append(1)
        return F.gelu(x)

    model(X)
    assert ran == [1]
    fusions.unregister("late")
    model(X)
    assert ran == [1]


def test_an_op_alone_is_fused_too():
    @te_fuser.fusion(joint=[ops.SiLU], name="mine", saves=["s"], **FREE)
    class Silu:
        @staticmethod
        def forward(m, x):
            m.emit("s", torch.sigmoid(x))
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(m, dy):
            return 7.0 * dy * m["s"]  # wrong, so that it shows

    op = ops.SiLU()
    y = op(X)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), X)[0], 7.0 * torch.sigmoid(X.detach()))


# ------------------------------------------------------------------------------------ what was written before


@pytest.mark.parametrize(
    "old",
    [
        {"registered": False, "takes": ("input",), "gives": ("output",)},
        {"registered": False, "takes": ("input",), "choose": lambda m, method: F.silu},
        {"registered": False, "compiles": lambda m, direction, needed: ()},
    ],
    ids=lambda old: " ".join(old),
)
def test_details_as_keywords_go_on_and_say_what_to_write(old):
    written = ", ".join(f"{name}=..." for name in old)
    words = rf"fusion({written}) is deprecated; write fusion(details=te_fuser.fusions.Details({written}))"
    with pytest.warns(DeprecationWarning, match=re.escape(words)) as heard:
        declare = te_fuser.fusion(forward=[ops.SiLU], name="mine", **FREE, **old)
    assert heard[0].filename == __file__
    entry = declare(F.silu if "takes" in old else lambda m, x: F.silu(x))
    new = fusions.Details(**old)
    assert {name: getattr(entry, name) for name in old if name != "registered"} == {
        name: getattr(new, name) for name in old if name != "registered"
    }
    model = sequential(ops.Linear(8, 8), ops.SiLU())
    with fusions.only(entry):
        assert "mine" in steps(model, "forward")
        assert_as_meant(model, X)
    assert "mine" not in fusions.names()


def test_old_and_new_details_together():
    with pytest.warns(DeprecationWarning):
        declare = te_fuser.fusion(forward=[ops.SiLU], details=fusions.Details(takes=("input",)), registered=False)
    entry = declare(F.silu)
    assert entry.takes == ("input",) and "silu" not in fusions.names()


def test_a_keyword_that_there_never_was():
    with pytest.raises(TypeError, match=r"fusion\(\) got an unexpected keyword argument 'emit'"):
        te_fuser.fusion(forward=[ops.SiLU], emit=["0.output"])
