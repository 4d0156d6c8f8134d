"""Schedules of a kernel on a GPU: who computes what, and what stays where between two passes over a row.

Five kinds of schedule, by where a row waits for the passes after the first:

    columns      no row reductions: threads own columns and walk down the rows; nothing waits
    tile         the same by tiles of 128 rows, whose transposed stores go through shared memory, or by blocks
    registers    the threads of a row hold its loaded vectors
    shared       shared memory holds them, filled by asynchronous copies, the next row already on its way
    reread       nobody holds them: each pass reads the row again, from L2

Which schedule a kernel gets is the business of `schedule_model`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx

from te_fuser.codegen.description import BLOCK, KernelDescription, Load, Store, item_size
from te_fuser.codegen.text import COMPARISONS
from te_fuser.formula.expr import Axes, Expr, leaf
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.reductions import substitute
from te_fuser.formula.traversal import topological


class Kind(str, enum.Enum):
    """Kind of schedule, by the place where a row waits between two passes."""

    COLUMNS = "columns"
    TILE = "tile"
    REGISTERS = "registers"
    SHARED = "shared"
    REREAD = "reread"


class Sums(str, enum.Enum):
    """Place where the column sums of a block grow."""

    NONE = "none"
    REGISTERS = "registers"
    SHARED = "shared"


@dataclass(frozen=True)
class Limits:
    """Limits of a schedule on one kind of GPU; every one has 65,536 registers per multiprocessor."""

    shared_bytes: int  # that one block may use
    resident_threads: int  # per multiprocessor
    registers: int = 65536


# The first that fits the architecture's number; 1 KiB of shared memory per block belongs to the system.
_LIMITS: dict[str, Limits] = {
    "80": Limits(163 * 1024, 2048),
    "86": Limits(99 * 1024, 1536),
    "87": Limits(163 * 1024, 1536),
    "89": Limits(99 * 1024, 1536),
    "90": Limits(227 * 1024, 2048),
    "100": Limits(227 * 1024, 2048),
    "103": Limits(227 * 1024, 2048),
}
_SMALLEST = Limits(99 * 1024, 1536)


def limits_of(arch: str) -> Limits:
    """The limits of an architecture such as "sm_90a"; an unknown one gets the smallest of all."""
    return _LIMITS.get(arch.removeprefix("sm_").rstrip("af"), _SMALLEST)


@dataclass(frozen=True)
class Schedule:
    """Way to run a description on a GPU.

    A row is cut into vectors of `vector` elements. `lanes` threads share a row, each takes `chunks` vectors of it, and
    `slots` rows are in a block at the same time. Kind `columns`: the block covers lanes * vector columns, and each
    thread has `ahead` rows in flight. Kind `tile`: so too, with `chunks` turns for the rows of a tile. Kind `shared`:
    `ahead` rows are in shared memory at once, one of them at work. Kind `registers`: a thread has `ahead` rows at once.

    The GPU is filled with blocks `rounds` times, and they walk over all rows; with 0 none walks, but by tiles with
    column sums a block does four. With `keeps` a thread has its share of the parameters in registers for all its rows.
    """

    kind: Kind
    vector: int
    lanes: int
    slots: int
    chunks: int
    ahead: int
    blocks_per_multiprocessor: int
    sums: Sums
    rounds: int = 1
    keeps: bool = False

    @property
    def threads(self) -> int:
        return self.lanes * self.slots

    @property
    def owns_columns(self) -> bool:
        """True where threads own columns and walk down the rows."""
        return self.kind in (Kind.COLUMNS, Kind.TILE)

    @property
    def ends_soon(self) -> bool:
        """True where a block does a row, or as many as its threads hold at once, and ends."""
        return self.rounds == 0 and not self.owns_columns

    @property
    def covered(self) -> int:
        """Columns that a block works on at once."""
        return self.lanes * self.vector * (1 if self.owns_columns else self.chunks)

    @property
    def rows(self) -> int:
        """Rows that a block does in one go."""
        return self.slots * (self.ahead * self.chunks if self.owns_columns else self.held)

    @property
    def held(self) -> int:
        """Rows that a thread has in registers at once."""
        return self.ahead if self.kind == Kind.REGISTERS else 1

    def tiles(self, width: int) -> int:
        """Number of blocks side by side along the features."""
        return -(-width // self.covered) if self.owns_columns else 1

    def __str__(self) -> str:
        if self.owns_columns:
            text = (
                f"{self.lanes} threads x {self.vector} columns, {self.slots} rows at once, {self.ahead} in flight each"
            )
            text = f"tiles of {self.rows} rows: {text}" if self.kind == Kind.TILE else text
        else:
            row = {Kind.REGISTERS: "registers", Kind.SHARED: f"shared memory ({self.ahead} at once)", Kind.REREAD: "L2"}
            text = f"row in {row[self.kind]}: {self.lanes} threads x {self.chunks} x {self.vector} columns"
            text += f", {self.rows} rows at once" if self.rows > 1 else ""
            text += ", parameters in registers" if self.keeps else ""
        sums = "" if self.sums == Sums.NONE else f", column sums in {self.sums.value}"
        few = "; each block does four of them" if self.kind == Kind.TILE and self.sums != Sums.NONE else ""
        walk = "; each block walks over its rows" if self.rounds else few
        return f"{text}{sums}, {self.blocks_per_multiprocessor} blocks per multiprocessor{walk}"


# ------------------------------------------------------------------------------ passes, and what waits between

# A byte that waits against an instruction that is computed again: a register costs as much as two instructions.
_COST_PER_BYTE = 0.5
_COST_AGAIN = 0.5  # of an instruction


def instructions(description: KernelDescription) -> float:
    """Instructions of one element, about; a product within one sum comes with the addition."""
    nodes = [n for n in description.nodes if n.axes & Axes.FEATURE and n.op != "input"]
    uses = Counter(id(a) for n in description.nodes for a in n.args)
    uses.update(id(r) for r in description.roots)
    fused = sum(any(a.op == "mul" and uses[id(a)] == 1 for a in n.args) for n in nodes if n.op in ("add", "sub"))
    return sum(FUNCTIONS[n.op].gpu for n in nodes) - fused


@dataclass(frozen=True)
class Pass:
    """One walk over the features of a row, behind which `reductions` are complete; the last one has none and stores.

    `waits` are the full-size nodes that later passes start from: loaded tensors, or values in float32.
    """

    reductions: tuple[Expr, ...]
    waits: tuple[Expr, ...]


@functools.lru_cache(maxsize=64)
def passes(description: KernelDescription, kind: Kind) -> tuple[Pass, ...]:
    """The walks over a row, with what waits between them chosen by size and by the cost of computing it again."""
    stages = description.reductions
    found = [Pass((), ())]
    needed = [r for r in description.roots if r.axes & Axes.FEATURE]
    for depth in range(len(stages) - 1, -1, -1):
        early = above([r.args[0] for stage in stages[: depth + 1] for r in stage], ())
        waits = _cut(needed, depth, kind, {id(n) for n in early})
        found.append(Pass(stages[depth], tuple(waits)))
        needed = [*(r.args[0] for r in stages[depth]), *waits]
    return tuple(reversed(found))


def is_full(e: Expr) -> bool:
    """True where a node differs from row to row and from feature to feature."""
    return bool(e.axes & Axes.FEATURE and e.axes & Axes.OUTER)


def above(roots: Iterable[Expr], known: Iterable[int]) -> list[Expr]:
    """The nodes below `roots` that those with the ids `known` leave to be computed, arguments first."""
    have = set(known)
    return topological(roots, lambda e: id(e) in have)


_NEVER_WAIT = {"keep", *COMPARISONS}


def _waiting_cost(e: Expr, kind: Kind, early: set[int]) -> float:
    """Cost of letting a node wait for a later pass; infinite where nothing but a tensor can wait.

    A node that no reduction needed so far would have to be computed just to wait.
    """
    if e.op == "input":
        return 2 * _COST_PER_BYTE if kind == Kind.REGISTERS else 0.0
    if kind == Kind.REREAD or e.op in _NEVER_WAIT:
        return math.inf
    return 4 * _COST_PER_BYTE + sum(map(_again, above([e], early)))


def _again(e: Expr) -> float:
    return 0.0 if e.op == "input" else _COST_AGAIN * FUNCTIONS[e.op].gpu


def _cut(needed: list[Expr], depth: int, kind: Kind, early: set[int]) -> list[Expr]:
    """The cheapest nodes of at most `depth` from which all of `needed` can be computed.

    A minimum cut: each node is needed or not, and a needed one waits or is computed again from its arguments.
    """
    order = topological(needed)
    wanted = {id(n): 2 * k for k, n in enumerate(order)}  # and 2 k + 1 where it is computed again
    begin, end = -1, -2
    graph = networkx.DiGraph()
    graph.add_nodes_from((begin, end))
    for n in order:
        again = wanted[id(n)] + 1
        if is_full(n) and n.depth <= depth:
            cost = _waiting_cost(n, kind, early)
            graph.add_edge(again - 1, again, **({"capacity": cost} if math.isfinite(cost) else {}))
            graph.add_edge(again, end, **({} if n.op == "input" else {"capacity": _again(n)}))
        else:
            graph.add_edge(again - 1, again)
        graph.add_edges_from((again, wanted[id(a)]) for a in n.args)
    graph.add_edges_from((begin, wanted[id(n)]) for n in needed)
    _, (asked, _) = networkx.minimum_cut(graph, begin, end)
    return [n for n in order if wanted[id(n)] in asked and wanted[id(n)] + 1 not in asked]


# ---------------------------------------------------------------------------------- a kernel cut in two


ROW_VALUE = "row value "  # begins the names of numbers that go from one kernel to the other


def split(description: KernelDescription) -> tuple[KernelDescription, KernelDescription]:
    """The stores and the column sums as kernels of their own.

    What the sums need of a row's reductions goes through memory, as float32. The second one reads the tensors again.
    """
    description = dataclasses.replace(description, overwrites=())
    parts = [p for s in description.sums for p in s.parts]
    needed = list(_row_values(parts))
    names = {id(n): f"{ROW_VALUE}{k}" for k, n in enumerate(needed)}
    replaced = substitute(parts, lambda n: leaf(names[id(n)], Axes.ROWS) if id(n) in names else None)
    remaining = iter(replaced)
    sums = tuple(dataclasses.replace(s, parts=tuple(next(remaining) for _ in s.parts)) for s in description.sums)
    between = tuple(Store(names[id(n)], (n,), Axes.ROWS, 1, "float32") for n in needed)
    rows = narrowed(dataclasses.replace(description, stores=(*description.stores, *between), sums=()))
    values = tuple(Load(s.name, Axes.ROWS, 1, "float32") for s in between)
    columns = dataclasses.replace(
        description,
        name=f"{description.name}_columns",
        loads=(*description.loads, *values),
        stores=(),
        sums=sums,
        maxima=(),
    )
    return rows, narrowed(columns)


def _row_values(parts: Iterable[Expr]) -> Iterator[Expr]:
    """The highest nodes that depend on row reductions and have no features."""
    seen: set[int] = set()
    stack = list(parts)[::-1]
    while stack:
        node = stack.pop()
        if not node.depth or id(node) in seen:
            continue
        seen.add(id(node))
        if node.axes & Axes.FEATURE:
            stack.extend(reversed(node.args))
        else:
            yield node


def narrowed(description: KernelDescription) -> KernelDescription:
    """The description without the loads and streams that it does not use."""
    used = {n.attrs[0] for n in description.nodes if n.op in ("input", "keep")}
    return dataclasses.replace(
        description,
        loads=tuple(t for t in description.loads if t.name in used),
        streams=tuple(s for s in description.streams if s in used),
    )


# ------------------------------------------------------------------------------------- what lies where


def full_loads(description: KernelDescription) -> list[Expr]:
    return [n for n in description.nodes if n.op == "input" and is_full(n)]


def kept(description: KernelDescription, s: Schedule) -> tuple[Expr, ...]:
    """Parameters that a thread has in registers for all its rows."""
    return tuple(n for n in description.nodes if n.op == "input" and n.axes == Axes.FEATURE) if s.keeps else ()


def shared_bytes(description: KernelDescription, s: Schedule) -> int:
    return sum(size for _, size in shelves(description, s))


def static_bytes(description: KernelDescription, s: Schedule) -> int:
    """Static shared memory of a block: for reductions, maxima, and sums of its slots."""
    stages = {len(stage) * s.held for stage in description.reductions}
    exchanges = sum(2 * 32 * 4 * n for n in stages) if s.lanes > 32 else 0
    exchanges += 32 * 4 * len(description.maxima) + 4 * 4 * BLOCK * sum(_waiting_in_blocks(description).values())
    share = max(1, s.vector // 4) if s.kind == Kind.TILE else s.vector  # a warp of a tile adds up its own sums
    return exchanges + (4 * s.threads * share if s.slots > 1 and description.sums else 0)


def _waiting_in_blocks(description: KernelDescription) -> dict[tuple[object, ...], int]:
    """Number of parts of each value that is stored by blocks, by what it is."""
    return {(*[p.digest for p in t.parts], t.made_in): len(t.parts) for t in description.in_blocks}


_COMING_BYTES = 4  # of shared memory for an element of a tile: three blocks of a multiprocessor have 64 KiB each


def coming(description: KernelDescription, s: Schedule) -> list[tuple[Expr, int | None]]:
    """Tensors of which a block that stores by blocks has a whole tile on its way, in shared memory.

    With the number of the value (counted by parts) that waits where the tensor was; None: they lie behind all of these.
    """
    values = _waiting_in_blocks(description).items()
    places = [item_size(str(made_in)) for (*_, made_in), parts in values for _ in range(parts)]
    found: list[tuple[Expr, int | None]] = []
    room, free = _COMING_BYTES - sum(places), dict(enumerate(places))
    for n in full_loads(description) if places else ():
        size = description.load_bytes[n.attrs[0]]
        place = next((k for k, taken in free.items() if taken == size), None)
        if size * s.vector < _LEAST_COPIED or (place is None and size > room):
            continue
        if place is None:
            room -= size
        else:
            del free[place]
        found.append((n, place))
    return found


_LEAST_COPIED = 4  # bytes of an asynchronous copy


def shelves(description: KernelDescription, s: Schedule) -> list[tuple[Expr | None, int]]:
    """Contents of dynamic shared memory: rows, waiting values, column sums, transposed tiles (None)."""
    own = s.threads * s.chunks * s.vector
    found: list[tuple[Expr | None, int]] = []
    if s.kind == Kind.TILE:  # one is written while another one is read
        parts = sum(len(t.parts) for t in description.transposed)
        turned = any(t.layout == "transposed_blocks" for t in description.in_blocks)
        waiting = _waiting_in_blocks(description)
        bytes_waiting = sum(count * item_size(str(made_in)) for (*_, made_in), count in waiting.items())
        behind = sum(description.load_bytes[n.attrs[0]] for n, place in coming(description, s) if place is None)
        return [(None, s.covered * s.rows)] * (2 * parts + bytes_waiting + max(turned, behind))
    if s.kind == Kind.SHARED:
        found += [(n, s.ahead * own * description.load_bytes[n.attrs[0]]) for n in full_loads(description)]
        values = {id(n): n for p in passes(description, s.kind) for n in p.waits if n.op != "input"}
        found += [(n, own * 4) for n in values.values()]
    if s.sums == Sums.SHARED:
        parts = sum(len(t.parts) for t in description.sums if t.axes & Axes.FEATURE)
        found += [(None, own * 4)] * parts
    return found
