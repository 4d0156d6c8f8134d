"""What is kept of a product: scales, histories, slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import te_fuser as te
from te_fuser.quantization.folding import fold
from te_fuser.quantization.state import ROLES, State, amax_of, ensure, scale_of, state_of
from te_fuser.recipe import DelayedScaling, Format

RECIPE = DelayedScaling(amax_history_len=4)


def product(recipe: DelayedScaling = RECIPE) -> te.ops.MatMul:
    made = te.ops.MatMul(16, 32, device="cpu")
    with te.autocast(recipe=recipe):
        ensure(made, recipe)
    return made


def recorded(op: te.ops.MatMul, **amaxes: float) -> State:
    """The state after a call that saw these."""
    for role, amax in amaxes.items():
        slot = amax_of(op, role)
        slot.copy_(torch.maximum(slot, torch.tensor(amax)))
    fold()
    return state_of(op)


def test_state_is_plain_buffers_of_the_op() -> None:
    op = product()
    assert torch.equal(op.fp8_scale, torch.ones(3)) and torch.equal(op.fp8_amax_history, torch.zeros(4, 3))
    assert {name for name, _ in op.named_buffers()} == {"fp8_scale", "fp8_amax_history"}
    assert [float(scale_of(op, role)) for role in ROLES] == [1.0, 1.0, 1.0]


def test_a_fold_makes_history_and_scales_of_what_was_recorded() -> None:
    op = product()
    state = recorded(op, input=2.0, weight=0.5, output_gradient=7.0)
    assert torch.equal(state.history, torch.tensor([[2.0, 0.5, 7.0], *[[0.0] * 3] * 3]))
    assert [float(scale_of(op, role)) for role in ROLES] == [224.0, 896.0, 8192.0]
    assert [float(amax_of(op, role)) for role in ROLES] == [0.0] * 3
    state = recorded(op, input=1.0)
    assert torch.equal(state.history[:2], torch.tensor([[1.0, 0.5, 7.0], [2.0, 0.0, 0.0]]))
    assert [float(s) for s in state.scale] == [224.0, 896.0, 8192.0]


def test_scales_are_another_tensor_after_a_fold() -> None:
    op = product()
    before = scale_of(op, "input")
    recorded(op, input=2.0)
    assert float(before) == 1.0 and before._version == 0 and float(scale_of(op, "input")) == 224.0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    fold()


def test_formats_give_the_largest() -> None:
    op = product(DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2, margin=1))
    assert recorded(op, output_gradient=7.0).scale.tolist() == [1.0, 1.0, 32.0]
