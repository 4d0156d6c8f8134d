"""Comparisons for tests of ops: an op by its reference, beside torch, both against torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from te_fuser.ops.base import FusableOperation, OpCall, Spec

Tensors = dict[str, torch.Tensor]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def spec(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Spec:
    return Spec(shape, dtype, torch.device(device))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed float64 numbers of both signs."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values_and_gradients(run: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The output and the gradient of every tensor, for one random output gradient."""
    given = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    y = run(**given)
    dy = normal(*y.shape, seed=99).to(y.dtype)
    gradients = torch.autograd.grad(y, list(given.values()), dy)
    return {"output": y.detach(), **{f"d_{n}": g for n, g in zip(given, gradients, strict=True)}}


def assert_as_good_as_torch(
    op: FusableOperation,
    torch_form: Callable[..., torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """In float64 the op is torch's; else it errs at most twice what torch errs, plus one ulp of the largest value."""
    exact = values_and_gradients(torch_form, {n: t.to(dtype).double() for n, t in tensors.items()})
    by_reference = lambda x, **others: op.reference(OpCall(tensors=others), x)  # noqa: E731
    got = values_and_gradients(by_reference, {n: t.to(dtype) for n, t in tensors.items()})
    rival = values_and_gradients(torch_form, {n: t.to(dtype) for n, t in tensors.items()})
    for name, want in exact.items():
        assert got[name].dtype == dtype and got[name].shape == want.shape
        if dtype == torch.float64:
            torch.testing.assert_close(got[name], want, rtol=1e-11, atol=1e-12)
            continue
        ulp = torch.finfo(dtype).eps * want.abs().max().item()
        for norm in (float("inf"), 2.0):
            ours, torchs = (error(r[name], want, norm) for r in (got, rival))
            assert ours <= 2 * torchs + ulp, f"{name}: {ours} > 2 * {torchs} + {ulp} (norm {norm})"


def error(got: torch.Tensor, want: torch.Tensor, norm: float) -> float:
    """The largest or the root-mean-square error."""
    difference = (got.double() - want).abs()
    return difference.max().item() if norm == float("inf") else difference.square().mean().sqrt().item()
