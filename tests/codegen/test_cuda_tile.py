"""Generated kernels that store 8 bits transposed or by blocks of 128: bytes and scales are those of stores by rows."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import subprocess
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, in_place, schedule_model
from te_fuser.codegen.compiler import load
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription, Target, describe, padded
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.nvrtc import INCLUDE
from te_fuser.codegen.schedule import Kind, coming, limits_of
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, row_sum
from te_fuser.formula import functions as f
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Axes, Expr
from te_fuser.ops.blockwise_scaling import quantized
from te_fuser.quantization import quantize
from tests.codegen import tile_cases
from tests.codegen.corpus import Kit, inputs
from tests.codegen.cuda_calls import complaints
from tests.codegen.cuda_on_cpu import Emulated
from tests.codegen.targets import COMPILER, ON_EVERY_TARGET, Kernels, call, compiled, emulated, shared_out, slots
from tests.float8 import BLOCKS, codes
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


def test_a_kernel_says_how_it_lies_transposed() -> None:
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


E4M3 = "float8_e4m3fn"
BLOCK_ROWS = (0, 1, 124, 128, 301)


def blocks(name: str, value: Expr, width: int, dtype: str, made_in: str, sides: str = "both") -> list[Target]:
    """A value as it is made, and by blocks of its rows and columns."""
    layouts = {"rows": ["blocks"], "turned": ["transposed_blocks"], "both": ["blocks", "transposed_blocks"]}[sides]
    return [
        Target(name, value, Axes.FULL, width, made_in),
        *[Target(f"{name}_{layout}", value, Axes.FULL, width, dtype, layout, made_in) for layout in layouts],
    ]


def copied(kit: Kit, width: int, dtype: str, sides: str = "both") -> KernelDescription:
    """x as it is."""
    return describe("copy", blocks("y", kit.full("x", width), width, dtype, kit.main, sides), (), kit.tensors)


def gelu(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """GELU(x + bias)."""
    x = kit.full("x", width) + kit.feature("bias", width)
    y = 0.5 * x * (1 + f.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return describe("gelu", blocks("y", y, width, dtype, kit.main), (), kit.tensors)


def gelu_slope(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """dx of GELU, and its sum over the rows."""
    x = kit.full("x", width)
    y = 0.5 * x * (1 + f.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    dx = differentiate({y: kit.full("dy", width)}, [x])[x]
    sums = [Target("dbias", dx, Axes.FEATURE, width, "float32")]
    return describe("gelu_slope", blocks("dx", dx, width, dtype, kit.main), sums, kit.tensors)


def slope(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """dx of a gated unit, of two parts, and its sum over the rows."""
    x = kit.full("x", 2 * width)
    gate, up = f.split(x, 2)
    dx = differentiate({gate * f.sigmoid(gate) * up: kit.full("dy", width)}, [x])[x]
    sums = [Target("dbias", dx, Axes.FEATURE, 2 * width, "float32")]
    return describe("slope", blocks("dx", dx, 2 * width, dtype, kit.main), sums, kit.tensors)


def block_cases() -> dict[str, KernelDescription]:
    found = {}
    for read in ("float32", "bfloat16", "float16"):
        kit = lambda: Kit(read, read)  # noqa: B023, E731
        for width in (16, 144, 256):
            for sides in ("rows", "turned", "both"):
                found[f"copied-{read}-{width}-{sides}"] = copied(kit(), width, E4M3, sides)
        found[f"gelu-{read}"] = gelu(kit(), 272, "float8_e5m2")
        found[f"slope-{read}"] = slope(kit(), 128, E4M3)
        for width in (256, 272):
            found[f"gelu_slope-{read}-{width}"] = gelu_slope(kit(), width, E4M3)
    return found


BLOCK_CASES = block_cases()


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    made = emulated([cuda.generate(d) for d in BLOCK_CASES.values()], tmp_path_factory.mktemp("blocks"))
    return dict(zip(BLOCK_CASES, made, strict=True))


def unpacked(t: torch.Tensor, height: int, inner: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a tensor by blocks, and its numbers [blocks, height]."""
    raw = t.view(torch.uint8).flatten()
    numbers = raw[height * room :].view(torch.float32).view(-(-inner // 128), height)
    return raw[: height * room].view(height, room), numbers


def check_blocks(d: KernelDescription, made: list[torch.Tensor], rows: int) -> None:
    """Assert that what lies by blocks is what `quantized` makes of what lies by rows."""
    by_rows = made[0]
    for s, t in zip(d.stores[1:], made[1:], strict=False):
        turned = s.layout == "transposed_blocks"
        given = by_rows.mT if turned else by_rows
        sizes = (s.width, rows, padded(rows)) if turned else (rows, s.width, s.width)
        data, numbers = unpacked(t, *sizes)
        wanted, inverse = quantized(given, FLOAT8[s.dtype], BLOCKS)
        assert torch.equal(data[:, : sizes[1]], codes(wanted)) and not data[:, sizes[1] :].any()
        assert torch.equal(numbers, inverse.float().mT)


@needs_compiler
@pytest.mark.parametrize("name", BLOCK_CASES)
def test_bytes_and_scales(name: str, in_blocks: dict[str, Emulated]) -> None:
    d = BLOCK_CASES[name]
    for rows in BLOCK_ROWS:
        tensors = inputs(d, rows, seed=rows)
        tensors["x"] *= torch.logspace(-3, 3, max(rows, 1), dtype=torch.float32)[:rows, None].to(tensors["x"].dtype)
        made = call(in_blocks[name], d, tensors, rows)
        check_blocks(d, made, rows)
        if d.sums:
            expected = made[0].double().sum(0)
            torch.testing.assert_close(made[-1].double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@needs_compiler
@pytest.mark.parametrize("read", ["float32", "bfloat16"])
def test_blocks_of_nothing_and_of_what_is_not_finite(read: str, in_blocks: dict[str, Emulated]) -> None:
    d = BLOCK_CASES[f"copied-{read}-256-both"]
    x = torch.zeros(132, 256, dtype=getattr(torch, read))
    x[1, 1], x[2, 130], x[130, 3], x[5, 5] = torch.inf, torch.nan, 1e-38, 3e38
    made = call(in_blocks[f"copied-{read}-256-both"], d, {"x": x}, 132)
    check_blocks(d, made, 132)


@needs_compiler
def test_every_schedule_of_blocks_gives_the_same(tmp_path: Path) -> None:
    found = []
    for d in (gelu(Kit("bfloat16", "bfloat16"), 272, E4M3), slope(Kit("bfloat16", "bfloat16"), 128, E4M3)):
        schedules = schedule_model.candidates(rewrite(d), LIMITS)
        assert len({s.vector for s in schedules}) > 1
        found += [(d, cuda.generate(d, schedules=[s])) for s in schedules]
    for (d, _), kernel in zip(found, emulated([k for _, k in found], tmp_path), strict=True):
        made = call(kernel, d, inputs(d, 140), 140)
        check_blocks(d, made, 140)


def test_no_lambda_is_generic() -> None:
    """NVRTC 13.0 takes those for functions of the host, and refuses them; later ones do not."""
    folder = Path(cuda.__file__).parents[1]
    texts = [path.read_text() for path in (*folder.glob("kernels/*.cu"), *folder.glob("codegen/include/*.cuh"))]
    texts += [cuda.generate(d).source for d in BLOCK_CASES.values()]
    assert len(texts) > 40 and not [text for text in texts if "](auto" in text]


def test_schedules_of_blocks() -> None:
    (s,) = cuda.generate(copied(Kit("bfloat16", "bfloat16"), 4096, E4M3)).schedules
    assert (s.kind, s.vector, s.lanes, s.slots, s.rows) == (Kind.TILE, 8, 16, 16, 128)
    d = BLOCK_CASES["copied-bfloat16-256-both"]
    for changed in ({"lanes": 8, "slots": 32, "chunks": 1}, {"slots": 8, "chunks": 4}):
        why = schedule_model.misfit(d, [dataclasses.replace(s, **changed)], LIMITS)
        assert "tiles of blocks have 128 columns for 256 threads" in why


def test_tiles_of_what_is_read_are_on_their_way_at_once() -> None:
    """In the memory of what is made of them, then of what is transposed; not where fewer blocks had room."""
    in_blocks = {}
    for read, behind in (("bfloat16", 1), ("float32", 0)):
        d = gelu_slope(Kit(read, read), 4096, E4M3)
        d = dataclasses.replace(d, stores=d.stores[1:])
        in_blocks[read] = cuda.generate(d)
        (s,) = in_blocks[read].schedules
        assert [place for _, place in coming(rewrite(d), s)] == [0, None][: 1 + behind]
        assert (s.rounds, in_blocks[read].source.count("te::fetch<")) == (
            0,
            2 * (1 + behind),
        )  # of whole tiles, and others
    assert in_blocks["bfloat16"].launches[0].shared_bytes == 128 * 128 * (2 + 2)
    assert in_blocks["float32"].launches[0].shared_bytes == 128 * 128 * (4 + 1)
    assert in_blocks["bfloat16"].schedules[0].blocks_per_multiprocessor == 3
    turn = in_blocks["bfloat16"].source.split("#pragma unroll 1")[1]
    assert turn.index("te::arrived<kTurns - 1>();") < turn.index("x_coming.at") < turn.index("te::depart();")
    assert "_vector[kAhead]" not in turn  # each row is read when it is computed


def test_rows_that_are_read_late_leave_registers_for_four_blocks() -> None:
    d = gelu(Kit("bfloat16", "bfloat16"), 4096, E4M3)
    assert cuda.generate(d).schedules[0].blocks_per_multiprocessor == 4


def test_a_kernel_says_how_it_lies_by_blocks() -> None:
    d = BLOCK_CASES["copied-bfloat16-144-both"]
    assert f"y_blocks: full x 144 {E4M3} in blocks of bfloat16 = " in str(d)
    assert f"y_transposed_blocks: full x 144 {E4M3} in transposed blocks of bfloat16 = " in str(d)
    other = [dataclasses.replace(s, made_in="float16") if s.made_in else s for s in d.stores]
    assert d.key != dataclasses.replace(d, stores=tuple(other)).key
    of_rows, of_columns = 100 * 144 + 4 * 2 * 100, 144 * 112 + 4 * 144
    assert d.bytes_moved(100) == (100 * 144 * 2, 100 * 144 * 2 + of_rows + of_columns)
    assert "is stored by blocks" in in_place.refusal(d, d.stores[1], d.loads[0])


def test_what_has_no_blocks_is_refused() -> None:
    kit = Kit()
    x, wide = kit.full("x", 16), kit.full("wide", 24)
    stored = Target("y", x, Axes.FULL, 16, E4M3, "blocks", "bfloat16")
    per_sample = [Target("s", x, Axes.SAMPLE_FEATURES, 16, "float32")]
    turned = Target("z", x, Axes.FULL, 16, E4M3, "transposed")
    for stores, sums, why in (
        ([dataclasses.replace(stored, made_in="")], [], "y is float8_e4m3fn of nothing; blocks are 8 bits of float32"),
        ([dataclasses.replace(stored, dtype="bfloat16")], [], "y is bfloat16 of bfloat16; blocks are 8 bits"),
        ([dataclasses.replace(stored, expression=wide, width=24)], [], "y .* 24 features are no multiple of 16"),
        ([dataclasses.replace(stored, expression=x - row_sum(x))], [], "y cannot be stored by blocks beside row sums"),
        ([stored], per_sample, "y cannot be stored by blocks beside sums of samples"),
        ([stored, turned], [], "y cannot be stored by blocks beside what is stored transposed"),
    ):
        with pytest.raises(ValueError, match=f"kernel k: {why}"):
            cuda.generate(describe("k", stores, sums, kit.tensors))
    two = expr.leaf("two", Axes.FULL, 96)
    gate, up = f.split(two, 2)
    d = describe(
        "k",
        [
            Target("y", two, Axes.FULL, 96, E4M3, "blocks", "bfloat16"),
            Target("z", gate + up, Axes.FULL, 48, "bfloat16"),
        ],
        (),
        {"two": (Axes.FULL, 96, "bfloat16")},
    )
    with pytest.raises(ValueError, match="y .* 96 features, in 2 parts, are no multiple of 128"):
        cuda.generate(d)


@pytest.mark.parametrize("make", [cpp.generate, InterpretedKernel])
def test_other_targets_have_no_blocks(make: object) -> None:
    with pytest.raises(ValueError, match="kernel copy: blocks of 8 bits are made by kernels of a GPU alone"):
        make(BLOCK_CASES["copied-bfloat16-256-both"])  # type: ignore[operator]
