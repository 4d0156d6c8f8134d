"""Generated C++ kernels against the interpreter in float64."""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cpp_scope
from te_fuser.codegen.compiler import Compiler, LoadedKernel, find_compiler, load
from te_fuser.codegen.description import KernelDescription
from te_fuser.formula import expr, random
from te_fuser.formula import functions as f
from te_fuser.formula.expr import Axes
from tests.codegen.corpus import RARE, Kit, descriptions, inputs, outputs, reference
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED, complaints
from tests.codegen.targets import call, shared_out
from tests.parallel.ranks import in_a_fork

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

CORPUS = descriptions()
ON_X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 processors")
AVX2, SSE2 = (pytest.param(flags, marks=ON_X86, id=str(flags)) for flags in (("-mavx2", "-mfma"), ("-msse2",)))


@pytest.fixture(scope="session")
def kernels(cache: Path) -> dict[str, LoadedKernel]:
    return dict(zip(CORPUS, load(list(CORPUS.values()), cache_dir=cache), strict=True))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_as_meant(
    d: KernelDescription, got: list[torch.Tensor], tensors: dict, rows: int, batch: tuple[int, int] = (1, 1)
) -> None:
    assert not complaints(d, tensors, got, rows, batch)


# ---------------------------------------------------------------------------------------- the corpus


@pytest.mark.parametrize("name", CORPUS)
def test_is_the_same_on_two_threads(kernels: dict[str, LoadedKernel], name: str, two_threads: None) -> None:
    """Rows do not depend on the number of threads; sums only in their rounding; and every result repeats."""
    d, rows, batch = CORPUS[name], 23, (5, 3)
    tensors = inputs(d, rows, batch[1])
    shared = shared_out(kernels[name])
    first, second = (call(shared, d, tensors, rows, batch) for _ in range(2))
    assert_as_meant(d, first, tensors, rows, batch)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(bits(a), bits(b))
    torch.set_num_threads(1)
    alone = call(shared, d, tensors, rows, batch)
    for a, b in list(zip(first, alone, strict=True))[: len(d.stores)]:
        assert torch.equal(bits(a), bits(b))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [AVX2, SSE2])
def test_narrower_vectors_mean_the_same(cache: Path, flags: tuple[str, ...]) -> None:
    compiler = find_compiler(flags=flags)
    for handle in load(list({d.name: d for d in CORPUS.values()}.values()), cache_dir=cache, compiler=compiler):
        d, rows, batch = handle.description, 7, (3, 2)
        tensors = inputs(d, rows, batch[1])
        assert_as_meant(d, call(handle.run, d, tensors, rows, batch), tensors, rows, batch)


def test_touches_nothing_outside_its_tensors(kernels: dict[str, LoadedKernel], cache: Path) -> None:
    """Every tensor ends where unmapped memory begins; in a process of its own, which would die of a wrong access."""
    in_a_fork(_run_at_borders, cache)


def _run_at_borders(cache: Path) -> None:
    libc, kept = ctypes.CDLL(None, use_errno=True), []
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def guarded(t: torch.Tensor) -> torch.Tensor:
        size = t.numel() * t.element_size()
        if not size:
            return t
        span = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, span + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(start + span, mmap.PAGESIZE, 0) == 0
        kept.append(memory)
        return torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=span - size).view(t.shape).copy_(t)

    for d, kernel in zip(CORPUS.values(), load(list(CORPUS.values()), cache_dir=cache), strict=True):
        for rows in (1, 3):
            tensors = [*inputs(d, rows, 2).values()]
            tensors += [torch.tensor([1, 2])] if d.streams else []
            tensors += outputs(d, rows, 2)
            kernel.run(tuple(map(guarded, tensors)), rows, 1, 2, tuple(range(len(d.streams))))


# ------------------------------------------------------------------------------------------ functions


def only(kernel_of: KernelDescription, cache: Path, compiler: Compiler | None = None) -> LoadedKernel:
    return load([kernel_of], cache_dir=cache, compiler=compiler)[0]


