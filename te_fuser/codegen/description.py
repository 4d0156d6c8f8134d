"""Description of a generated kernel, free of any schedule."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from te_fuser.formula import expr
from te_fuser.formula.expr import Axes, Expr, part
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.random import Shared
from te_fuser.formula.reductions import extreme, substitute, sum_features, unmarked
from te_fuser.formula.traversal import render_together, topological
from te_fuser.record import record


@record()
class Load:
    """A tensor that is read.

    `axes` says its shape: FULL [rows, width]; ROWS [rows] (float32 statistics) ; FEATURE [width];
    SAMPLE_FEATURES [samples, width]; BATCH [samples]; NONE a scalar.
    """

    name: str
    axes: Axes
    width: int
    dtype: str  # a name of the table of dtypes


PLACES = ("row_rank", "column_rank", "row_block")  # of a rank's part, see `formula.random.RankPlacement`
Layout = Literal["rows", "transposed", "blocks", "transposed_blocks"]
TOKENS = 16  # a multiple of so many is a row of what is stored transposed
BLOCK = 128  # numbers that have a scale of their own, where it is stored by blocks


@record()
class Store:
    """A tensor that is written: FULL [rows, width] as one or more parts side by side, or ROWS [rows].

    One that is "transposed" lies as [width, rows], with zeros behind the rows up to a multiple of 16. One in "blocks"
    is of 8 bits: rounded to `made_in`, each 128 numbers of a row multiplied by the power of two that their largest
    magnitude leaves room for, and rounded again. Behind the rows lie the reciprocals of these scales, float32
    [ceil(width / 128), rows]. "transposed_blocks" are the same of what is transposed: [width, rows] with zeros, and
    [ceil(rows / 128), width].
    """

    name: str
    parts: tuple[Expr, ...]
    axes: Axes
    width: int
    dtype: str
    layout: Layout = "rows"
    made_in: str = ""


@record()
class Sum:
    """A sum over rows: of each feature (FEATURE), of each feature of a sample (SAMPLE_FEATURES), or of all (NONE).

    For NONE and BATCH the parts are already reduced over the features.
    """

    name: str
    parts: tuple[Expr, ...]
    axes: Axes
    width: int
    dtype: str


@dataclass(frozen=True)
class ScaleOf:
    """The scale of a magnitude to `most`, a dtype's largest number (`recipe.OwnScales`)."""

    most: float
    power_of_two: bool
    epsilon: float


NUMBERS = ("inverse", "scale", "largest", "blocks")  # of a maximum with its scale; before, those of nothing: 1, 1, 0, 0


@dataclass(frozen=True)
class Maximum:
    """The largest magnitude of everything, in a float32 that the call gives: it is raised to that, and never lowered.

    As the bits of floats are ordered, NaN is larger than infinity; so results do not depend on who comes first.

    Attributes:
        scale: what the last block of a CUDA kernel makes of it: the call gives four numbers, `NUMBERS`, of which the
            last two are zero again when the first two are there. Other targets make none.
        made_in: the dtype that everything is rounded to first, by CUDA kernels alone; else float32.
    """

    name: str
    parts: tuple[Expr, ...]
    width: int
    scale: ScaleOf | None = None
    made_in: str = ""


@dataclass(frozen=True)
class KernelCounts:
    """Counts of a kernel's work: full-size loads and stores, row sums, their stages, sums over rows."""

    loads: int
    stores: int
    row_sums: int
    stages: int
    column_sums: int


