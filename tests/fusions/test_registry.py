"""Registered fusions: each direction fires, is right, says why not; in which scopes they are in force."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost, Details, OneOf, Optional, Repeat, fusion
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient
from tests.fusions.products import covered
from tests.fusions.products import reasons as reasons_of
from tests.fusions.registered import (
    FREE,
    X,
    declare_backward,
    declare_forward,
    declare_joint,
    declared,
    joined,
    mlp,
    reasons,
    steps,
)
from tests.twins import assert_as_meant, sequential, tensor

# ----------------------------------------------------------------------------------- the three directions


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
    def forward(m, x):
        return x + m[0].bias + m["1.other"]

    def backward(m, dy):
        return dy, {"0.bias": dy.sum(0), "1.other": dy}

    joined(forward, backward, joint=[ops.Bias, ops.Add], name="mine")
    model = sequential(ops.Linear(8, 8), ops.Add("c"), ops.GELU())
    assert steps(model, "forward", c=X)[1] == "mine" and "mine" in steps(model, "backward", c=X)
    assert_as_meant(model, X, c=tensor(6, 8, seed=3))
    assert_as_meant(model, X, c=tensor(6, 8, seed=3, grad=False))
    assert_as_meant(sequential(te_fuser.Residual(ops.Linear(8, 8))), X)


def test_what_a_fusion_gives_or_saves_for_backward_is_there_only_then():
    gives = {declare_forward: ["output", "1.output"], declare_joint: ["output", "slope"]}
    for declare, names in gives.items():
        entry, model = declare(), mlp()
        made = {step.name: [name for name, _ in step.outputs] for step in model.plan(X).forward}
        assert made["mine"] == names
        assert ("mine: slope" in [k.name for k in model.plan(X).kept]) == (declare is declare_joint)
        with torch.no_grad():
            made = {step.name: [name for name, _ in step.outputs] for step in model.plan(X).forward}
            assert made["mine"] == ["output"] and not model.plan(X).kept
        fusions.unregister(entry)


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

    @op_table.exports.row(True)
    class Named(ops.Bias):
        kind = ops.Bias

        def named_outputs(self):
            return ("seen",)

    declare()
    model = sequential(ops.MatMul(8, 8), Named(8), ops.GELU("none"))
    assert "mine" in steps(sequential(ops.MatMul(8, 8), ops.Bias(8), ops.GELU("none")), "backward")
    assert "mine" not in steps(model, "backward", outputs=("seen",))
    assert any("is also read outside the pattern" in r for r in reasons(model, "mine", outputs=("seen",)))
    assert_as_meant(model, X, ("seen",))


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


def test_a_whole_plan_that_gives_what_only_backward_reads() -> None:
    """Without grad its second value is of no use, and the body gives it all the same."""

    @fusion(
        forward=[ops.Bias, ops.SiLU],
        name="bias_silu_both",
        cost=lambda m: Cost(seconds=1e-9),
        emits=("0.output",),
        details=Details(takes=("input", "0.bias"), gives=("output", "0.output"), registered=False),
    )
    def both(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moved = x + bias
        return torch.nn.functional.silu(moved), moved

    model = sequential(ops.Bias(5), ops.SiLU())
    x = tensor(7, 5)
    with fusions.only(both), torch.no_grad():
        assert [s.name for s in model.plan(x).forward] == ["bias_silu_both"]
        torch.testing.assert_close(model(x), model.reference(x))
        torch.testing.assert_close(model(x), model.reference(x))


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
    with contextlib.suppress(ZeroDivisionError), fusions.disabled("mine"):
        raise ZeroDivisionError
    assert steps(model, "forward")[1] == "mine"


def test_only_and_without_a_fusion_that_need_not_be_registered():
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
    fusions.unregister("mine")
    with fusions.only(declare_forward(registered=False)):
        assert "mine" in steps(model, "forward")
        assert_as_meant(model, X)
    assert "mine" not in steps(model, "forward")
    model = sequential(ops.GELU(), ops.Bias(8), ops.SiLU(), ops.Linear(8, 8))
    with fusions.disabled("stretch"):
        assert steps(model, "forward")[:3] == ["gelu_fwd", "bias_fwd", "silu_fwd"]
        assert_as_meant(model, X)


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
    def forward(m, x):
        m.emit("s", torch.sigmoid(x))
        return x * torch.sigmoid(x)

    def backward(m, dy):
        return 7.0 * dy * m["s"]  # wrong, so that it shows

    joined(forward, backward, joint=[ops.SiLU], name="mine", saves=["s"])
    op = ops.SiLU()
    y = op(X)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), X)[0], 7.0 * torch.sigmoid(X.detach()))


class _Bodies:
    @staticmethod
    def dx(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return dy @ weight

    @staticmethod
    def parameters(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dy, x = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
        return dy.T @ x, dy.sum(0)


def apart(**changes: object) -> fusions.Fusion:
    options = {
        "backward": [ops.MatMul, ops.Bias],
        "gradients": (
            Gradient(("input",), ("0.weight",), "dx"),
            Gradient(("0.weight", "1.bias"), ("input",), "parameters"),
        ),
        "cost": lambda m: (Cost(seconds=1e-9), Cost(seconds=2e-9)),
        "name": "apart",
        "registered": False,
    }
    return declared(**{**options, **changes})(_Bodies)


@pytest.mark.usefixtures("few_rows")
def test_nodes_run_apart_and_are_right() -> None:
    model, x = sequential(ops.SiLU(), ops.Linear(8, 6), ops.SiLU()), tensor(5, 8)
    with fusions.only(apart(), "stretch"):
        steps = [s for s in model.plan(x).backward if s.name == "apart"]
        assert [(s.seconds, s.chain) for s in steps] == [(1e-9, True), (2e-9, False)]
        assert_as_meant(model, x)
        te_fuser.verify(apart(), kernels="reference", dtypes=[torch.float64])


def test_nodes_are_chosen_for_a_match() -> None:
    asked = []

    def choose(m: fusions.Match, method: str) -> object:
        asked.append((len(m), method))
        return getattr(_Bodies, method)

    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    with fusions.only(apart(choose=choose)):
        assert_as_meant(model, x)
    assert set(asked) == {(2, "dx"), (2, "parameters")}


def test_what_is_made_together_must_be_needed_together() -> None:
    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    model[0].bias.requires_grad_(False)
    with fusions.only(apart()):
        why = "nobody needs the gradient of 1.bias, which it makes with 0.weight"
        assert reasons_of(model.plan(x), "apart") == {why}
    model[0].weight.requires_grad_(False)
    with fusions.only(apart()):
        assert covered(model.plan(x).backward)[0] == ("apart", 0, 2)
        (dx,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(dx, torch.ones(5, 6, dtype=x.dtype) @ model[0].weight)
    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    entry = apart(gradients=(Gradient(("input",), ("0.weight",), "dx"),), cost=None)
    with fusions.only(entry):
        assert reasons_of(model.plan(x), "apart") == {"it gives no gradient of 0.weight, 1.bias"}


class _Slope:
    """SiLU behind a product: its slope is made once, with dx, and read by the weight's gradient."""

    @staticmethod
    def dx(dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.sigmoid(h)
        dh = dy * s * (1 + h * (1 - s))
        return dh @ weight, dh

    @staticmethod
    def dw(dh: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return dh.T @ x


SLOPE = {
    "backward": [ops.MatMul, ops.SiLU],
    "gradients": (
        Gradient(("input", "0.d_output"), ("0.output", "0.weight"), "dx"),
        Gradient(("0.weight",), ("0.d_output", "input"), "dw"),
    ),
    "cost": lambda m: (Cost(seconds=0.0), Cost(seconds=0.0)),
    "name": "slope",
    "registered": False,
}


def test_a_node_reads_the_gradient_of_a_value_inside_that_another_makes() -> None:
    entry = declared(**SLOPE)(_Slope)
    model, x = sequential(ops.SiLU(), ops.MatMul(8, 6), ops.SiLU(), verify=True), tensor(5, 8)
    with fusions.only(entry, "stretch"):
        first, second = (s for s in model.plan(x).backward if s.name == "slope")
        assert first.chain and not second.chain and first.writes()[1] == second.reads()[0]
        assert_as_meant(model, x)
        model[1].weight.requires_grad_(False)
        assert [s.name for s in model.plan(x).backward].count("slope") == 1
        torch.testing.assert_close(*(torch.autograd.grad(run(x).sum(), x)[0] for run in (model, model.reference)))
    # Without an input that needs its gradient nothing makes what the other node reads.
    with fusions.only(declared(**SLOPE)(_Slope)):
        found = reasons_of(sequential(ops.MatMul(8, 6), ops.SiLU()).plan(tensor(5, 8, grad=False)), "slope")
    assert found == {"nobody needs the gradients that it makes 0.d_output with"}
