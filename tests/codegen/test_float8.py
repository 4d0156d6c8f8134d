"""Generated kernels that store and read 8 bits: the same bytes on every target."""

from __future__ import annotations

import pytest
import torch

from te_fuser.codegen import cpp, cuda
from te_fuser.codegen.description import KernelDescription, Target, describe
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, quantize, row_sum
from te_fuser.formula.expr import Axes
from tests.codegen.targets import ON_EVERY_TARGET, Kernels, call, compiled
from tests.float8 import codes, every_number, nearest_codes, numbers, telling_numbers
from tests.needs import needs_compiler

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
kernels = compiled({d.key: d for d in (*TO.values(), *FROM.values(), *TWICE.values())})


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
