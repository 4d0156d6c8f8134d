"""Matrices in 8 bits, turned and scaled, also by blocks: by PyTorch, and by kernels run on the CPU."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.codegen.description import ScaleOf
from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import (
    OwnWeights,
    QuantizeBlocks,
    QuantizeWeights,
    Transposed8,
    Weight8,
    measuring_weights,
    quantizer_on,
    weights_by_torch,
)
from te_fuser.ops.blockwise_scaling import quantized, scale_by
from te_fuser.quantization import quantize
from te_fuser.recipe import OwnScales, QParams
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, E5M2, FORMATS, PLAIN, POWERS, WAYS, codes, every_number, telling_numbers
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

# Tokens and features: whole tiles, parts of them, next to none.
SIZES = [(128, 128), (256, 384), (1, 16), (17, 48), (130, 272), (127, 128), (129, 144), (300, 16), (16, 2064)]
NOTHING = [(0, 48), (5, 0), (0, 0)]
SHAPES = [(128, 128), (16, 16), (48, 272), (272, 48), (144, 400), (16, 16), (256, 128)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Quantized = tuple[torch.Tensor, torch.Tensor]  # by rows and turned


def bytes_like(tokens: int, features: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """All codes, in no order."""
    rng = torch.Generator().manual_seed(tokens * 31 + features)
    found = torch.randint(0, 256, (tokens, features), dtype=torch.uint8, generator=rng)
    return found.to(device).view(dtype)


def turned_wrongly(data: torch.Tensor, turned: torch.Tensor) -> str:
    """Complaint about a matrix that should be data [tokens, features] turned; empty: nothing."""
    tokens, features = data.shape
    room = math.ceil(tokens / 16) * 16
    if turned.dtype != data.dtype or turned.shape != (features, room) or not turned.is_contiguous():
        return f"{turned.dtype} {list(turned.shape)}"
    if not torch.equal(codes(turned)[:, :tokens], codes(data).mT):
        return f"{(codes(turned)[:, :tokens] != codes(data).mT).sum()} of {data.numel()} bytes"
    return "" if not codes(turned)[:, tokens:].any() else "what is behind the tokens"


def weights_like(dtypes: Sequence[torch.dtype], device: str = "cpu") -> list[torch.Tensor]:
    """Weights of `SHAPES`, each of the next dtype."""
    rng = torch.Generator().manual_seed(len(dtypes))
    made = []
    for k, shape in enumerate(SHAPES):
        w = torch.randn(shape, generator=rng) * 10.0 ** (k - 3)
        made.append(w.to(dtypes[k % len(dtypes)]).to(device))
    return made


def quantize_weights(
    weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor] | None = None
) -> list[Quantized]:
    """Weights as weight caches quantize them: on a GPU by the kernel."""
    wanted = [Weight8(w.dtype, records=amaxes is not None) for w in weights]
    device = weights[0].device
    run = quantizer_on(device, wanted) if device.type == "cuda" else functools.partial(weights_by_torch, wanted)
    numbers = [scales] if amaxes is None else [scales, amaxes]
    made = run(*[t for each in zip(weights, *numbers, strict=True) for t in each])
    return list(zip(made[::2], made[1::2], strict=True))


def weights_wrongly(
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    found: Sequence[Quantized],
    before: Sequence[float],
    amaxes: Sequence[torch.Tensor] | None = None,
) -> list[str]:
    """Complaints about weights quantized by scales, and about amaxes that were `before`."""
    wrong = []
    for k, (w, scale, (rows, turned)) in enumerate(zip(weights, scales, found, strict=True)):
        expected = quantize(w, E4M3, scale)
        for name, ours, exact in (("rows", rows, expected.data), ("turned", turned, expected.transposed)):
            if ours.shape != exact.shape or ours.dtype != exact.dtype or not torch.equal(codes(ours), codes(exact)):
                wrong.append(f"{name} of weight {k}, {w.dtype} {list(w.shape)}")
        if amaxes is not None:
            wanted = torch.maximum(torch.full_like(expected.amax, before[k]), expected.amax)
            if not torch.equal(wanted.nan_to_num(-1.0), amaxes[k].nan_to_num(-1.0)):
                wrong.append(f"amax {amaxes[k]} of weight {k}, not {wanted}")
    return wrong


def run_weights(
    weights: Sequence[torch.Tensor], quantizer: Callable[[Sequence[Weight8]], Callable[..., Any]]
) -> list[str]:
    """Quantizes weights by scales in no order, with amaxes of which one is larger already, and looks at both."""
    device, count = weights[0].device.type, len(weights)
    scales = (torch.rand(count, generator=torch.Generator().manual_seed(count)) * 400 + 0.3).to(device)
    before = [0.0, 1e6, *[0.0] * (count - 2)]
    amaxes = torch.tensor(before, device=device).unbind()
    given = [t for each in zip(weights, scales.unbind(), amaxes, strict=True) for t in each]
    made = quantizer([Weight8(w.dtype, records=True) for w in weights])(*given)
    return weights_wrongly(weights, scales.unbind(), list(zip(made[::2], made[1::2], strict=True)), before, amaxes)


KERNEL, OTHER = QuantizeWeights(), QuantizeWeights(E5M2)
CPU = torch.device("cpu")  # on which tensors stand for those of a GPU
OF_ALL = [*((dtype,) for dtype in DTYPES), DTYPES]

WANTED = ("rows", "turned", "both")
BLOCKS = [
    *(QuantizeBlocks(dtype, E4M3, w, square) for dtype, w, square in itertools.product(DTYPES, WANTED, (False, True))),
    *(QuantizeBlocks(torch.bfloat16, E5M2, w) for w in WANTED),
    QuantizeBlocks(torch.bfloat16, E4M3, power_of_two=False, epsilon=0.25),
]


def every_kernel() -> Iterator[TextKernel[Any]]:
    yield from (KERNEL, OTHER, *map(Transposed8, FORMATS), *map(measuring_weights, (PLAIN, POWERS)), *BLOCKS)


emulated = emulating(every_kernel)

by_kernel = functools.partial(quantizer_on, CPU)


@pytest.mark.parametrize("dtypes", OF_ALL)
def test_weights_by_torch(dtypes: tuple[torch.dtype, ...]) -> None:
    weights = weights_like(dtypes)
    assert not run_weights(weights, lambda wanted: functools.partial(weights_by_torch, wanted))


@needs_compiler
@pytest.mark.parametrize("dtypes", OF_ALL)
def test_weights_by_the_kernel(dtypes: tuple[torch.dtype, ...], emulated: FakeDriver) -> None:
    """In one launch, parameters too."""
    weights = [torch.nn.Parameter(w) for w in weights_like(dtypes)]
    emulated.launches = 0
    assert not run_weights(weights, by_kernel)
    assert emulated.launches == 1


@needs_compiler
@pytest.mark.parametrize("count", [72, 73, 150])
def test_many(count: int, emulated: FakeDriver) -> None:
    """A launch takes 72."""
    weights = [torch.full((16, 16 + 16 * (k % 3)), float(k)) for k in range(count)]
    emulated.launches = 0
    assert not run_weights(weights, by_kernel)
    assert emulated.launches == -(-count // 72)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number(dtype: torch.dtype, emulated: FakeDriver) -> None:
    """The bytes of `quantize`, of infinities and NaN too; NaN is the largest magnitude."""
    x = (telling_numbers(E4M3)[: 2**16] if dtype == torch.float32 else every_number(dtype)).reshape(-1, 64)
    usual = x.clone().nan_to_num(0.0, posinf=3.0, neginf=-3.0)
    scales, amaxes = [torch.tensor(3.1), torch.tensor(0.02)], [torch.zeros(()), torch.zeros(())]
    made = by_kernel([Weight8(dtype, records=True)] * 2)(x, scales[0], amaxes[0], usual, scales[1], amaxes[1])
    found = list(zip(made[::2], made[1::2], strict=True))
    assert not weights_wrongly([x, usual], scales, found, [0.0, 0.0], amaxes)
    assert amaxes[0].isnan() and amaxes[1].isfinite()


LAYOUTS = [(True, False), (False, True), (True, True)]


@needs_compiler
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(("rows", "turned"), LAYOUTS)
def test_what_nobody_wants_is_not_made(rows: bool, turned: bool, records: bool, emulated: FakeDriver) -> None:
    """One tensor comes alone, and of several weights each is made as it is wanted."""
    scale, other = torch.tensor(31.0), torch.randn(32, 32)
    for w in weights_like(DTYPES):
        exact, slot = quantize(w, E4M3, scale), torch.tensor(1e-3)
        first = Weight8(w.dtype, rows, turned, records)
        given = w, scale, *([slot] if records else [])
        for maker in (by_kernel, lambda wanted: functools.partial(weights_by_torch, wanted)):
            slot.fill_(1e-3)
            alone: Any = maker([first])(*given)
            both = maker([first, Weight8(torch.float32, turned=False)])(*given, other, scale)
            assert slot == (max(exact.amax.item(), torch.tensor(1e-3).item()) if records else torch.tensor(1e-3))
            wanted = [exact.data] * rows + [exact.transposed] * turned
            found = alone if len(wanted) > 1 else (alone,)
            assert len(found) == len(wanted) and len(both) == len(wanted) + 1
            for ours, again, expected in zip(found, both, wanted, strict=False):
                assert ours.shape == expected.shape and ours.is_contiguous()
                assert torch.equal(codes(ours), codes(expected)) and torch.equal(codes(again), codes(expected))


@needs_compiler
def test_other_8_bits(emulated: FakeDriver) -> None:
    """Of matrices of any height, by rows."""
    for x in (torch.randn(17, 48), torch.randn(130, 32).bfloat16(), torch.randn(1, 16).half()):
        slot, exact = torch.zeros(()), quantize(x, E5M2, 900.0)
        found = quantizer_on(CPU, [Weight8(x.dtype, turned=False, records=True)], E5M2)(x, torch.tensor(900.0), slot)
        assert found.dtype == E5M2 and torch.equal(codes(found), codes(exact.data)) and slot == exact.amax
    with pytest.raises(ValueError, match="makes numbers of 8 bits, not bfloat16"):
        _native.QuantizeWeights(b"", "bfloat16")


@needs_compiler
def test_weights_that_lie_otherwise_are_copied(emulated: FakeDriver) -> None:
    apart = torch.randn(32, 64)[:, 16:]
    shifted = torch.randn(32 * 48 + 1)[1:].view(32, 48)
    assert not run_weights([apart, shifted, torch.nn.Parameter(torch.randn(48, 32).mT)], by_kernel)


@needs_compiler
def test_weights_of_nothing(emulated: FakeDriver) -> None:
    emulated.launches = 0
    amax = torch.zeros(())
    for maker in (by_kernel, lambda wanted: functools.partial(weights_by_torch, wanted)):
        rows, turned = maker([Weight8(torch.float32, records=True)])(torch.zeros(0, 32), torch.ones(()), amax)
        assert rows.shape == (0, 32) and turned.shape == (32, 0) and amax == 0
        assert maker([])() == ()
    assert emulated.launches == 0


W, ONE = torch.zeros(16, 32), torch.ones(())
NATIVE = {
    "no words": ((W, ONE), TypeError, "takes bytes that say what is made, and tensors"),
    "no such dtype": ((b"\x0f", W, ONE), ValueError, "weight 0 is said to be what its tensors are not"),
    "too few": ((b"\x14", W, ONE), ValueError, "weight 0 is said to be"),
    "dtype": ((b"\x05", W, ONE), TypeError, "bfloat16"),
    "dimensions": ((b"\x04", W[0], ONE), ValueError, "tensor 0 must be a weight"),
    "scale": ((b"\x04", W, ONE.double()), TypeError, "float32"),
}


@needs_compiler
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_kernel_refuses(name: str, emulated: FakeDriver) -> None:
    given, kind, words = NATIVE[name]
    with pytest.raises(kind, match=words):
        KERNEL.ready(CPU)(*given)  # type: ignore[arg-type]
    assert repr(KERNEL.ready(CPU)) == "<QuantizeWeights>"
    with pytest.raises(TypeError, match="bytes"):
        _native.QuantizeWeights(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [*SIZES, *NOTHING, (7, 13)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_turned_by_torch(dtype: torch.dtype, size: tuple[int, int]) -> None:
    data = bytes_like(*size, dtype)
    assert not turned_wrongly(data, quantizers.transpose_by_torch(data))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_turned_by_the_kernel(size: tuple[int, int], emulated: FakeDriver) -> None:
    """In one launch, whatever lies behind the first two dimensions."""
    data = bytes_like(*size, E4M3)
    emulated.launches = 0
    assert not turned_wrongly(data, quantizers.transpose_by_kernel(data))
    assert emulated.launches == 1
    assert torch.equal(codes(quantizers.transpose_by_kernel(data[:, None])), codes(quantizers.transpose_by_torch(data)))


@needs_compiler
def test_matrices_that_lie_otherwise_are_copied(emulated: FakeDriver) -> None:
    data = bytes_like(64, 48, E4M3)
    apart = bytes_like(64, 64, E4M3)[:, 16:]
    shifted = torch.zeros(64 * 48 + 3, dtype=torch.uint8)[3:].view(64, 48)
    shifted.copy_(codes(data))
    for given in (apart, shifted.view(E4M3), data.view(torch.uint8).mT.contiguous().view(E4M3).mT):
        wanted = given.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(E4M3)
        assert not turned_wrongly(wanted, quantizers.transpose_by_kernel(given))


@needs_compiler
def test_nothing_is_turned(emulated: FakeDriver) -> None:
    emulated.launches = 0
    for size in NOTHING:
        data = bytes_like(*size, E4M3)
        assert not turned_wrongly(data, quantizers.transpose_by_kernel(data))
    assert emulated.launches == 0


def test_rows_that_are_not_turned() -> None:
    assert quantizers.why_not_transposed(48) is None
    with pytest.raises(ValueError, match="rows of a multiple of 16, not 40"):
        quantizers.transpose_by_kernel(bytes_like(16, 40, E4M3))


B16, F32 = torch.bfloat16, torch.float32


@needs_compiler
@pytest.mark.parametrize("mixed", [False, True])
def test_weights_by_scales_of_their_own(emulated: FakeDriver, mixed: bool) -> None:
    """Scales of the definition, in the layouts that are wanted; by one launch each where all have one rule."""
    wanted = [Weight8(B16), Weight8(F32, turned=False), Weight8(B16, rows=False), Weight8(B16)]
    scalings = [PLAIN, POWERS if mixed else PLAIN, PLAIN, PLAIN]
    rng = torch.Generator().manual_seed(0)
    sizes = ((48, 16), (272, 128), (16, 160), (32, 32))
    weights = [
        (torch.randn(size, generator=rng) * 3.0**k).to(w.dtype)
        for k, (size, w) in enumerate(zip(sizes, wanted, strict=True))
    ]
    weights[3].zero_()
    emulated.launches = 0
    made, scales, inverses = OwnWeights(torch.device("cpu"), wanted, scalings)(*weights)
    assert emulated.launches == (3 if mixed else 2)
    there = iter(made)
    for w, said, scaling, scale, inverse in zip(weights, wanted, scalings, scales, inverses, strict=True):
        data, right = quantized(w, E4M3, scaling)
        assert inverse.shape == () and inverse == right and scale.reciprocal() == right
        assert inverse.data_ptr() % 16 == inverses[0].data_ptr() % 16
        if said.rows:
            assert torch.equal(codes(next(there)), codes(data))
        if said.turned:
            assert torch.equal(codes(next(there)), codes(quantizers.transpose_by_torch(data)))


@needs_compiler
def test_one_weight_by_a_scale_of_its_own(emulated: FakeDriver) -> None:
    w = torch.randn(32, 16)
    (data,), _, (inverse,) = OwnWeights(torch.device("cpu"), [Weight8(F32, turned=False)], [PLAIN])(w)
    right, wanted = quantized(w, E4M3, PLAIN)
    assert torch.equal(codes(data), codes(right)) and inverse == wanted


@needs_compiler
def test_weights_of_no_numbers_by_scales_of_their_own(emulated: FakeDriver) -> None:
    _, scales, inverses = OwnWeights(torch.device("cpu"), [Weight8(F32)], [PLAIN])(torch.zeros(0, 16))
    assert [*map(float, (*scales, *inverses))] == [1.0, 1.0]


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-30, 0.3, 1.0, 7.0, 448.0, 3e38, math.inf, math.nan])
def test_scales_by_torch(amax: float) -> None:
    for way in WAYS:
        number = torch.tensor(amax)
        wanted = scale_by(number.clone(), *way)
        scale, inverse = quantizers.scale_by_torch(number, *way)
        assert number == 0.0 and scale == wanted and inverse == wanted.reciprocal()


def test_what_kernels_are_told() -> None:
    assert quantizers.in_kernels(E5M2, WAYS[1][1]) == ScaleOf(57344.0, True, 0.25)


def matrix(tokens: int, features: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(tokens * 31 + features)
    return (torch.randn(tokens, features, generator=rng) * scale).to(dtype)


def check_blocks(x: torch.Tensor, kernel: QuantizeBlocks) -> None:
    """The bytes of the definition by rows and turned, zeros behind the tokens, and scales as products take them."""
    scaling = OwnScales(QParams(kernel.power_of_two, kernel.epsilon), (128, 128) if kernel.square else (1, 128))
    rows, turned = quantizers.BlocksOf(kernel)(x)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    tokens, features = flat.shape
    for side, found, given in (("rows", rows, flat), ("turned", turned, flat.mT)):
        if kernel.wanted not in (side, "both"):
            assert not found[0].numel()
            continue
        data, inverse = quantized(given, kernel.narrow, scaling)
        whole = side == "rows" and tokens % 4 == 0
        room = tokens if whole else quantizers.padded(tokens)
        ours = found[0].reshape(room, features) if side == "rows" else found[0].mT
        assert found[0].dtype == kernel.narrow and ours.shape == (room, features) and found[0].is_contiguous()
        assert found[0].shape == x.shape if whole else True
        right = data if side == "rows" else data.mT
        assert torch.equal(codes(ours)[:tokens], codes(right)) and not codes(ours)[tokens:].any()
        lies = inverse if kernel.square else inverse.mT
        scales = found[1][: lies.shape[0], : lies.shape[1]]
        assert torch.equal(scales, lies) or not x.numel(), side
        assert found[1].shape[1] % 4 == 0 and found[1].is_contiguous()


@needs_compiler
@pytest.mark.parametrize(
    "kernel", BLOCKS, ids=lambda k: f"{str(k.dtype)[6:]}-{str(k.narrow)[13:]}-{k.wanted}-{k.square}-{k.power_of_two}"
)
def test_blocks(kernel: QuantizeBlocks, emulated: FakeDriver) -> None:
    for tokens, features in (*SIZES, (128, 272), (3, 128), *NOTHING):
        spread = torch.exp2((torch.arange(tokens)[:, None] * 5 + torch.arange(features) // 8 * 3) % 23 - 11.0)
        check_blocks(matrix(tokens, features, kernel.dtype) * spread.to(kernel.dtype), kernel)
    check_blocks(matrix(30, 128, kernel.dtype).view(5, 6, 128), kernel)
    if not kernel.square:
        emulated.launches = 0
        check_blocks(matrix(64, 384, kernel.dtype).view(4, 16, 384), kernel)
        assert emulated.launches == 1


@needs_compiler
@pytest.mark.parametrize("number", [0.0, math.inf, math.nan, 1e-30, 3e38, 7.0])
def test_special_numbers_in_blocks(number: float, emulated: FakeDriver) -> None:
    for fill, kernel in itertools.product((0.0, 1e-3), (BLOCKS[4], BLOCKS[5], BLOCKS[-1])):
        x = torch.full((132, 256), fill).to(kernel.dtype)
        x[17, 5] = x[129, 200] = number
        check_blocks(x, kernel)


@needs_compiler
def test_what_lies_otherwise_is_copied(emulated: FakeDriver) -> None:
    for x in (
        torch.randn(32, 64)[:, 16:],
        torch.randn(32 * 48 + 1)[1:].view(32, 48),
        torch.randn(48, 32).mT,
        torch.nn.Parameter(torch.randn(16, 16)),
    ):
        check_blocks(x, QuantizeBlocks(torch.float32, E4M3))


def test_refused_in_words() -> None:
    for shape in ((3, 40), (2**31, 16)):
        with pytest.raises(ValueError, match=r"multiples of 16 and up to 2147483520 rows, got \[\d+, \d+\]"):
            quantizers.BlocksOf(BLOCKS[0])(torch.empty(shape, device="meta"))
