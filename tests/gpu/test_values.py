"""Opaque ops of several values on a GPU: 8 bits, scales and gradients in other dtypes, between generated kernels."""

from __future__ import annotations

import pytest
import torch

from te_fuser import Sequential, ops
from tests.fuser.pairs import Pair
from tests.test_values_proof import NARROW, WIDTH, assert_as_exact, model

GPU = torch.device("cuda")


@pytest.mark.parametrize("leading", [(7, 3), (1,), (0,), (1031,)])
@pytest.mark.parametrize("asked", [(), ("scale", "twice")])
def test_values_and_gradients(leading: tuple[int, ...], asked: tuple[str, ...]) -> None:
    """As in float64, with float32's products."""
    x = torch.randn(*leading, WIDTH, device=GPU, requires_grad=True)
    assert_as_exact(model("generated").to(GPU), x, asked, 1e-4, scaled=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_step_is_verified(dtype: torch.dtype) -> None:
    ours = model("generated", dtype, verify=True).to(GPU)
    x = torch.randn(33, WIDTH, device=GPU).to(dtype).requires_grad_()
    assert NARROW in {v.spec.dtype for v in ours.plan(x).graph.values}
    sum(y.double().sum() for y in ours(x, outputs=("twice",))).backward()
    assert x.grad is not None


def test_large_values_are_not_stored_over() -> None:
    """Both values of an op stay what they were, though kernels around it may store over what dies."""
    width = 4096
    ours = Sequential(ops.GELU(), Pair(), ops.MatMul(width, width), ops.GELU(), ops.Add("other"), ops.GELU()).to(GPU)
    x = torch.randn(1024, width, device=GPU, requires_grad=True)
    leaves = [x, *ours.parameters()]
    got, again, want = (torch.autograd.grad(run(x).square().mean(), leaves) for run in (ours, ours, ours.reference))
    for a, b, c in zip(got, again, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-2, atol=1e-2 * c.abs().max().item())
