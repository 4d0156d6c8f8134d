"""Numbers of 8 bits on a GPU: bytes turned, weights by their scales, matrices by blocks, amaxes folded into scales.

Products of 8 bits read what lies along what they sum: a weight by rows in forward and turned for the gradient of their
input, tokens turned for that of a weight. So a matrix that two of them read is made by rows and turned, from one
reading: all weights of a list in one launch, beside their largest magnitudes; others by a scale for each block, which
follows from that, as `ops/blockwise_scaling.py` computes it. The kernels' texts are `transposed8.cu`,
`quantize_weights.cu`, `quantize_blocks.cu` and `fold_amaxes.cu`.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, constants_of, over_rows
from te_fuser.codegen.cuda_text import CTYPES, literal
from te_fuser.codegen.description import NUMBERS, ScaleOf, padded
from te_fuser.dtypes import text_of
from te_fuser.formula.float8 import rounded
from te_fuser.ops.blockwise_scaling import scale_by
from te_fuser.ops.quantized_matmul import STEP
from te_fuser.recipe.recipes import OwnScales

_SIDE, _THREADS = 128, 256  # of a tile; of a block
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each does one tile, or one product, and ends
_MOST_TOKENS = 2**31 - STEP


def transpose_by_torch(data: torch.Tensor) -> torch.Tensor:
    """data [..., features] of 8 bits as [features, padded tokens], by PyTorch."""
    rows = data.flatten(0, -2) if data.dim() > 1 else data[None]
    turned = torch.zeros(rows.shape[1], padded(len(rows)), dtype=torch.uint8, device=data.device)
    turned[:, : len(rows)] = rows.view(torch.uint8).mT  # bytes: not every operation knows 8 bits
    return turned.view(data.dtype)


def transpose_by_kernel(data: torch.Tensor) -> torch.Tensor:
    """Turn data in one launch, on a GPU; plans compile the kernel."""
    *leading, features = data.shape
    tokens = math.prod(leading)
    why = why_not_transposed(features)
    if why is not None or max(tokens, features) > _MOST_TOKENS:
        raise ValueError(
            why or f"the kernel that turns bytes counts up to {_MOST_TOKENS}, got {tokens} rows of {features}"
        )
    turned = data.new_empty((features, padded(tokens)))
    tiles = -(-tokens // _SIDE) * -(-features // _SIDE)
    if tiles:
        kernel = Transposed8(data.dtype).ready(data.device)
        kernel((data.contiguous(), turned), tiles, 1, 1, (tokens, features))
    return turned


def why_not_transposed(features: int) -> str | None:
    """Reason why the kernel does not transpose rows of so many features."""
    return (
        f"the kernel that turns bytes takes rows of a multiple of {STEP}, not {features}" if features % STEP else None
    )


@dataclass(frozen=True)
class Transposed8(TextKernel[_native.CudaKernel]):
    """The kernel beside a plan's generated ones."""

    dtype: torch.dtype
    name: ClassVar[str] = "transposed8"
    source: ClassVar[Path] = Path(__file__).with_name("transposed8.cu")

    def native(self, cubin: bytes) -> _native.CudaKernel:
        return over_rows(self.name, cubin, [(text_of(self.dtype), STEP)] * 2, 1, 2, _THREADS, blocks=_ENDLESS)


# Four float32, 1, 1, 0 and 0 as `NUMBERS` lie, in one number that is as long: filled in by one launch.
_OF_NOTHING = complex(*struct.unpack("=2d", struct.pack("=4f", 1.0, 1.0, 0.0, 0.0)))


def of_nothing(count: int, device: torch.device) -> torch.Tensor:
    """`NUMBERS` that kernels raise, float32 [count, 4]: those of an amax of 0."""
    return torch.full((count, 1), _OF_NOTHING, dtype=torch.complex128, device=device).view(torch.float32)


def lower_again(amax: torch.Tensor) -> None:
    """Have an amax be 0 again, [], or among `NUMBERS`, whose others stay."""
    (amax[NUMBERS.index("largest") :] if amax.dim() else amax).zero_()


def in_kernels(dtype: torch.dtype, scaling: OwnScales) -> ScaleOf:
    """Rule of a factor's one scale, in a dtype of 8 bits, as kernels are told it."""
    return ScaleOf(torch.finfo(dtype).max, scaling.by.power_2_scale, scaling.by.amax_epsilon)


