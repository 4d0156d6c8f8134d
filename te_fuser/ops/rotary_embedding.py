"""Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).

At position p, pair i of the features of every query and key head turns by the angle p * base ** (-2 i / rotary_dim):

    (a, b) -> (a cos - b sin, b cos + a sin)

A pair is (x[i], x[i + rotary_dim / 2]) in the style "half" (GPT-NeoX, Llama), (x[2 i], x[2 i + 1]) in the style
"interleaved" (GPT-J, and the paper).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.ops import op_table
from te_fuser.ops.attention.head_parallel import OfPositions
from te_fuser.ops.attention.heads import LAYOUTS, PackedHeads, one_of
from te_fuser.ops.attention.math import raised
from te_fuser.ops.base import OpCall, Spec
from te_fuser.ops.checks import finite_number, whole_number
from te_fuser.ops.sharing import Spans, blocks_of

_CHUNK = 1 << 18  # elements that a CPU turns at a time, so that their float32 copy stays in its cache


def _turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    y = torch.empty_like(x)
    (a, b), (to_a, to_b) = x.chunk(2, -1), y.chunk(2, -1)
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=direction)
    return y


def _turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    """A complex product, in place: one pass instead of four."""
    torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(torch.complex(cos, sin * direction))
    return x


@dataclass(frozen=True)
class RotaryStyle:
    """Pairing of features: `turn` may overwrite x; the others are for the reference."""

    turn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
    apart: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    together: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


STYLES = {
    "half": RotaryStyle(_turn_halves, lambda x: x.chunk(2, -1), lambda a, b: torch.cat((a, b), -1)),
    "interleaved": RotaryStyle(
        _turn_pairs, lambda x: (x[..., 0::2], x[..., 1::2]), lambda a, b: torch.stack((a, b), -1).flatten(-2)
    ),
}


class _TableCache:
    """Function that makes tensors and keeps those that were used last; its last argument is their device.

    A tensor made while a CUDA graph is captured lies in its memory and gets values in replays alone: it is not kept.
    A tensor that a graph was given stays, since the graph reads it in each replay.
    """

    def __init__(self, make: Callable[..., tuple[torch.Tensor, torch.Tensor]], most: int) -> None:
        self._make, self._most = make, most
        self._known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_graphs: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        functools.update_wrapper(self, make)

    def __call__(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._known.pop(given, None) or self._in_graphs.get(given)
        graphed = given[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is None:
            found = self._make(*given)
            if graphed:
                return found
        if graphed:
            self._in_graphs[given] = found
        self._known[given] = found
        while len(self._known) > self._most:
            self._known.pop(next(iter(self._known)), None)
        return found

    def clear(self) -> None:
        """Keep those that graphs read alone."""
        self._known.clear()


def _cached_tables(most: int) -> Callable[[Callable[..., tuple[torch.Tensor, torch.Tensor]]], _TableCache]:
    return functools.partial(_TableCache, most=most)


@_cached_tables(64)
def _table(
    length: int, rotary_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    # A table made in inference mode could not be used where autograd records.
    with torch.inference_mode(False), torch.no_grad():
        frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
        angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


@_cached_tables(256)
def rotation_table(
    spans: Spans, rotary_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, rotary_dim / 2], for `spans`, of float64 angles, kept by length."""
    last = max(first + count for first, count in spans)
    tables = _table(1 << max(last - 1, 0).bit_length(), rotary_dim, base, dtype, device)
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = (blocks_of(table, spans) for table in tables)
    return cos, sin