def grid(width: int) -> torch.Tensor:
    """Rows of numbers of every magnitude, denormal ones too, and a dense grid where functions bend or vanish."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32).view(torch.float32)
    dense = torch.linspace(-105, 105, 1 << 18)
    near_one = 1 + torch.linspace(-0.5, 0.5, 1 << 16)
    turns = (torch.arange(-(1 << 17), 1 << 17, dtype=torch.float64) * (math.pi / 2)).float()
    found = torch.cat([every[every.isfinite()], dense, dense / 16, near_one, near_one - 1, turns])
    return found[: len(found) // width * width].reshape(-1, width)


@pytest.mark.parametrize("flags", [None, AVX2, SSE2])
def test_functions_are_accurate(cache: Path, flags: tuple[str, ...] | None) -> None:
    d = CORPUS["every_function-40-f32"]
    tensors = {"x": grid(40)}
    got = call(only(d, cache, find_compiler(flags=flags)).run, d, tensors, len(tensors["x"]))
    exact = reference(d, tensors, len(tensors["x"]))
    for store, value, want in zip(d.stores, got, exact, strict=True):
        rounded = want.float()
        finite = rounded.isfinite()
        _, exponent = torch.frexp(want)
        last_place = torch.ldexp(torch.ones_like(want), exponent.clamp_min(-125) - 24)
        error = ((value.double() - want).abs() / last_place)[finite].max()
        assert error < 2.7, f"{store.name}: {error:.2f} units in the last place"
        torch.testing.assert_close(value[~finite], rounded[~finite], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("width", [1, 17, 200])
def test_row_reductions_look_at_every_feature(cache: Path, width: int) -> None:
    kit = Kit()
    x = kit.full("x", width)
    total = f.row_max(x) + 2 * f.row_sum(x) + 0.5 * f.row_max(-x) + 4 * f.row_min(-x)
    d = kit.forward("every_feature", {"y": (total, width)})
    (y,) = call(only(d, cache).run, d, {"x": torch.eye(width) - 3}, width)
    torch.testing.assert_close(y, torch.full_like(y, 6.0 + 2 * (1 - 3 * width) + (1.5 if width > 1 else 1.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("flags", [None, AVX2, SSE2])
def test_conversions_are_torchs(cache: Path, dtype: torch.dtype, flags: tuple[str, ...] | None) -> None:
    compiler = find_compiler(flags=flags)
    name = str(dtype).removeprefix("torch.")

    def convert(t: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        kit = Kit()
        x = kit.leaf("x", Axes.FULL, 16, str(t.dtype).removeprefix("torch."))
        kit.main = str(to).removeprefix("torch.")
        handle = only(kit.forward(f"cast_{name}", {"y": (x, 16)}), cache, compiler)
        return call(handle.run, handle.description, {"x": t}, len(t))[0]

    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, 16)
    torch.testing.assert_close(convert(every, torch.float32), every.float(), equal_nan=True, rtol=0, atol=0)
    middles = every.float().view(torch.int32)
    step = 1 << (15 if dtype == torch.bfloat16 else 12)
    near = torch.cat([middles + step + k for k in (-1, 0, 1)]).view(torch.float32)
    near = torch.cat([near, near * 2.0**-13, grid(16), torch.tensor(RARE)[None]])
    torch.testing.assert_close(convert(near, dtype), near.to(dtype), equal_nan=True, rtol=0, atol=0)


# --------------------------------------------------------------------------------------- random draws


def mask_kernel(width: int, parts: int, drop: float) -> KernelDescription:
    kit = Kit()
    keep = expr.keep_leaf("dropout", random.threshold(drop), Axes.FULL, width * parts)
    pieces = f.split(keep, parts)
    return kit.forward("mask", {f"y{k}": (piece, width) for k, piece in enumerate(pieces)})


@pytest.mark.parametrize(("width", "parts"), [(1, 1), (3, 1), (8, 1), (257, 1), (3, 2), (40, 3), (128, 2)], ids=str)
@pytest.mark.parametrize("flags", [None, SSE2])
def test_dropout_bits_are_those_of_the_reference(
    cache: Path, width: int, parts: int, flags: tuple[str, ...] | None
) -> None:
    d = mask_kernel(width, parts, 0.3)
    rows = 21
    got = call(only(d, cache, find_compiler(flags=flags)).run, d, {}, rows)
    drawn = random.keep_bits(torch.arange(rows), width * parts, SEED, OFFSET, FIRST_STREAM)
    want = (drawn >= random.threshold(0.3)).float()
    assert torch.equal(torch.cat(got, -1), want)


class Launch(ctypes.Structure):
    """te_launch, for calls of a kernel's own function."""

    _fields_ = (
        ("tensors", ctypes.POINTER(ctypes.c_void_p)),
        ("rows", ctypes.c_int64),
        ("batch_inner", ctypes.c_int64),
        ("batch_size", ctypes.c_int64),
        ("integers", ctypes.POINTER(ctypes.c_int64)),
        ("scratch", ctypes.POINTER(ctypes.c_void_p)),
        ("partials", ctypes.POINTER(ctypes.c_void_p)),
    )


