"""CUDA C++ from a kernel description: readable text, and what a launch of it needs to know.

One function does the rows; with column sums, a second one adds up the partial sums of the blocks in a fixed order. Rows
too long for sums and stores together get a third (`schedule.split`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_fuser.codegen import schedule_model as model
from te_fuser.codegen.cuda_body import SUFFIX, Parameter
from te_fuser.codegen.cuda_columns import ColumnText, TileText
from te_fuser.codegen.cuda_formulas import is_precise, rewrite
from te_fuser.codegen.cuda_rows import RowText
from te_fuser.codegen.cuda_text import CTYPES, EVERY_ROW, FINISH_THREADS, CudaNames, Text
from te_fuser.codegen.description import KernelDescription, Sum
from te_fuser.codegen.schedule import Kind, Schedule, limits_of, shared_bytes, split
from te_fuser.formula.expr import Axes

# ------------------------------------------------------------------------------------ what a launch needs


class RowGrid(NamedTuple):
    """Grid of blocks that walk over rows: `tiles` side by side, and as many groups of rows as the GPU holds at once.

    With `sums` each group has its own partial sums, as many groups for each sample where they are `per_sample`.
    """

    tiles: int
    rows_per_block: int
    blocks_per_multiprocessor: int
    per_sample: bool
    sums: bool


class SumGrid(NamedTuple):
    """Grid of blocks that add up partial sums, of 32 columns each."""

    fixed: int
    per_sample: int


@dataclass(frozen=True)
class CudaLaunch:
    """One kernel of the source: its symbol, its arguments in order, and its block."""

    symbol: str
    parameters: tuple[Parameter, ...]
    threads: int
    shared_bytes: int
    grid: RowGrid | SumGrid


@dataclass(frozen=True)
class PartialSums:
    """Scratch for the partial sums of one sum: float32, [groups, width]; uninitialised."""

    name: str
    width: int


@dataclass(frozen=True)
class CudaKernel:
    """The text of a description, its launches in order, and the scratch between them.

    `overwrites` are the pairs (store, load) that may have the same memory: the description's, or none where the kernel
    is cut in two.
    """

    name: str
    source: str
    launches: tuple[CudaLaunch, ...]
    partials: tuple[PartialSums, ...]
    row_values: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    overwrites: tuple[tuple[str, str], ...] = ()


def generate(description: KernelDescription, arch: str = "sm_90a", *, schedules: Sequence[Schedule] = ()) -> CudaKernel:
    """The CUDA text of a description.

    Args:
        schedules: instead of what `schedule_model` picks: one, or two for stores and column sums in their own kernels.

    Raises:
        ValueError: for a dtype that generated kernels do not store, or what a kernel by tiles cannot do.
    """
    for tensor in description.tensors:
        if tensor.dtype not in CTYPES:
            raise ValueError(
                f"kernel {description.name}: {tensor.name} is {tensor.dtype}; "
                f"generated kernels store {', '.join(CTYPES)}"
            )
    rewritten = rewrite(description)
    limits = limits_of(arch)
    if why := model.tile_refusal(rewritten, limits):
        raise ValueError(f"kernel {description.name}: {why}")
    if not schedules:
        whole = model.pick(rewritten, limits)
        parts = (rewritten,) if whole else split(rewritten)
        schedules = [s for part in parts if (s := model.pick(part, limits))]
    parts = (rewritten,) if len(schedules) == 1 else split(rewritten)
    return _assemble(description, list(zip(parts, schedules, strict=True)))


# --------------------------------------------------------------------------------- the sums of the blocks


def _finish_text(symbol: str, sums: Sequence[Sum]) -> tuple[str, CudaLaunch]:
    """The kernel that adds up the partial sums of all sums, those of the whole batch first."""
    ordered = sorted(sums, key=lambda t: bool(t.axes & Axes.BATCH))
    names, text = CudaNames(), Text()
    parameters = [Parameter("partial", t.name, "const float* __restrict__") for t in ordered]
    parameters += [Parameter("sum", t.name, f"{CTYPES[t.dtype]}* __restrict__") for t in ordered]
    pointers = [names.fresh(p.name + SUFFIX.get(p.kind, "")) for p in parameters]
    parameters += [Parameter("groups", "groups", "int"), Parameter("batch_size", "batch_size", "int")]
    listed = ",\n    ".join(
        f"{p.ctype} {n}" for p, n in zip(parameters, [*pointers, "groups", "batch_size"], strict=True)
    )
    fixed = per_sample = 0
    with text.block(f'extern "C" __global__ void __launch_bounds__(te::kFinishThreads) {symbol}(\n    {listed})'):
        text("te::wait_for_earlier();")
        text("__shared__ float found[32][33];")
        text("int block = blockIdx.x;")
        for number, t in enumerate(ordered):
            partial, total = pointers[number], pointers[len(ordered) + number]
            if number:
                before = ordered[number - 1]
                text(f"block -= {_tiles(before)}{' * batch_size' if before.axes & Axes.BATCH else ''};")
            width, tiles = t.width if t.axes & Axes.FEATURE else 1, _tiles(t)
            call = f"te::finish(found, {partial}, {total}"
            if t.axes & Axes.BATCH:
                per_sample += tiles
                with text.block(f"if (block < {tiles} * batch_size)"):
                    text(f"const int splits = groups / batch_size, sample = block / {tiles};")
                    first = "static_cast<long long>(sample) * splits"
                    text(f"return {call}, {first}, splits, block % {tiles}, sample, {width});")
            else:
                fixed += tiles
                text(f"if (block < {tiles}) return {call}, 0, groups, block, 0, {width});")
    return "\n".join(text.lines), CudaLaunch(symbol, tuple(parameters), FINISH_THREADS, 0, SumGrid(fixed, per_sample))


def _tiles(t: Sum) -> int:
    return -(-t.width // 32) if t.axes & Axes.FEATURE else 1


def _assemble(description: KernelDescription, kernels: Sequence[tuple[KernelDescription, Schedule]]) -> CudaKernel:
    launches, bodies = [], []
    if len(kernels) > 1:
        description = dataclasses.replace(description, overwrites=())
    space = "te::precise" if is_precise(description) else "te::fast"
    for d, s in kernels:
        kind: type[ColumnText | RowText] = _WRITERS.get(s.kind, RowText)
        writer = kind(_symbol(d.name), d, s, space)
        bodies.append(f"// {s}.\n{writer.write()}")
        grid = RowGrid(
            s.tiles(d.width),
            s.rows,
            s.blocks_per_multiprocessor * (s.rounds or EVERY_ROW),
            writer.per_sample,
            bool(d.sums),
        )
        launches.append(CudaLaunch(writer.symbol, writer.parameters, s.threads, shared_bytes(d, s), grid))
    if description.sums:
        body, launch = _finish_text(f"{_symbol(description.name)}_finish", description.sums)
        bodies.append(f"// Adds up what the blocks found, in a fixed order.\n{body}")
        launches.append(launch)
    head = "".join(f"// {line}\n" for line in str(description).splitlines())
    partials = tuple(PartialSums(t.name, t.width if t.axes & Axes.FEATURE else 1) for t in description.sums)
    values = [p.name for launch in launches[:1] for p in launch.parameters if p.kind == "row_value"]
    header = "te_cuda_tile.cuh" if description.transposed else "te_cuda.cuh"
    header = "te_cuda_blocks.cuh" if description.in_blocks else header
    source = f'{head}#include "{header}"\n\n' + "\n\n".join(bodies) + "\n"
    schedules = tuple(s for _, s in kernels)
    return CudaKernel(
        description.name, source, tuple(launches), partials, tuple(values), schedules, description.overwrites
    )


_WRITERS: dict[Kind, type[ColumnText]] = {Kind.COLUMNS: ColumnText, Kind.TILE: TileText}


def _symbol(name: str) -> str:
    return CudaNames().fresh(name)
