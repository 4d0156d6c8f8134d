"""How threads share a head whose features turn in pairs: vectors of neighbours, and where partners are."""

from __future__ import annotations

import torch

WARP = 32
_ACCESS = 16  # bytes: the widest access
_LINE = 128  # bytes of a line of the cache


def vector_of(dtype: torch.dtype, head_dim: int, rotary_dim: int, style: str) -> int:
    """Neighbours that a thread takes at once: at most 16 bytes, within a head, partners in one place."""
    wanted = _ACCESS // dtype.itemsize
    unit = rotary_dim // 2 if style == "half" else rotary_dim
    while head_dim % wanted or (unit and unit % wanted):
        wanted //= 2
    return wanted


def partner_of(dtype: torch.dtype, head_dim: int, rotary_dim: int, style: str) -> str:
    """Where a thread finds the partners of its vector: "kInside" it, in its "kSecond" vector, or in another "kLane".

    Half of what turns should be a whole line of the cache where it is a vector of its own.
    """
    vector = vector_of(dtype, head_dim, rotary_dim, style)
    if not rotary_dim or (style == "interleaved" and vector > 1):
        return "kInside"
    half, whole = rotary_dim // 2, head_dim // vector
    in_a_warp = _is_power_of_two(whole) and whole <= WARP and _is_power_of_two(half // vector)
    narrow = half * dtype.itemsize < _LINE and vector * dtype.itemsize == _ACCESS
    return "kLane" if style == "half" and narrow and in_a_warp else "kSecond"


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
