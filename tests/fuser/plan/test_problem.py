"""Places of fusions: the runs of ops that fused operations stand for, and nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost, Details, Fusion, OneOf, Optional, Repeat
from te_fuser.verify import example
from tests.twins import assert_as_meant, randomize, sequential, tensor

X = tensor(6, 8)


@example(make=lambda features: randomize(GatedProjection(features, features)))
class GatedProjection(ops.FusedOperation):
    """SwiGLU(x W^T + b)."""

    def __init__(self, features: int = 8, inner: int = 8) -> None:
        super().__init__(up=ops.Linear(features, 2 * inner), gate=ops.SwiGLU())


class Other(GatedProjection):
    """Another kind, of the same ops."""


class Nested(ops.FusedOperation):
    def __init__(self) -> None:
        super().__init__(norm=ops.LayerNorm(8), inner=GatedProjection())


class Kernel:
    """Its own code for both directions."""

    @staticmethod
    def forward(m, x):
        hidden = F.linear(x, m[0].weight, m[1].bias)
        m.emit("hidden", hidden)
        gate, linear = hidden.chunk(2, -1)
        return F.silu(gate) * linear

    @staticmethod
    def backward(m, dy):
        gate, linear = m["hidden"].chunk(2, -1)
        s = torch.sigmoid(gate)
        dhidden = torch.cat([dy * linear * s * (1 + gate * (1 - s)), dy * gate * s], -1)
        rows = dhidden.reshape(-1, dhidden.shape[-1])
        x = m["input"].reshape(-1, m["input"].shape[-1])
        return dhidden @ m[0].weight, {"0.weight": rows.T @ x, "1.bias": rows.sum(0)}


@pytest.fixture
def kernel() -> Fusion:
    declare = te_fuser.fusion(
        joint=[GatedProjection], name="gated", reads=["input"], saves=["hidden"], cost=lambda m: Cost(seconds=0.0)
    )
    return declare(Kernel)


def places(pattern, *listed: ops.FusableOperation) -> list[tuple[int, int]]:
    """Places (start, stop) of a pattern in a list of elementary ops."""
    entry = te_fuser.fusion(forward=pattern, name="probe", details=Details(registered=False))(lambda m, x: x)
    with fusions.only(entry):
        model, whole = sequential(*listed), te_fuser.fuser.plan.problem.find_matches
        graph = model.plan(X).graph
        options = te_fuser.fuser.plan.problem.Options(te_fuser.fuser.plan.device.DEVICES["cpu"])
        return [(start, stop) for _, start, stop in whole(graph, options)[0]]


def test_it_fits_where_one_stands_and_nowhere_else() -> None:
    alike = (ops.Linear(8, 16), ops.SwiGLU())
    assert places([GatedProjection], *alike, GatedProjection(), *alike) == [(3, 6)]
    assert places([GatedProjection], Other()) == [] and places([Other], Other()) == [(0, 3)]
    assert places([ops.MatMul, ops.Bias, ops.SwiGLU], *alike, GatedProjection()) == [(0, 3), (3, 6)]
    assert places([ops.FusedOperation], *alike, Other(), GatedProjection()) == [(3, 6), (6, 9)]


def test_it_is_a_part_of_patterns_like_others() -> None:
    assert places([ops.LayerNorm, GatedProjection], Nested(), ops.LayerNorm(8), GatedProjection()) == [(0, 4), (4, 8)]
    assert places([Nested], Nested()) == [(0, 4)]
    shared = GatedProjection()
    assert places([Repeat(GatedProjection, 2), ops.GELU], shared, shared, ops.GELU()) == [(0, 7)]
    assert places([Optional(GatedProjection), OneOf(ops.GELU, Other)], Other(), GatedProjection(), ops.GELU()) == [
        (0, 3),
        (3, 7),
        (6, 7),
    ]


def test_its_own_code_runs_in_both_directions(kernel: Fusion) -> None:
    model = sequential(ops.LayerNorm(8), GatedProjection(), ops.Linear(8, 16), ops.SwiGLU(), Nested())
    plan = model.plan(X)
    for steps in (plan.forward, plan.backward):
        assert sorted((s.start, s.stop) for s in steps if s.name == "gated") == [(1, 4), (8, 11)]
    assert_as_meant(model, X)
    assert_as_meant(model, X.detach())
    with fusions.disabled("gated"):
        assert not [s for s in model.plan(X).forward if s.name == "gated"]
        assert_as_meant(model, X)


def test_verify_checks_it(kernel: Fusion, few_rows: None) -> None:
    assert te_fuser.verify("gated", dtypes=[torch.float32]).rows
    wrong = te_fuser.fusion(
        joint=[GatedProjection], name="wrong", saves=["hidden"], reads=["input"], details=Details(registered=False)
    )
    body = type("Wrong", (Kernel,), {"backward": staticmethod(lambda m, dy: (Kernel.backward(m, dy)[0], {}))})
    with pytest.raises(te_fuser.VerificationError):
        te_fuser.verify(wrong(body), dtypes=[torch.float32])


def test_it_has_the_parameters_of_its_parts(kernel: Fusion) -> None:
    model = sequential(GatedProjection())
    assert list(model.state_dict()) == ["0.up.weight", "0.up.bias"] == [n for n, _ in model.named_parameters()]
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(twin(X), model(X))
    assert twin[0].infer(model.plan(X).x).shape == (6, 8)
    y = model[0](X)  # alone
    torch.testing.assert_close(y, model.reference(X))


def test_a_change_in_a_part_is_a_change(kernel: Fusion) -> None:
    model = sequential(GatedProjection())
    op, before = model[0], model(X)
    torch.testing.assert_close(op(X), before)
    op.gate.gate_first = False
    gate, linear = F.linear(X, op.up.weight, op.up.bias).chunk(2, -1)
    with fusions.disabled("gated"):
        for run in (model, op):
            torch.testing.assert_close(run(X), gate * F.silu(linear))
        op.gate = ops.GLU()
        for run in (model, op):
            torch.testing.assert_close(run(X), torch.sigmoid(gate) * linear)


def test_hooks_on_a_part_are_refused_and_on_the_whole_run() -> None:
    model = sequential(ops.GELU(), GatedProjection())
    want, called = model(X), []
    handle = model[1].gate.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(TypeError, match="GatedProjection: part 'gate' has a hook, which would not run: hook the whole"):
        model(X)
    handle.remove()
    model[1].register_forward_hook(lambda *_: called.append(2))
    torch.testing.assert_close(model(X), want)
    assert called == [2]


def test_autocast_between_the_parts_is_no_obstacle() -> None:
    """A Cast may stand in the run; the ops then run one by one or as other fusions have them."""
    model = sequential(Nested(), dtype=torch.float32)
    x = tensor(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert "gated" not in [s.name for s in model.plan(x).forward]
        torch.testing.assert_close(model(x), model.reference(x), rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------------------------ conditions


LOOKS = {
    "at nothing": (lambda m: m[0].in_features == 8 and m[1].kind is ops.Bias, 1),
    "at a parameter": (lambda m: bool(m[0].weight.any()), 4),
    "at the op": (lambda m: m[0].op.in_features == 8, 4),
    "by a method": (lambda m: bool(m[0].extra_repr()), 4),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_condition_that_sees_no_parameter_is_asked_once_for_all_places_that_are_alike(look: str) -> None:
    answer, times = LOOKS[look]
    asked = []

    def when(m: fusions.Match) -> bool:
        asked.append(m)
        return answer(m)

    @fusions.fusion(forward=[ops.MatMul, ops.Bias], when=when, details=Details(registered=False))
    def product(m, x):
        return F.linear(x, m[0].weight, m[1].bias)

    model = te_fuser.Sequential(*(ops.Linear(8, 8) for _ in range(4))).to(X.dtype)
    with torch.no_grad():
        model[2].weight.zero_()
    with fusions.only(product):
        found = model.plan(X, device="cpu")
    assert len(asked) == times
    refused = [r.start for r in found.refusals if r.name == "product" and "condition" in r.reason]
    assert refused == ([4] if look == "at a parameter" else [])
