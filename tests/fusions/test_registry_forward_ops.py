"""Joint fusions whose directions cover different ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost, Details, Fusion, Match, Optional, fusion
from te_fuser.fusions.match import FusionCall
from te_fuser.ops.base import Gradient
from tests.fusions.registered import declared, joined
from tests.twins import assert_as_meant, sequential, tensor

MLP = (ops.MatMul, ops.Bias, ops.ReLU, ops.MatMul)


def places(plan: Plan) -> list[tuple[int, int]]:
    """Begins and ends of the plan's segments."""
    return [(s.start, s.stop) for s in plan.segments]


@pytest.fixture
def bias_silu() -> Fusion:
    @fusion(
        joint=[Optional(ops.Bias), ops.SiLU],
        name="bias_silu",
        cost=lambda m: Cost(seconds=1e-9),
        reads=("-1.input",),
        saves=("gate",),
        details=Details(forward_ops=1),
    )
    class body:
        @staticmethod
        def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
            assert len(m) == 1
            gate = torch.sigmoid(x)
            m.emit("gate", gate)
            return x * gate

        @staticmethod
        def backward(m: FusionCall, dy: torch.Tensor) -> Any:
            x, gate = m["-1.input"], m["gate"]
            dx = dy * (gate + x * gate * (1 - gate))
            return dx, {"0.bias": dx.reshape(-1, dx.shape[-1]).sum(0)} if m.needs("0.bias") else {}

    return body


def steps(model: te_fuser.Sequential, x: torch.Tensor, direction: str) -> dict[str, tuple[int, int]]:
    plan = model.plan(x)
    return {s.name: (s.start, s.stop) for s in (plan.forward if direction == "forward" else plan.backward)}


def test_the_ops_before_run_forward_as_they_are_planned(bias_silu: Fusion) -> None:
    model, x = sequential(ops.Linear(8, 6), ops.SiLU(), ops.MatMul(6, 3)), tensor(4, 5, 8)
    forward, backward = steps(model, x, "forward"), steps(model, x, "backward")
    assert forward["matmul_bias"] == (0, 2) and forward["bias_silu"] == (2, 3)
    assert backward["bias_silu"] == (1, 3)
    assert_as_meant(model, x, tolerance=1e-10)
    kept = {k.name for k in model.plan(x).kept if k.owner == "activation"}
    assert {"bias.output", "bias_silu: gate"} <= kept


def test_where_the_ops_before_are_not_there_or_are_read_elsewhere_or_no_gradient_is_needed(bias_silu: Fusion) -> None:
    model, x = sequential(ops.ReLU(), ops.SiLU(), ops.Bias(8), ops.SiLU()), tensor(4, 5, 8)
    plan = model.plan(x)
    assert [(s.start, s.stop) for s in plan.forward if s.name == "bias_silu"] == [(1, 2), (3, 4)]
    assert [(s.start, s.stop) for s in plan.backward if s.name == "bias_silu"] == [(2, 4), (1, 2)]
    assert_as_meant(model, x, tolerance=1e-10)
    # Then the longer match has no backward, and the shorter one does.
    model, x = sequential(ops.Bias(8), ops.Fork("b"), ops.SiLU(), ops.Add("b")), tensor(4, 5, 8)
    assert steps(model, x, "backward")["bias_silu"] == (2, 3)
    assert_as_meant(model, x, tolerance=1e-10)
    model, x = sequential(ops.Bias(8), ops.SiLU()), tensor(4, 5, 8, grad=False).requires_grad_(False)
    with torch.no_grad():
        assert steps(model, x, "forward")["bias_silu"] == (1, 2)
        torch.testing.assert_close(model(x), model.reference(x))


# ---- a window of each direction ------------------------------------------------------------------------------------


