"""The functions that walk over rows: one class for each way to do it, and what they share.

The levels of a kernel's text are the call, the row, and the element of a row; a value stands at the outermost level
where it is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from te_fuser.codegen import schedule as plan
from te_fuser.codegen.cuda_formulas import is_boolean
from te_fuser.codegen.cuda_text import CTYPES, Formulas, Names, Text, bare, number, part_role
from te_fuser.codegen.description import KernelDescription, Store, Sum
from te_fuser.codegen.schedule import Kind, Schedule, Sums
from te_fuser.formula.expr import Axes, Expr


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    `kind` is where it comes from: "load", "store", "sum" (a tensor of the description), "seed" (two int64 on the
    device: seed and offset), "partial" (float32 scratch of `Partial`), "row_value" (float32 scratch, one a row),
    "rows", "batch_inner", "batch_size", "stream" (the number of a random stream), "groups" (of the summing kernel).
    """

    kind: str
    name: str
    ctype: str


class KernelText:
    """What the text of every schedule shares: its parameters, its levels (call, row, element), its sums."""

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        self.symbol, self.d, self.s = symbol, description, schedule
        self.text, self.names = Text(), Names()
        self.formulas = Formulas(self.names, space)
        self.known: dict[int, str] = {}
        self.loads = {t.name: t for t in description.loads}
        self.per_sample = any(t.axes & Axes.BATCH for t in description.sums)
        self.parameters = tuple(self._parameters())
        self.pointer = {
            (p.kind, p.name): p.name if p.kind in _PLAIN else self.names.fresh(p.name + SUFFIX.get(p.kind, ""))
            for p in self.parameters
        }
        self.random = {name: self.names.fresh(f"{name}_random") for name in description.streams}
        self.sum_names = {
            (t.name, k): self.names.fresh(f"{t.name}{f'_{k}' if len(t.parts) > 1 else ''}_sum")
            for t in description.sums
            for k in range(len(t.parts))
        }
        users: dict[int, list[Expr]] = {}
        for node in description.nodes:
            for a in node.args:
                users.setdefault(id(a), []).append(node)
        self.users = users

    # ---- parameters

    def _parameters(self) -> Iterator[Parameter]:
        d = self.d
        for t in d.loads:
            kind = "row_value" if t.name.startswith(plan.ROW_VALUE) else "load"
            yield Parameter(kind, t.name, f"const {CTYPES[t.dtype]}* __restrict__")
        if d.streams:
            yield Parameter("seed", "seed", "const long long* __restrict__")
        for s in d.stores:
            kind = "row_value" if s.name.startswith(plan.ROW_VALUE) else "store"
            yield Parameter(kind, s.name, f"{CTYPES[s.dtype]}* __restrict__")
        for total in d.sums:
            yield Parameter("partial", total.name, "float* __restrict__")
        yield Parameter("rows", "rows", "long long")
        yield Parameter("batch_inner", "batch_inner", "int")
        yield Parameter("batch_size", "batch_size", "int")
        for name in d.streams:
            yield Parameter("stream", name, "int")

    def signature(self) -> str:
        """The head of the function, with as many registers a thread as the planned blocks leave it."""
        listed = ",\n    ".join(f"{p.ctype} {self.pointer[p.kind, p.name]}" for p in self.parameters)
        bounds = f"{self.s.threads}, {self.s.blocks_per_multiprocessor}"
        return f'extern "C" __global__ void __launch_bounds__({bounds}) {self.symbol}(\n    {listed})'

    # ---- levels

    def call_level(self) -> None:
        """What is the same for all rows."""
        for name, variable in self.random.items():
            stream = self.pointer["stream", name]
            self.text(f"const te::Random {variable} = te::random({self.pointer['seed', 'seed']}, {stream});")
        once = [n for n in self.d.nodes if n.axes == Axes.NONE and not n.depth]
        self._level(once, self.known)

    def row_level(self, depth: int, known: dict[int, str]) -> None:
        """What is one number a row, after `depth` stages of reductions."""
        rows = [n for n in self.d.nodes if not n.axes & Axes.FEATURE and n.depth == depth and (n.axes or depth)]
        self._level(rows, known)

    def _level(self, nodes: Sequence[Expr], known: dict[int, str]) -> None:
        level, roots = {id(n) for n in nodes}, {id(r) for r in self.d.roots}
        wanted = [
            n for n in nodes
            if id(n) in roots or (n.op != "const" and any(id(u) not in level for u in self.users.get(id(n), ())))
        ]  # fmt: skip
        self.formulas.write(self.text, wanted, known, self._scalar_leaf)
        for n in wanted:
            self._name(n, known)

    def _name(self, node: Expr, known: dict[int, str]) -> None:
        """Give a number that loops use a name, so that they do not compute it again."""
        if not re.fullmatch(r"[\w:.\[\]]+", known[id(node)]):
            name = self.names.fresh("t")
            self.text(f"const {'bool' if is_boolean(node) else 'float'} {name} = {bare(known[id(node)])};")
            known[id(node)] = name

    def _scalar_leaf(self, e: Expr) -> str:
        index = "row" if e.axes & Axes.OUTER else "sample" if e.axes & Axes.BATCH else "0"
        if e.op == "keep":
            return f"te::draw<1>({self.random[e.attrs[0]]}, {index}, 1, 0).get(0) >= {e.attrs[1]}u"
        return f"te::number({self.load_pointer(e)}[{index}])"

    @property
    def needs_sample(self) -> bool:
        """Whether a row must know its sample."""
        return any(n.op in ("input", "keep") and n.axes & Axes.BATCH and not n.axes & Axes.OUTER for n in self.d.nodes)

    # ---- vectors

    def load_pointer(self, e: Expr) -> str:
        """The parameter that a leaf is read through."""
        kind = "row_value" if e.attrs[0].startswith(plan.ROW_VALUE) else "load"
        return self.pointer[kind, e.attrs[0]]

    def address(self, pointer: str, axes: Axes, width: int, offset: int) -> str:
        """Where the vector at `column` begins."""
        terms = [pointer]
        if axes & Axes.OUTER:
            terms.append(f"row * {width}")
        elif axes & Axes.BATCH:
            terms.append(f"static_cast<long long>(sample) * {width}")
        return " + ".join([*terms, *([str(offset)] if offset else []), "column"])

    def load(self, e: Expr) -> str:
        """The expression that reads the vector of a leaf."""
        function = "te::load" if e.axes & Axes.OUTER else "te::load_repeated"
        return f"{function}<kVector>({self.address(self.load_pointer(e), e.axes, e.attrs[2], e.attrs[1])})"

    def vector_type(self, e: Expr) -> str:
        """The type of a vector of a leaf."""
        return f"te::Vector<{CTYPES[self.loads[e.attrs[0]].dtype]}, kVector>"

    def elements(
        self,
        targets: Sequence[Expr],
        known: Mapping[int, str],
        vectors: Mapping[int, str],
        then: Callable[[dict[int, str]], None],
    ) -> None:
        """The loop over the elements of one vector: computes `targets`, then does `then` with their texts."""
        draws: dict[int, str] = {}
        for n in plan.above(targets, known):
            if n.op == "keep":
                name, _, offset, full = n.attrs
                draws[id(n)] = self.names.fresh(f"{part_role(n)}_draws")
                column = f"{offset} + column" if offset else "column"
                call = f"te::draw<kVector>({self.random[name]}, row, {full}, {column})"
                self.text(f"const te::Draws<kVector> {draws[id(n)]} = {call};")

        def leaf(e: Expr) -> str:
            return f"{draws[id(e)]}.get(i) >= {e.attrs[1]}u" if e.op == "keep" else f"te::get({vectors[id(e)]}, i)"

        inner = dict(known)
        with self.text.loop("i", "kVector"), self.names.scope():
            self.formulas.write(self.text, targets, inner, leaf)
            then(inner)

    # ---- what a row leaves behind

    def last_pass(self, known: Mapping[int, str], vectors: Mapping[int, str], chunk: str) -> None:
        """Store one vector of every full-size output and add to the column sums."""
        outputs: list[tuple[str, str, Expr]] = []
        for s in self.d.stores:
            if s.axes & Axes.FEATURE:
                for k, p in enumerate(s.parts):
                    name = self.names.fresh(f"{s.name}{f'_{k}' if len(s.parts) > 1 else ''}_out")
                    self.text(f"float {name}[kVector];")
                    pointer = self.pointer["store", s.name]
                    outputs.append((name, self.address(pointer, s.axes, s.width, k * self.d.width), p))
        sums = [(t, k, p) for t in self.d.sums if t.axes & Axes.FEATURE for k, p in enumerate(t.parts)]

        def then(inner: dict[int, str]) -> None:
            for name, _, p in outputs:
                self.text(f"{name}[i] = {bare(number(p, inner))};")
            for t, k, p in sums:
                self.text(f"{self.sum_names[t.name, k]}{chunk}[i] += {bare(number(p, inner))};")

        if outputs or sums:
            self.elements([p for _, _, p in outputs] + [p for _, _, p in sums], known, vectors, then)
        for name, address, _ in outputs:
            self.text(f"te::store({address}, {name});")

    def row_stores(self, known: Mapping[int, str], condition: str) -> None:
        """Store what is one number a row, and add up what is summed over rows only."""
        rows = [s for s in self.d.stores if not s.axes & Axes.FEATURE]
        with self.text.block(f"if ({condition})") if rows else contextlib.nullcontext():
            for s in rows:
                kind = "row_value" if s.name.startswith(plan.ROW_VALUE) else "store"
                value = bare(number(s.parts[0], known))
                self.text(f"{self.pointer[kind, s.name]}[row] = te::rounded<{CTYPES[s.dtype]}>({value});")
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                self.text(f"{self.sum_names[t.name, 0]}[0] += {bare(number(t.parts[0], known))};")

    def declare_scalar_sums(self) -> None:
        """The sums of numbers that a row has one of."""
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                self.text(f"float {self.sum_names[t.name, 0]}[1] = {{}};")

    def write_sums(self, name: str, pointer: str, width: int, offset: int, group: str, inside: str) -> None:
        """Store the partial sums of one vector of columns, added up over the rows that the block does at once."""
        slot = " && slot == 0" if self.s.slots > 1 else ""
        if self.s.slots > 1:
            self.text(f"te::add_slots<kSlots, kLanes>(shared_sums, slot, lane, {name});")
        at = " + ".join([pointer, f"{group} * {width}", *([str(offset)] if offset else []), "column"])
        line = f"te::store({at}, {name});"
        condition = (inside + slot).removeprefix(" && ")
        self.text(f"if ({condition}) {line}" if condition else line)

    def write_scalar_sums(self, group: str, first: str) -> None:
        """Store the partial sums of numbers that a row has one of."""
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                name = self.sum_names[t.name, 0]
                if self.s.slots > 1:
                    self.text(f"te::add_slots<kSlots, kLanes>(shared_sums, slot, lane, {name});")
                self.text(f"if ({first}) {self.pointer['partial', t.name]}[{group}] = {name}[0];")

    def finished(self) -> str:
        """The text, with those constants of the schedule that it uses."""
        body = "\n".join(self.text.lines)
        used = [f"{name} = {value}" for name, value in self._constants.items() if re.search(rf"\b{name}\b", body)]
        return body.replace(_CONSTANTS, f"constexpr int {', '.join(used)};")

    def declare_threads(self, constants: Mapping[str, int]) -> None:
        """The numbers of the schedule, and which part of the block this thread is."""
        s = self.s
        constants = {"kWidth": self.d.width, "kVector": s.vector, "kLanes": s.lanes, **constants, "kSlots": s.slots}
        self.text(_CONSTANTS)
        self._constants = constants
        if s.slots > 1:
            self.text("const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;")
            if self.d.sums:
                self.text("__shared__ float shared_sums[kLanes * kSlots * kVector];")
        else:
            self.text("const int lane = threadIdx.x;")

    def declare_range(self, group: str, groups: str) -> None:
        """The rows of this block: `first`, `step` and `count` of an index that `row_at` turns into a row."""
        slots = " * kSlots" if self.s.slots > 1 else ""
        if self.per_sample:
            self.text("// Blocks own samples: the index counts the rows of one sample.")
            self.text(f"const int splits = {groups} / batch_size;")
            self.text(f"const int sample = {group} / splits, split = {group} % splits;")
            self.text("const long long count = te::rows_of_sample(rows, batch_inner, batch_size);")
            group, groups = "split", "splits"
        elif self.plain_rows:
            return
        else:
            self.text("const long long count = rows;")
        self.text(f"const long long step = static_cast<long long>({groups}){slots};")
        self.text(f"const long long first = static_cast<long long>({group}){slots};")

    @property
    def plain_rows(self) -> bool:
        """Whether a block simply takes every so many rows, one at a time."""
        return self.s.slots == 1 and not self.per_sample and self.s.kind != Kind.COLUMNS

    def row_at(self, index: str) -> str:
        """The row with this index."""
        return f"te::row_of({index}, sample, batch_inner, batch_size)" if self.per_sample else index