@record()
class KernelDescription:
    """A kernel, free of schedule. `width` is the feature count of one part: every full-size node has this width.

    `overwrites` are pairs (store, load): a call may give both the same memory; see `codegen.in_place`. With `shared`
    the run-time integers go on behind those of the streams, as `PLACES` says.
    """

    name: str
    width: int
    loads: tuple[Load, ...]
    stores: tuple[Store, ...]
    sums: tuple[Sum, ...]
    streams: tuple[str, ...]  # names of the random streams; their numbers are run-time integers, in this order
    overwrites: tuple[tuple[str, str], ...] = ()
    maxima: tuple[Maximum, ...] = ()
    shared: tuple[tuple[str, Shared], ...] = ()  # by random stream, where ranks share what it draws for

    @functools.cached_property
    def outputs(self) -> tuple[Store | Sum, ...]:
        """Everything that is written, in the order of the kernel's tensors."""
        return (*self.stores, *self.sums)

    @functools.cached_property
    def tensors(self) -> tuple[Load | Store | Sum, ...]:
        """Everything that is read or written; a call has maxima and the seed before outputs."""
        return (*self.loads, *self.outputs)

    @functools.cached_property
    def transposed(self) -> tuple[Store, ...]:
        return tuple(s for s in self.stores if is_transposed(s))

    @functools.cached_property
    def in_blocks(self) -> tuple[Store, ...]:
        return tuple(s for s in self.stores if is_in_blocks(s))

    @property
    def is_by_tiles(self) -> bool:
        """True where some output is stored otherwise than row by row."""
        return bool(self.transposed or self.in_blocks)

    @functools.cached_property
    def integers(self) -> int:
        return len(self.streams) + (len(PLACES) if self.shared else 0)

    def share_of(self, stream: str) -> Shared | None:
        """Split over ranks of what a stream draws for; None where it is whole."""
        return dict(self.shared).get(stream)

    @functools.cached_property
    def load_bytes(self) -> dict[str, int]:
        return {t.name: item_size(t.dtype) for t in self.loads}

    @functools.cached_property
    def roots(self) -> tuple[Expr, ...]:
        """Every expression that is stored or summed, or whose largest magnitude is wanted."""
        return tuple(p for item in (*self.outputs, *self.maxima) for p in item.parts)

    @functools.cached_property
    def nodes(self) -> tuple[Expr, ...]:
        return tuple(topological(self.roots))

    @functools.cached_property
    def reductions(self) -> tuple[tuple[Expr, ...], ...]:
        """The row reductions by stage; those of one stage need one synchronization together."""
        deepest = max((r.depth for r in self.roots), default=0)
        found = [n for n in self.nodes if n.reduces]
        return tuple(tuple(n for n in found if n.depth == d) for d in range(1, deepest + 1))

    @functools.cached_property
    def key(self) -> str:
        """A digest of the meaning: equal for equal kernels, whatever process builds them."""
        text = "\n".join([self.name, str(self.width), *map(repr, self.loads), *self.streams])
        for item in self.outputs:
            text += f"\n{type(item).__name__} {item.name} {int(item.axes)} {item.width} {item.dtype} "
            text += ",".join(p.digest for p in item.parts)
        text += "".join(f"\n{s.name} transposed" for s in self.transposed)
        text += "".join(f"\n{s.name} {s.layout} of {s.made_in}" for s in self.in_blocks)
        text += "".join(f"\n{store} over {load}" for store, load in self.overwrites)
        text += "".join(f"\nMaximum {m.name} {m.width} {','.join(p.digest for p in m.parts)}" for m in self.maxima)
        text += "".join(f"\n{m.name} in {m.made_in} makes {m.scale}" for m in self.maxima if m.scale or m.made_in)
        text += "".join(f"\n{name} draws for {shared}" for name, shared in self.shared)
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    def counts(self) -> KernelCounts:
        """The figures by which a derived backward is compared with a hand-written one."""
        return KernelCounts(
            loads=sum(load.axes == Axes.FULL for load in self.loads),
            stores=sum(store.axes == Axes.FULL for store in self.stores),
            row_sums=sum(len(stage) for stage in self.reductions),
            stages=len(self.reductions),
            column_sums=len(self.sums),
        )

    def bytes_moved(self, rows: int, samples: int = 1) -> tuple[int, int]:
        read = sum(elements_of(t, rows, samples) * item_size(t.dtype) for t in self.loads)
        written = sum(elements_of(t, rows, samples) * item_size(t.dtype) for t in self.outputs)
        return read, written

    def __str__(self) -> str:
        lines = [f"kernel {self.name}"]
        lines += [f"  load  {t.name}: {axes_text(t.axes)} x {t.width} {t.dtype}" for t in self.loads]
        steps, texts = render_together(self.roots)
        lines += [f"  {step}" for step in steps]
        rest = iter(texts)
        for item in self.outputs:
            body = ", ".join(next(rest) for _ in item.parts)
            kind = type(item).__name__.lower()
            dtype = f"{item.dtype} transposed" if is_transposed(item) else item.dtype
            if isinstance(item, Store) and is_in_blocks(item):
                dtype = f"{item.dtype} in {item.layout.replace('_', ' ')} of {item.made_in}"
            lines.append(f"  {kind:5} {item.name}: {axes_text(item.axes)} x {item.width} {dtype} = {body}")
        for m in self.maxima:
            body = ", ".join(next(rest) for _ in m.parts)
            made_in, of_it = f" {m.made_in}" if m.made_in else "", "" if m.scale is None else f", and {m.scale}"
            lines.append(f"  max   {m.name}: full x {m.width}{made_in} = {body}{of_it}")
        lines += [f"  {store} may be stored over {load}" for store, load in self.overwrites]
        lines += [f"  {name} draws for a part of the whole: {shared}" for name, shared in self.shared]
        return "\n".join(lines)


def item_size(dtype: str) -> int:
    """Bytes of one element, by PyTorch's name of its dtype."""
    return getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def is_transposed(tensor: Load | Store | Sum) -> bool:
    """True where a tensor is stored as [width, rows]."""
    return isinstance(tensor, Store) and tensor.layout == "transposed"


def is_in_blocks(tensor: Load | Store | Sum) -> bool:
    """True where a tensor is stored with a scale for each block."""
    return isinstance(tensor, Store) and tensor.layout in ("blocks", "transposed_blocks")


