"""Query and key heads normalized and turned by angles of the call, in one pass each way; values are copied.

    y = turn(norm(x))                                  or norm(turn(x)), or one of them alone
    dx, dweight, dbias, column sums of dx              of dy, and of x where there is a norm

The kernel's text is `qk_norm_rope.cu`; NVRTC compiles it for the heads at hand.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import constants_of
from te_fuser.codegen.cuda_text import CTYPES, FINISH_THREADS
from te_fuser.dtypes import name_of, text_of
from te_fuser.kernels import heads_pass
from te_fuser.kernels.heads_pass import MOST_ROWS, WARP, HeadsPass, Scaled, as_one, reach, readable
from te_fuser.ops.attention.heads import LAYOUTS

_RESIDENT_READING = (
    384  # threads of a multiprocessor where backward reads the input too: what a norm needs stays in registers
)
_IN_FLIGHT = 128  # bytes that a thread loads before it uses the first
_STAGED = 24 * 1024  # bytes of angles in shared memory, at most
_FORMS_KEPT = 256
MOST_FEATURES = 512  # of a head: what a thread holds of it stays in registers
WEIGHTS = ("weight", "key_weight", "bias", "key_bias")
WHOLE = {torch.int32: "int", torch.int64: "long long"}
_TABLES = {"angles": "kAngles", "pair": "kPair", "cos_sin": "kCosSin"}
_NORMS = {"RMSNorm": "kRms", "LayerNorm": "kLayer", "L2Normalization": "kL2"}
_INTEGERS = 14
_ORDERS = {**LAYOUTS, "tokens": (0, 1)}  # which dimensions are positions and samples


@dataclass(frozen=True)
class Groups:
    """Layout of heads in the features: groups, in each its queries, keys and others."""

    groups: int
    queries: int
    keys: int
    others: int
    head_dim: int

    @classmethod
    def of(cls, heads: int, kv_heads: int | None, head_dim: int, packing: str) -> Groups:
        """Build for heads alone (kv_heads=None), for keys and values alone (heads=0), or for all, packed."""
        groups = (kv_heads or 1) if packing == "interleaved" else 1
        keys = (kv_heads or 0) // groups
        return cls(groups, heads // groups, keys, keys, head_dim)

    @property
    def heads(self) -> int:
        """All of them."""
        return self.groups * (self.queries + self.keys + self.others)

    @property
    def features(self) -> int:
        """Number of features of all heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Turning:
    """Rotation of heads; see `ops.RotaryByAngles`.

    Attributes:
        rotary_dim: features that turn.
        tables: "angles" (of all that turns), "pair" (of queries, of keys) or "cos_sin"; `dtype` is theirs.
        starts, offsets: dtypes of them, where the call gives them; if both, the same.
        padded: whether rows at positions without angles are padding, and take the nearest; else they are NaN.
    """

    rotary_dim: int
    style: str
    tables: str
    queries: bool
    keys: bool
    dtype: torch.dtype
    starts: torch.dtype | None
    offsets: torch.dtype | None
    padded: bool


