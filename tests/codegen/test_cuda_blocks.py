"""Generated kernels that quantize by blocks of 128: bytes and scales are those of what they would store by rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, in_place, schedule_model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription, Target, describe, padded
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.schedule import Kind, coming, limits_of
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, row_sum
from te_fuser.formula import functions as f
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Axes, Expr
from te_fuser.ops.blockwise_scaling import quantized
from tests.codegen.corpus import Kit, inputs
from tests.codegen.cuda_on_cpu import Emulated
from tests.codegen.targets import call, emulated
from tests.float8 import BLOCKS, codes
from tests.needs import needs_compiler

LIMITS = limits_of("sm_90a")
E4M3 = "float8_e4m3fn"
ROWS = (0, 1, 124, 128, 301)


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


def cases() -> dict[str, KernelDescription]:
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


CASES = cases()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    made = emulated([cuda.generate(d) for d in CASES.values()], tmp_path_factory.mktemp("blocks"))
    return dict(zip(CASES, made, strict=True))


def unpacked(t: torch.Tensor, height: int, inner: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a tensor by blocks, and its numbers [blocks, height]."""
    raw = t.view(torch.uint8).flatten()
    numbers = raw[height * room :].view(torch.float32).view(-(-inner // 128), height)
    return raw[: height * room].view(height, room), numbers


def check(d: KernelDescription, made: list[torch.Tensor], rows: int) -> None:
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
@pytest.mark.parametrize("name", CASES)
def test_bytes_and_scales(name: str, kernels: dict[str, Emulated]) -> None:
    d = CASES[name]
    for rows in ROWS:
        tensors = inputs(d, rows, seed=rows)
        tensors["x"] *= torch.logspace(-3, 3, max(rows, 1), dtype=torch.float32)[:rows, None].to(tensors["x"].dtype)
        made = call(kernels[name], d, tensors, rows)
        check(d, made, rows)
        if d.sums:
            expected = made[0].double().sum(0)
            torch.testing.assert_close(made[-1].double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@needs_compiler
@pytest.mark.parametrize("read", ["float32", "bfloat16"])
def test_blocks_of_nothing_and_of_what_is_not_finite(read: str, kernels: dict[str, Emulated]) -> None:
    d = CASES[f"copied-{read}-256-both"]
    x = torch.zeros(132, 256, dtype=getattr(torch, read))
    x[1, 1], x[2, 130], x[130, 3], x[5, 5] = torch.inf, torch.nan, 1e-38, 3e38
    made = call(kernels[f"copied-{read}-256-both"], d, {"x": x}, 132)
    check(d, made, 132)


@needs_compiler
def test_every_schedule_gives_the_same(tmp_path: Path) -> None:
    found = []
    for d in (gelu(Kit("bfloat16", "bfloat16"), 272, E4M3), slope(Kit("bfloat16", "bfloat16"), 128, E4M3)):
        schedules = schedule_model.candidates(rewrite(d), LIMITS)
        assert len({s.vector for s in schedules}) > 1
        found += [(d, cuda.generate(d, schedules=[s])) for s in schedules]
    for (d, _), kernel in zip(found, emulated([k for _, k in found], tmp_path), strict=True):
        made = call(kernel, d, inputs(d, 140), 140)
        check(d, made, 140)


def test_no_lambda_is_generic() -> None:
    """NVRTC 13.0 takes those for functions of the host, and refuses them; later ones do not."""
    folder = Path(cuda.__file__).parents[1]
    texts = [path.read_text() for path in (*folder.glob("kernels/*.cu"), *folder.glob("codegen/include/*.cuh"))]
    texts += [cuda.generate(d).source for d in CASES.values()]
    assert len(texts) > 40 and not [text for text in texts if "](auto" in text]


def test_schedules() -> None:
    (s,) = cuda.generate(copied(Kit("bfloat16", "bfloat16"), 4096, E4M3)).schedules
    assert (s.kind, s.vector, s.lanes, s.slots, s.rows) == (Kind.TILE, 8, 16, 16, 128)
    d = CASES["copied-bfloat16-256-both"]
    for changed in ({"lanes": 8, "slots": 32, "chunks": 1}, {"slots": 8, "chunks": 4}):
        why = schedule_model.misfit(d, [dataclasses.replace(s, **changed)], LIMITS)
        assert "tiles of blocks have 128 columns for 256 threads" in why


def test_tiles_of_what_is_read_are_on_their_way_at_once() -> None:
    """In the memory of what is made of them, then of what is transposed; not where fewer blocks had room."""
    kernels = {}
    for read, behind in (("bfloat16", 1), ("float32", 0)):
        d = gelu_slope(Kit(read, read), 4096, E4M3)
        d = dataclasses.replace(d, stores=d.stores[1:])
        kernels[read] = cuda.generate(d)
        (s,) = kernels[read].schedules
        assert [place for _, place in coming(rewrite(d), s)] == [0, None][: 1 + behind]
        assert (s.rounds, kernels[read].source.count("te::fetch<")) == (
            0,
            2 * (1 + behind),
        )  # of whole tiles, and others
    assert kernels["bfloat16"].launches[0].shared_bytes == 128 * 128 * (2 + 2)
    assert kernels["float32"].launches[0].shared_bytes == 128 * 128 * (4 + 1)
    assert kernels["bfloat16"].schedules[0].blocks_per_multiprocessor == 3
    turn = kernels["bfloat16"].source.split("#pragma unroll 1")[1]
    assert turn.index("te::arrived<kTurns - 1>();") < turn.index("x_coming.at") < turn.index("te::depart();")
    assert "_vector[kAhead]" not in turn  # each row is read when it is computed


def test_rows_that_are_read_late_leave_registers_for_four_blocks() -> None:
    d = gelu(Kit("bfloat16", "bfloat16"), 4096, E4M3)
    assert cuda.generate(d).schedules[0].blocks_per_multiprocessor == 4


def test_a_kernel_says_how_it_lies() -> None:
    d = CASES["copied-bfloat16-144-both"]
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
        make(CASES["copied-bfloat16-256-both"])  # type: ignore[operator]
