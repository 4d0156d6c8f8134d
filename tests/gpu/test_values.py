"""Opaque ops of several values on a GPU: 8 bits, scales and gradients in other dtypes, between generated kernels."""

from __future__ import annotations

import pytest
import torch

from te_fuser import Sequential, ops
from tests.fuser.pairs import Pair
from tests.test_values_proof import NARROW, WIDTH, arriving, exact, model

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


@pytest.mark.parametrize("leading", [(7, 3), (1,), (0,), (1031,)])
@pytest.mark.parametrize("asked", [(), ("scale", "twice")])
def test_values_and_gradients(leading: tuple[int, ...], asked: tuple[str, ...]) -> None:
    """As in float64, with float32's products."""
    ours = model("generated").to(GPU)
    x = torch.randn(*leading, WIDTH, device=GPU, requires_grad=True)
    made = ours(x, outputs=asked) if asked else (ours(x),)
    found, leaves = exact(ours, x)
    want = found if asked else found[:1]
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    dys = [dy.to(GPU) for dy in arriving([y.cpu() for y in made])]
    pairs = [(y, w, dy) for y, w, dy in zip(made, want, dys, strict=True) if y.requires_grad]
    got = torch.autograd.grad([y for y, _, _ in pairs], [x, *ours.parameters()], [dy for _, _, dy in pairs])
    right = torch.autograd.grad([w for _, w, _ in pairs], leaves, [dy.double() for _, _, dy in pairs])
    for a, b in zip(got, right, strict=True):
        scale = b.abs().max().item() if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * scale)


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
