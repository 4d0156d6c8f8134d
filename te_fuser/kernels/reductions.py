"""Reductions of many tensors by one launch: amaxes folded into histories and scales, partial sums of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from te_fuser import _native
from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.dtypes import text_of

ROLES = 3
APART = 4  # floats from one number of a snapshot to the next: cuBLAS reads scales at multiples of 16 bytes
_THREADS = 192
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each does one product and ends
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
    """Folds amaxes of always the same products, whose histories and scales stay where they are.

    Args:
        products: by their rows among the amaxes; other rows are counted and cleared alone.
        rows: how many there may be.

    Raises:
        ValueError: for tensors of other shapes or dtypes, and for those that do not lie side by side.
        RuntimeError: while a stream is captured, as the device is told where they lie.
    """

    def __init__(self, products: Mapping[int, Folded], rows: int, device: torch.device) -> None:
        for product in products.values():
            _check(product, device)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "which amaxes are folded is told the device outside of a capture: enter a region once more before the "
                "capture, after the last call that made or moved scales"
            )
        listed = [_NOTHING] * rows  # of `Product` in the text
        for place, (row, (history, scale, *rule)) in enumerate(products.items()):
            listed[row] = (history.data_ptr(), scale.data_ptr(), len(history), place, *map(int, rule))
        self._table = torch.tensor(listed, dtype=torch.int64).view(rows, len(_NOTHING)).to(device)
        self._count = len(products)
        self._kernel = FoldAmaxes().ready(device)

    def by_kernel(
        self,
        seen: torch.Tensor,
        amaxes: torch.Tensor,
        not_finite: torch.Tensor,
        rows: int,
        over: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fold what was seen, count what is not finite and clear the amaxes, in one launch.

        Args:
            seen: float32 [rows, 3] or longer; it may be `amaxes`.
            rows: how many there are now, no fewer than those of products.
            amaxes: float32, the same.
            not_finite: int64, the same: raised by one where an amax is infinite or NaN.
            over: what this gave before, to be written again; without it the numbers have memory of their own.

        Returns:
            Of each product three scales and three reciprocals, float32 [products, 6, 4], the first of four each: at
            multiples of 16 bytes.
        """
        numbers = over
        if numbers is None:
            numbers = torch.empty(self._count, 2 * ROLES, APART, dtype=torch.float32, device=amaxes.device)
        if rows:
            self._kernel((self._table, seen, amaxes, not_finite, numbers), rows, 1, 1, ())
        return numbers


def _check(product: Folded, device: torch.device) -> None:
    for name, t, shape in (("history", product.history, "[length, 3]"), ("scale", product.scale, "[3]")):
        fits = t.dim() == shape.count(",") + 1 and t.shape[-1] == ROLES and t.numel()
        if t.dtype != torch.float32 or not fits or not t.is_contiguous():
            got = f"{text_of(t.dtype)} {list(t.shape)}"
            raise ValueError(f"a {name} that is folded is float32 {shape}, side by side, got {got}")
        if t.device != device:
            raise ValueError(f"a {name} is on {t.device}, its amaxes on {device}")


@dataclass(frozen=True)
class FoldAmaxes(TextKernel[_native.CudaKernel]):
    """The kernel as plans compile theirs."""

    name: ClassVar[str] = "fold_amaxes"

    def text(self) -> str:
        """The CUDA text."""
        return Path(__file__).with_name("fold_amaxes.cu").read_text()

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it: the table, what was seen, slots, counts, the snapshot."""
        tensors = [("int64", 8), ("float32", 4), ("float32", 4), ("int64", 8), ("float32", 16)]
        return over_rows(self.name, cubin, tensors, 2, 0, _THREADS, blocks=_ENDLESS)


@dataclass(frozen=True)
class ColumnSumsKernel(TextKernel[_native.ColumnSums]):
    """The kernel as plans compile it beside their generated ones."""

    name: ClassVar[str] = "column_sums"

    def text(self) -> str:
        """The CUDA text."""
        return Path(__file__).with_name("column_sums.cu").read_text()

    def native(self, cubin: bytes) -> _native.ColumnSums:
        """The kernel as the native runtime takes it."""
        return _native.ColumnSums(cubin)
