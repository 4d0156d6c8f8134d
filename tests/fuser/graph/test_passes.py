"""Contexts of calls change lists and are noticed; the reference draws and casts as the plan does."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.graph import passes
from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp
from te_fuser.fuser.graph.passes import CallContext, ReadyList
from te_fuser.guards import Facts
from te_fuser.ops.base import LoweredOp
from tests.twins import sequential, tensor

FACTOR: ContextVar[float | None] = ContextVar("factor", default=None)


class Scaled(CallContext):
    """In here each GELU's output is multiplied by a number."""

    key = staticmethod(FACTOR.get)

    def __init__(self) -> None:
        self.entries: list[Hashable] = []
        self.lefts = 0
        self.settings = {"held": 1}

    def prepare(self, listed: Sequence[ListedOp], key: Hashable, reads: bool) -> ReadyList:
        if key is None:
            self.lefts += 1
            return ReadyList(listed)
        self.entries.append((key, reads))
        return ReadyList([*listed], not reads, lambda: Facts(items=((self.settings, "held", 1),)))

    def rewrite(self, listed: Sequence[ListedOp], call: CallSpecs, key: Hashable) -> Sequence[ListedOp]:
        call.notes.append(f"times {key} on {call.x.device.type}")
        found: list[ListedOp] = []
        for item in listed:
            found.append(item)
            if isinstance(item.lowered.op, ops.GELU):
                scale = LoweredOp(ops.Scale(value=key), {})
                found.append(ListedOp(scale, f"{item.path}.scaled", {}, (), stream=item.stream))
        return found


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scaled]:
    made = Scaled()
    monkeypatch.setattr(passes, "_known", [made])
    yield made


@contextlib.contextmanager
def factor(by: float) -> Iterator[None]:
    token = FACTOR.set(by)
    try:
        yield
    finally:
        FACTOR.reset(token)


def test_lists_change_with_what_surrounds_a_call(scaled: Scaled) -> None:
    model = te_fuser.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Dropout(0.5)).eval()
    x = torch.randn(3, 8)
    plain = model(x)
    for by in (2.0, 3.0, 2.0):
        with factor(by):
            torch.testing.assert_close(model(x), plain * by)
            torch.testing.assert_close(model.reference(x), plain * by)
        torch.testing.assert_close(model(x), plain)
    assert len(model.plans_kept()) == 3
    with factor(4.0):
        assert "times 4.0 on cpu" in str(model.explain(x, details=True))
        double = model.double()(x.double())  # which nothing surrounds
        torch.testing.assert_close(double, model.reference(x.double()))
    torch.testing.assert_close(double.float(), plain)


def test_known_calls_ask_nothing_but_facts(scaled: Scaled) -> None:
    model, x = te_fuser.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(3, 8)
    with factor(2.0):
        for _ in range(3):
            model(x)
        assert scaled.entries == [(2.0, False)]
        scaled.settings["held"] = 2
        model(x)
        assert scaled.entries == [(2.0, False), (2.0, False)]
    for _ in range(3):
        model(x)
    assert scaled.lefts == 1


def test_references_are_made_ready_apart(scaled: Scaled) -> None:
    model, x = te_fuser.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(3, 8)
    with factor(2.0):
        model.reference(x)
        model(x)
    assert scaled.entries == [(2.0, True), (2.0, False)]


def test_draws_stay_as_they_are(scaled: Scaled) -> None:
    model, x = te_fuser.Sequential(ops.GELU(), ops.Dropout(0.5)), torch.randn(30, 8)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with factor(2.0):
        torch.testing.assert_close(model(x), plain * 2.0)


def test_only_so_many_listings_are_kept(scaled: Scaled) -> None:
    model, x = te_fuser.Sequential(ops.Linear(8, 8), ops.GELU(), kernels="reference"), torch.randn(3, 8)
    plain = model(x)
    for by in range(1, 20):
        with factor(float(by)):
            torch.testing.assert_close(model(x), plain * by)
    assert len(model._prepared()[0].fuser._lists.within) <= 8


def test_every_plan_draws_its_own_seed() -> None:
    # A plain module makes two plans of one list.
    model = sequential(ops.Dropout(0.5), torch.nn.Identity(), ops.Dropout(0.5), ops.Bias(32))
    x = tensor(8, 32)
    torch.manual_seed(3)
    fused = model(x)
    torch.manual_seed(3)
    assert torch.equal(fused, model.reference(x))
    kept = (fused != model[3].bias).double().mean()
    assert 0.15 < kept < 0.35  # a quarter: the two masks are not the same


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_how_much_is_drawn_does_not_depend_on_the_plan(p: float) -> None:
    # A dropout that keeps nothing reads no seed.
    model = sequential(ops.Dropout(p), ops.Bias(8))
    torch.manual_seed(5)
    model(tensor(4, 8))
    after = torch.rand(1)
    torch.manual_seed(5)
    model.reference(tensor(4, 8))
    assert torch.equal(after, torch.rand(1))


def test_backward_under_autocast_is_that_outside_of_it() -> None:
    model = sequential(
        ops.Linear(16, 48), ops.DotProductAttention(2, 8, mask="none", layout="sequence_first"), dtype=torch.float32
    )
    x = tensor(6, 2, 16, dtype=torch.float32)

    def gradient(inside: bool) -> torch.Tensor:
        with torch.autocast("cpu"):
            y = model(x).float().square().sum()
            if inside:
                return torch.autograd.grad(y, x)[0]
        return torch.autograd.grad(y, x)[0]

    with te_fuser.fusions.only():
        assert torch.equal(gradient(True), gradient(False))


def test_an_empty_batch_of_samples() -> None:
    model = sequential(ops.AdaptiveLayerNorm(8, batch_dim=0))
    x, scale, shift = tensor(0, 3, 8), tensor(0, 8), tensor(0, 8)
    assert model.reference(x, scale=scale, shift=shift).shape == model(x, scale=scale, shift=shift).shape == (0, 3, 8)


def test_casts_move_no_draw() -> None:
    """Streams are numbered by an op's place in the list: what autocast adds before it changes no mask."""
    model = sequential(ops.Dropout(0.5), ops.Linear(64, 64), ops.Dropout(0.5), ops.ReLU(), dtype=torch.float32)
    torch.nn.init.eye_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    x = torch.ones(32, 64, requires_grad=True)

    def kept() -> torch.Tensor:
        torch.manual_seed(7)
        return model(x) != 0

    plain = kept()
    with torch.autocast("cpu", torch.bfloat16):
        assert [n.op.kind.__name__ for n in model.plan(x).graph.nodes].count("Cast") == 1
        assert torch.equal(kept(), plain)