_CONSTANTS = "constants;"
_PLAIN = ("seed", "rows", "batch_inner", "batch_size")
SUFFIX = {"partial": "_partial", "stream": "_stream"}


class ColumnText(KernelText):
    """No row reductions: a thread owns `kVector` columns and walks down the rows."""

    def write(self) -> str:
        """The function."""
        with self.text.block(self.signature()):
            self._prologue()
            with self.text.block("if (column < kWidth)") if self._ragged else contextlib.nullcontext():
                self._rows()
            self._epilogue()
        return self.finished()

    @property
    def _tiles(self) -> int:
        return self.s.tiles(self.d.width)

    @property
    def _ragged(self) -> bool:
        return self._tiles * self.s.covered != self.d.width

    @property
    def _group(self) -> tuple[str, str]:
        return ("group", "groups") if self._tiles > 1 else ("blockIdx.x", "gridDim.x")

    def _leaves(self, travelling: bool) -> list[Expr]:
        """Tensors that are read for each row, or those that stay while a thread walks down."""
        own = Axes.FEATURE if not self.per_sample else Axes.SAMPLE_FEATURES
        leaves = [n for n in self.d.nodes if n.op == "input" and n.axes & Axes.FEATURE]
        return [n for n in leaves if bool(n.axes & ~own) == travelling]

    def _prologue(self) -> None:
        text = self.text
        self.declare_threads({"kTiles": self._tiles, "kAhead": self.s.ahead})
        if self._tiles > 1:
            text("const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles, groups = gridDim.x / kTiles;")
        tile = "(tile * kLanes + lane)" if self._tiles > 1 else "lane"
        text(f"const int column = {tile} * kVector;")
        self.declare_range(*self._group)
        self.call_level()
        for t in self.d.sums:
            for k in range(len(t.parts)) if t.axes & Axes.FEATURE else ():
                text(f"float {self.sum_names[t.name, k]}[kVector] = {{}};")
        self.declare_scalar_sums()

    def _rows(self) -> None:
        text = self.text
        stays = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in self._leaves(False)}
        for n in self._leaves(False):
            text(f"const {self.vector_type(n)} {stays[id(n)]} = {self.load(n)};")
        travels = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in self._leaves(True)}
        slot = " + slot" if self.s.slots > 1 else ""
        with text.block(f"for (long long base = first{slot}; base < count; base += step * kAhead)"):
            numbers = [n for n in self.d.nodes if n.op == "input" and n.axes == Axes.ROWS]
            self._numbers = {id(n): self.names.fresh(f"{n.attrs[0]}_ahead") for n in numbers}
            if travels or numbers:
                text("// All loads first, so that they are on their way together.")
                for n in self._leaves(True):
                    text(f"{self.vector_type(n)} {travels[id(n)]}[kAhead];")
                for name in self._numbers.values():
                    text(f"float {name}[kAhead];")
                with text.loop("ahead", "kAhead"), self._row():
                    if any(n.axes & Axes.OUTER == 0 for n in self._leaves(True)):
                        self._sample()
                    for n in self._leaves(True):
                        text(f"{travels[id(n)]}[ahead] = {self.load(n)};")
                    for n in numbers:
                        text(f"{self._numbers[id(n)]}[ahead] = {self._scalar_leaf(n)};")
            with text.loop("ahead", "kAhead"), self._row():
                self._one_row({**stays, **{i: f"{name}[ahead]" for i, name in travels.items()}})

    @contextlib.contextmanager
    def _row(self) -> Iterator[None]:
        index = "base + ahead * step"
        self.text(f"const long long row = {self.row_at(index)};")
        with self.text.block("if (row < rows)"):
            yield

    def _sample(self) -> None:
        if self.needs_sample and not self.per_sample:
            self.text("const int sample = te::sample_of(row, batch_inner, batch_size);")

    def _one_row(self, vectors: Mapping[int, str]) -> None:
        known = {**self.known, **{i: f"{name}[ahead]" for i, name in self._numbers.items()}}
        self._sample()
        self.row_level(0, known)
        self.last_pass(known, vectors, "")
        self.row_stores(known, "tile == 0 && lane == 0" if self._tiles > 1 else "lane == 0")

    def _epilogue(self) -> None:
        group = f"static_cast<long long>({self._group[0]})"
        for t in self.d.sums:
            if t.axes & Axes.FEATURE:
                for k in range(len(t.parts)):
                    pointer, inside = self.pointer["partial", t.name], " && column < kWidth" if self._ragged else ""
                    self.write_sums(self.sum_names[t.name, k], pointer, t.width, k * self.d.width, group, inside)
        first = "threadIdx.x == 0 && tile == 0" if self._tiles > 1 else "threadIdx.x == 0"
        self.write_scalar_sums(group, first)