def declare_by_sign(name: str = "by_sign", pattern: tuple[type, ...] = MLP, **options: Any) -> Fusion:
    """ReLU by the sign of what it read; forward begins an op earlier, backward ends an op later."""

    class body:
        @staticmethod
        def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
            assert [type(m[k].op) for k in range(len(m))] == [ops.MatMul, ops.Bias, ops.ReLU]
            h = torch.nn.functional.linear(x, m[0].weight, m[1].bias)
            m.emit("sign", h > 0)
            return h.relu()

        @staticmethod
        def backward(m: FusionCall, dy: torch.Tensor) -> Any:
            assert [type(m[k].op) for k in range(len(m))] == [ops.Bias, ops.ReLU, ops.MatMul]
            dh = torch.where(m["sign"], dy @ m["2.weight"], 0.0)
            rows, before = dy.reshape(-1, dy.shape[-1]), m["1.output"]
            return dh, {
                "0.bias": dh.reshape(-1, dh.shape[-1]).sum(0),
                "2.weight": rows.t() @ before.reshape(-1, before.shape[-1]),
            }

    options = {"reads": ("2.weight", "1.output"), "saves": ("sign",), **options}
    return declared(
        joint=pattern,
        name=name,
        cost=lambda m: Cost(seconds=0.0),
        saved_bytes=lambda m: {"sign": m.x.rows * m[0].op.out_features},
        forward_ops=slice(3),
        backward_ops=slice(1, 4),
        **options,
    )(body)


@pytest.fixture
def by_sign() -> Fusion:
    return declare_by_sign()


def mlp(**options: Any) -> te_fuser.Sequential:
    return sequential(ops.Linear(8, 6), ops.ReLU(), ops.Linear(6, 3), **options)


def test_each_direction_covers_its_own_ops(by_sign: Fusion) -> None:
    model, x = mlp(), tensor(4, 5, 8)
    assert steps(model, x, "forward") == {"by_sign": (0, 3), "matmul_bias": (3, 5)}
    assert steps(model, x, "backward")["by_sign"] == (1, 4)
    kept = {k.name: k.bytes for k in model.plan(x).kept if k.owner == "activation"}
    assert kept == {"relu.output": 4 * 5 * 6 * 8, "by_sign: sign": 4 * 5 * 6}
    assert_as_meant(model, x)
    model = sequential(*(part for _ in range(2) for part in (ops.Linear(8, 8), ops.ReLU())), ops.MatMul(8, 8))
    x = tensor(5, 8)
    assert [s.start for s in model.plan(x).forward if s.name == "by_sign"] == [0, 3]
    assert [s.start for s in model.plan(x).backward if s.name == "by_sign"] == [4, 1]
    assert_as_meant(model, x)


