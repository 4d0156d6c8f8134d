"""Generated kernels that store 8 bits transposed: the same values on every target, and bytes that are those of rows."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, in_place, schedule_model
from te_fuser.codegen.compiler import load
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription, Target, describe
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.nvrtc import INCLUDE
from te_fuser.codegen.schedule import Kind, limits_of
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, row_sum
from te_fuser.formula.expr import Axes
from te_fuser.quantization import quantize
from tests.codegen import tile_cases
from tests.codegen.corpus import Kit, inputs
from tests.codegen.cuda_calls import complaints
from tests.codegen.targets import COMPILER, ON_EVERY_TARGET, Kernels, call, compiled, emulated, shared_out, slots
from tests.float8 import codes
from tests.needs import needs_compiler

CASES = tile_cases.cases()
LIMITS = limits_of("sm_90a")
ROWS = ((0, (1, 1)), (1, (1, 1)), (24, (4, 3)), (301, (1, 1)))
kernels = compiled(CASES)


def check(kernel: object, d: KernelDescription, rows: int, batch: tuple[int, int] = (1, 1)) -> None:
    tensors = inputs(d, rows, batch[1], seed=rows)
    raised = slots(d)
    made = call(kernel, d, tensors, rows, batch, raised)
    tile_cases.check(d, tensors, made, [t.item() for t in raised.values()], rows, batch)


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, target: str, kernels: Kernels) -> None:
    """Bytes, column sums and maxima, of no rows, few, and more than one tile."""
    d = CASES[name]
    for rows, batch in ROWS:
        check(kernels(target, d), d, rows, batch)


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("read", tile_cases.READ)
def test_the_bytes_of_a_quantized_tensor(read: str, dtype: str, target: str, kernels: Kernels) -> None:
    for width in (33, 72):
        d = CASES[f"plain-{width}-{read}-{dtype}"]
        x = 500 * torch.randn(140, width, generator=torch.Generator().manual_seed(width)).to(getattr(torch, read))
        x[3, width // 2], x[137, 0] = torch.inf, torch.nan
        raised = slots(d)
        y, transposed = call(kernels(target, d), d, {"x": x, "scale": torch.tensor([1.7])}, 140, raised=raised)
        wanted = quantize(x, FLOAT8[dtype], 1.7)
        assert torch.equal(codes(y), codes(wanted.data))
        assert torch.equal(codes(transposed), codes(wanted.transposed))
        assert raised["amax"].isnan() and wanted.amax.isnan()


@needs_compiler
def test_threads_of_a_cpu_share_the_rows(tmp_path: Path) -> None:
    d = CASES["gelu_slope-33-bfloat16-float8_e4m3fn"]
    shared = shared_out(load([d], cache_dir=tmp_path)[0])
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        check(shared, d, 4099)
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("family", [f for f in tile_cases.FAMILIES if "gelu" not in f.__name__])  # others do as they
def test_every_schedule_gives_the_same(family: tile_cases.Family, tmp_path: Path) -> None:
    d = family(Kit("bfloat16", "bfloat16"), 264, "float8_e4m3fn")
    found = schedule_model.candidates(rewrite(d), LIMITS)
    assert len({s.lanes for s in found}) > 1 and len({s.chunks for s in found}) > 1
    for kernel in emulated([cuda.generate(d, schedules=[s]) for s in found], tmp_path):
        check(kernel, d, 140)


# ------------------------------------------------------------------------------------------------- schedules


def test_a_warp_reads_whole_lines() -> None:
    for read, vector in (("float32", 4), ("bfloat16", 8)):
        d = tile_cases.plain(Kit(read, read), 4096, "float8_e4m3fn")
        (s,) = cuda.generate(d).schedules
        assert (s.kind, s.vector, s.lanes, s.rows) == (Kind.TILE, vector, 8, 128)
    (s,) = cuda.generate(tile_cases.turned(Kit(), 4096, "float8_e5m2")).schedules
    assert (s.vector, s.lanes) == (16, 8)
    (s,) = cuda.generate(tile_cases.dropout(Kit(), 4096, "float8_e5m2")).schedules
    assert s.vector == 8  # one call of the generator gives 8 draws


@pytest.mark.parametrize("family", tile_cases.FAMILIES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_every_width_has_a_schedule_within_the_limits(family: tile_cases.Family, arch: str) -> None:
    device = limits_of(arch)
    for width in (1, 2, 7, 100, 1022, 4096, 11008, 28672, 65535):
        for read in ("float32", "bfloat16"):
            kernel = cuda.generate(family(Kit(read, read), width, "float8_e4m3fn"), arch)
            (s,) = kernel.schedules
            assert s.tiles(width) * s.covered >= width and width % s.vector == 0
            assert s.threads * s.blocks_per_multiprocessor <= device.resident_threads
            assert kernel.launches[0].shared_bytes <= 64 * 1024


def test_blocks_with_column_sums_do_not_walk() -> None:
    """Blocks end after a few tiles; those that take many registers are smaller, and some load while others compute."""
    for family, threads in ((tile_cases.dropout, 256), (tile_cases.gelu_slope, 128)):
        for width in (4096, 16384):
            kernel = cuda.generate(family(Kit("bfloat16", "bfloat16"), width, "float8_e5m2"))
            (s,) = kernel.schedules
            assert (s.covered, s.threads, s.rounds) == (64, threads, 0)
            assert "each block does four of them" in kernel.source


@needs_compiler
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_banks(count: int, tmp_path: Path) -> None:
    """No two threads of a warp write to one bank at once, and no eight that read 16 bytes each."""
    source, library = tmp_path / "place.cpp", tmp_path / "place.so"
    source.write_text(
        '#include "te_cuda_tile.cuh"\n'
        f'extern "C" int place(int column, int piece) {{ return te::place<{count}>(column, piece); }}\n'
    )
    command = [str(COMPILER), "-std=c++17", "-w", "-shared", "-fPIC", f"-I{INCLUDE}", "-include"]
    subprocess.run(
        [*command, str(Path(__file__).parent / "cuda_on_cpu.h"), str(source), "-o", str(library)], check=True
    )
    place = ctypes.CDLL(str(library)).place
    for warp in range(8):
        for k in range(count):
            four = [4 * warp + t // 8 for t in range(32)]
            written = [place(t % 8 * count + k, f // 4) + f % 4 for t, f in enumerate(four)]
            assert len({word % 32 for word in written}) == 32
    places = {place(n // 8, n % 8) for n in range(64 * count)}
    assert len(places) == 64 * count
    for column in range(8 * count):
        assert len({place(column, piece) % 32 for piece in range(8)}) == 8


# --------------------------------------------------------------------------------------------------- what is said


def test_a_kernel_says_how_it_lies() -> None:
    d = tile_cases.plain(Kit("bfloat16", "bfloat16"), 16, "float8_e4m3fn")
    rows = dataclasses.replace(d, stores=tuple(dataclasses.replace(s, layout="rows") for s in d.stores))
    assert "store y_transposed: full x 16 float8_e4m3fn transposed = " in str(d) and "transposed =" not in str(rows)
    assert d.key != rows.key
    assert d.bytes_moved(100) == (100 * 16 * 2 + 4, 100 * 16 + 112 * 16)
    assert "transposed" in cuda.generate(d).source and "store_transposed" in cpp.generate(d).source


def test_transposed_stores_overwrite_nothing() -> None:
    kit = Kit()
    x = kit.leaf("x", Axes.FULL, 16, "float8_e4m3fn")
    stores = [Target(n, x, Axes.FULL, 16, "float8_e4m3fn", n) for n in ("transposed", "rows")]
    d = describe("copy", stores, (), kit.tensors)
    assert in_place.pairs(d, {"x"}) == (("rows", "x"),)
    assert in_place.refusal(d, d.stores[0], d.loads[0]) == "transposed is stored transposed"


def test_what_tiles_cannot_do_is_refused() -> None:
    kit = Kit()
    x = kit.full("x", 16)
    turned = Target("y", x, Axes.FULL, 16, "float8_e4m3fn", "transposed")
    per_sample = [Target("s", x, Axes.SAMPLE_FEATURES, 16, "float32")]
    normed = dataclasses.replace(turned, expression=x - row_sum(x))
    wide = dataclasses.replace(turned, dtype="bfloat16")
    many = [dataclasses.replace(turned, name=f"y{k}") for k in range(40)]
    for stores, sums, why in (
        ([normed], [], "y cannot be stored transposed beside row sums"),
        ([turned], per_sample, "y cannot be stored transposed beside sums of samples"),
        ([wide], [], "y is bfloat16; only 8 bits are stored transposed"),
        (many, [], "y0, y1, .* cannot be stored transposed together"),
    ):
        with pytest.raises(ValueError, match=f"kernel k: {why}"):
            cuda.generate(describe("k", stores, sums, kit.tensors))
    with pytest.raises(ValueError, match=r"kernel k: s \(feature\) cannot lie transposed: only full stores do"):
        describe("k", [dataclasses.replace(turned, name="s", axes=Axes.FEATURE)], (), kit.tensors)


def test_schedules_that_do_not_fit_are_told() -> None:
    d, rows = CASES["plain-72-bfloat16-float8_e4m3fn"], CASES["plain-72-bfloat16-float8_e4m3fn"]
    rows = dataclasses.replace(rows, stores=rows.stores[:1])
    (tile,), (columns,) = cuda.generate(d).schedules, cuda.generate(rows).schedules
    assert not schedule_model.misfit(d, [tile], LIMITS) and not schedule_model.misfit(rows, [columns], LIMITS)
    assert "not for a kernel that stores transposed" in schedule_model.misfit(d, [columns], LIMITS)
    assert "not for a kernel that stores nothing transposed" in schedule_model.misfit(rows, [tile], LIMITS)
    for changed in ({"chunks": 2}, {"ahead": 2}, {"lanes": 4}, {"slots": 2, "chunks": 16}):
        assert "tiles have 128 rows" in schedule_model.misfit(d, [dataclasses.replace(tile, **changed)], LIMITS)


@needs_compiler
def test_other_dtypes_on_the_cpu(tmp_path: Path) -> None:
    x = expr.leaf("x", Axes.FULL, 7)
    found = [
        describe(
            "turn",
            [Target("y", 2 * x - row_sum(x), Axes.FULL, 7, dtype, "transposed")],
            (),
            {"x": (Axes.FULL, 7, dtype)},
        )
        for dtype in ("float32", "bfloat16", "float16")
    ]
    for d, kernel in zip(found, load(found, cache_dir=tmp_path), strict=True):
        for run in (kernel.run, InterpretedKernel(d)):
            tensors = inputs(d, 19)
            (y,) = call(run, d, tensors, 19)
            assert not complaints(d, tensors, [y], 19) and y.shape == (7, 32)