def sizes_in_blocks(layout: Layout, rows: int, width: int) -> tuple[int, int]:
    """The sizes of a tensor by blocks: rows with four bytes for each of their scales."""
    height, inner, room = (rows, width, width) if layout == "blocks" else (width, rows, padded(rows))
    return height, room + 4 * -(-inner // BLOCK)


def padded(rows: int) -> int:
    """Number of rows for which a tensor that is stored transposed has room."""
    return -(-rows // TOKENS) * TOKENS


def elements_of(tensor: Load | Store | Sum, rows: int, samples: int) -> int:
    """Number of elements of a tensor in a call with so many rows and samples."""
    if isinstance(tensor, Store) and is_in_blocks(tensor):
        return math.prod(sizes_in_blocks(tensor.layout, rows, tensor.width))
    return elements(tensor.axes, tensor.width, padded(rows) if is_transposed(tensor) else rows, samples)


def elements(axes: Axes, width: int, rows: int, samples: int) -> int:
    """Number of elements of a tensor of this extent."""
    count = width if axes & Axes.FEATURE else 1
    if axes & Axes.OUTER:
        return count * rows
    return count * samples if axes & Axes.BATCH else count


def axes_text(axes: Axes) -> str:
    names = {Axes.FULL: "full", Axes.ROWS: "rows", Axes.FEATURE: "feature", Axes.NONE: "scalar"}
    return names.get(axes, "+".join(a.name.lower() for a in (Axes.OUTER, Axes.BATCH, Axes.FEATURE) if axes & a))  # type: ignore[union-attr]


class NotOneKernel(ValueError):
    """Raised for expressions that do not fit one kernel; the message says why."""


@record()
class Target:
    """A tensor that a kernel shall write, and how it lies."""

    name: str
    expression: Expr
    axes: Axes
    width: int
    dtype: str
    layout: Layout = "rows"
    made_in: str = ""


def describe(
    name: str,
    targets: Iterable[Target],
    sums: Iterable[Target],
    tensors: dict[str, tuple[Axes, int, str]],
    maxima: Iterable[Target] = (),
) -> KernelDescription:
    """Build a description from whole expressions, for leaves by name as (axes, full width, dtype).

    Raises:
        NotOneKernel: when the feature sizes do not divide one another.
        ValueError: for what shall lie transposed and has no element for each row and feature.
    """
    stores, totals, largest = list(targets), list(sums), list(maxima)
    given = (*stores, *totals, *largest)
    for t in given:
        if t.layout != "rows" and (t.axes != Axes.FULL or t not in stores):
            raise ValueError(
                f"kernel {name}: {t.name} ({axes_text(t.axes)}) cannot lie {t.layout}: only full stores do"
            )
    written = [(t, unmarked(t.expression)) for t in given]
    widths = [t.width for t in given if t.axes & Axes.FEATURE]
    unit = math.gcd(*[e.unit for _, e in written], *widths) or 1
    narrowed: _Narrowed = {}
    cut = []
    for t, e in written:
        pieces = t.width // unit
        whole = [part(e, k, pieces) for k in range(pieces)] if t.axes & Axes.FEATURE else [e]
        parts = [_narrow_reductions(p, unit, narrowed) for p in whole]
        cut.append(tuple([p.args[0] if p.op == t.dtype else p for p in parts]))  # storing rounds to it anyway
    nodes = topological([p for parts in cut for p in parts])
    found = {n.width for n in nodes if n.has_features}
    if len(found) > 1:
        raise NotOneKernel(f"feature sizes {sorted(found)} do not fit one tile")
    used = {n.attrs[0] for n in nodes if n.op == "input"}
    streams = tuple(dict.fromkeys([n.attrs[0] for n in nodes if n.op == "keep"]))
    rest = iter(cut)
    made = KernelDescription(
        name,
        unit,
        tuple([Load(n, *tensor) for n, tensor in tensors.items() if n in used]),
        tuple([Store(t.name, next(rest), t.axes, t.width, t.dtype, t.layout, t.made_in) for t in stores]),
        tuple([Sum(t.name, next(rest), t.axes, t.width, t.dtype) for t in totals]),
        streams,
        maxima=tuple([Maximum(t.name, next(rest), t.width) for t in largest]),
    )
    vars(made)["nodes"] = tuple(nodes)  # so that nobody looks for them again
    return made


_Narrowed = dict[int, tuple[Expr, Expr]]  # of this kernel: id of a wide reduction -> it, and what stands for it


def _narrow_reductions(e: Expr, unit: int, narrowed: _Narrowed) -> Expr:
    """Rewrite wider row reductions below `e` over parts of `unit` features, each once."""

    if not e.depth or e.widest == unit:
        return e

    def narrow(node: Expr) -> Expr | None:
        if not node.reduces or node.args[0].width == unit:
            return None
        if id(node) not in narrowed:
            narrowed[id(node)] = (node, _in_parts(node, unit, narrowed))
        return narrowed[id(node)][1]

    return substitute([e], narrow)[0]


def _in_parts(node: Expr, unit: int, narrowed: _Narrowed) -> Expr:
    pieces = node.args[0].width // unit
    parts = [_narrow_reductions(part(node.args[0], k, pieces), unit, narrowed) for k in range(pieces)]
    if node.op == "row_sum":
        return functools.reduce(expr.add, [sum_features(p, unit) for p in parts])
    joins = FUNCTIONS[node.op].joins
    return functools.reduce(lambda a, b: expr.binary(joins, a, b), [extreme(node.op, p) for p in parts])
