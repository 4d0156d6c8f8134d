"""Kernels on every target: values of the corpus against float64, rare numbers, words; and machine code of GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, cuda_loader
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.description import KernelDescription, Target, describe
from te_fuser.codegen.schedule import limits_of
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr
from te_fuser.formula import functions as f
from te_fuser.formula.expr import Axes
from tests.codegen import corpus, test_cuda_tile, test_float8, test_in_place, tile_cases
from tests.codegen.corpus import RARE, Kit, descriptions, inputs, rare_inputs, reference
from tests.codegen.cuda_calls import complaints
from tests.codegen.targets import ON_EVERY_TARGET, Kernels, call, compiled
from tests.needs import needs_compiler, needs_nvrtc

CORPUS = descriptions()


def named(kernel: str, weight: str, *roles: str) -> KernelDescription:
    """Tensors of these names, parameters called so behind them, and outputs that are words."""
    kit, total = Kit(), expr.ZERO
    for role in roles:
        total = total + f.exp(kit.full(role, 3)) * kit.feature(f"{role}.{weight}", 3)
    return kit.forward(kernel, {"int": (total, 3), "double": (total * 2, 3), "bitand": (total * 3, 3)})


def scalars() -> KernelDescription:
    """Numbers that no row changes: an expression of scalars, a row sum of a parameter, a broadcast store."""
    kit = Kit()
    x, weight, slope = kit.full("x", 17), kit.feature("weight", 17), kit.leaf("slope", Axes.NONE)
    factor = f.exp(slope) / (1 + slope * slope)
    norm = f.rsqrt(f.row_sum(weight * weight))
    chosen = f.where(slope > 0, x, -x)
    out = {"y": (chosen * factor + weight * norm, 17), "norm": (norm + 0 * weight, 17), "flat": (weight * factor, 17)}
    return kit.forward("scalars", out)


def odds_and_ends() -> KernelDescription:
    """Constants, rows and broadcasts that are stored, and sums of what a row sum gives."""
    x = expr.leaf("x", Axes.FULL, 24)
    total = f.row_sum(x)
    targets = [
        Target("seven", expr.const(7), Axes.FULL, 24, "bfloat16"),
        Target("minus", expr.const(-0.1), Axes.ROWS, 1, "float32"),
        Target("total", total, Axes.FULL, 24, "float32"),
    ]
    sums = [Target("everything", total, Axes.NONE, 1, "float32"), Target("spread", total, Axes.FEATURE, 24, "float32")]
    return describe("odds and ends", targets, sums, {"x": (Axes.FULL, 24, "float32")})


OF_CPP = ("class", "row", "te", "at", "x_row", "x", "sum_1", "2nd", "a.b", "a_b", "float", "größe")
OF_CUDA = ("decltype", "wchar_t", "row", "te", "lane", "x_row", "x", "t_1", "2nd", "a.b", "a_b", "größe")
SPECIAL = {
    "scalars": scalars(),
    "odds and ends": odds_and_ends(),
    "words of C++": named("default", "weight", *OF_CPP),
    "words of CUDA": named("2 in one", "_weight", *OF_CUDA),
}
ALL = {**CORPUS, **SPECIAL}
kernels = compiled(ALL)


@needs_compiler
@ON_EVERY_TARGET
@pytest.mark.parametrize("name", ALL)
def test_values_of_a_description_err_no_more_than_twice_pytorch(name: str, target: str, kernels: Kernels) -> None:
    """Sums of no rows are zeros."""
    d = ALL[name]
    kernel = kernels(target, d)
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (13, (1, 1)), (64, (1, 1)), (24, (2, 3)), (7, (3, 2)), (7, (1, 4))):
        if rows == 64 and target != "cpp":
            continue  # which takes these rows in several vectors; the others take their time
        if rows == 7 and not any(t.axes & Axes.BATCH for t in (*d.loads, *d.sums)):
            continue  # nothing of it is a sample's
        tensors = inputs(d, rows, batch[1], seed=rows)
        assert not complaints(d, tensors, call(kernel, d, tensors, rows, batch), rows, batch)


@needs_compiler
@pytest.mark.parametrize("target", ["cpp", "cuda"])
@pytest.mark.parametrize("name", ["every_function-40-f32", "two_operands-16-f32", "kinks-16-f32", "choices_fwd-40-f32"])
def test_rare_values_are_as_in_torch(name: str, target: str, kernels: Kernels) -> None:
    d, rows = CORPUS[name], len(RARE)
    tensors = rare_inputs(d)
    made = call(kernels(target, d), d, tensors, rows)
    for store, got, want in zip(d.stores, made, reference(d, tensors, rows, dtype=torch.float32), strict=True):
        torch.testing.assert_close(
            got, want, rtol=3e-7, atol=2e-45, equal_nan=True, msg=lambda m, s=store: f"{s.name}: {m}"
        )


@needs_compiler
def test_rows_of_no_sample_give_nothing(kernels: Kernels) -> None:
    d = CORPUS["scale_shift_bwd-17-f32"]
    assert all(t.numel() == 0 for t in call(kernels("cuda", d), d, inputs(d, 0, 0), 0, (1, 0)))


def wide(read: str, stored: str) -> KernelDescription:
    x = expr.leaf("x", Axes.FULL, 8)
    return describe("wide", [Target("y", x + x, Axes.FULL, 8, stored)], (), {"x": (Axes.FULL, 8, read)})


@pytest.mark.parametrize("make", [cpp.generate, cuda.generate])
@pytest.mark.parametrize(("read", "stored", "name"), [("float64", "float32", "x"), ("float32", "float64", "y")])
def test_float64_is_refused_by_its_name(read: str, stored: str, name: str, make: Callable[..., object]) -> None:
    words = f"kernel wide: {name} is float64; generated kernels (know|store) float32"
    with pytest.raises(ValueError, match=words):
        make(wide(read, stored))


# ------------------------------------------------------------------------------------------------ machine code

BF16 = ("bfloat16", "bfloat16")
LARGE = [
    (corpus.layer_norm, (4096, 8192, 16384, 65536)), (corpus.rms_norm, (4096,)), (corpus.bias_gelu, (16384,)),
    (corpus.swiglu, (14336,)), (corpus.dropout_add_layer_norm, (4096, 8192, 10240, 12288, 16384)),
    (corpus.geglu_chain, (10240, 16384)), (corpus.softmax, (2048,)),
]  # fmt: skip


def large() -> Iterator[KernelDescription]:
    yield from (d for family, widths in LARGE for w in widths for d in family(Kit(*BF16), w))


def narrow() -> Iterator[KernelDescription]:
    """8 bits: from 8.9 on there is an instruction for it, before that whole numbers do it."""
    for dtype in FLOAT8:
        yield from (test_float8.TWICE[dtype], test_float8.FROM[dtype, 16])
        yield test_float8.to_float8(dtype, "bfloat16", 4096)
        yield from (test_float8.TO[dtype, "bfloat16", width] for width in (1, 2))


def tiles(reads: Sequence[str] = ("bfloat16",), widths: Sequence[int] = (4096,)) -> Iterator[KernelDescription]:
    for family in tile_cases.FAMILIES:
        yield from (family(Kit(*BF16), width, "float8_e4m3fn") for width in widths)
    for read in reads:
        for make in (test_cuda_tile.copied, test_cuda_tile.gelu, test_cuda_tile.slope):
            d = make(Kit(read, read), 4096, "float8_e4m3fn")
            yield dataclasses.replace(d, stores=d.stores[1:])


def overwriting() -> Iterator[KernelDescription]:
    plain = (test_in_place.BIAS_GELU, *test_in_place.LAYER_NORM, CORPUS["dropout_swiglu_bwd-40-f16"])
    yield from map(test_in_place.over, plain)


def raising(every: int = 1) -> Iterator[KernelDescription]:
    yield from (test_float8.RAISING[name] for name in test_float8.NAMES[::every])


# Of each architecture what is compiled: of the newest and the oldest less, whose text is that of the one between.
HOPPER: dict[str, Callable[[], Iterator[KernelDescription]]] = {
    "corpus": lambda: iter(CORPUS.values()),
    "large": large,
    "8 bits": narrow,
    "tiles": lambda: tiles(("bfloat16", "float32"), (4096, 33)),
    "overwriting": overwriting,
    "raising": raising,
}
OTHERS: dict[str, Callable[[], Iterator[KernelDescription]]] = {
    "corpus": lambda: iter([*CORPUS.values()][::4]),
    "8 bits": narrow,
    "tiles": tiles,
    "overwriting": overwriting,
    "raising": lambda: raising(4),
}
COMPILED = {"sm_90a": HOPPER, "sm_80": OTHERS, "sm_100a": OTHERS}


@needs_nvrtc
@pytest.mark.parametrize(("arch", "what"), [(arch, what) for arch, made in COMPILED.items() for what in made])
def test_machine_code_spills_next_to_nothing_and_loads(arch: str, what: str, tmp_path: Path) -> None:
    shared = limits_of(arch).shared_bytes

    def complaint(d: KernelDescription) -> str:
        kernel, made = compile_kernel(d, arch, cache=tmp_path)
        resources = {r.symbol: r for r in made.resources}
        assert sorted(resources) == sorted(launch.symbol for launch in kernel.launches)
        # One block that fills a multiprocessor leaves nothing to give to its threads.
        full = any(s.blocks_per_multiprocessor == 1 for s in kernel.schedules)
        most = 0 if what == "8 bits" and d.width == 4096 else 64 if what == "large" and full else 16
        wrong = [r for r in resources.values() if r.spilled_bytes > most]
        launched = [(resources[launch.symbol], launch.shared_bytes) for launch in kernel.launches]
        wrong += [r for r, more in launched if r.shared_bytes + more > shared]
        assert d.name in repr(cuda_loader.native_kernel(d, kernel, made.cubin))
        return f"{d.name} {d.width}: {wrong} {kernel.schedules}" if wrong else ""

    with ThreadPoolExecutor(2) as pool:
        assert not [text for text in pool.map(complaint, COMPILED[arch][what]()) if text]


@needs_compiler
def test_constants_that_float32_has_no_decimal_for_are_infinite_or_nan(tmp_path: Path) -> None:
    """As in PyTorch."""
    x = expr.leaf("x", Axes.FULL, 8)
    values = {"beyond": -1e300, "infinite": math.inf, "nan": math.nan}
    targets = [
        Target(name, f.where(x > 0, x, expr.const(value)), Axes.FULL, 8, "float32") for name, value in values.items()
    ]
    d = describe("constants", targets, [], {"x": (Axes.FULL, 8, "float32")})
    found, tensors = Kernels([d], tmp_path, tmp_path), {"x": torch.arange(-4.0, 4.0)[None].contiguous()}
    for target in ("cpp", "cuda"):
        for got, value in zip(call(found(target, d), d, tensors, 1), (-math.inf, math.inf, math.nan), strict=True):
            wanted = torch.where(tensors["x"] > 0, tensors["x"], value)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
