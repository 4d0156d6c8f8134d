"""Packed queries, keys and values in one pass: gathered, turned by their position, stored, their columns added up.

    packed = turn(x + bias)                       before attention
    dqkv, dbias = turn_back(dq | dk | dv), sums   after it, from what its kernels return apart

The result may be in 8 bits (`Scaled`), as products of 8 bits take the gradient of what they gave.

The kernel's text is `packed_heads.cu`; NVRTC compiles it for the numbers of heads at hand.

Legend: B samples, S positions, G key/value heads, R query heads of each, D features of a head,
F = (G * R + 2 * G) * D packed features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import constants_of
from te_fuser.codegen.cuda_text import CTYPES, FINISH_THREADS
from te_fuser.dtypes import name_of
from te_fuser.kernels.heads_pass import MOST_ROWS, HeadsPass, Scaled, as_one, reach, readable
from te_fuser.ops.attention.heads import LAYOUTS, PackedHeads
from te_fuser.ops.rotary_embedding import rotation_table
from te_fuser.ops.sharing import Context, Spans

_FORMS_KEPT = 256
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotation:
    """Rotation of queries and keys; its fields are arguments of `ops.RotaryEmbedding`."""

    rotary_dim: int
    base: float
    style: str
    position_offset: int = 0
    context: Context = Context()

    def spans(self, positions: int) -> Spans:
        """The positions of so many rows: (first, how many) of each block."""
        return tuple([(self.position_offset + first, count) for first, count in self.context.spans(positions)])


@dataclass(frozen=True)
class PackedPass(HeadsPass):
    """Case that the text of the pass is written for.

    Attributes:
        parts: whether queries, keys and values come from three tensors.
        bias, sums: dtypes of the bias that is added and of the sums over rows, if any.
        stored: the dtype of 8 bits that the result is scaled to, if it is.
    """

    heads: PackedHeads
    parts: bool = False
    rotary_dim: int = 0
    style: str = "half"
    back: bool = False
    bias: torch.dtype | None = None
    sums: torch.dtype | None = None
    stored: torch.dtype | None = None
    name: ClassVar[str] = "packed_heads"
    source: ClassVar[Path] = Path(__file__).with_suffix(".cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    @classmethod
    def of(
        cls,
        heads: PackedHeads,
        dtype: torch.dtype,
        rotation: Rotation | None = None,
        *,
        parts: bool = False,
        back: bool = False,
        bias: torch.dtype | None = None,
        sums: torch.dtype | None = None,
        stored: torch.dtype | None = None,
    ) -> PackedPass:
        """Pass of `turn`, or of `Packing` (parts, back); layouts and bases share a text."""
        turning = (rotation.rotary_dim, rotation.style) if rotation else (0, "half")
        return cls(replace(heads, layout="sequence_first"), dtype, parts, *turning, back, bias, sums, stored)

    @property
    def lanes(self) -> int:
        return (self.heads.heads + 2 * self.heads.kv_heads) * self.units

    @property
    def rows_at_once(self) -> int:
        """Rows that a thread loads before it uses the first, as measured on an H200."""
        return 8 if self.rotary_dim and self.partner != "kSecond" else 4

    def constants(self) -> list[str]:
        dtypes = {"Element": self.dtype, "BiasElement": self.bias, "SumElement": self.sums, "OutElement": self.stored}
        types = {name: CTYPES[name_of(dtype or self.dtype)] for name, dtype in dtypes.items()}
        heads = self.heads
        integers = {
            "kQueries": heads.heads, "kGroups": heads.kv_heads, "kHeadDim": heads.head_dim, "kRotary": self.rotary_dim,
            "kVector": self.vector, "kThreads": self.threads, "kBlocks": self.per_multiprocessor, "kTiles": self.tiles,
            "kRows": self.rows_at_once, "kDistance": self.rotary_dim // 2 if self.style == "half" else 1,
        }  # fmt: skip
        flags = {
            "kBlocked": heads.packing == "blocked", "kParts": self.parts, "kBias": self.bias is not None,
            "kSums": self.sums is not None, "kScaled": self.stored is not None,
        }  # fmt: skip
        lines = ["enum { kInside, kSecond, kLane };", f"constexpr int kPartner = {self.partner};"]
        lines += constants_of(types, integers, flags)
        return [*lines, f"constexpr float kDirection = {-1.0 if self.back else 1.0};"]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        element, wide = name_of(self.dtype), self.vector * self.dtype.itemsize
        read = [(element, wide)] * (3 if self.parts else 1)
        read += [("float32", 4)] * 2 if self.rotary_dim else []
        read += [(name_of(self.bias), self.bias.itemsize)] if self.bias else []
        read += [("float32", 4)] * 2 if self.stored else []
        stored = self.stored or self.dtype
        written = [(name_of(stored), self.vector * stored.itemsize)]
        written += [(name_of(self.sums), self.sums.itemsize)] if self.sums else []
        dtypes, alignments = zip(*read, *written, strict=True)
        return _native.CudaKernel(
            self.name,
            cubin,
            dtypes,
            alignments,
            len(read),
            _launches(self, len(read)),
            (self.heads.features,) if self.sums else (),
            0,
            2 + (4 + 3 + 3 if self.parts else 4),
            waits=True,
        )


# -------------------------------------------------------------------------------------------------- calling it


def turn(
    heads: PackedHeads,
    rotation: Rotation,
    x: torch.Tensor,
    *,
    back: bool = False,
    bias: torch.Tensor | None = None,
    sums: torch.dtype | None = None,
    scaled: Scaled | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn queries and keys of packed x + bias, or turn them back: the result, contiguous, and the sums [F] or None.

    Args:
        sums: the dtype of the sums over rows that are returned too, as the gradient of a bias is.
        scaled: how the result is stored in 8 bits; None: as x is.
    """
    biased, stored = None if bias is None else bias.dtype, None if scaled is None else scaled.dtype
    ready = _ready(heads, x.dtype, False, rotation, back, biased, sums, stored, x.device)
    x = readable(x, ready.vector)
    sequence, batch = LAYOUTS[heads.layout]
    strides = x.stride(sequence), x.stride(batch), 0, 0
    rows = Rows.of(heads, [x], strides, ready.vector, samples=x.shape[batch], positions=x.shape[sequence])
    return _run(ready, rows, [x], bias, scaled)


