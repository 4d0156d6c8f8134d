"""Helpers for tests on several GPUs: devices, meshes, layers, and tolerances of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import te_fuser
from te_fuser import ops
from te_fuser.distributed.dtensor import how_laid

NEAR = 0.03  # of the largest, in bfloat16
SIZES = {"cuda": (512, 2048, 8, 256, 4), "cpu": (64, 128, 4, 8, 2)}  # hidden, inner, heads, positions, batch


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def mesh() -> DeviceMesh:
    return init_device_mesh(device(), (dist.get_world_size(),), mesh_dim_names=("tp",))


def by_nccl() -> bool:
    return dist.get_backend() == "nccl"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers, equal on all ranks."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device(), dtype=torch.bfloat16)


def batch(seed: int = 0) -> torch.Tensor:
    """[positions, batch, features]."""
    hidden, _, _, positions, samples = SIZES[device()]
    return random(positions, samples, hidden, seed=seed)


def own(whole: torch.Tensor, dim: int = 0, ranks: DeviceMesh | None = None) -> torch.Tensor:
    """Block of this rank, among all or these."""
    count, rank = (dist.get_world_size(), dist.get_rank()) if ranks is None else (ranks.size(), ranks.get_local_rank())
    return whole.chunk(count, dim)[rank]


def layers(count: int = 2, dropout: float = 0.0, gated: bool = False) -> te_fuser.Sequential:
    """Transformer layers of ops, with numbers that are the same on all ranks."""
    hidden, inner, heads, _, _ = SIZES[device()]

    def layer() -> te_fuser.Sequential:
        attention = ops.DotProductAttention(heads, hidden // heads, mask="causal", layout="sequence_first")
        up, act = (2 * inner, ops.SwiGLU()) if gated else (inner, ops.GELU())
        return te_fuser.Sequential(
            te_fuser.Residual(
                ops.LayerNorm(hidden), ops.Linear(hidden, 3 * hidden), attention, ops.Linear(hidden, hidden),
                ops.Dropout(dropout),
            ),
            te_fuser.Residual(
                ops.RMSNorm(hidden), ops.Linear(hidden, up), act, ops.Linear(inner, hidden), ops.Dropout(dropout)
            ),
        )  # fmt: skip

    torch.manual_seed(0)
    with torch.device(device()):
        return te_fuser.Sequential(*(layer() for _ in range(count))).to(torch.bfloat16)


def assert_near(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    error = ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6)).item()
    assert error <= NEAR, f"{name} differs by {error:.3f} of the largest"


def mlps(count: int = 2, dropout: float = 0.0, **options: Any) -> te_fuser.Sequential:
    """Without attention, whose backward may add up in any order: what is computed twice is equal bit for bit."""
    hidden, inner, _, _, _ = SIZES[device()]

    def layer() -> te_fuser.Residual:
        up, down = ops.Linear(hidden, inner), ops.Linear(inner, hidden)
        return te_fuser.Residual(ops.LayerNorm(hidden), up, ops.GELU(), down, ops.Dropout(dropout))

    torch.manual_seed(0)
    with torch.device(device()):
        return te_fuser.Sequential(*(layer() for _ in range(count)), **options).to(torch.bfloat16)


def whole(t: torch.Tensor | None) -> torch.Tensor:
    assert t is not None
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Of parameters, by name, whole and in the order of the model that nobody shares."""
    for path, module in model.named_modules():
        laid = how_laid(module)
        for name, p in module.named_parameters(recurse=False):
            full = whole(p.grad)
            yield f"{path}.{name}", laid[name].whole(full) if name in laid else full


def assert_alike(model: torch.nn.Module, twin: torch.nn.Module, terms: dist.ProcessGroup | None = None) -> None:
    """Gradients of parameters are those of the model that nobody shares; of `terms`, which ranks have, the sums."""
    for (name, got), q in zip(gradients(model), twin.parameters(), strict=True):
        assert q.grad is not None
        if terms is not None:
            got = got.contiguous()
            dist.all_reduce(got, group=terms)
        assert_near(got, q.grad, name)


def backward(model: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, input gradient), with gradients of parameters left in them."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad
