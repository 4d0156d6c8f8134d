"""Inputs that a collective of PyTorch still sends: lists wait for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import te_fuser
from te_fuser import ops
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import sequential, tensor

F = 8


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, under way; its gradient is that of the sum of all ranks' losses."""
    y = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    assert isinstance(y, AsyncCollectiveTensor)
    return y


@pytest.mark.parametrize("plain_first", [False, True])
@on_ranks
def test_lists_wait_for_their_input(plain_first: bool) -> None:
    model = sequential(ops.LayerNorm(F), ops.Linear(F, F), ops.GELU())
    whole = tensor(2 * WORLD, F)
    if plain_first:  # whose plan is there then
        model(whole)
    x = whole.detach().chunk(WORLD)[dist.get_rank()].clone().requires_grad_()
    y, want = model(summed(x)), model(whole)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    dy = tensor(*y.shape, grad=False, seed=1)
    y.backward(dy)
    want.backward(WORLD * dy)
    assert whole.grad is not None
    torch.testing.assert_close(x.grad, whole.grad.chunk(WORLD)[dist.get_rank()])


@on_ranks
def test_named_inputs_and_single_ops_wait_too() -> None:
    x, own = tensor(2 * WORLD, F), tensor(2, F, grad=False, seed=dist.get_rank())
    skip = torch.cat([tensor(2, F, grad=False, seed=rank) for rank in range(WORLD)])
    listed = te_fuser.Sequential(ops.GELU(), ops.Add("skip"))
    torch.testing.assert_close(listed(x, skip=summed(own)), listed(x, skip=skip), rtol=0, atol=0)
    torch.testing.assert_close(ops.GELU()(summed(own)), ops.GELU()(skip), rtol=0, atol=0)
