"""Generated kernels that store and read 8 bits, the same bytes on every target, and largest magnitudes they raise."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, cuda_body, schedule_model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.description import KernelDescription, Maximum, Target, describe
from te_fuser.codegen.schedule import Kind, limits_of
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, quantize, row_sum, sigmoid
from te_fuser.formula.expr import Axes, Expr
from te_fuser.kernels.quantizers import in_kernels
from te_fuser.ops.activations import GELU_FORMS
from te_fuser.ops.blockwise_scaling import scale_by
from tests.codegen.corpus import Kit, descriptions, inputs, layer_norm, reference
from tests.codegen.cuda_calls import complaints, streams
from tests.codegen.cuda_on_cpu import build
from tests.codegen.targets import COMPILER, ON_EVERY_TARGET, Kernels, call, compiled, shared_out, slots
from tests.float8 import WAYS, codes, every_number, nearest_codes, numbers, telling_numbers
from tests.needs import needs_compiler, needs_nvrtc

READ = ("float32", "bfloat16", "float16")
WIDTHS = (1, 2, 6, 16, 33)


def to_float8(dtype: str, read: str, width: int) -> KernelDescription:
    """y = x * scale in 8 bits."""
    x, scale = expr.leaf("x", Axes.FULL, width), expr.leaf("scale", Axes.NONE)
    y = quantize(x, scale, FLOAT8[dtype])
    tensors = {"x": (Axes.FULL, width, read), "scale": (Axes.NONE, 1, "float32")}
    return describe(f"to_{dtype}", [Target("y", y, Axes.FULL, width, dtype)], (), tensors)


def from_float8(dtype: str, width: int) -> KernelDescription:
    """Kernel that widens 8 bits to float32."""
    x = expr.leaf("x", Axes.FULL, width)
    return describe(
        f"from_{dtype}", [Target("y", x * 2, Axes.FULL, width, "float32")], (), {"x": (Axes.FULL, width, dtype)}
    )


def rounded_twice(dtype: str) -> KernelDescription:
    """Kernel that uses a quantized value further: stored in 8 bits, and its double in float32."""
    x, scale = expr.leaf("x", Axes.FULL, 16), expr.leaf("scale", Axes.NONE)
    y = quantize(x, scale, FLOAT8[dtype])
    stores = [Target("y", y, Axes.FULL, 16, dtype), Target("twice", 2 * y, Axes.FULL, 16, "float32")]
    tensors = {"x": (Axes.FULL, 16, "float32"), "scale": (Axes.NONE, 1, "float32")}
    return describe(f"twice_{dtype}", stores, (), tensors)


TO = {(dtype, read, width): to_float8(dtype, read, width) for dtype in FLOAT8 for read in READ for width in WIDTHS}
FROM = {(dtype, width): from_float8(dtype, width) for dtype in FLOAT8 for width in WIDTHS}
TWICE = {dtype: rounded_twice(dtype) for dtype in FLOAT8}


def stored(kernels: Kernels, target: str, d: KernelDescription, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of a target's kernel for tensors that have one row after another."""
    named = {load.name: t for load, t in zip(d.loads, tensors, strict=True)}
    return call(kernels(target, d), d, named, tensors[0].shape[0])


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """As many whole rows as there are."""
    return x[: x.numel() // width * width].reshape(-1, width).contiguous()


def numbers_of(read: str, dtype: str) -> torch.Tensor:
    return telling_numbers(FLOAT8[dtype]) if read == "float32" else every_number(getattr(torch, read))


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize(("dtype", "read", "width"), TO)
def test_bytes_that_are_stored(kernels: Kernels, dtype: str, read: str, width: int, target: str) -> None:
    x = rows_of(numbers_of(read, dtype), width)
    if target == "cuda" and width != 16:
        x = x[:: max(1, 16 // width)].contiguous()  # the emulation takes its time
    for scale in (1.0, 3.1, 2.0**-9) if width == 16 else (0.7,):
        (y,) = stored(kernels, target, TO[dtype, read, width], x, torch.tensor(scale))
        assert torch.equal(codes(y), nearest_codes(x.float() * scale, FLOAT8[dtype])), scale


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize(("dtype", "width"), FROM)
def test_numbers_that_are_read(kernels: Kernels, dtype: str, width: int, target: str) -> None:
    x = rows_of(torch.arange(256, dtype=torch.uint8), width).view(FLOAT8[dtype])
    (y,) = stored(kernels, target, FROM[dtype, width], x)
    wanted = rows_of(numbers(FLOAT8[dtype]), width) * 2
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("dtype", FLOAT8)
def test_who_reads_it_in_the_same_kernel_sees_what_is_stored(kernels: Kernels, dtype: str, target: str) -> None:
    x = rows_of(telling_numbers(FLOAT8[dtype]), 16)
    y, twice = stored(kernels, target, TWICE[dtype], x, torch.tensor(0.7))
    assert torch.equal(codes(y), nearest_codes(x * 0.7, FLOAT8[dtype]))
    torch.testing.assert_close(twice, 2 * y.float(), rtol=0, atol=0, equal_nan=True)


def test_what_is_stored_is_rounded_by_the_store_alone() -> None:
    d = TO["float8_e4m3fn", "bfloat16", 16]
    assert "float8" not in cpp.generate(d).source.split("{", 1)[1] and "nearest" not in cuda.generate(d).source
    assert "te::float8_e4m3fn(" in cpp.generate(TWICE["float8_e4m3fn"]).source


def test_vectors_go_by_the_narrowest_tensor() -> None:
    (schedule,) = cuda.generate(TO["float8_e5m2", "bfloat16", 16]).schedules
    assert schedule.vector == 16
    (schedule,) = cuda.generate(TO["float8_e5m2", "bfloat16", 6]).schedules
    assert schedule.vector == 2


def test_threads_that_share_a_row_load_16_bytes_beside_stores_in_8_bits() -> None:
    """And of rows to come one is on its way where columns are added up, not two."""
    width, dtype = 4096, "float8_e4m3fn"
    names, scale = ("x", "y", "z"), expr.leaf("scale", Axes.NONE)
    x, y, z = (expr.leaf(name, Axes.FULL, width) for name in names)
    normed = x * row_sum(x * y) + z
    tensors = {**dict.fromkeys(names, (Axes.FULL, width, "bfloat16")), "scale": (Axes.NONE, 1, "float32")}
    narrow = Target("out", quantize(normed, scale, FLOAT8[dtype]), Axes.FULL, width, dtype)
    wide = Target("out", normed, Axes.FULL, width, "bfloat16")
    totals = [Target(f"sum{k}", e, Axes.FEATURE, width, "float32") for k, e in enumerate((normed, x * z, y))]
    for target in (narrow, wide):
        (alone,) = cuda.generate(describe("rows", [target], (), tensors)).schedules
        (summed,) = cuda.generate(describe("sums", [target], totals, tensors)).schedules
        assert alone.vector == summed.vector == 8
        assert summed.ahead == (2 if target is narrow else 3)


NAMES = (
    "layer_norm_fwd-40-bf16", "layer_norm_bwd-257-f32", "rms_norm_bwd-1024-bf16", "bias_gelu_fwd-257-f16",
    "bias_gelu_bwd-257-f16", "layer_norm_swiglu_bwd-40-f32", "swiglu_fwd-1024-bf16", "scale_shift_bwd-17-f32",
    "dropout_add_layer_norm_fwd-1024-bf16-f32", "dropout_add_layer_norm_bwd-1024-bf16-f32", "softmax_fwd-40-f32",
    "drop_path_bwd-40-bf16", "cast-257-f32",
)  # fmt: skip


def raising(d: KernelDescription) -> KernelDescription:
    """The kernel with its wide outputs in 8 bits, and the largest magnitude of each of them."""
    wide = [s for s in d.stores if s.axes == Axes.FULL]
    stores = tuple(dataclasses.replace(s, dtype="float8_e4m3fn") if s in wide else s for s in d.stores)
    return dataclasses.replace(
        d, stores=stores, maxima=tuple(Maximum(f"amax_{s.name}", s.parts, s.width) for s in wide)
    )


CORPUS = descriptions()
RAISING = {name: raising(CORPUS[name]) for name in NAMES}
TWO_ROWS = "layer_norm_fwd-2048-bf16"  # of which a thread has two
RAISING[TWO_ROWS] = raising(layer_norm(Kit("bfloat16", "bfloat16"), 2048)[0])


def calibrating(width: int) -> KernelDescription:
    """A kernel that looks and stores nothing."""
    x = expr.leaf("x", Axes.FULL, width)
    return describe(
        "look", (), (), {"x": (Axes.FULL, width, "float32")}, [Target("amax", x * 0.5, Axes.FULL, width, "float32")]
    )


LOOK = {width: calibrating(width) for width in (1, 6, 33, 64)}
kernels = compiled({d.key: d for made in (TO, FROM, TWICE, RAISING, LOOK) for d in made.values()})


def wanted(d: KernelDescription, tensors: dict[str, torch.Tensor], rows: int, batch: tuple[int, int]) -> list[float]:
    """The largest magnitude of what each wide output is made of."""
    exact = reference(d, tensors, rows, batch=batch, streams=streams(d))
    found = zip(d.stores, exact, strict=False)
    return [e.abs().max().item() if e.numel() else 0.0 for s, e in found if s.axes == Axes.FULL]


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("name", RAISING)
def test_beside_what_is_stored(name: str, target: str, kernels: Kernels) -> None:
    d = RAISING[name]
    kernel = kernels(target, d)
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (13, (1, 1)), (24, (2, 3))):
        tensors, given = inputs(d, rows, batch[1], seed=rows), slots(d)
        made = call(kernel, d, tensors, rows, batch, raised=given)
        assert not complaints(d, tensors, made, rows, batch)
        found = [t.item() for t in given.values()]
        assert found == pytest.approx(wanted(d, tensors, rows, batch), rel=1e-5)


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("width", LOOK)
def test_it_is_raised_and_never_lowered(width: int, target: str, kernels: Kernels) -> None:
    d = LOOK[width]
    kernel = kernels(target, d)
    rng = torch.Generator().manual_seed(width)
    x = torch.randn(29, width, generator=rng)
    largest, given = 0.5 * x.abs().max().item(), slots(d)

    def look(x: torch.Tensor) -> float:
        call(kernel, d, {"x": x}, x.shape[0], raised=given)
        return given["amax"].item()

    assert look(x) == largest
    assert look(0.9 * x) == look(x[:0]) == look(torch.zeros(3, width)) == largest
    assert look(-2.0 * x) == 2.0 * largest
    x[17, width // 2] = -math.inf
    assert look(x) == math.inf
    x[3, 0] = math.nan
    assert math.isnan(look(x)) and math.isnan(look(torch.ones(2, width)))


def looking(formula: Callable[..., Expr], width: int, dtype: str) -> KernelDescription:
    """A kernel that looks for the largest magnitude of a function of one tensor or two."""
    names = "xz"[: formula.__code__.co_argcount]
    leaves = [expr.leaf(name, Axes.FULL, width) for name in names]
    wanted = [Target("amax", formula(*leaves), Axes.FULL, width, "float32")]
    return describe("look", (), (), dict.fromkeys(names, (Axes.FULL, width, dtype)), wanted)


BOUNDED: dict[str, Callable[..., Expr]] = {
    "gelu": lambda x: GELU_FORMS["tanh"](x),
    "gelu by erf": lambda x: GELU_FORMS["none"](x),
    "silu": lambda x: x * sigmoid(x),
    "swiglu": lambda x, z: x * sigmoid(x) * z,
    "geglu": lambda x, z: GELU_FORMS["tanh"](x) * z,
}


def with_special_numbers(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """x as it is, of other sizes, nothing, and with numbers for which a bound says nothing."""
    yield from (x, x * 1e-3, x * 1e-36, x * 1e4, x[:0], torch.zeros_like(x))
    for number in (math.inf, -math.inf, math.nan, 3e38, -3e38):
        for row in (0, len(x) // 2, len(x) - 1):
            found = x.clone()
            found[row, row % x.shape[1]] = number
            yield found


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_cannot_be_larger_is_passed_over(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of a kernel that computes everything, which NaN is the largest of."""
    every = [looking(formula, width, dtype) for formula in BOUNDED.values() for width in (1, 40, 257)]
    texts = [cuda.generate(d) for d in every]
    monkeypatch.setattr(cuda_body, "bound_of", lambda e: None)
    plain = [cuda.generate(d) for d in every]
    assert all(
        "may_be_larger" in a.source and "may_be_larger" not in b.source for a, b in zip(texts, plain, strict=True)
    )
    kernels = build(str(COMPILER), [*texts, *plain], tmp_path)
    rng, seen = torch.Generator().manual_seed(3), set()
    for d, kernel, whole in zip(every, kernels, kernels[len(every) :], strict=False):
        for x in with_special_numbers(torch.randn(61, d.width, generator=rng)):
            z = torch.randn(x.shape, generator=rng)
            tensors = {t.name: v.to(getattr(torch, dtype)) for t, v in zip(d.loads, (x, z), strict=False)}
            found = [slots(d, 0.01), slots(d, 0.01)]
            for k, given in zip((kernel, whole), found, strict=True):
                call(k, d, tensors, len(x), raised=given)
            bits, wanted = (given["amax"].view(torch.int32).item() for given in found)
            assert bits == wanted
            seen.add(math.isfinite(found[0]["amax"].item()))
    assert seen == {True, False}


AMAXES = [0.0, 1e-40, 1e-30, 0.3, 1.0, 7.0, 448.0, 3e38, math.inf, math.nan]


@needs_compiler
def test_scales_by_the_last_block(tmp_path: Path) -> None:
    """Scales by the definition, their reciprocals, and zeros to be raised again: by many blocks or one."""
    plain = LOOK[33]
    every = [
        dataclasses.replace(plain, maxima=(dataclasses.replace(plain.maxima[0], scale=in_kernels(*way)),))
        for way in WAYS
    ]
    assert len({d.key for d in (plain, *every)}) == 5 and "ScaleOf" in str(every[0])
    for way, d, kernel in zip(WAYS, every, build(str(COMPILER), [*map(cuda.generate, every)], tmp_path), strict=True):
        for amax, rows in itertools.product(AMAXES, (1, 29, 4099)):
            x, numbers = torch.zeros(rows, 33), torch.zeros(4)
            x[rows // 2, 7] = 2.0 * amax if amax < 1e38 else amax
            found = 0.5 * x[rows // 2, 7]
            for _ in range(2):
                call(kernel, d, {"x": x}, rows, raised={"amax": numbers})
                scale = scale_by(found.abs(), *way)
                assert numbers.tolist() == [scale.reciprocal().item(), scale.item(), 0.0, 0.0]


@needs_compiler
def test_as_many_threads_as_there_are_find_the_same(kernels: Kernels) -> None:
    d, rows = RAISING["layer_norm_swiglu_bwd-40-f32"], 4099
    shared = shared_out(kernels.loaded[d.key])
    tensors, before, found = inputs(d, rows), torch.get_num_threads(), []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        given = slots(d)
        call(shared, d, tensors, rows, raised=given)
        found.append([t.item() for t in given.values()])
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@needs_compiler
def test_every_kind_of_schedule(tmp_path: Path) -> None:
    """Also where column sums have a kernel of their own, which raises nothing."""
    limits = limits_of("sm_90a")
    for name in ("layer_norm_bwd-257-f32", "layer_norm_fwd-40-bf16"):
        d = RAISING[name]
        found: dict[object, tuple[schedule_model.Schedule, ...]] = {}
        rewritten = rewrite(d)
        for s in schedule_model.candidates(rewritten, limits):
            found.setdefault((s.kind, s.ahead, s.sums, s.lanes > 32), (s,))
        if d.sums:
            found["apart"] = schedule_model.apart(rewritten, limits)[0]
        kernels = [cuda.generate(d, schedules=s) for s in found.values()]
        tensors = inputs(d, 13)
        folder = tmp_path / name
        folder.mkdir()
        for kernel in build(str(COMPILER), kernels, folder):
            given = slots(d)
            made = call(kernel, d, tensors, 13, raised=given)
            assert not complaints(d, tensors, made, 13)
            values = [t.item() for t in given.values()]
            assert values == pytest.approx(wanted(d, tensors, 13, (1, 1)), rel=1e-5), kernel.kernel.schedules


@needs_compiler
def test_two_rows_a_thread(tmp_path: Path) -> None:
    """With as many rows as there are, twice as many threads for a row, and none of its parameters kept."""
    d = RAISING[TWO_ROWS]
    (picked,) = cuda.generate(d).schedules
    assert picked.held == 2 and picked.rows == 2
    half = dataclasses.replace(picked, lanes=2 * picked.lanes, chunks=picked.chunks // 2)
    schedules = [picked, half, dataclasses.replace(picked, keeps=False), dataclasses.replace(picked, ahead=3)]
    limits = limits_of("sm_90a")
    assert not any(schedule_model.misfit(rewrite(d), (s,), limits) for s in schedules)
    walking = dataclasses.replace(picked, rounds=1)
    assert "2 rows only in blocks of no others" in schedule_model.misfit(rewrite(d), (walking,), limits)
    kernels = [cuda.generate(d, schedules=(s,)) for s in schedules]
    for kernel in build(str(COMPILER), kernels, tmp_path):
        for rows in (1, 2, 7):
            tensors, given = inputs(d, rows), slots(d)
            made = call(kernel, d, tensors, rows, raised=given)
            assert not complaints(d, tensors, made, rows)
            assert [t.item() for t in given.values()] == pytest.approx(wanted(d, tensors, rows, (1, 1)), rel=1e-5)


@needs_nvrtc
def test_a_row_waits_as_it_was_loaded(tmp_path: Path) -> None:
    """As converted numbers it takes twice the registers: then fewer blocks of two rows fit on a multiprocessor."""
    d = raising(layer_norm(Kit("bfloat16", "bfloat16"), 4096)[0])
    kernel, made = compile_kernel(d, "sm_90a", cache=tmp_path)
    (schedule,) = kernel.schedules
    assert (schedule.kind, schedule.chunks, schedule.held) == (Kind.REGISTERS, 4, 2)
    assert schedule.blocks_per_multiprocessor >= 5 and [r.spilled_bytes for r in made.resources] == [0]


def test_blocks_that_end_soon_read_what_they_raise_when_they_begin() -> None:
    soon = cuda.generate(RAISING["layer_norm_fwd-40-bf16"])
    first, last = (soon.source.index(f"te::{name}") for name in ("raised_so_far", "raise<"))
    assert (
        soon.schedules[0].ends_soon
        and soon.schedules[0].held == 1
        and first < soon.source.index("te::load<kVector>(x") < last
    )
    walking = cuda.generate(RAISING["layer_norm_bwd-257-f32"])
    assert not walking.schedules[0].ends_soon and "raised_so_far" not in walking.source


def test_a_row_that_is_only_read_has_a_thread_for_each_vector() -> None:
    assert [cuda.generate(LOOK[width]).schedules[0].lanes for width in (1, 6, 33, 64)] == [1, 4, 32, 16]


def test_a_kernel_says_what_it_raises() -> None:
    d = RAISING["cast-257-f32"]
    assert "max   amax_" in str(d) and d.key != dataclasses.replace(d, maxima=()).key
