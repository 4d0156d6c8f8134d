"""Reductions of many tensors by one launch: amaxes folded into histories and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, over_rows

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
        return over_rows(self.name, cubin, tensors, 2, 0, _THREADS, blocks=_ENDLESS)
