"""Kernels that start before the one before them has ended read what that one wrote."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops

WIDTH = 4096


def chain() -> te_fuser.Sequential:
    """Generated kernels between products; their backward adds up columns, which takes two kernels in a row."""
    parts = [te_fuser.Residual(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU()) for _ in range(4)]
    return te_fuser.Sequential(*parts).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_gives_the_same_every_time(captured: bool) -> None:
    torch.manual_seed(0)
    model = chain()
    x = torch.randn(512, WIDTH, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    call = te_fuser.cuda_graph(model, x.clone().requires_grad_()) if captured else model

    def step() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        # A graph writes its gradients to the same memory again.
        return [t.detach().clone() for t in (y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy))]

    first = step()
    exact = chain().double()
    exact.load_state_dict(model.state_dict())
    leaf = x.double().requires_grad_()
    y = exact.reference(leaf)
    wanted = [y.detach(), *torch.autograd.grad(y, [leaf, *exact.parameters()], dy.double())]
    for made, want in zip(first, wanted, strict=True):
        assert (made.double() - want).norm() <= 0.02 * want.norm()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