def scale_by_torch(amax: torch.Tensor, dtype: torch.dtype, scaling: OwnScales) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a largest magnitude, and its reciprocal, on any device; amax is zero afterwards."""
    with torch.no_grad():
        scale = scale_by(amax, dtype, scaling)
        amax.zero_()
        return scale, scale.reciprocal()


DTYPE = torch.float8_e4m3fn
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROWS, _TURNED, _RECORDS = 4, 8, 16  # beside these, what the native runtime is told of a weight
Quantizer = Callable[..., Any]


@dataclass(frozen=True)
class Weight8:
    """Request for a weight of this dtype in 8 bits; `records`: its amax is raised."""

    dtype: torch.dtype
    rows: bool = True
    turned: bool = True
    records: bool = False

    @property
    def code(self) -> int:
        """Number for the native runtime."""
        return KINDS[self.dtype] | _ROWS * self.rows | _TURNED * self.turned | _RECORDS * self.records


def quantizer_on(
    device: torch.device, weights: Sequence[Weight8], dtype: torch.dtype = DTYPE, scale: ScaleOf | None = None
) -> Quantizer:
    """f(weight, scale, its amax where that is raised, the next weight, ...) -> what is made, as a tuple.

    Weights are [out, in] in multiples of 16, and become the bytes of `quantization.quantize`; an amax is raised to the
    largest magnitude, NaN is the largest. One tensor is given alone. On a CUDA device, by one launch; plans compile the
    kernel. By rows, matrices of any height are taken.
    """
    return functools.partial(QuantizeWeights(dtype, scale).ready(device), bytes([w.code for w in weights]))


def weights_by_torch(weights: Sequence[Weight8], *tensors: torch.Tensor) -> Any:
    """Quantize weights by PyTorch's operations, on any device."""
    given, made = iter(tensors), []
    for weight in weights:
        wide, scale = next(given).detach().float(), next(given)
        data = rounded(wide * scale, DTYPE)
        if weight.records and (amax := next(given)) is not None and wide.numel():
            torch.maximum(amax, wide.abs().amax(), out=amax)
        made += [data] if weight.rows else []
        made += [transpose_by_torch(data)] if weight.turned else []
    return tuple(made) if len(made) != 1 else made[0]


@dataclass(frozen=True)
class QuantizeWeights(TextKernel[_native.QuantizeWeights]):
    """The kernel as plans compile it beside their generated ones; `dtype` is the 8 bits that it makes.

    `scale` is what it makes of each amax; it is then given four numbers for each, `codegen.description.NUMBERS`.
    """

    dtype: torch.dtype = DTYPE
    scale: ScaleOf | None = None
    name: ClassVar[str] = "quantize_weights"
    source: ClassVar[Path] = Path(__file__).with_name("quantize_weights.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda_quantize.cuh", "te_quantize_weights.h")

    def constants(self) -> list[str]:
        by = self.scale or ScaleOf(1.0, False, 0.0)
        flags = {"kScales": self.scale is not None, "kPowerOfTwo": by.power_of_two}
        floats = f"constexpr float kMost = {literal(by.most)}, kEpsilon = {literal(by.epsilon)};"
        return [*constants_of({"Narrow": CTYPES[text_of(self.dtype)]}, {}, flags), floats]

    def native(self, cubin: bytes) -> _native.QuantizeWeights:
        return _native.QuantizeWeights(cubin, text_of(self.dtype))


_SCALE, _INVERSE = NUMBERS.index("scale"), NUMBERS.index("inverse")


def measuring_weights(scaling: OwnScales) -> QuantizeWeights:
    """The kernel that makes scales of weights."""
    return QuantizeWeights(DTYPE, in_kernels(DTYPE, scaling))


