"""Cases for blanked rows, with and without a GPU: sides, and what becomes of each row, in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from te_fuser.kernels.attention.lengths import Blanks, Side


def numbers(*values: int) -> torch.Tensor:
    """As kernels read them."""
    return torch.tensor(values, dtype=torch.int32)


LENGTHS, OTHERS = numbers(0, 7, 3), numbers(5, 5, 0)
OFFSETS, KEYS = numbers(0, 4, 4, 9), numbers(0, 2, 7, 12)
CASES: Mapping[str, Blanks] = {
    "lengths": Blanks(Side(7, lengths=LENGTHS)),
    "lengths, sequence first": Blanks(Side(7, lengths=LENGTHS), sequence_first=True),
    "all of them": Blanks(Side(7, lengths=numbers(7, 7))),
    "lengths of both": Blanks(Side(7, lengths=LENGTHS), Side(5, lengths=OTHERS)),
    "lengths of the others": Blanks(Side(7), Side(5, lengths=OTHERS), sequence_first=True),
    "too long": Blanks(Side(7, lengths=numbers(8, 7, -1))),
    "others too long": Blanks(Side(7, lengths=LENGTHS), Side(5, lengths=numbers(6, 5, 5))),
    "offsets": Blanks(Side(11, OFFSETS)),
    "offsets and lengths": Blanks(Side(11, OFFSETS, numbers(3, 0, 4))),
    "offsets of both": Blanks(Side(11, OFFSETS), Side(13, KEYS)),
    "longer than the longest": Blanks(Side(11, OFFSETS), longest=4),
    "others longer than the longest": Blanks(Side(11, OFFSETS), Side(13, KEYS), longest=4),
    "longer than its room": Blanks(Side(11, OFFSETS, numbers(4, 1, 5))),
    "beyond the tokens": Blanks(Side(8, OFFSETS)),
    "before the tokens": Blanks(Side(11, numbers(2, 4, 9))),
    "many": Blanks(Side(300, numbers(*range(0, 280, 7)), numbers(*(n % 8 for n in range(39))))),
    "no sequence": Blanks(Side(3, numbers(0))),
}


def wrong(side: Side, n: int, longest: int | None) -> bool:
    """True if sequence n cannot be as the side says."""
    begin, end = (0, side.positions) if side.offsets is None else side.offsets[n : n + 2].tolist()
    length = end - begin if side.lengths is None else int(side.lengths[n])
    bounded = longest is not None and side.offsets is not None
    outside = begin < 0 or end > side.positions or (n == 0 and begin != 0) or (bounded and end - begin > longest)
    return outside or not 0 <= length <= end - begin


def seen(side: Side, n: int) -> int:
    """Number of rows of sequence n."""
    if side.lengths is not None:
        return int(side.lengths[n])
    return side.positions if side.offsets is None else int(side.offsets[n + 1] - side.offsets[n])


def blanked(x: torch.Tensor, blanks: Blanks) -> torch.Tensor:
    """x as it should be."""
    own, other, made = blanks.own, blanks.other or Side(1), x.clone()
    for index in itertools.product(*map(range, x.shape[:-1])):
        if own.offsets is None:
            n, at = index[::-1] if blanks.sequence_first else index
        else:
            n = sum(int(end) <= index[0] for end in own.offsets[1:])
            if n == len(own.offsets) - 1:
                made[index] = 0.0
                continue
            at = index[0] - int(own.offsets[n])
        if wrong(own, n, blanks.longest) or wrong(other, n, blanks.longest):
            made[index] = torch.nan
        elif at >= seen(own, n) or seen(other, n) == 0:
            made[index] = 0.0
    return made


def rows_for(blanks: Blanks, dtype: torch.dtype, features: int = 24) -> torch.Tensor:
    """Rows of a case."""
    positions, counts = blanks.own.positions, blanks.counts
    assert counts is not None
    shape = (positions,) if blanks.own.offsets is not None else (len(counts), positions)
    shape = shape[::-1] if blanks.sequence_first else shape
    return torch.randn(*shape, features, generator=torch.Generator().manual_seed(3)).to(dtype)