class RowText(KernelText):
    """Row reductions: `kLanes` threads share a row and walk over it once for each stage, and once more to store."""

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        super().__init__(symbol, description, schedule, space)
        self.passes = plan.passes(description, schedule.kind)
        leaves = [n for n in description.nodes if n.op == "input" and n.axes & Axes.FEATURE]
        self.full = [n for n in leaves if n.axes & Axes.OUTER]
        self.features = [n for n in leaves if not n.axes & Axes.OUTER]
        self.row_names = {id(n): self.names.fresh(f"{part_role(n)}_row") for n in self.full}
        self.vector_names = {id(n): self.names.fresh(f"{part_role(n)}_vector") for n in leaves}
        self.kept = plan.kept(description, schedule)
        numbers = [n for n in description.nodes if n.op == "input" and n.axes == Axes.ROWS]
        travelling = numbers if schedule.kind == Kind.SHARED else []
        self.coming = {id(n): self.names.fresh(f"{n.attrs[0]}_coming") for n in travelling}
        values = {id(n): n for p in self.passes for n in p.waits if n.op != "input"}
        self.waiting = {i: self.names.fresh("waiting") for i in values}
        self.ragged = schedule.covered != description.width
        self.index, self.next = ("row", "row + gridDim.x") if self.plain_rows else ("base", "base + step")
        self.first, self.count = ("blockIdx.x", "rows") if self.plain_rows else ("first", "count")
        step = "gridDim.x" if self.plain_rows else "step"
        self.loop = f"{self.index} = {self.first}; {self.index} < {self.count}; {self.index} += {step}"

    def write(self) -> str:
        """The function."""
        text = self.text
        with text.block(self.signature()):
            self._prologue()
            with text.block(f"for (long long {self.loop})"):
                self._row()
            self._epilogue()
        return self.finished()

    # ---- before the loop over rows

    def _prologue(self) -> None:
        text, s = self.text, self.s
        self.declare_threads({"kChunks": s.chunks, "kThreads": s.threads})
        self._declare_shelves()
        stages = [len(p.reductions) for p in self.passes if p.reductions]
        if s.lanes > 32:
            for count in sorted(set(stages)):
                text(f"__shared__ float exchange_{count}[2][{count}][32];")
            text("int phase = 0;")
        self.declare_range("blockIdx.x", "gridDim.x")
        self.call_level()
        self._declare_sums()
        self._keep_features()
        if s.kind == Kind.SHARED:
            self._declare_fetch()

    def _declare_shelves(self) -> None:
        shelves = plan.shelves(self.d, self.s)
        if not shelves:
            return
        self.text("extern __shared__ uint4 shelves[];")
        offset, sums = 0, iter(self._feature_sums())
        for node, size in shelves:
            at = f"shelves + {offset // 16}"
            if node is None:
                self.text(f"float* const {self.sum_names[next(sums)]} = reinterpret_cast<float*>({at});")
            elif node.op == "input":
                kind = self.vector_type(node)
                self.text(f"{kind}* const {self.row_names[id(node)]} = reinterpret_cast<{kind}*>({at});")
            else:
                self.text(f"float* const {self.waiting[id(node)]} = reinterpret_cast<float*>({at});")
            offset += size

    def _feature_sums(self) -> list[tuple[str, int]]:
        return [(t.name, k) for t in self.d.sums if t.axes & Axes.FEATURE for k in range(len(t.parts))]

    def _declare_sums(self) -> None:
        for key in self._feature_sums():
            if self.s.sums == Sums.REGISTERS:
                self.text(f"float {self.sum_names[key]}[kChunks][kVector] = {{}};")
            else:
                with self.text.loop("chunk", "kChunks"):
                    self.text(
                        f"te::put<kThreads>({self.sum_names[key]}, chunk, threadIdx.x, te::Zeros<kVector>().values);"
                    )
        self.declare_scalar_sums()

    def _keep_features(self) -> None:
        for n in self.kept:
            self.row_names[id(n)] = self.names.fresh(f"{part_role(n)}_vectors")
            self.text(f"{self.vector_type(n)} {self.row_names[id(n)]}[kChunks];")
        if self.kept:
            with self._chunks():
                for n in self.kept:
                    self.text(f"{self.row_names[id(n)]}[chunk] = {self.load(n)};")

    def _declare_fetch(self) -> None:
        text = self.text
        for name in self.coming.values():
            text(f"float {name} = 0.0f;")
        text("// Each thread copies what it will read itself, so that no barrier is needed.")
        with text.block(f"const auto fetch_row = [&](long long {self.index}, int turn)"):
            self._declare_row()
            with self._chunks():
                for n in self.full:
                    source = self.address(self.load_pointer(n), n.axes, n.attrs[2], n.attrs[1])
                    text(f"te::fetch(&{self._shelf(n)}, {source});")
            text("te::depart();")
            for n in self.d.nodes:
                if id(n) in self.coming:
                    text(f"{self.coming[id(n)]} = {self._scalar_leaf(n)};")
        text.lines[-1] += ";"
        if self.s.ahead == 2:
            text("int turn = 0;")
            text(f"if ({self.first} < {self.count}) fetch_row({self.first}, turn);")

    def _shelf(self, n: Expr) -> str:
        turn = "turn * kChunks + chunk" if self.s.ahead == 2 else "chunk"
        return f"{self.row_names[id(n)]}[({turn}) * kThreads + threadIdx.x]"

    # ---- one row

    def _declare_row(self) -> None:
        """`row`; slots beyond the last row compute that one again, and `mine` keeps them from storing it."""
        if not self.plain_rows:
            index = "base + slot" if self.s.slots > 1 else "base"
            self.text(f"const long long wanted = {self.row_at(index)};")
            self.text("const bool mine = wanted < rows;")
            self.text("const long long row = mine ? wanted : rows - 1;")

    def _row(self) -> None:
        text, known = self.text, dict(self.known)
        self._declare_row()
        if self.needs_sample and not self.per_sample:
            text("const int sample = te::sample_of(row, batch_inner, batch_size);")
        if self.s.kind == Kind.SHARED:
            self._wait_for_row(known)
        if self.s.kind == Kind.REGISTERS:
            self._load_row()
        self.row_level(0, known)
        for stage, p in enumerate(self.passes):
            if p.reductions:
                self._reducing_pass(stage, p, known)
                self.row_level(stage + 1, known)
        with contextlib.nullcontext() if self.plain_rows else text.block("if (mine)"):
            self._storing_pass(known)
        if self.s.kind == Kind.SHARED and self.s.ahead == 2:
            text("turn ^= 1;")

    def _wait_for_row(self, known: dict[int, str]) -> None:
        if self.s.ahead == 1:
            self.text(f"fetch_row({self.index}, 0);")
        for n in self.d.nodes:
            if id(n) in self.coming:
                known[id(n)] = self.names.fresh(f"{n.attrs[0]}_value")
                self.text(f"const float {known[id(n)]} = {self.coming[id(n)]};")
        if self.s.ahead == 2:
            self.text("// The next row travels while this one is computed.")
            self.text(f"if ({self.next} < {self.count}) fetch_row({self.next}, turn ^ 1);")
            self.text("else te::depart();")
        self.text(f"te::arrived<{self.s.ahead - 1}>();")

    def _load_row(self) -> None:
        for n in self.full:
            self.text(f"{self.vector_type(n)} {self.row_names[id(n)]}[kChunks];")
        with self._chunks():
            for n in self.full:
                self.text(f"{self.row_names[id(n)]}[chunk] = {self.load(n)};")
        for name in self.waiting.values():
            self.text(f"float {name}[kChunks][kVector];")

    @contextlib.contextmanager
    def _chunks(self) -> Iterator[None]:
        fully = self.s.kind == Kind.REGISTERS or self.s.sums == Sums.REGISTERS
        unroll = "#pragma unroll" if fully else "#pragma unroll 2"
        with self.text.loop("chunk", "kChunks", unroll):
            self.text("const int column = (chunk * kLanes + lane) * kVector;")
            guard = self.text.block("if (column < kWidth)") if self.ragged else contextlib.nullcontext()
            with guard, self.names.scope():
                yield

    def _reducing_pass(self, stage: int, p: plan.Pass, known: dict[int, str]) -> None:
        names, kinds = [], []
        for r in p.reductions:
            kind = "Sum" if r.op == "row_sum" else "Max"
            names.append(self.names.fresh(f"row_{kind.lower()}"))
            kinds.append(f"te::{kind}")
            self.text(f"float {names[-1]} = {'0.0f' if kind == 'Sum' else '-te::infinity()'};")
        before = self.passes[stage - 1].waits if stage else ()
        new = [n for n in p.waits if n.op != "input" and all(n is not b for b in before)]
        with self._chunks():
            shelved = self._shelved(new)

            def then(inner: dict[int, str]) -> None:
                for n in new:
                    self.text(f"{shelved[id(n)]}[i] = {bare(inner[id(n)])};")
                    inner[id(n)] = f"{shelved[id(n)]}[i]"
                for r, name in zip(p.reductions, names, strict=True):
                    value = bare(number(r.args[0], inner))
                    self.text(f"{name} += {value};" if r.op == "row_sum" else f"{name} = te::maximum({name}, {value});")

            self._chunk_elements([*new, *(r.args[0] for r in p.reductions)], before, known, then)
            if self.s.kind == Kind.SHARED:
                for n in new:
                    self.text(f"te::put<kThreads>({self.waiting[id(n)]}, chunk, threadIdx.x, {shelved[id(n)]});")
        listed = ", ".join(names)
        if self.s.lanes > 32:
            exchange = f"exchange_{len(names)}[phase]"
            self.text(f"te::reduce_block<kThreads, {', '.join(kinds)}>({exchange}, {listed});")
            self.text("phase ^= 1;")
        elif self.s.lanes > 1:
            self.text(f"te::reduce_lanes<kLanes, {', '.join(kinds)}>({listed});")
        known.update({id(r): name for r, name in zip(p.reductions, names, strict=True)})

    def _shelved(self, nodes: Sequence[Expr]) -> dict[int, str]:
        """Where the elements of waiting values are while a chunk is computed."""
        if self.s.kind == Kind.REGISTERS:
            return {id(n): f"{self.waiting[id(n)]}[chunk]" for n in nodes}
        found = {id(n): self.names.fresh("waiting_values") for n in nodes}
        for name in found.values():
            self.text(f"float {name}[kVector];")
        return found

    def _chunk_elements(
        self,
        targets: Sequence[Expr],
        waiting: Iterable[Expr],
        known: Mapping[int, str],
        then: Callable[[dict[int, str]], None],
    ) -> None:
        inner, vectors = self._chunk_inputs(targets, waiting, known)
        self.elements(targets, inner, vectors, then)

    def _chunk_inputs(
        self, targets: Sequence[Expr], waiting: Iterable[Expr], known: Mapping[int, str]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Vectors and waiting values that a chunk needs, read where they are."""
        inner = dict(known)
        values = [n for n in waiting if n.op != "input"]
        wanted = {id(n) for n in plan.above(targets, [*known, *map(id, values)])}
        direct = {id(a) for n in plan.above(targets, [*known, *map(id, values)]) for a in n.args} | set(
            map(id, targets)
        )
        for n in values:
            if id(n) in direct:
                (name,) = self._shelved([n]).values()
                if self.s.kind == Kind.SHARED:
                    self.text(f"te::take<kThreads>({self.waiting[id(n)]}, chunk, threadIdx.x, {name});")
                inner[id(n)] = f"{name}[i]"
        vectors: dict[int, str] = {}
        for n in (*self.full, *self.features):
            if id(n) in wanted:
                vectors[id(n)] = self._vector(n)
        return inner, vectors

    def _vector(self, n: Expr) -> str:
        if (n.axes & Axes.OUTER and self.s.kind == Kind.REGISTERS) or n in self.kept:
            return f"{self.row_names[id(n)]}[chunk]"
        source = self._shelf(n) if n.axes & Axes.OUTER and self.s.kind == Kind.SHARED else self.load(n)
        self.text(f"const {self.vector_type(n)} {self.vector_names[id(n)]} = {source};")
        return self.vector_names[id(n)]

    def _storing_pass(self, known: dict[int, str]) -> None:
        text = self.text
        waiting = self.passes[-2].waits
        targets = [p for p in self.d.roots if p.axes & Axes.FEATURE] + self._broadcast()
        if targets:
            with self._chunks():
                inner, vectors = self._chunk_inputs(targets, waiting, known)
                chunk = "[chunk]" if self.s.sums == Sums.REGISTERS else ""
                if self.s.sums == Sums.SHARED:
                    kept = {key: self.sum_names[key] for key in self._feature_sums()}
                    for key, shelf in kept.items():
                        self.sum_names[key] = self.names.fresh(f"{shelf}_chunk")
                        text(f"float {self.sum_names[key]}[kVector];")
                        text(f"te::take<kThreads>({shelf}, chunk, threadIdx.x, {self.sum_names[key]});")
                self.last_pass(inner, vectors, chunk)
                if self.s.sums == Sums.SHARED:
                    for key, shelf in kept.items():
                        text(f"te::put<kThreads>({shelf}, chunk, threadIdx.x, {self.sum_names[key]});")
                        self.sum_names[key] = shelf
        self.row_stores(known, "lane == 0")

    def _broadcast(self) -> list[Expr]:
        """Numbers of a row that are stored or summed for every feature."""
        items: list[Store | Sum] = [*self.d.stores, *self.d.sums]
        return [p for t in items if t.axes & Axes.FEATURE for p in t.parts if not p.axes & Axes.FEATURE]

    # ---- after the loop

    def _epilogue(self) -> None:
        group = "static_cast<long long>(blockIdx.x)"
        sums = [t for t in self.d.sums if t.axes & Axes.FEATURE]
        if sums:
            with self.text.loop("chunk", "kChunks"):
                self.text("const int column = (chunk * kLanes + lane) * kVector;")
                for t in sums:
                    for k in range(len(t.parts)):
                        self._write_sum(t, k, group)
        self.write_scalar_sums(group, "threadIdx.x == 0")

    def _write_sum(self, t: Sum, k: int, group: str) -> None:
        name = self.sum_names[t.name, k]
        if self.s.sums == Sums.SHARED:
            shelf, name = name, self.names.fresh(f"{name}_chunk")
            self.text(f"float {name}[kVector];")
            self.text(f"te::take<kThreads>({shelf}, chunk, threadIdx.x, {name});")
        else:
            name = f"{name}[chunk]"
        inside = " && column < kWidth" if self.ragged else ""
        self.write_sums(name, self.pointer["partial", t.name], t.width, k * self.d.width, group, inside)