def test_no_cut_between_what_saves_and_what_reads(by_sign: Fusion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model, x = sequential(ops.MatMul(8, 8), *mlp(), ops.MatMul(3, 3)), tensor(5, 8)
    assert steps(model, x, "forward")["by_sign"] == (1, 4) and steps(model, x, "backward")["by_sign"] == (2, 5)
    assert places(model.plan(x)) == [(0, 1), (1, 6), (6, 7)]
    assert_as_meant(model, x)


def test_no_cut_where_the_windows_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward saves in the first op what backward reads in the last one."""
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        m.emit("twice", 2 * x)
        return x @ m[0].weight.t()

    def backward(m: FusionCall, dy: torch.Tensor) -> Any:
        # The op's input is half of what was saved times the first op's weight, which is the identity here.
        return dy @ m["0.weight"], {"0.weight": dy.t() @ (m["twice"] / 2)}

    windows = {"forward_ops": slice(1), "backward_ops": 1, "registered": False}
    entry = joined(forward, backward, joint=[ops.MatMul, ops.MatMul], name="apart", saves=("twice",), **windows)
    model, x = sequential(ops.MatMul(8, 8), ops.MatMul(8, 8)), tensor(5, 8)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    with fusions.only(entry):
        plan = model.plan(x)
        assert places(plan) == [(0, 2)]
        assert_as_meant(model, x)
    with fusions.only():
        assert places(model.plan(x)) == [(0, 1), (1, 2)]


def test_what_is_read_outside_the_whole_match_or_saved_for_nobody() -> None:
    """A value that only forward covers, and a later op reads."""
    entry = declare_plain(joint=(ops.MatMul, ops.Bias, ops.Fork, ops.ReLU, ops.MatMul), forward_ops=slice(4))
    parts = ops.MatMul(8, 6), ops.Bias(6), ops.Fork("h"), ops.ReLU(), ops.MatMul(6, 6), ops.Add("h")
    model, x = sequential(*parts), tensor(5, 8)
    with fusions.only(entry):
        assert "plain" not in steps(model, x, "forward")
        assert "h is also read outside the pattern" in {r.reason for r in model.plan(x).refusals}
        assert_as_meant(model, x)
    model, x = mlp(), tensor(5, 8, grad=False)
    model[0].requires_grad_(False)
    with fusions.only(declare_plain()):
        plan = model.plan(x)
        assert "plain" not in {s.name for s in plan.backward}
        assert "nobody needs the gradient for which it saves sign" in {r.reason for r in plan.refusals}
        assert_as_meant(model, x)


def test_forwards_that_overlap(by_sign: Fusion) -> None:
    """Then one of the two is left out, and says why."""

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) @ m[1].weight.t()

    def backward(m: FusionCall, dy: torch.Tensor) -> Any:
        gate = torch.sigmoid(m["input"])
        d = dy @ m["1.weight"]
        return d * gate * (1 + m["input"] * (1 - gate)), {"1.weight": dy.t() @ (m["input"] * gate)}

    joined(forward, backward, joint=[ops.SiLU, ops.MatMul], name="silu_matmul", reads=("input", "1.weight"))
    model, x = sequential(ops.SiLU(), *mlp()), tensor(5, 8)
    names = steps(model, x, "forward").keys() & {"by_sign", "silu_matmul"}
    assert len(names) == 1
    (other,) = {"by_sign", "silu_matmul"} - names
    (taken,) = names
    found = {r.reason for r in model.plan(x).refusals if r.name == other}
    assert f"its forward overlaps that of {taken}" in found
    assert_as_meant(model, x)


def test_forwards_of_one_fusion_that_overlap() -> None:
    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        m.emit("between", x @ m[0].weight.t())
        return x @ m[0].weight.t() @ m[1].weight.t()

    def backward(m: FusionCall, dy: torch.Tensor) -> Any:
        return dy @ m["0.weight"], {"0.weight": dy.t() @ m["between"]}

    windows = {"backward_ops": 1, "registered": False}
    entry = joined(forward, backward, joint=[ops.MatMul, ops.MatMul], name="two", saves=("between",), **windows)
    model, x = sequential(*(ops.MatMul(8, 8) for _ in range(3))), tensor(5, 8)
    with fusions.only(entry):
        plan = model.plan(x)
        assert [s.name for s in plan.forward].count("two") == 1
        assert "its forward overlaps that of two" in {r.reason for r in plan.refusals}
        assert_as_meant(model, x)


def test_others_that_read_what_its_forward_does_not_give(by_sign: Fusion) -> None:
    """A step of backward outside its window reads a value inside its forward's."""

    @fusion(
        backward=[ops.MatMul],
        cost=lambda m: Cost(seconds=0.0),
        reads=("input", "output", "0.weight"),
        details=Details(registered=False),
    )
    def reads_its_output(m: FusionCall, dy: torch.Tensor) -> Any:
        assert m["output"].shape == dy.shape
        return dy @ m["0.weight"], {"0.weight": dy.t() @ m["input"]}

    model, x = mlp(memory="fast"), tensor(5, 8)
    with fusions.only(by_sign, reads_its_output):
        assert {"reads_its_output"} < steps(model, x, "backward").keys()
        assert "by_sign" not in steps(model, x, "forward")
        found = {r.reason for r in model.plan(x).refusals if r.name == "by_sign"}
        assert "other steps of backward read what its forward does not give" in found
        assert_as_meant(model, x)
    # Forward may be better off with a fusion that gives no such value; then the other one is left out.
    with fusions.only(by_sign, reads_its_output, "matmul_bias"):
        assert "by_sign" in steps(model, x, "forward")
        assert_as_meant(model, x)


def test_a_window_without_ops() -> None:
    declare_by_sign("nothing", (fusions.Repeat(ops.MatMul),))
    with pytest.raises(ValueError, match="fusion 'nothing': its backward covers none of the 1 ops of a match"):
        mlp().plan(tensor(5, 8))


# ---- plain functions of tensors ------------------------------------------------------------------------------------


def sign_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.nn.functional.linear(x, w, b)
    return h.relu(), h > 0


def declare_plain(**options: Any) -> Fusion:
    """As by_sign, of functions of tensors whose backward nodes run apart."""

    class body:
        forward = staticmethod(sign_forward)

        @staticmethod
        def input_gradient(dy: torch.Tensor, w: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
            return torch.where(sign, dy @ w, 0.0)

        @staticmethod
        def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    given: dict[str, Any] = {
        "joint": MLP,
        "name": "plain",
        "cost": lambda m: Cost(seconds=0.0),
        "forward_ops": slice(3),
        "backward_ops": 2,
        "takes": ("input", "0.weight", "1.bias"),
        "saves": ("sign",),
        "gradients": (
            Gradient(("input",), ("1.weight", "sign"), "input_gradient"),
            Gradient(("1.weight",), ("0.output",), "weight_gradient"),
        ),
        "registered": False,
    }
    return declared(**{**given, **options})(body)


@pytest.mark.parametrize("frozen", [(), ("0.bias",), ("0.weight", "0.bias"), ("2.weight",), ("2.weight", "2.bias")])
def test_a_joint_fusion_of_plain_functions(frozen: tuple[str, ...]) -> None:
    model, x = mlp(), tensor(4, 5, 8)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with fusions.only(declare_plain()):
        forward, backward = steps(model, x, "forward"), steps(model, x, "backward")
        assert forward["plain"] == (0, 3) and backward["plain"] == (2, 4)
        assert_as_meant(model, x)


def test_a_plain_forward_with_a_backward_that_is_one_step() -> None:
    def backward(m: FusionCall, dy: torch.Tensor) -> Any:
        return torch.where(m["sign"], dy @ m["1.weight"], 0.0), {"1.weight": dy.t() @ m["0.output"]}

    windows = {"forward_ops": slice(3), "backward_ops": 2, "registered": False}
    named = {"takes": ("input", "0.weight", "1.bias"), "saves": ("sign",), "reads": ("1.weight", "0.output")}
    entry = joined(sign_forward, backward, joint=MLP, name="plain_forward", **named, **windows)
    model, x = mlp(), tensor(5, 8)
    with fusions.only(entry):
        assert steps(model, x, "backward")["plain_forward"] == (2, 4)
        assert_as_meant(model, x)


def test_everything_that_plans_sees_the_whole_match() -> None:
    seen = []

    def noted(result: Any) -> Any:
        def note(m: Match, *method: str) -> Any:
            assert [type(op.op) for op in m.ops] == list(MLP)
            seen.append((type(result), *method))
            return result[method[0]] if method else result

        return note

    node = Cost(seconds=1e-9)
    bodies = {
        "forward": sign_forward,
        "input_gradient": lambda dy, w, sign: torch.where(sign, dy @ w, 0.0),
        "weight_gradient": lambda dy, x: dy.t() @ x,
    }
    entry = declare_plain(
        cost=noted((node, (node, Cost(seconds=2e-9)))),
        choose=noted(bodies),
        saved_bytes=noted({"sign": 77}),
        when=noted(True),
    )
    model, x = mlp(), tensor(5, 8)
    with fusions.only(entry):
        plan = model.plan(x)
        assert [s.seconds for s in (*plan.forward, *plan.backward) if s.name == "plain"] == [1e-9, 1e-9, 2e-9]
        assert 77 in {k.bytes for k in plan.kept}
        assert_as_meant(model, x)
    assert {what for what in seen if what[0] is dict} == {(dict,), *((dict, name) for name in bodies)}
