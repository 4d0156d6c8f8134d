"""Helpers for tests of the products' fusions: plans for a GPU that is not at hand, and a library that computes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from te_fuser import Sequential
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost, Fusion
from te_fuser.kernels.cublaslt import products
from te_fuser.ops import GELU, Linear
from te_fuser.ops.base import FusableOperation
from tests import fake_cublaslt, fake_cuda
from tests.fake_cublaslt import FakeCublasLt
from tests.plans.models import autocast


def plan(
    *ops: FusableOperation,
    features: int = 4096,
    rows: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = "h200",
    grad: bool = True,
    frozen: Sequence[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
    cast: bool = False,
    memory: str = "balanced",
    kernels: str = "auto",
) -> Plan:
    """The plan for a device by its name and an input without memory; without a name, for the CPU.

    Args:
        frozen: parameters, or "x", that need no gradient.
        dtypes: of parameters that have another one.
        cast: under autocast to bfloat16.
    """
    where = "meta" if device else "cpu"
    model = Sequential(*ops, memory=memory, kernels=kernels).to(dtype).to_empty(device=where)
    x = torch.empty(rows, features, dtype=dtype, device=where, requires_grad=grad and "x" not in frozen)
    for name, p in model.named_parameters():
        p.requires_grad_(grad and name not in frozen)
        p.data = p.data.to((dtypes or {}).get(name, dtype))
    with autocast_on_cuda() if cast else contextlib.nullcontext():
        return model.plan(x, device=device)


def gelu_mlp(gelu: str = "tanh", inner: int = 16384) -> tuple[FusableOperation, ...]:
    """The two products around a GELU, 4096 -> inner -> 4096."""
    return Linear(4096, inner, device="meta"), GELU(gelu), Linear(inner, 4096, device="meta")


def covered(steps: Sequence[object]) -> list[tuple[str, int, int]]:
    """(name, start, stop) of steps."""
    return [(s.name, s.start, s.stop) for s in steps]  # type: ignore[attr-defined]


def reasons(p: Plan, name: str) -> set[str]:
    """Reasons for which a fusion was not taken."""
    return {r.reason for r in p.refusals if r.name == name}


def free(fusion: Fusion) -> Fusion:
    """The fusion at no cost, so that it is taken wherever it may be."""
    return dataclasses.replace(fusion, cost=lambda m: Cost(seconds=0.0))


def autocast_on_cuda() -> contextlib.AbstractContextManager[None]:
    """torch.autocast("cuda", torch.bfloat16), which torch turns off where it sees no GPU."""
    return autocast(torch.bfloat16, "cuda")


@contextlib.contextmanager
def library_on_the_cpu() -> Iterator[FakeCublasLt]:
    """A cuBLASLt that takes tensors on the CPU."""
    driver, library = fake_cuda.compile_driver(), fake_cublaslt.compile_library()
    # Products outlive a test, and with them problems of the library before.
    products.configured.cache_clear()
    products.product_of.cache_clear()
    with fake_cuda.in_place(driver), fake_cublaslt.in_place(library) as fake:
        yield fake
    products.configured.cache_clear()
    products.product_of.cache_clear()
