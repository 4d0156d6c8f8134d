"""The reference: the same draws and the same casts as the plan, rounding where ops say so."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.twins import sequential, tensor


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