@dataclass(frozen=True)
class Norming:
    """Normalization of heads; see `ops.HeadNorm`.

    Attributes:
        norm: "RMSNorm", "LayerNorm" or "L2Normalization".
        centered: whether weights are what is added to 1.
        last: whether it comes behind the rotation.
        dtype: of the parameters; None: there are none.
    """

    norm: str
    centered: bool = False
    last: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TurnedPass(HeadsPass):
    """Case that the text of the pass is written for.

    Attributes:
        columns: the dtype of the sums over rows that backward gives, if any.
        gradients: of which of `WEIGHTS` backward gives the gradients.
        stored: the dtype of 8 bits that the result is scaled to, if it is.
    """

    heads: Groups
    turning: Turning | None = None
    norming: Norming | None = None
    back: bool = False
    columns: torch.dtype | None = None
    gradients: tuple[str, ...] = ()
    stored: torch.dtype | None = None
    name: ClassVar[str] = "turned_heads"
    source: ClassVar[Path] = Path(__file__).with_suffix(".cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    # ------------------------------------------------------------------------------- who does what

    @property
    def rotary_dim(self) -> int:
        return self.turning.rotary_dim if self.turning else 0

    @property
    def style(self) -> str:
        return self.turning.style if self.turning else "half"

    @property
    def width(self) -> int:
        """Threads of a head: a power of two, so that they add up by halves."""
        return min(WARP, 1 << (self.units - 1).bit_length())

    @property
    def slots(self) -> int:
        """Units of a thread."""
        return -(-self.units // self.width)

    @property
    def lanes(self) -> int:
        return self.heads.heads * self.width

    @property
    def resident(self) -> int:
        return _RESIDENT_READING if self.reads else super().resident

    @property
    def rows_at_once(self) -> int:
        """Rows that a thread loads before it uses the first."""
        vectors = self.slots * (2 if self.partner == "kSecond" else 1) * (2 if self.reads else 1)
        rows = max(1, min(8, _IN_FLIGHT // (vectors * self.vector * self.dtype.itemsize)))
        angles = 16 * self.rotary_dim * (2 if self.turning and self.turning.tables == "pair" else 1)
        return max(1, min(rows, _STAGED // angles)) if angles else rows

    @property
    def reads(self) -> bool:
        """True where backward reads the input of the forward."""
        return self.back and self.norming is not None

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters that it reads: backward does not read biases."""
        if self.norming is None or self.norming.dtype is None:
            return ()
        names = [name for name, count in (("weight", self.heads.queries), ("key_weight", self.heads.keys)) if count]
        if self.norming.norm == "LayerNorm" and not self.back:
            names += [name.replace("weight", "bias") for name in names]
        return tuple(names)

    # ------------------------------------------------------------------------------------- the text

    def constants(self) -> list[str]:
        return [
            "enum { kInside, kSecond, kLane };",
            "enum { kAngles, kPair, kCosSin };",
            "enum { kNone, kRms, kLayer, kL2 };",
            *constants_of(self._types(), self._integers(), self._flags()),
            *self._sums_text(),
        ]

    def _types(self) -> dict[str, str]:
        turning, norming = self.turning, self.norming
        whole = (turning.starts or turning.offsets) if turning else None
        found = {
            "Element": self.dtype,
            "TableElement": turning.dtype if turning else None,
            "WeightElement": norming.dtype if norming else None,
            "ColumnElement": self.columns,
            "OutElement": self.stored or self.dtype,
        }
        types = {name: CTYPES[name_of(dtype or torch.float32)] for name, dtype in found.items()}
        return {**types, "Whole": WHOLE[whole or torch.int32]}

    def _integers(self) -> dict[str, object]:
        heads = self.heads
        return {
            "kPartner": self.partner, "kTables": _TABLES[self.turning.tables] if self.turning else "kAngles",
            "kNorm": _NORMS[self.norming.norm] if self.norming else "kNone", "kGroups": heads.groups,
            "kQueries": heads.queries, "kKeys": heads.keys, "kOthers": heads.others, "kHeadDim": heads.head_dim,
            "kRotary": self.rotary_dim, "kVector": self.vector, "kUnits": self.units, "kWidth": self.width,
            "kSlots": self.slots, "kThreads": self.threads, "kBlocks": self.per_multiprocessor, "kTiles": self.tiles,
            "kRows": self.rows_at_once,
        }  # fmt: skip

    def _flags(self) -> dict[str, object]:
        turning, norming = self.turning, self.norming
        return {
            "kHalves": self.style == "half", "kTurnsQueries": turning and turning.queries,
            "kTurnsKeys": turning and turning.keys, "kStarts": turning and turning.starts,
            "kOffsets": turning and turning.offsets, "kPadded": turning and turning.padded,
            "kNormLast": norming and norming.last, "kWeights": norming and norming.dtype,
            "kCentered": norming and norming.centered, "kBack": self.back, "kSumsColumns": self.columns,
            "kSumsWeights": self.gradients, "kScaled": self.stored,
        }  # fmt: skip

    def _sums_text(self) -> list[str]:
        """The sums, as macros that are called for each."""
        first = 1 if self.columns else 0
        each = ["X(0, kFeatures, 1, ColumnElement)"] if self.columns else []
        each += [f"X({first + n}, kHeadDim, kTiles, WeightElement)" for n in range(len(self.gradients))]
        kinds = {
            name: f"X({first + n}, {'kKey' if name.startswith('key_') else 'kQuery'})"
            for n, name in enumerate(self.gradients)
        }
        weights = [text for name, text in kinds.items() if name.endswith("weight")]
        biases = [text for name, text in kinds.items() if name.endswith("bias")]
        return [
            f"#define TE_SUMS(X) {' '.join(each)}",
            f"#define TE_COLUMN_SUMS(X) {'X(0, 0)' if self.columns else ''}",
            f"#define TE_WEIGHT_SUMS(X) {' '.join(weights)}",
            f"#define TE_BIAS_SUMS(X) {' '.join(biases)}",
        ]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        wide = self.vector * self.dtype.itemsize
        read = dict.fromkeys(("from", "read") if self.reads else ("from",), (name_of(self.dtype), wide))
        if self.turning is not None:
            turning = self.turning
            for name in ("first", "second")[: 1 if turning.tables == "angles" else 2]:
                read[name] = (name_of(turning.dtype), turning.dtype.itemsize)
            for name, dtype in (("starts", turning.starts), ("offsets", turning.offsets)):
                if dtype is not None:
                    read[name] = (text_of(dtype), dtype.itemsize)
        weights = self.norming.dtype if self.norming is not None else None
        for name in self.weights:
            assert weights is not None
            read[name] = (name_of(weights), weights.itemsize)
        read.update(dict.fromkeys(("scale", "amax") if self.stored else (), ("float32", 4)))
        stored = self.stored or self.dtype
        written = [
            (name_of(stored), self.vector * stored.itemsize),
            *((name_of(dtype), dtype.itemsize) for dtype in self.sums),
        ]
        dtypes, alignments = zip(*read.values(), *written, strict=True)
        rows = (*([1] if self.columns else []), *[self.tiles] * len(self.gradients))
        launches = _launches(self, list(read))
        return _native.CudaKernel(
            self.name,
            cubin,
            dtypes,
            alignments,
            len(read),
            launches,
            self.widths,
            0,
            _INTEGERS,
            waits=True,
            partial_rows=rows,
        )

    @property
    def sums(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the sums: of columns, of the gradients of weights."""
        weights = self.norming.dtype if self.norming else None
        return (*([self.columns] if self.columns else []), *([weights] * len(self.gradients) if weights else []))

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of elements of each of the `sums`."""
        return (*([self.heads.features] if self.columns else []), *[self.heads.head_dim] * len(self.gradients))


def reason_not(head_dim: int, *dtypes: torch.dtype) -> str | None:
    """Reason why the kernel does not take such heads, or tensors of these dtypes."""
    wide = f"its kernel takes heads of at most {MOST_FEATURES} features" if head_dim > MOST_FEATURES else None
    return heads_pass.reason_not(*dtypes) or wide


# -------------------------------------------------------------------------------------------------- calling it


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a call beside the heads.

    Attributes:
        tables: angles; angles of queries and of keys; or cosines and sines, each [L, 1 or B, 1, rotary_dim].
        starts: whole numbers [B], of tokens [N].
        offsets: of tokens: whole numbers [N + 1].
        weights: name -> parameter of the norm, [head_dim].
    """

    tables: Sequence[torch.Tensor] = ()
    starts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


Form = tuple[_native.CudaKernel, tuple[int, ...], tuple[int, int], tuple[int, ...]]


class Turned:
    """A pass as it is called. What devices, sizes and strides decide is worked out when they are new.

    `layout` is "sequence_first" [S, B, features], "batch_first" [B, S, features], or "tokens" [tokens, features]; of a
    norm alone "tokens" too, and heads are any [.., features].
    """

    def __init__(self, p: TurnedPass, layout: str, eps: float = 0.0) -> None:
        self._pass, self._order = p, _ORDERS[layout]
        (self._eps,) = struct.unpack("<i", struct.pack("<f", eps))  # in float32, as the whole number of its bits
        self._known: dict[Hashable, Form] = {}

    def __call__(
        self,
        x: torch.Tensor,
        given: PassInputs,
        *,
        read: torch.Tensor | None = None,
        scaled: Scaled | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result, contiguous, and the sums in the order of `TurnedPass.sums`.

        Args:
            x: heads, or in backward the gradient of the output, on a CUDA device, of the pass's dtype.
            read: in backward of a norm, the input of the forward.
            scaled: how the result is stored in 8 bits, where the pass says that it is.
        """
        p = self._pass
        out = torch.empty_like(x, dtype=p.stored or x.dtype, memory_format=torch.contiguous_format)
        sums = [x.new_empty(n, dtype=dtype) for n, dtype in zip(p.widths, p.sums, strict=True)]
        if not x.numel():
            return out, [t.zero_() for t in sums]
        sources = [x] if read is None else [x, read]
        tables, ends = given.tables, None if given.offsets is None else len(given.offsets)
        form = x.device, x.shape, ends, *[(t.shape, t.stride(), t.dtype) for t in (*sources, *tables)]
        known = self._known.get(form)
        if known is None:
            before = [t.data_ptr() for t in (*sources, *tables)]
            sources = [readable(_by_rows(t), p.vector) for t in sources]
            tables = [_flat_table(t, p.turning) for t in tables]
            known = self._form(sources, tables, given)
            if [t.data_ptr() for t in (*sources, *tables)] == before:  # nothing was copied
                if len(self._known) >= _FORMS_KEPT:
                    self._known.clear()
                self._known[form] = known
        kernel, reaches, counts, numbers = known
        tensors = [as_one(t, n) for t, n in zip((*sources, *tables), reaches, strict=True)]
        tensors += [t.contiguous() for t in (given.starts, given.offsets) if t is not None]
        tensors += [given.weights[name].contiguous() for name in p.weights]
        tensors += [] if scaled is None else [scaled.scale, scaled.amax]
        kernel((*tensors, out, *sums), counts[0], 1, counts[1], numbers)
        return out, sums

    def _form(self, sources: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], given: PassInputs) -> Form:
        """Arguments of a call with three-dimensional heads and with tables in these strides."""
        shape, vector, (sequence, batch) = sources[0].shape, self._pass.vector, self._order
        if shape[0] * shape[1] > MOST_ROWS:
            raise ValueError(f"{shape[0]} x {shape[1]} rows are more than {MOST_ROWS}: split the batch")
        ahead = shape[1] * shape[2], shape[2]  # of the result
        steps = [step // vector for step in (ahead[sequence], ahead[batch])]
        steps += [t.stride(d) // vector for t in sources for d in (sequence, batch)]
        steps += [0] * (2 * (2 - len(sources)))
        numbers = self._eps, *steps, *_table_numbers(tables, given)
        reaches = tuple(map(reach, (*sources, *tables)))
        return self._pass.ready(sources[0].device), reaches, (shape[0] * shape[1], shape[batch]), numbers


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """[.., features] as three dimensions."""
    if x.dim() == 3:
        return x
    return x[:, None] if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def _flat_table(table: torch.Tensor, turning: Turning | None) -> torch.Tensor:
    """[L, 1 or B, 1, rotary_dim] whose angles lie side by side, in the pass's dtype."""
    assert turning is not None
    if not table.shape[0]:
        raise ValueError("rotary angles of no position: give as many as there are positions")
    table = table.to(turning.dtype)
    return table if table.stride(3) == 1 else table.contiguous()


def _table_numbers(tables: Sequence[torch.Tensor], given: PassInputs) -> tuple[int, ...]:
    """Strides of both tables, their length, sequences, and whether each row has angles of its own."""
    if not tables:
        return (0,) * 7
    strides = [n for t in tables for n in (t.stride(0), t.stride(1) if t.shape[1] > 1 else 0)]
    strides += [] if len(tables) == 2 else strides
    sequences = 0 if given.offsets is None else len(given.offsets) - 1
    by_row = given.starts is not None or given.offsets is not None or any(t.shape[1] > 1 for t in tables)
    return (*strides, min(t.shape[0] for t in tables), sequences, int(by_row))


def _launches(p: TurnedPass, read: list[str]) -> tuple[_native.CudaLaunch, ...]:
    """Launches, by each argument's source; any address stands for an absent one."""
    places = {name: ("tensor", k) for k, name in enumerate(read)}
    if "second" not in places:
        places["second"] = places.get("first", ("tensor", 0))
    names = ["from", "read", "first", "second", "starts", "offsets"]
    names += ["weight", "bias", "key_weight", "key_bias", "scale", "amax"]
    sources = [places.get(name, ("tensor", 0)) for name in names]
    sums = [pair for n in range(len(p.sums)) for pair in (("partial", n), ("tensor", len(read) + 1 + n))]
    counts = [("rows", 0), ("batch_size", 0), ("groups", 0), *(("integer", k) for k in range(_INTEGERS))]
    arguments = (*sources, ("tensor", len(read)), *counts, *sums)
    grid = (p.tiles, p.rows_at_once, p.per_multiprocessor, False, bool(p.sums))
    launches: list[_native.CudaLaunch] = [("turned_heads", p.threads, 0, grid, arguments)]
    if p.sums:
        blocks = sum(-(-width // 32) for width in p.widths)
        launches.append(("turned_heads_finish", FINISH_THREADS, 0, (blocks, 0), (("groups", 0), *sums)))
    return tuple(launches)