class OwnWeights:
    """f(*weights) -> (what is made of them in 8 bits, their scales, the reciprocals of these).

    `scalings` say how each gets its scale; by one launch for those that do alike. Plans compile the kernels.
    """

    def __init__(self, device: torch.device, weights: Sequence[Weight8], scalings: Sequence[OwnScales]) -> None:
        self._device, self._made = device, sum([w.rows + w.turned for w in weights])
        self._quantize = quantizer_on(device, [replace(w, records=False) for w in weights])
        alike: dict[OwnScales, list[int]] = {}
        for place, scaling in enumerate(scalings):
            alike.setdefault(scaling, []).append(place)
        looked = [replace(w, rows=False, turned=False, records=True) for w in weights]
        self._measure = [
            (places, quantizer_on(device, [looked[k] for k in places], scale=in_kernels(DTYPE, scaling)))
            for scaling, places in alike.items()
        ]

    def __call__(self, *weights: torch.Tensor) -> tuple[Sequence[Any], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        numbers = of_nothing(len(weights), self._device)
        each, columns = numbers.unbind(), numbers.unbind(1)
        for places, measure in self._measure:
            measure(*[t for k in places for t in (weights[k], each[k], each[k])])
        scales = columns[_SCALE].unbind()
        made = self._quantize(*[t for pair in zip(weights, scales, strict=True) for t in pair])
        return made if self._made != 1 else (made,), scales, columns[_INVERSE].unbind()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOUR = 4  # products by blocks take rows in multiples of so many
_MOST = 2**31 - _SIDE


# What a product reads of a matrix: 8 bits along what it sums, and what they are multiplied by.
Factor = tuple[torch.Tensor, torch.Tensor]


def kernel_of(x: torch.dtype, dtype: torch.dtype, scaling: OwnScales, wanted: str) -> QuantizeBlocks:
    """Kernel that makes a matrix in 8 bits of one in x, by rows, turned or both."""
    square = scaling.block is not None and scaling.block[0] > 1
    return QuantizeBlocks(x, dtype, wanted, square, scaling.by.power_2_scale, scaling.by.amax_epsilon)


class BlocksOf:
    """f(x [.., features]) -> x by a scale for each 1 x 128 or 128 x 128 numbers, by rows and turned, in one launch.

    By rows it is [.., features], or [tokens up to a multiple of 16, features] where tokens are no multiple of 4;
    turned, [features, tokens up to a multiple of 16]. The scales lie as `_native.CudaMatmul` takes them. What the
    kernel does not make is empty.
    """

    __slots__ = ("_by_rows", "_kernel", "_ready", "_turned")

    def __init__(self, kernel: QuantizeBlocks) -> None:
        self._kernel, self._ready = kernel, dict[torch.device, Any]()
        self._by_rows, self._turned = kernel.wanted != "turned", kernel.wanted != "rows"

    def __call__(self, x: torch.Tensor) -> tuple[Factor, Factor]:
        *leading, features = shape = x.shape
        tokens = math.prod(leading)
        rows = _readable(x, tokens)
        behind, whole = padded(tokens), tokens % FOUR == 0
        new = rows.new_empty if whole else rows.new_zeros
        sizes, room = (shape, tokens) if whole else ((behind, features), behind)
        by_rows = self._factor(new, sizes, room, features) if self._by_rows else self._nothing(rows)
        turned = self._factor(new, (features, behind), features, tokens) if self._turned else self._nothing(rows)
        if tiles := -(-tokens // _SIDE) * -(-features // _SIDE):
            tensors, leads = (
                (rows, by_rows[0], turned[0], by_rows[1], turned[1]),
                (by_rows[1].shape[1], turned[1].shape[1]),
            )
            self._on(x.device)(tensors, tiles, 1, 1, (tokens, features, *leads))
        return by_rows, turned

    def _factor(self, new: Callable[..., torch.Tensor], sizes: Sequence[int], rows: int, columns: int) -> Factor:
        """Memory for rows of so many numbers, and for their scales."""
        scales = _scales_of(rows, columns, self._kernel.square) if rows and columns else (0, 0)
        return new(sizes, dtype=self._kernel.narrow), new(scales, dtype=torch.float32)

    def _nothing(self, like: torch.Tensor) -> Factor:
        """A factor that is not made."""
        return like.new_empty(0, dtype=self._kernel.narrow), like.new_empty((0, 0), dtype=torch.float32)

    def _on(self, device: torch.device) -> Any:
        found = self._ready.get(device)
        if found is None:
            found = self._ready[device] = self._kernel.ready(device)
        return found


def unpacked(made: torch.Tensor, columns: int, turned: bool = False) -> Factor:
    """A matrix as a generated kernel makes it by blocks, [.., features and room for their scales].

    `columns` are features; turned, tokens, which come up to a multiple of 16.
    """
    *leading, _ = made.shape
    rows, room, flat = math.prod(leading), padded(columns) if turned else columns, made.view(-1)
    data, inverse = flat[: rows * room], flat[rows * room :]
    return data.view(*leading, room), inverse.view(torch.float32).view(_scales_of(rows, columns, False))


def _scales_of(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """The shape of the scales of a factor with so many rows of so many numbers."""
    blocks = -(-columns // _SIDE)
    return (-(-rows // _SIDE), -(-blocks // FOUR) * FOUR) if square else (blocks, rows)


def _readable(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """x as the kernel can read it."""
    features = x.shape[-1]
    if features % STEP or max(tokens, features) > _MOST:
        raise ValueError(
            f"the kernels that quantize take features in multiples of {STEP} and up to {_MOST} rows, got "
            f"{[tokens, features]}"
        )
    if x.is_contiguous() and x.data_ptr() % STEP == 0:
        return x
    return x.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class QuantizeBlocks(TextKernel[_native.CudaKernel]):
    """The kernel that quantizes by blocks.

    Attributes:
        wanted: "rows", "turned" or "both".
        square: whether a block is 128 x 128, else 128 numbers of a row.
    """

    dtype: torch.dtype
    narrow: torch.dtype
    wanted: str = "both"
    square: bool = False
    power_of_two: bool = True
    epsilon: float = 0.0
    name: ClassVar[str] = "quantize_blocks"
    source: ClassVar[Path] = Path(__file__).with_name("quantize_blocks.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda_blocks.cuh",)

    def constants(self) -> list[str]:
        flags = {"kSquare": self.square, "kPowerOfTwo": self.power_of_two}
        flags |= {"kByRows": self.wanted != "turned", "kTurned": self.wanted != "rows"}
        types = {"Element": CTYPES[text_of(self.dtype)], "Narrow": CTYPES[text_of(self.narrow)]}
        most = torch.finfo(self.narrow).max
        floats = f"constexpr float kMost = {most}f, kEpsilon = {float(self.epsilon)!r}f;"
        return [*constants_of(types, {}, flags), floats]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        narrow, number = (text_of(self.narrow), STEP), ("float32", 4)
        tensors = [(text_of(self.dtype), STEP), narrow, narrow, number, number]
        tile = _SIDE * _SIDE * (self.dtype.itemsize + (self.wanted != "rows"))
        return over_rows(self.name, cubin, tensors, 1, 4, _THREADS, blocks=_ENDLESS, shared_bytes=tile)


# ------------------------------------------------------------- amaxes folded into histories and scales, one launch

ROLES = 3
APART = 4  # floats from one number of a snapshot to the next: cuBLAS reads scales at multiples of 16 bytes
_FOLD_THREADS = 192
_NOTHING: tuple[int, ...] = (0,) * 8


class Folded(NamedTuple):
    """A product whose amaxes are folded: what is written in place, and by which rule.

    Attributes:
        history: float32 [length, 3], newest first.
        scale: float32 [3].
        newest: whether the scale follows from the newest amax; else from the largest.
        margin: powers of two left free, -126 to 126.
        forward, backward: the largest numbers of the formats.
    """

    history: torch.Tensor
    scale: torch.Tensor
    newest: bool
    margin: int
    forward: float
    backward: float


class AmaxFolder:
    """Folds amaxes of always the same products, whose histories and scales stay where they are, side by side.

    `products` are by row among the amaxes, of which there may be `rows`; other rows are counted and cleared alone.
    """

    def __init__(self, products: Mapping[int, Folded], rows: int, device: torch.device) -> None:
        listed = [_NOTHING] * rows  # of `Product` in the text
        for place, (row, (history, scale, *rule)) in enumerate(products.items()):
            listed[row] = (history.data_ptr(), scale.data_ptr(), len(history), place, *map(int, rule))
        self._table = torch.tensor(listed, dtype=torch.int64).view(rows, len(_NOTHING)).to(device)
        self._count = len(products)
        self._kernel = FoldAmaxes().ready(device)

    def by_kernel(
        self, amaxes: torch.Tensor, not_finite: torch.Tensor, rows: int, over: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Fold amaxes, count what is not finite and clear them, in one launch.

        Args:
            amaxes: float32 [rows, 3] or longer.
            not_finite: int64, the same: raised by one where an amax is infinite or NaN.
            rows: how many there are now, no fewer than those of products.
            over: what this gave before, to be written again; without it the numbers have memory of their own.

        Returns:
            Of each product three scales and three reciprocals, float32 [products, 6, 4], the first of four each: at
            multiples of 16 bytes.
        """
        numbers = over
        if numbers is None:
            numbers = torch.empty(self._count, 2 * ROLES, APART, dtype=torch.float32, device=amaxes.device)
        if rows:
            self._kernel((self._table, amaxes, amaxes, not_finite, numbers), rows, 1, 1, ())
        return numbers


@dataclass(frozen=True)
class FoldAmaxes(TextKernel[_native.CudaKernel]):
    """The kernel as plans compile theirs."""

    name: ClassVar[str] = "fold_amaxes"
    source: ClassVar[Path] = Path(__file__).with_name("fold_amaxes.cu")

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The native kernel of the table, what was seen, slots, counts, the snapshot."""
        tensors = [("int64", 8), ("float32", 4), ("float32", 4), ("int64", 8), ("float32", 16)]
        return over_rows(self.name, cubin, tensors, 2, 0, _FOLD_THREADS, blocks=_ENDLESS)
