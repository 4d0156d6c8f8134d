"""Covers: what is computed again in backward is memory that goes, or time that a fusion costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusion, ops
from te_fuser.fusions import Cost, unregister
from te_fuser.ops.base import NamedInput
from tests.twins import assert_as_meant


class Times(ops.RowOp):
    """y = x * other, whose backward reads both."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"other": NamedInput(self.name)}

    def compute(self, x: Any, other: Any) -> Any:
        return x * other


WIDTH, NORM = 64, 512 * 64 * 4  # bytes of the norm's output
NORMED = [lambda: ops.LayerNorm(WIDTH), lambda: ops.Fork("n"), lambda: ops.Linear(WIDTH, WIDTH)]
TAKEN = [*NORMED, lambda: ops.Fork("a"), lambda: ops.Take("n")]
# Behind the first product: what reads the norm's output, under its own name or another, and how often that is kept.
READ: dict[str, list[Callable[[], torch.nn.Module]]] = {
    "by a product": [*TAKEN, lambda: ops.Linear(WIDTH, WIDTH), lambda: ops.Add("a")],
    "by a product, in another shape": [
        *TAKEN,
        lambda: ops.Reshape(-1, 32),
        lambda: ops.Linear(32, 32),
        lambda: ops.Reshape(-1, WIDTH),
        lambda: ops.Add("a"),
    ],
    "by a kernel": [*TAKEN, lambda: ops.RMSNorm(WIDTH), lambda: ops.Add("a")],
    "by a kernel, as itself": [*NORMED, lambda: Times("n")],
}


def kept_by(model: Sequential, x: torch.Tensor) -> int:
    """The bytes of the large tensors that a call keeps beside parameters and x."""
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    assert y.grad_fn is not None
    return sum(size for place, size in found.items() if place not in own and size >= NORM)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean", 0])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_under_another_name_is_kept_once_and_not_computed_again(name: str, memory: str | int) -> None:
    model, x = Sequential(*[part() for part in READ[name]], memory=memory), torch.randn(512, WIDTH, requires_grad=True)
    plan = model.plan(x)
    assert plan.kept_bytes() == kept_by(model, x)
    assert "layer_norm.output" in [k.name for k in plan.kept] and not [c for c in plan.choices if c.recomputed]
    assert not plan.choices or name == "by a kernel, as itself"
    assert_as_meant(model, x, tolerance=1e-4)


def test_what_only_products_read_is_computed_again() -> None:
    """`Add` reads nothing in backward, so that the memory of what is taken goes."""
    model = Sequential(*[part() for part in TAKEN], ops.Add("a"), memory="lean")
    x = torch.randn(512, WIDTH, requires_grad=True)
    plan = model.plan(x)
    assert [c.value for c in plan.choices if c.recomputed] == ["layer_norm.output"]
    assert plan.kept_bytes() == kept_by(model, x) == 0
    assert_as_meant(model, x, tolerance=1e-4)


@pytest.mark.parametrize("memory", ["fast", "balanced"])
def test_to_take_a_value_costs_nothing(memory: str) -> None:
    model = Sequential(*[part() for part in READ["by a product"]], memory=memory)
    x = torch.empty(8192, WIDTH, requires_grad=True)
    plan = model.plan(x, device="h200")
    taken = [s for s in plan.steps if s.name.startswith("take")]
    assert [s.name for s in taken] == ["take", "take.value_gradient"]
    assert all(s.seconds == s.cost.read == s.cost.written == s.cost.launches == 0 for s in taken)


def test_a_fusion_that_gives_too_little_says_what_it_would_cost() -> None:
    """Backward would compute the statistics of its norms again, or does so where that is cheaper."""
    chain = [ops.LayerNorm(512), ops.GELU(), ops.LayerNorm(512), ops.GELU(), ops.LayerNorm(512)]

    def planned(seconds: float) -> Any:
        fusion(forward=[type(op) for op in chain], name="normed", cost=lambda m: Cost(seconds=seconds))(lambda m, x: x)
        try:
            return Sequential(*chain, memory="fast").plan(x, device="cpu")
        finally:
            unregister("normed")

    x = torch.empty(4096, 512, requires_grad=True)
    without = Sequential(*chain, memory="fast").plan(x, device="cpu")
    (row,) = without.forward
    cheap = planned(0.9 * row.seconds)
    assert [step.name for step in cheap.forward] == ["normed"] and not cheap.refusals
    why = "backward reads per-row statistics or op results that it does not give; "
    longer = cheap.seconds() + 0.09 * row.seconds - without.seconds()
    dear = f"a plan whose backward does without that is predicted {longer * 1e6:.1f} us longer"
    dearest = f"in forward alone: predicted {0.01 * row.seconds * 1e6:.1f} us more than {row.name}"
    for share, cost in ((0.99, dear), (1.01, dearest)):
        plan = planned(share * row.seconds)
        assert [step.name for step in plan.forward] == [row.name]
        assert [r.reason for r in plan.refusals] == [why + cost]