@pytest.mark.parametrize("flags", [None, SSE2])
def test_dropout_bits_of_billions_of_rows(cache: Path, flags: tuple[str, ...] | None) -> None:
    """The group number passes 2**32 in the midst of a row; the store begins where row 0 would lie."""
    width, first, rows = 24, (2**32 - 1) // 3, 3
    handle = only(mask_kernel(width, 1, 0.3), cache, find_compiler(flags=flags))
    kernel = cpp.generate(handle.description)
    got = torch.full((rows, width), math.nan)
    seed = torch.tensor([SEED, OFFSET])
    scratch = torch.empty(kernel.scratch_floats + 16)
    aligned = -(-scratch.data_ptr() // 64) * 64
    launch = Launch(
        (ctypes.c_void_p * 2)(seed.data_ptr(), got.data_ptr() - first * width * 4),
        first + rows, 1, 1,
        (ctypes.c_int64 * 1)(FIRST_STREAM),
        (ctypes.c_void_p * 1)(aligned),
    )  # fmt: skip
    function = ctypes.CDLL(str(handle.library))[f"{kernel.symbol}_rows"]
    function.argtypes = (ctypes.POINTER(Launch), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    function(ctypes.byref(launch), first, first + rows, 0)
    drawn = random.keep_bits(torch.arange(first, first + rows), width, SEED, OFFSET, FIRST_STREAM)
    assert torch.equal(got, (drawn >= random.threshold(0.3)).float())


@pytest.mark.parametrize("drop", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(cache: Path, drop: float) -> None:
    d = mask_kernel(40, 1, drop)
    (got,) = call(only(d, cache).run, d, {}, 9)
    assert (got == 1 - drop).all()


# ------------------------------------------------------------------------------------- sums over rows


def column_sums() -> KernelDescription:
    kit = Kit()
    x, bias = kit.full("x", 16), kit.feature("bias", 16)
    scale, gain, slope = kit.leaf("scale", Axes.SAMPLE_FEATURES, 16), kit.leaf("gain", Axes.BATCH), kit.leaf("slope", 0)
    return kit.backward("sums_bwd", {"y": (x * slope + bias + scale + x * gain, 16)}, [bias, scale, gain, slope])


@pytest.mark.parametrize("batch", [(1, 1), (25000, 4), (1, 100)], ids=str)
def test_sums_over_many_rows_stay_accurate(cache: Path, batch: tuple[int, int]) -> None:
    """100,000 rows: added one by one in float32 they would be off by about 1e-3."""
    d, rows = column_sums(), 100_000
    tensors = inputs(d, rows, batch[1])
    for name in ("x", "dy"):
        tensors[name] = tensors[name] * 0.1 + 1.0
    got = call(only(d, cache).run, d, tensors, rows, batch)
    for item, value, want in zip(d.sums, got, reference(d, tensors, rows, batch=batch), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=4e-7, atol=0, msg=lambda m, s=item: f"{s.name}: {m}")


# --------------------------------------------------------------------------------------------- text


def test_dear_values_are_computed_once_and_cheap_ones_again() -> None:
    softmax = cpp.generate(CORPUS["softmax_fwd-40-f32"]).source
    assert softmax.count("te::exp(") == 1
    assert softmax.count("te::load_buffer(") == 1
    layer_norm = cpp.generate(CORPUS["layer_norm_fwd-257-f32"])
    assert layer_norm.scratch_floats == 0
    chain = cpp.generate(CORPUS["geglu_chain_bwd-257-f32"]).source
    assert chain.count("te::tanh(") == 1


def test_sums_that_no_loop_needs_share_the_last_loop() -> None:
    for name in ("prelu_bwd-257-f32", "gains_bwd-40-f32"):
        assert cpp.generate(CORPUS[name]).source.count("te::features<") == 1


def test_plain_elements_are_one_long_row() -> None:
    assert "te::elements(row_begin * 257, row_end * 257" in cpp.generate(CORPUS["cast-257-f32"]).source
    assert "te::elements(" not in cpp.generate(CORPUS["bias_gelu_fwd-16-f32"]).source


def test_one_long_row_ends_anywhere(kernels: dict[str, LoadedKernel], two_threads: None) -> None:
    d = CORPUS["gelu_erf_fwd-3-bf16"]
    for rows in (1, 5, 6, 11, 1001):
        tensors = inputs(d, rows)
        for kernel in (kernels["gelu_erf_fwd-3-bf16"].run, shared_out(kernels["gelu_erf_fwd-3-bf16"])):
            assert_as_meant(d, call(kernel, d, tensors, rows), tensors, rows)


def test_a_long_chain_of_operations(cache: Path) -> None:
    kit = Kit()
    x = y = kit.full("x", 24)
    for step in range(150):
        y = f.where(y > 0, y * 0.75 + x, y - x * (1 + step / 100))
    d = kit.forward("chain", {"y": (y, 24)})
    tensors = inputs(d, 5)
    got = call(only(d, cache).run, d, tensors, 5)
    torch.testing.assert_close(got[0].double(), reference(d, tensors, 5)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 2), "0.5f"), (40, "40.0f"), (1e-5, "1e-05f"), (Fraction(1, 3), "0.33333334f"), (-1, "-1.0f"),
        (math.inf, "te::infinity"), (-math.inf, "-te::infinity"), (1e300, "te::infinity"), (2.0**24, "16777216.0f"),
    ],
)  # fmt: skip
def test_literals(value: float, text: str) -> None:
    assert cpp_scope.literal(float(value)) == text