class Packing:
    """Packs the gradients of q, k and v, turned back if at all."""

    def __init__(self, heads: PackedHeads, rotation: Rotation | None = None) -> None:
        self._heads, self._rotation = heads, rotation
        self._known: dict[Hashable, tuple[_Ready, Rows]] = {}

    def __call__(
        self,
        parts: Parts,
        grouped: Callable[..., Parts] | None = None,
        *,
        sums: torch.dtype | None = None,
        scaled: Scaled | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed gradient in the layout of the heads, and the sums [F] or None.

        Args:
            parts: queries [B, G, R, S, D], keys and values [B, G, S, D], on a CUDA device, of one dtype, with any
                strides.
            grouped: makes such parts of those that are given, by views alone.
            sums, scaled: as `turn` takes them.
        """
        q, k, v = parts
        stored = None if scaled is None else scaled.dtype
        form = q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, sums, stored
        known = self._known.get(form)
        if known is not None:
            return _run(*known, [q, k, v], None, scaled)
        q, k, v = parts if grouped is None else grouped(*parts)
        ready = _ready(self._heads, q.dtype, True, self._rotation, True, None, sums, stored, q.device)
        sources = [readable(part, ready.vector) for part in (q, k, v)]
        rows = rows_of_parts(self._heads, sources, ready.vector)
        if all(source is part for source, part in zip(sources, (q, k, v), strict=True)):
            if len(self._known) >= _FORMS_KEPT:
                self._known.clear()
            self._known[form] = ready, rows
        return _run(ready, rows, sources, None, scaled)


def rows_of_parts(heads: PackedHeads, parts: Sequence[torch.Tensor], vector: int) -> Rows:
    q, k, v = parts
    (q_sample, q_group, q_head, q_position, _), k_steps, v_steps = q.stride(), k.stride(), v.stride()
    strides = q_position, q_sample, q_group, q_head, *_positions_first(k_steps), *_positions_first(v_steps)
    return Rows.of(heads, parts, strides, vector, samples=q.shape[0], positions=q.shape[3])


def _positions_first(steps: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides of positions, samples and groups of a tensor [B, G, S, D]."""
    return steps[2], steps[0], steps[1]


@dataclass(frozen=True)
class Rows:
    """Sizes and strides of a launch's tensors, as the kernel takes them.

    Attributes:
        reaches: elements from the first to the last of each source; 0: it is contiguous.
        steps: the integers that the kernel takes.
    """

    out: tuple[int, int, int]
    count: int
    samples: int
    positions: int
    reaches: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(
        cls,
        heads: PackedHeads,
        sources: Iterable[torch.Tensor],
        strides: tuple[int, ...],
        vector: int,
        *,
        samples: int,
        positions: int,
    ) -> Rows:
        """Build for a result in the layout of `heads`."""
        if samples * positions > MOST_ROWS:
            raise ValueError(
                f"{samples} samples of {positions} positions are more than {MOST_ROWS} rows: split the batch"
            )
        out = (*heads.leading(samples, positions), heads.features)
        ahead = out[1] * heads.features, heads.features
        sequence, batch = LAYOUTS[heads.layout]
        steps = tuple(step // vector for step in (ahead[sequence], ahead[batch], *strides))
        return cls(out, samples * positions, samples, positions, tuple(map(reach, sources)), steps)


def _run(
    ready: _Ready,
    rows: Rows,
    sources: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scaled: Scaled | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate, and launch on tensors that can be read where they lie."""
    first = sources[0]
    out = first.new_empty(rows.out, dtype=None if scaled is None else scaled.dtype)
    sums = None if ready.sums is None else first.new_empty(rows.out[2], dtype=ready.sums)
    if not rows.count:
        return out, None if sums is None else sums.zero_()
    # The native runtime takes contiguous tensors alone.
    tensors = [as_one(x, n) for x, n in zip(sources, rows.reaches, strict=True)]
    if ready.rotation is not None:
        turned = ready.rotation
        spans = turned.spans(rows.positions)
        tensors += rotation_table(spans, turned.rotary_dim, turned.base, torch.float32, first.device)
    if bias is not None:
        tensors.append(bias.contiguous())
    if scaled is not None:
        tensors += [scaled.scale, scaled.amax]
    tensors += [out] if sums is None else [out, sums]
    ready.kernel(tuple(tensors), rows.count, 1, rows.samples, rows.steps)
    return out, sums


# ------------------------------------------------------------------------------------------------- making it


@dataclass(frozen=True)
class _Ready:
    """Parts of a call beside its tensors."""

    kernel: _native.CudaKernel
    vector: int
    rotation: Rotation | None
    sums: torch.dtype | None


@functools.cache
def _ready(
    heads: PackedHeads,
    dtype: torch.dtype,
    parts: bool,
    rotation: Rotation | None,
    back: bool,
    bias: torch.dtype | None,
    sums: torch.dtype | None,
    stored: torch.dtype | None,
    device: torch.device,
) -> _Ready:
    p = PackedPass.of(heads, dtype, rotation, parts=parts, back=back, bias=bias, sums=sums, stored=stored)
    return _Ready(p.ready(device), p.vector, rotation, sums)


def _launches(p: PackedPass, out: int) -> tuple[_native.CudaLaunch, ...]:
    """Launches, by each argument's source; any address stands for an absent one."""
    nothing = ("tensor", 0)
    sources = [("tensor", k) for k in ((0, 1, 2) if p.parts else (0, 0, 0))]
    after = 3 if p.parts else 1
    angles = [("tensor", after), ("tensor", after + 1)] if p.rotary_dim else [nothing, nothing]
    scaled = [("tensor", out - 2), ("tensor", out - 1)] if p.stored else [nothing, nothing]
    bias = ("tensor", out - 1 - (2 if p.stored else 0)) if p.bias else nothing
    sums = [("tensor", out + 1), ("partial", 0)] if p.sums else [nothing, nothing]
    counts = [("rows", 0), ("batch_size", 0), ("groups", 0)]
    steps = [("integer", k) for k in range(2 + (10 if p.parts else 4))] + ([] if p.parts else [("batch_size", 0)] * 6)
    grid = (p.tiles, p.rows_at_once, p.per_multiprocessor, False, p.sums is not None)
    arguments = (*sources, *angles, bias, *scaled, ("tensor", out), *sums, *counts, *steps)
    launches: list[_native.CudaLaunch] = [("packed_heads", p.threads, 0, grid, arguments)]
    if p.sums:
        finish = (("partial", 0), ("tensor", out + 1), ("groups", 0))
        launches.append(("packed_heads_finish", FINISH_THREADS, 0, (-(-p.heads.features // 32), 0), finish))
    return tuple(launches)