@op_table.reading.row(lambda op, x: op.packed.reading(x))
class RotaryEmbedding(OfPositions):
    """Rotate the query and key heads of packed queries, keys and values by their positions p; values stay.

    Args:
        head_dim: features of one head; pair i of them, (a, b), becomes (a cos t - b sin t, b cos t + a sin t) with
            t = p * base^(-2 i / rotary_dim).
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; None: as many.
        base: the base of the angles; the slowest pair's wavelength is about 2 pi base positions.
        layout: "sequence_first" [S, B, F] or "batch_first" [B, S, F].
        packing: "interleaved" or "blocked", see `PackedHeads`.
        style: "half": pair i is features i and i + rotary_dim / 2; "interleaved": features 2 i and 2 i + 1.
        rotary_dim: the number of features to rotate, the first ones of each head; None: all.
        position_offset: the position of the first row.

    Attributes:
        context: ranks that cut the sequence, which a list with an attention on such a part says by itself.
    """

    reads = ()

    def __init__(
        self,
        head_dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        base: float = 10000.0,
        layout: str = "sequence_first",
        packing: str = "interleaved",
        style: str = "half",
        rotary_dim: int | None = None,
        position_offset: int = 0,
    ) -> None:
        super().__init__()
        packed = PackedHeads(heads, heads if kv_heads is None else kv_heads, head_dim, layout, packing)
        rotary_dim = head_dim if rotary_dim is None else whole_number("RotaryEmbedding", "rotary_dim", rotary_dim)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim must be even and in [2, head_dim = {head_dim}], got {rotary_dim}: features turn in pairs"
            )
        if finite_number("RotaryEmbedding", "base", base) <= 0.0:
            raise ValueError(f"base must be positive, got {base}")
        if whole_number("RotaryEmbedding", "position_offset", position_offset) < 0:
            raise ValueError(f"position_offset must not be negative, got {position_offset}")
        self.head_dim = head_dim
        self.heads = heads
        self.kv_heads = packed.kv_heads
        self.base = float(base)
        self.layout = layout
        self.packing = packing
        self.style = one_of("style", style, STYLES)
        self.rotary_dim = rotary_dim
        self.position_offset = position_offset

    @property
    def packed(self) -> PackedHeads:
        """Layout of the heads."""
        return PackedHeads(self.heads, self.kv_heads, self.head_dim, self.layout, self.packing)

    @property
    def sequence_dim(self) -> int:
        return LAYOUTS[self.layout][0]

    def spans(self, positions: int) -> Spans:
        """The positions of so many rows: (first, how many) of each block."""
        return tuple([(self.position_offset + first, count) for first, count in self._context.spans(positions)])

    def infer(self, x: Spec) -> Spec:
        """Spec of x, as it is."""
        self.packed.check(type(self).__name__, x)
        return x

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The formula, recorded by autograd."""
        style, wide = STYLES[self.style], self._split(raised(x))
        cos, sin = self._table(wide)
        turning, others = wide[..., : self._turning, :], wide[..., self._turning :, :]
        a, b = style.apart(turning[..., : self.rotary_dim])
        turned = style.together(a * cos - b * sin, b * cos + a * sin)
        whole = torch.cat((torch.cat((turned, turning[..., self.rotary_dim :]), -1), others), -2)
        return whole.reshape(x.shape).to(x.dtype)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """x with queries and keys turned."""
        return self._turned(x, 1)

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        """dy turned back."""
        return self._turned(dy, -1)

    @property
    def _turning(self) -> int:
        """Number of heads of a group that turn: all but the values."""
        return self.heads // self.kv_heads + 1 if self.packing == "interleaved" else self.heads + self.kv_heads

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[.., .., groups, heads of a group, head_dim], the heads of values last in their group."""
        groups = self.kv_heads if self.packing == "interleaved" else 1
        return x.view(*x.shape[:2], groups, x.shape[-1] // (groups * self.head_dim), self.head_dim)

    def _table(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, broadcastable to pairs of heads as `_split` gives them."""
        sequence, _ = LAYOUTS[self.layout]
        length, wide = heads.shape[sequence], torch.float64 if heads.dtype == torch.float64 else torch.float32
        tables = rotation_table(self.spans(length), self.rotary_dim, self.base, wide, heads.device)
        shape = [1, 1, 1, 1, self.rotary_dim // 2]
        shape[sequence] = length
        cos, sin = (table.view(shape) for table in tables)
        return cos, sin

    def _turned(self, x: torch.Tensor, direction: int) -> torch.Tensor:
        y = x.new_empty(x.shape)
        source, target = self._split(x), self._split(y)
        target[..., self._turning :, :].copy_(source[..., self._turning :, :])
        source, target = source[..., : self._turning, :], target[..., : self._turning, :]
        if self.rotary_dim < self.head_dim:
            target[..., self.rotary_dim :].copy_(source[..., self.rotary_dim :])
            source, target = source[..., : self.rotary_dim], target[..., : self.rotary_dim]
        cos, sin = self._table(source)
        sequence, _ = LAYOUTS[self.layout]
        length = source.shape[sequence]
        at_once = max(1, length if x.is_cuda else _CHUNK * length // max(source.numel(), 1))
        for first in range(0, length, at_once):
            span = (sequence, first, min(at_once, length - first))
            wide = source.narrow(*span).to(cos.dtype, copy=True, memory_format=torch.contiguous_format)
            turned = STYLES[self.style].turn(wide, cos.narrow(*span), sin.narrow(*span), direction)
            target.narrow(*span).copy_(turned)
        return y
