"""Weights in 8 bits, by rows and turned, each by its scale: those of a model in one launch, or one alone.

Products of 8 bits read a weight by rows in forward and turned for the gradient of their input; beside it the largest
magnitude is noted, which later scales follow from. The kernels' texts are `quantize_weights.cu` and
`quantize_weight.cu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.cuda_text import CTYPES
from te_fuser.codegen.written import TextKernel
from te_fuser.dtypes import text_of
from te_fuser.formula.float8 import rounded
from te_fuser.kernels import transposed8

if TYPE_CHECKING:
    from te_fuser import _native

STEP = 16  # rows and columns of a weight come in multiples of so many
DTYPE = torch.float8_e4m3fn
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SOURCE = Path(__file__).with_suffix(".cu")
_SIDE, _THREADS = 128, 256  # of a tile; of a block
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each does one tile and ends
Quantized = tuple[torch.Tensor, torch.Tensor]  # [out, in] and [in, out], float8_e4m3fn


class WeightQuantizer:
    """Quantizes always the same number of weights, which have the same places among scales and amaxes.

    Where weights lie is kept for the next call; a call that finds one elsewhere tells the device anew.

    Args:
        places: which of the scales, and of the amaxes, is that of each weight.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.places = tuple(places)
        self._key: tuple[object, ...] | None = None
        self._table: torch.Tensor | None = None
        self._tiles = 0

    def __call__(
        self, weights: Sequence[torch.Tensor], scales: torch.Tensor, amaxes: torch.Tensor | None = None
    ) -> list[Quantized]:
        """Each weight times its scale in float8_e4m3fn, by rows and turned: the bytes of `quantization.quantize`.

        Args:
            weights: [out, in], float32, bfloat16 or float16, on one device; out and in are multiples of 16.
            scales: float32 [S] on that device.
            amaxes: float32 [S]: raised to the largest magnitude of each weight; NaN is the largest. None: left out.

        Raises:
            ValueError, TypeError: for tensors that are not so.
            RuntimeError: while a stream is captured, for weights that lie elsewhere than in the last call.
        """
        self._check(weights, scales, amaxes)
        if not weights:
            return []
        if scales.device.type != "cuda":
            return by_torch(weights, [scales[k] for k in self.places], _slots(amaxes, self.places))
        return self.by_kernel(weights, scales, amaxes)

    def by_kernel(
        self, weights: Sequence[torch.Tensor], scales: torch.Tensor, amaxes: torch.Tensor | None
    ) -> list[Quantized]:
        """The same in one launch, on a GPU; plans compile the kernel."""
        read = [_readable(w.detach()) for w in weights]
        table = self._told(read)
        sizes = [w.numel() for w in read]
        rows = torch.empty(sum(sizes), dtype=DTYPE, device=scales.device)
        turned = torch.empty_like(rows)
        if self._tiles:
            tensors = (table, scales, rows, turned, scales if amaxes is None else amaxes)
            QuantizeWeights().ready(scales.device)(tensors, self._tiles, 1, 1, (len(read), int(amaxes is not None)))
        pieces = (t.split(sizes) for t in (rows, turned))
        return [(r.view(w.shape), t.view(w.shape[::-1])) for w, r, t in zip(read, *pieces, strict=True)]

    def _check(self, weights: Sequence[torch.Tensor], scales: torch.Tensor, amaxes: torch.Tensor | None) -> None:
        if len(weights) != len(self.places):
            raise ValueError(f"there are {len(self.places)} places of scales for {len(weights)} weights")
        for name, vector in (("scales", scales), ("amaxes", amaxes)):
            if vector is None:
                continue
            if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
                got = f"{text_of(vector.dtype)} {list(vector.shape)}"
                raise ValueError(f"{name} are float32 [S], side by side, got {got}")
            if not all(0 <= place < len(vector) for place in self.places):
                raise ValueError(f"there are {len(vector)} {name}, and places up to {max(self.places)}")
        for w in weights:
            _check_weight(w, scales.device)

    def _told(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The table on the device: what `Weight` in the text is, a row for each."""
        key = tuple((w.data_ptr(), w.shape, w.dtype) for w in weights)
        if key == self._key and self._table is not None:
            return self._table
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "weights lie elsewhere than in the last call, and where is told the device outside of a capture: run "
                "the model once before capturing, with the weights that it is captured with"
            )
        listed, tiles, offset = [], 0, 0
        for w, place in zip(weights, self.places, strict=True):
            rows, columns = w.shape
            listed.append((w.data_ptr(), tiles, offset, rows, columns, KINDS[w.dtype], place, place))
            tiles += _tiles(rows, columns)
            offset += w.numel()
        table = torch.tensor(listed, dtype=torch.int64).to(weights[0].device)
        self._key, self._table, self._tiles = key, table, tiles
        return table


def by_torch(
    weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor | None]
) -> list[Quantized]:
    """The same by PyTorch: each weight by its scale, float32 [], raising its amax, float32 [], if it has one."""
    found = []
    for w, scale, amax in zip(weights, scales, amaxes, strict=True):
        wide = w.detach().float()
        data = rounded(wide * scale, DTYPE)
        if amax is not None and wide.numel():
            torch.maximum(amax, wide.abs().amax(), out=amax)
        found.append((data, transposed8.by_torch(data)))
    return found


def _slots(amaxes: torch.Tensor | None, places: Sequence[int]) -> list[torch.Tensor | None]:
    return [None if amaxes is None else amaxes[place] for place in places]


def _check_weight(w: torch.Tensor, device: torch.device) -> None:
    if w.dtype not in KINDS:
        taken = ", ".join(map(text_of, KINDS))
        raise TypeError(f"weights are quantized from {taken}, got {text_of(w.dtype)}")
    if w.dim() != 2 or w.shape[0] % STEP or w.shape[1] % STEP or max(w.shape) >= 2**31:
        raise ValueError(f"weights are [out, in] in multiples of {STEP}, got {list(w.shape)}")
    if w.device != device:
        raise ValueError(f"a weight is on {w.device}, its scale on {device}")


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // _SIDE) * -(-columns // _SIDE)


def _readable(w: torch.Tensor) -> torch.Tensor:
    """w, or a copy that the kernel can read."""
    if w.is_contiguous() and w.data_ptr() % STEP == 0:
        return w
    return w.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------ one weight


def quantize_weight(
    w: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None = None, *, wanted: str = "both"
) -> Quantized:
    """One weight times its scale in float8_e4m3fn, by rows and turned.

    Args:
        w: as `WeightQuantizer` takes them.
        scale: float32 [] or [1] on its device.
        amax: the same: raised to the largest magnitude.
        wanted: "rows", "turned" or "both"; the other one then holds anything.

    Raises:
        ValueError, TypeError: for tensors that are not so, and for another word.
    """
    _check_weight(w, scale.device)
    for name, number in (("scale", scale), ("amax", amax)):
        if number is not None and (number.dtype != torch.float32 or number.numel() != 1):
            raise ValueError(f"{name} is one number in float32, got {text_of(number.dtype)} {list(number.shape)}")
    if w.device.type != "cuda":
        return by_torch([w], [scale], [amax])[0]
    return quantize_weight_by_kernel(w, scale, amax, wanted)


def quantize_weight_by_kernel(
    w: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, wanted: str
) -> Quantized:
    """The same in one launch, on a GPU; plans compile the kernel."""
    kernel = QuantizeWeight(w.dtype, wanted, amax is not None)
    read = _readable(w.detach())
    rows = read.new_empty(read.shape if wanted != "turned" else 0, dtype=DTYPE)
    turned = read.new_empty(read.shape[::-1] if wanted != "rows" else 0, dtype=DTYPE)
    tiles = _tiles(*read.shape)
    if tiles:
        kernel.ready(w.device)(
            (read, scale, rows, turned, scale if amax is None else amax), tiles, 1, 1, tuple(read.shape)
        )
    return rows, turned


# -------------------------------------------------------------------------------------------------- the kernels


@dataclass(frozen=True)
class QuantizeWeights(TextKernel["_native.CudaKernel"]):
    """The kernel for many weights as plans compile it beside their generated ones."""

    name: ClassVar[str] = "quantize_weights"

    def text(self) -> str:
        """The CUDA text."""
        return _SOURCE.read_text()

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        return _native_kernel(self.name, ("int64", 8), cubin)


@dataclass(frozen=True)
class QuantizeWeight(TextKernel["_native.CudaKernel"]):
    """The kernel for one weight.

    Attributes:
        dtype: the weight's.
        wanted: "rows", "turned" or "both".
        records: whether an amax is raised.
    """

    dtype: torch.dtype
    wanted: str = "both"
    records: bool = False
    name: ClassVar[str] = "quantize_weight"

    def __post_init__(self) -> None:
        if self.wanted not in ("rows", "turned", "both"):
            raise ValueError(f'of a weight "rows", "turned" or "both" are wanted, got {self.wanted!r}')

    def text(self) -> str:
        """The CUDA text: the constants, and `quantize_weight.cu`."""
        flags = {"kByRows": self.wanted != "turned", "kTurned": self.wanted != "rows", "kAmax": self.records}
        lines = ['#include "te_cuda_quantize.cuh"', "", f"using Element = {CTYPES[text_of(self.dtype)]};"]
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
        return "\n".join([*lines, "", _SOURCE.with_name("quantize_weight.cu").read_text()])

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        return _native_kernel(self.name, (text_of(self.dtype), STEP), cubin)


def _native_kernel(name: str, first: tuple[str, int], cubin: bytes) -> _native.CudaKernel:
    """Of a dtype and an alignment of the first tensor; the others, and the integers, are alike."""
    from te_fuser import _native

    dtypes, alignments = (
        (first[0], "float32", "float8_e4m3fn", "float8_e4m3fn", "float32"),
        (first[1], 4, STEP, STEP, 4),
    )
    sources = [("tensor", k) for k in range(5)] + [("rows", 0), ("groups", 0), ("integer", 0), ("integer", 1)]
    launch = (name, _THREADS, 0, (1, 1, _ENDLESS, False, False), tuple(sources))
    return _native.CudaKernel(name, cubin, dtypes, alignments, 2, (launch,), (), 0, 2, waits=True)
