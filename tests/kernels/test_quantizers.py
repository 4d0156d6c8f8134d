"""Weights in 8 bits, matrices turned, scales: by PyTorch, and by kernels run on the CPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from te_fuser import _native
from te_fuser.codegen.description import ScaleOf
from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import (
    OwnWeights,
    QuantizeWeights,
    Transposed8,
    Weight8,
    measuring_weights,
    quantizer_on,
    weights_by_torch,
)
from te_fuser.ops.blockwise_scaling import quantized, scale_by
from te_fuser.quantization import quantize
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, E5M2, FORMATS, PLAIN, POWERS, WAYS, codes, every_number, telling_numbers
from tests.kernels.emulated import emulating
from tests.kernels.weights8 import (
    DTYPES,
    NOTHING,
    SIZES,
    bytes_like,
    quantize_weights,
    run_weights,
    turned_wrongly,
    weights_like,
    weights_wrongly,
)
from tests.needs import needs_compiler

KERNEL, OTHER = QuantizeWeights(), QuantizeWeights(E5M2)
CPU = torch.device("cpu")  # on which tensors stand for those of a GPU
OF_ALL = [*((dtype,) for dtype in DTYPES), DTYPES]

emulated = emulating(lambda: [KERNEL, OTHER, *map(Transposed8, FORMATS), *map(measuring_weights, (PLAIN, POWERS))])

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


def test_several_at_once() -> None:
    """The common `quantize_weights` runs by PyTorch on a CPU."""
    weights = weights_like((torch.bfloat16,))
    scales, amaxes = [torch.tensor(3.0)] * 7, [torch.zeros(()) for _ in range(7)]
    assert not weights_wrongly(weights, scales, quantize_weights(weights, scales, amaxes), [0.0] * 7, amaxes)
    assert not weights_wrongly(weights, scales, quantize_weights(weights, scales), [0.0] * 7)


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
