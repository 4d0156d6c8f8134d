"""Random draws for a part of the whole: every target gives a rank what one process alone draws at that place."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cuda
from te_fuser.codegen.compiler import find_compiler, load
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.distributed.group import Group
from te_fuser.distributed.shard import Share
from te_fuser.formula import expr, random
from te_fuser.formula import functions as f
from te_fuser.formula.expr import Axes
from te_fuser.formula.random import RandomStream, Shared
from tests.codegen.corpus import Kit, outputs
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED
from tests.codegen.cuda_on_cpu import build

COMPILER = shutil.which("g++") or shutil.which("clang++")
DROP = random.threshold(0.3)
OUTER, OWN, INNER = 3, 4, 2  # the rows of a rank: [3, 4, 2] of [3, 4 * ranks, 2]

# The columns of a rank, the pieces of them that a kernel stores apart, and how they are shared.
CASES = {
    "rows": (24, 1, Shared(rows=2)),
    "rows apart": (21, 1, Shared(rows=3, apart=True)),
    "columns": (16, 1, Shared(columns=3)),
    "columns of odd numbers": (5, 1, Shared(columns=2)),
    "columns in pieces": (48, 3, Shared(columns=2)),
    "odd columns in pieces": (12, 2, Shared(columns=2)),
    "parts": (48, 2, Shared(columns=2, parts=2)),
    "wide parts": (128, 2, Shared(columns=2, parts=2)),
    "parts in one piece": (48, 1, Shared(columns=3, parts=3)),
    "odd parts": (20, 2, Shared(columns=2, parts=2)),
    "both": (32, 2, Shared(rows=2, apart=True, columns=2, parts=2)),
    "one rank": (24, 1, Shared()),
}


def drawing(width: int, pieces: int, shared: Shared, axes: Axes = Axes.FULL) -> KernelDescription:
    """A kernel that stores what it draws."""
    keep = expr.keep_leaf("dropout", DROP, axes, width)
    stored = f.split(keep, pieces) if axes & Axes.FEATURE else [keep] * pieces
    made = Kit().forward("mask", {f"y{k}": (piece, width // pieces) for k, piece in enumerate(stored)})
    return dataclasses.replace(made, shared=(("dropout", shared),))


def whole_mask(width: int, shared: Shared, ranks: tuple[int, int]) -> torch.Tensor:
    """Part of one process's mask that rank `ranks` (among those of rows, and of columns) has."""
    outer = OUTER if shared.apart else 1
    shape = outer, shared.rows, (OUTER // outer) * OWN * INNER, shared.parts, shared.columns, width // shared.parts
    rows, columns = outer * shared.rows * shape[2], width * shared.columns
    drawn = RandomStream(SEED, OFFSET, FIRST_STREAM).bits(rows, columns, torch.device("cpu")) >= DROP
    return drawn.view(shape)[:, ranks[0], :, :, ranks[1]].reshape(-1, width).float()


def places(shared: Shared) -> Iterator[tuple[tuple[int, int], tuple[int, int, int]]]:
    """The ranks that there are, and the integers of their calls."""
    block = OWN * INNER if shared.apart else OUTER * OWN * INNER
    for rows in range(shared.rows):
        for columns in range(shared.columns):
            yield (rows, columns), (rows, columns, block)


def run(kernel: object, d: KernelDescription, place: Sequence[int], batch: tuple[int, int] = (1, 1)) -> torch.Tensor:
    """Output of a kernel of the CPU, or of the interpreter."""
    rows, made = OUTER * OWN * INNER, outputs(d, OUTER * OWN * INNER)
    kernel((torch.tensor([SEED, OFFSET]), *made), rows, *batch, (FIRST_STREAM, *place))  # type: ignore[operator]
    return torch.cat(made, -1)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: str) -> None:
    width, pieces, shared = CASES[case]
    d = drawing(width, pieces, shared)
    for ranks, place in places(shared):
        assert torch.equal(run(InterpretedKernel(d), d, place), whole_mask(width, shared, ranks))


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("flags", [None, ("-O1",)], ids=str)
def test_cpp(tmp_path: Path, flags: tuple[str, ...] | None) -> None:
    kernels = {name: drawing(*case) for name, case in CASES.items()}
    loaded = load(list(kernels.values()), cache_dir=tmp_path, compiler=find_compiler(flags=flags))
    for (name, d), kernel in zip(kernels.items(), loaded, strict=True):
        width, _, shared = CASES[name]
        for ranks, place in places(shared):
            assert torch.equal(run(kernel.run, d, place), whole_mask(width, shared, ranks)), (name, ranks)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_cuda(tmp_path: Path) -> None:
    kernels = {name: drawing(*case) for name, case in CASES.items()}
    emulated = build(str(COMPILER), [cuda.generate(d) for d in kernels.values()], tmp_path)
    for (name, d), kernel in zip(kernels.items(), emulated, strict=True):
        width, _, shared = CASES[name]
        for ranks, place in places(shared):
            made = outputs(d, OUTER * OWN * INNER)
            kernel(d, {}, made, OUTER * OWN * INNER, place=place)
            assert torch.equal(torch.cat(made, -1), whole_mask(width, shared, ranks)), (name, ranks)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("by", ["samples", "rows"])
def test_samples(tmp_path: Path, by: str) -> None:
    """Of shared samples a rank has its own; where each rank has rows of every sample, all draw the same for it."""
    shared, size = Shared(rows=2, samples=by == "samples"), OUTER * OWN
    d, batch, rows = drawing(8, 1, shared, Axes.BATCH), (INNER, size), OUTER * OWN * INNER
    (loaded,) = load([d], cache_dir=tmp_path, compiler=find_compiler())
    (emulated,) = build(str(COMPILER), [cuda.generate(d)], tmp_path)
    drawn = random.keep_bits(torch.arange(2 * size), 1, SEED, OFFSET, FIRST_STREAM) >= DROP
    for rank in range(2):
        own = drawn[rank * size : (rank + 1) * size] if by == "samples" else drawn[:size]
        want = own[torch.arange(rows) // INNER].float().expand(-1, 8)
        made = outputs(d, rows, size)
        emulated(d, {}, made, rows, batch, place=(rank, 0, rows))
        for got in (*made, *(run(k, d, (rank, 0, rows), batch) for k in (loaded.run, InterpretedKernel(d)))):
            assert torch.equal(got, want)


def test_what_is_whole_has_the_text_and_key_of_always() -> None:
    d = drawing(24, 1, Shared(rows=2))
    plain = dataclasses.replace(d, shared=())
    assert plain.key != d.key and plain.integers == 1 and d.integers == 4
    assert "row_block" in cuda.generate(d).source and "row_block" not in cuda.generate(plain).source


def test_shares_say_how_values_are_cut() -> None:
    two = Group("two", 2)
    assert Share().shared(None, 3) == Shared() and Share((Group(),)).shared(0, 3) == Shared(samples=True)
    assert Share((two,)).shared(None, 3) == Shared(rows=2)
    assert Share((two,)).shared(0, 3) == Shared(rows=2, samples=True)
    assert Share((two, Group("three", 3))).shared(None, 3) == Shared(rows=6)
    assert Share((two,), dim=1).shared(-2, 3) == Shared(rows=2, apart=True, samples=True)
    assert Share(columns=(two,), parts=2).shared(1, 3) == Shared(columns=2, parts=2)
