"""PyTorch's products through symmetric memory, as they are documented, by functional collectives: they run anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # noqa: F401 - it declares the operators

from te_fuser import fusions
from te_fuser.fusions import Cost, Fusion
from te_fuser.kernels import symmetric
from te_fuser.ops.collective import Exchange
from te_fuser.ops.group import Group

NAMES = (
    "all_gather_matmul",
    "all_gather_matmul_backward",
    "all_gather_matmul_backward_main_grad",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_backward",
    "matmul_reduce_scatter_backward_main_grad",
)
called: list[str] = []  # the operators, as they were


def _all_gather_matmul(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    called.append("fused_all_gather_matmul")
    assert a.is_contiguous() and gather_dim == 0 and return_A
    gathered = Exchange(join=gather_dim).run(a, _group(group_name))
    return gathered, [gathered @ b for b in bs]


def _matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    called.append("fused_matmul_reduce_scatter")
    assert reduce_op == "sum" and scatter_dim == 0
    return Exchange(cut=scatter_dim).run(a @ b, _group(group_name))


def _group(name: str) -> Group:
    return Group(name, torch.distributed.distributed_c10d._resolve_process_group(name).size())  # type: ignore[arg-type]


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """In here they run on the CPU, and nothing speaks against them."""
    called.clear()
    with contextlib.ExitStack() as scope, pytest.MonkeyPatch.context() as patch:
        library = scope.enter_context(torch.library._scoped_library("symm_mem", "IMPL"))
        library.impl("fused_all_gather_matmul", _all_gather_matmul, "CPU")
        library.impl("fused_matmul_reduce_scatter", _matmul_reduce_scatter, "CPU")
        patch.setattr(symmetric, "obstacle", lambda group, device: None)
        patch.setattr(symmetric, "workspace", lambda group, size: None)
        yield


@contextlib.contextmanager
def taken(*names: str) -> Iterator[None]:
    """In here plans take these pipelines wherever they fit, beside the kernels of row ops, and no other fusion."""
    with fusions.only(fusions.STRETCH, *map(_free, names or NAMES)):
        yield


def _free(name: str) -> Fusion:
    return dataclasses.replace(fusions.get(name), cost=_nothing)


def _nothing(m: Any) -> Cost:
    return Cost(seconds=0.0)
