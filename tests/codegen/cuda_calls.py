"""Arguments of a call of a generated CUDA kernel, and the judgement of its results: for the CPU and for GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from te_fuser.codegen.cuda import CudaKernel, RowGrid
from te_fuser.codegen.description import KernelDescription, Store, Sum
from te_fuser.dtypes import STORED
from te_fuser.formula import expr
from te_fuser.formula.expr import Expr
from te_fuser.formula.random import RandomStream
from te_fuser.formula.reductions import row_sum
from tests.codegen.corpus import reference

SEED, OFFSET, FIRST_STREAM = -0x123456789ABCDEF, 7, 2**31 + 5
HALF_ULP = {name: torch.finfo(dtype).eps / 2 for name, dtype in STORED.items()}
Values = Mapping[tuple[str, str], torch.Tensor | int | None]


def streams(description: KernelDescription) -> dict[str, RandomStream]:
    """A random stream for each name."""
    return {name: RandomStream(SEED, OFFSET, FIRST_STREAM + k) for k, name in enumerate(description.streams)}


@dataclass(frozen=True)
class Sizes:
    """The grid of each launch, the groups of partial sums, and float32 elements of each scratch buffer."""

    blocks: tuple[int, ...]
    groups: int
    partials: tuple[int, ...]


def sizes_of(kernel: CudaKernel, rows: int, samples: int, multiprocessors: int) -> Sizes:
    """Grid and scratch sizes of one call, as the native runtime must find them; launches may have no blocks."""
    groups, blocks = 0, []
    for launch in kernel.launches:
        grid = launch.grid
        if isinstance(grid, RowGrid):
            groups = _groups(grid, rows, samples, multiprocessors)  # sums are in the last kernel over rows
            blocks.append(grid.tiles * groups)
        elif groups == (samples if grid.fixed == 0 else 1):
            blocks.append(0)  # each sum comes from one block, which stores it itself
        else:
            blocks.append(grid.fixed + grid.per_sample * samples)
    scratch = groups if blocks[-1] else 0
    return Sizes(tuple(blocks), groups, tuple(scratch * p.width for p in kernel.partials))


def _groups(grid: RowGrid, rows: int, samples: int, multiprocessors: int) -> int:
    """With sums a block does rows four times before another one is worth its partial sums.

    But a few blocks are always worth having, unless one of them is done after two turns and nothing is left to add up.
    """
    samples = samples if grid.per_sample else 1
    if samples == 0 or (rows == 0 and not grid.sums):
        return 0
    wanted = -(-max(1, rows // samples) // grid.rows_per_block)
    if grid.sums:
        few = min(wanted, -(-64 // (grid.tiles * samples)))
        wanted = 1 if wanted <= 2 else max(few, -(-wanted // 4))
    room = multiprocessors * grid.blocks_per_multiprocessor // (grid.tiles * samples)
    return samples * max(1, min(wanted, room))


def arguments(
    kernel: CudaKernel,
    description: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    rows: int,
    batch: tuple[int, int],
    multiprocessors: int,
    device: str = "cpu",
) -> dict[tuple[str, str], torch.Tensor | int | None]:
    """Every argument by (kind, name); scratch is poisoned with NaN. The seed comes by value where rows are odd."""
    sizes = sizes_of(kernel, rows, batch[1], multiprocessors)
    by_value = rows % 2 == 1
    found: dict[tuple[str, str], torch.Tensor | int | None] = {
        ("rows", "rows"): rows,
        ("batch_inner", "batch_inner"): batch[0],
        ("batch_size", "batch_size"): batch[1],
        ("groups", "groups"): sizes.groups,
        ("seed", "seed"): None if by_value else torch.tensor([SEED, OFFSET], dtype=torch.int64, device=device),
        ("seed_value", "seed_value"): SEED if by_value else 1,
        ("seed_offset", "seed_offset"): OFFSET if by_value else 2,
    }
    raised = {t.name for t in description.maxima}
    found |= {("maximum" if name in raised else "load", name): tensor for name, tensor in tensors.items()}
    found |= {("stream", name): FIRST_STREAM + k for k, name in enumerate(description.streams)}
    items = [*(("store", t.name) for t in description.stores), *(("sum", t.name) for t in description.sums)]
    found |= dict(zip(items, outputs, strict=True))
    for partial, size in zip(kernel.partials, sizes.partials, strict=True):
        found["partial", partial.name] = torch.full((size,), math.nan, device=device)
    for name in kernel.row_values:
        found["row_value", name] = torch.full((rows,), math.nan, device=device)
    return found


def complaints(
    description: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    rows: int,
    batch: tuple[int, int] = (1, 1),
) -> list[str]:
    """Wrong outputs, in words: each may err twice what PyTorch errs in float32, plus one unit in the last place.

    Errors are over the output's scale, the largest and the root of the mean square; where the reference is infinite or
    not a number, the output must be the same. A sum may err as the order of its terms makes it: one over rows by the
    size of its terms, what comes from one over features by one unit more.
    """
    exact = reference(description, tensors, rows, batch=batch, streams=streams(description))
    plain = reference(description, tensors, rows, batch=batch, streams=streams(description), dtype=torch.float32)
    sizes = reference(_of_sizes(description), tensors, rows, batch=batch, streams=streams(description))
    items: list[Store | Sum] = [*description.stores, *description.sums]
    units = 2 if description.reductions else 1
    found = (_complaint(t, units, *each) for t, *each in zip(items, outputs, exact, plain, sizes, strict=True))
    return [text for text in found if text]


def _of_sizes(description: KernelDescription) -> KernelDescription:
    """Copy of the kernel in which every sum adds up the absolute values of its terms."""

    def sizes(e: Expr) -> Expr:
        if e.op == "row_sum":
            return row_sum(sizes(e.args[0]))
        return expr.unary("abs", e)

    sums = tuple(dataclasses.replace(s, parts=tuple(sizes(p) for p in s.parts)) for s in description.sums)
    return dataclasses.replace(description, sums=sums)


def _complaint(
    target: Store | Sum, units: int, out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, sizes: torch.Tensor
) -> str:
    dtype = getattr(torch, target.dtype)
    wanted, got, usual = exact.to(dtype).double(), out.cpu().double(), plain.to(dtype).double()
    finite = wanted.isfinite()
    if not torch.equal(got[~finite], wanted[~finite]) and not torch.equal(
        got[~finite].isnan(), wanted[~finite].isnan()
    ):
        return f"{target.name}: {got[~finite][:4].tolist()} where {wanted[~finite][:4].tolist()} is right"
    if not finite.any():
        return ""
    if not got[finite].isfinite().all():
        return f"{target.name}: {int((~got[finite].isfinite()).sum())} values are not finite"
    scale = exact[finite].abs().max().clamp_min(2.0**-24).item()
    order = 2.0**-21 * sizes[finite].max().item() if isinstance(target, Sum) else 0.0
    for name, size in (
        ("largest", lambda x: x.abs().max().item()),
        ("typical", lambda x: x.square().mean().sqrt().item()),
    ):
        error, allowed = size(got[finite] - exact[finite]), 2 * size(usual[finite] - exact[finite])
        if error > allowed + units * 2 * HALF_ULP[target.dtype] * scale + order:
            figures = f"{name} error {error / scale:.2e}, PyTorch's is {allowed / 2 / scale:.2e}"
            return f"{target.name} ({target.dtype}): {figures}"
    return ""
