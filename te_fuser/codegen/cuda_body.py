"""Parts shared by the functions that walk over rows: parameters, levels, vectors, sums.

The levels of a kernel's text are the call, the row, and the element of a row; a value stands at the outermost level
where it is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from te_fuser.codegen.cuda_formulas import is_boolean
from te_fuser.codegen.cuda_text import CTYPES, CudaNames, Formulas, Text, bare, literal, number, part_role
from te_fuser.codegen.description import NUMBERS, PLACES, KernelDescription, Maximum, Store, Sum
from te_fuser.codegen.schedule import ROW_VALUE, Kind, Schedule, above
from te_fuser.codegen.text import part_name
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.magnitude import Slope, bound_of, slope_of


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    `kind` is where it comes from: "load", "store", "sum", "maximum" (a tensor of the description), "seed" (two int64
    on the device, seed and offset, or nullptr: then "seed_value" and "seed_offset" bring them), "partial" (scratch of
    `PartialSums`), "row_value" (float32 scratch, one a row), "rows", "batch_inner", "batch_size", "stream" (the number
    of a random stream), "place" (where what is drawn for lies in the whole), "groups" (of the summing kernel).
    """

    kind: str
    name: str
    ctype: str


class CudaKernelText:
    """Text that every schedule shares: its parameters, its levels (call, row, element), its sums."""

    def __init__(self, symbol: str, description: KernelDescription, schedule: Schedule, space: str) -> None:
        self.symbol, self.d, self.s = symbol, description, schedule
        self.text, self.names = Text(), CudaNames()
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
            (t.name, k): self.names.fresh(f"{part_name(t.name, k, len(t.parts))}_sum")
            for t in description.sums
            for k in range(len(t.parts))
        }
        self.largest = {m.name: self.names.fresh(f"{m.name}_largest") for m in description.maxima}
        self.so_far = {m.name: self.names.fresh(f"{m.name}_so_far") for m in description.maxima}
        # A kernel that only looks for a maximum may look at what is cheaper than the magnitudes, and no smaller.
        looks = not description.outputs and len(description.maxima) == 1
        found = [bound_of(p) for p in description.maxima[0].parts] if looks else []
        self.bounds = [b for b in found if b is not None]
        if len(self.bounds) < len(found):
            self.bounds = []
        self.met, self.bound = self.names.fresh("met"), self.names.fresh("bound")
        users: dict[int, list[Expr]] = {}
        for node in description.nodes:
            for a in node.args:
                users.setdefault(id(a), []).append(node)
        self.users = users

    # ---- parameters

    def _parameters(self) -> Iterator[Parameter]:
        d = self.d
        # What may be the same memory must not be said to be another's: nothing is read by `ld.global.nc` then.
        over, under = {store for store, _ in d.overwrites}, {load for _, load in d.overwrites}
        for t in d.loads:
            kind = "row_value" if t.name.startswith(ROW_VALUE) else "load"
            yield Parameter(kind, t.name, f"const {CTYPES[t.dtype]}*{'' if t.name in under else _RESTRICT}")
        for m in d.maxima:
            yield Parameter("maximum", m.name, "float* __restrict__")
        if d.streams:
            yield Parameter("seed", "seed", "const long long* __restrict__")
            yield Parameter("seed_value", "seed_value", "long long")
            yield Parameter("seed_offset", "seed_offset", "long long")
        for s in d.stores:
            kind = "row_value" if s.name.startswith(ROW_VALUE) else "store"
            yield Parameter(kind, s.name, f"{CTYPES[s.dtype]}*{'' if s.name in over else _RESTRICT}")
        for total in d.sums:
            yield Parameter("partial", total.name, "float* __restrict__")
        for total in d.sums:
            yield Parameter("sum", total.name, f"{CTYPES[total.dtype]}* __restrict__")
        yield Parameter("rows", "rows", "long long")
        yield Parameter("batch_inner", "batch_inner", "int")
        yield Parameter("batch_size", "batch_size", "int")
        for name in d.streams:
            yield Parameter("stream", name, "int")
        if d.shared:
            yield from (Parameter("place", name, "int") for name in PLACES)

    def signature(self) -> str:
        """The head of the function, with the registers that its blocks leave a thread."""
        listed = ",\n    ".join(f"{p.ctype} {self.pointer[p.kind, p.name]}" for p in self.parameters)
        bounds = f"{self.s.threads}, {self.s.blocks_per_multiprocessor}"
        return f'extern "C" __global__ void __launch_bounds__({bounds}) {self.symbol}(\n    {listed})'

    def begin(self) -> None:
        """Write what comes before any read or write."""
        self.text("te::wait_for_earlier();")
        if self.d.sums:
            self.text("te::let_next_start();")

    # ---- levels

    def call_level(self) -> None:
        """Write the values that are the same for all rows."""
        for name, variable in self.random.items():
            stream = self.pointer["stream", name]
            self.text(f"const te::Random {variable} = te::random(seed, seed_value, seed_offset, {stream});")
        self._level([n for n in self.d.nodes if n.axes == Axes.NONE and not n.depth], self.known)

    def row_level(self, depth: int, known: dict[int, str]) -> None:
        """Write the values that are one number a row, after `depth` stages of reductions."""
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
            shared = self.d.share_of(e.attrs[0])
            if shared is not None and shared.samples:
                index = "sample + static_cast<long long>(batch_size) * row_rank"
            return f"te::draw<1>({self.random[e.attrs[0]]}, {index}, 1, 0).get(0) >= {e.attrs[1]}u"
        return f"te::number({self.load_pointer(e)}[{index}])"

    @property
    def needs_sample(self) -> bool:
        """True where a row must know its sample."""
        return any(n.op in ("input", "keep") and n.axes & Axes.BATCH and not n.axes & Axes.OUTER for n in self.d.nodes)

    # ---- vectors

    def load_pointer(self, e: Expr) -> str:
        """The parameter that a leaf is read through."""
        kind = "row_value" if e.attrs[0].startswith(ROW_VALUE) else "load"
        return self.pointer[kind, e.attrs[0]]

    def address(self, pointer: str, axes: Axes, width: int, offset: int) -> str:
        """Address of the first element of the vector at `column`."""
        terms = [pointer]
        if axes & Axes.OUTER:
            terms.append(f"row * {width}")
        elif axes & Axes.BATCH:
            terms.append(f"static_cast<long long>(sample) * {width}")
        return " + ".join([*terms, *([str(offset)] if offset else []), "column"])

    def load(self, e: Expr) -> str:
        """The expression that reads the vector of a leaf."""
        return f"te::load<kVector>({self.address(self.load_pointer(e), e.axes, e.attrs[2], e.attrs[1])})"

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
        """The loop over the elements of one vector: `then` gets the texts of `targets`."""
        draws: dict[int, str] = {}
        for n in above(targets, known):
            if n.op == "keep":
                draws[id(n)] = self.names.fresh(f"{part_role(n)}_draws")
                self.text(f"const te::Draws<kVector> {draws[id(n)]} = {self._draw(n)};")

        def leaf(e: Expr) -> str:
            return f"{draws[id(e)]}.get(i) >= {e.attrs[1]}u" if e.op == "keep" else self.element(e, vectors[id(e)])

        inner = dict(known)
        with self.text.loop("i", "kVector"), self.names.scope():
            self.formulas.write(self.text, targets, inner, leaf)
            then(inner)

    def element(self, e: Expr, vector: str) -> str:
        """Element `i` of the vector of a leaf."""
        return f"te::get({vector}, i)"

    def _draw(self, e: Expr) -> str:
        """The draws for a vector of the kept elements of a stream."""
        name, _, offset, full = e.attrs
        shared = self.d.share_of(name)
        column, row = f"{offset} + column" if offset else "column", "row"
        if shared is None:
            return f"te::draw<kVector>({self.random[name]}, row, {full}, {column})"
        if shared.rows > 1:
            row = f"te::whole_row<{shared.rows if shared.apart else 0}>(row, row_block, row_rank)"
        if shared.columns == 1:
            return f"te::draw<kVector>({self.random[name]}, {row}, {full}, {column})"
        block, whole = full // shared.parts, full * shared.columns
        if block % 8 or e.width > block:
            ranks = f"{block}, {shared.columns}, column_rank"
            return f"te::draw_apart<kVector>({self.random[name]}, {row}, {whole}, {column}, {ranks})"
        before = offset + offset // block * block * (shared.columns - 1)
        column = f"{before} + {block} * column_rank + column"
        return f"te::draw<kVector>({self.random[name]}, {row}, {whole}, {column})"

    # ---- what a row leaves behind

    def last_pass(self, known: Mapping[int, str], vectors: Mapping[int, str], chunk: str) -> None:
        """Store one vector of every full-size output and add to the column sums."""
        outputs: list[tuple[str, str, Expr]] = []
        for s in self.stored_as_vectors:
            for k, p in enumerate(s.parts):
                name = self.names.fresh(f"{part_name(s.name, k, len(s.parts))}_out")
                self.text(f"float {name}[kVector];")
                outputs.append((name, self.store_line(s, k, name), p))
        sums = [(t, k, p) for t in self.d.sums if t.axes & Axes.FEATURE for k, p in enumerate(t.parts)]
        largest = [(self.largest[m.name], p) for m in self.d.maxima for p in m.parts]

        def then(inner: dict[int, str]) -> None:
            for name, _, p in outputs:
                self.text(f"{name}[i] = {bare(number(p, inner))};")
            for t, k, p in sums:
                self.text(f"{self.sum_names[t.name, k]}{chunk}[i] += {bare(number(p, inner))};")
            for name, p in largest:
                self.text(f"{name} = te::larger({name}, {bare(number(p, inner))});")

        targets = [*(p for _, _, p in outputs), *(p for _, _, p in sums), *(p for _, p in largest)]
        if self.bounds:
            self._where_it_may_be_larger(targets, known, vectors, then)
        elif targets:
            self.elements(targets, known, vectors, then)
        for _, line, _ in outputs:
            self.text(line)

    def _where_it_may_be_larger(
        self,
        targets: Sequence[Expr],
        known: Mapping[int, str],
        vectors: Mapping[int, str],
        then: Callable[[dict[int, str]], None],
    ) -> None:
        """The loop of a kernel that only looks for a maximum, over vectors that may have a larger one."""
        (name,) = self.largest.values()
        slope = slope_of(targets[0]) if len(targets) == 1 else None
        self.text(f"unsigned {self.bound} = 0u;")
        if slope is None:
            self._bound_of_each(known, vectors)
        else:
            self._bound_of_all(slope, targets[0], known, vectors)
        with self.text.block(f"if (te::may_be_larger({self.bound}, {name}, &{self.met}))"):
            self.elements(targets, known, vectors, then)
            self.text(f"te::meet({name}, &{self.met});")

    def _bound_of_each(self, known: Mapping[int, str], vectors: Mapping[int, str]) -> None:
        def then(inner: dict[int, str]) -> None:
            for b in self.bounds:
                self.text(f"{self.bound} = te::larger({self.bound}, {bare(number(b, inner))});")

        self.elements(self.bounds, known, vectors, then)

    def _bound_of_all(self, slope: Slope, e: Expr, known: Mapping[int, str], vectors: Mapping[int, str]) -> None:
        """Write the bound of `e` over all numbers between the smallest and the largest of a vector."""
        high, low = self.names.fresh("high"), self.names.fresh("low")
        self.text(f"float {high} = 0.0f, {low} = 0.0f;")

        def then(inner: dict[int, str]) -> None:
            x = number(slope.leaf, inner)
            self.text(f"{high} = te::maximum({high}, {x});")
            self.text(f"{low} = te::minimum({low}, {x});")

        self.elements([slope.leaf], known, vectors, then)
        with self.names.scope():
            there = dict(known)
            self.formulas.write(self.text, [e], there, lambda leaf: high)
            self.text(
                f"{self.bound} = te::larger(te::larger(0u, {bare(there[id(e)])}), {literal(slope.at_zero)} * {low});"
            )

    @property
    def stored_as_vectors(self) -> tuple[Store, ...]:
        """Stores that take the vectors of a row."""
        return tuple(s for s in self.d.stores if s.axes & Axes.FEATURE)

    def store_line(self, s: Store, k: int, name: str) -> str:
        """The statement that stores the vector `name` of part k."""
        return f"te::store({self.address(self.pointer['store', s.name], s.axes, s.width, k * self.d.width)}, {name});"

    def row_stores(self, known: Mapping[int, str], condition: str) -> None:
        """Store what is one number a row, and add up what is summed over rows only."""
        rows = [s for s in self.d.stores if not s.axes & Axes.FEATURE]
        with self.text.block(f"if ({condition})") if rows else contextlib.nullcontext():
            for s in rows:
                kind = "row_value" if s.name.startswith(ROW_VALUE) else "store"
                value = bare(number(s.parts[0], known))
                self.text(f"{self.pointer[kind, s.name]}[row] = te::rounded<{CTYPES[s.dtype]}>({value});")
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                self.text(f"{self.sum_names[t.name, 0]}[0] += {bare(number(t.parts[0], known))};")

    def declare_largest(self) -> None:
        """The largest magnitudes that a thread has met."""
        if self.largest:
            self.text(f"__shared__ float raised[{len(self.largest)}][32];")
        for name in self.largest.values():
            self.text(f"unsigned {name} = 0u;")
        if self.s.ends_soon:
            for m in self.d.maxima:
                self.text(f"const unsigned {self.so_far[m.name]} = te::raised_so_far({self._raised(m)});")
        if self.bounds:
            self.text(f"__shared__ unsigned {self.met};")
            self.text(f"if (threadIdx.x == 0) {self.met} = 0u;")
            self.text("__syncthreads();")

    def _raised(self, m: Maximum) -> str:
        """Address of the number that blocks raise."""
        number = self.pointer["maximum", m.name]
        return number if m.scale is None else f"{number} + {NUMBERS.index('largest')}"

    def raise_largest(self) -> None:
        """Raise the numbers of the call to them."""
        for k, m in enumerate(self.d.maxima):
            number, largest, scale = self.pointer["maximum", m.name], self.largest[m.name], m.scale
            if m.made_in:  # the largest of what is rounded
                rounded = f"te::rounded<{CTYPES[m.made_in]}>(te::as_float({largest}))"
                largest = f"te::larger(0u, te::number({rounded}))"
            given = [f"raised[{k}]", self._raised(m), largest, *([self.so_far[m.name]] if self.s.ends_soon else [])]
            self.text(f"te::raise<kThreads>({', '.join(given)});")
            if scale is not None:
                power_of_two = str(scale.power_of_two).lower()
                limits = f"{literal(scale.most)}, {literal(scale.epsilon)}"
                self.text(f"te::scale_of_all<{power_of_two}>({number}, gridDim.x, {limits});")

    def declare_scalar_sums(self) -> None:
        """The sums of numbers that a row has one of."""
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                self.text(f"float {self.sum_names[t.name, 0]}[1] = {{}};")

    def write_sums(self, name: str, t: Sum, offset: int, group: str, inside: str) -> None:
        """Store the sums of one vector of columns, added up over the rows that the block does at once."""
        slot = " && slot == 0" if self.s.slots > 1 else ""
        if self.s.slots > 1:
            self.text(f"te::add_slots<kSlots, kLanes>(shared_sums, slot, lane, {name});")
        column = f"{offset} + column" if offset else "column"
        line = f"te::store_sums({self.sum_places(t, group, column)}, {name});"
        condition = (inside + slot).removeprefix(" && ")
        self.text(f"if ({condition}) {line}" if condition else line)

    def write_scalar_sums(self, group: str, first: str) -> None:
        """Store the sums of numbers that a row has one of."""
        for t in self.d.sums:
            if not t.axes & Axes.FEATURE:
                name = self.sum_names[t.name, 0]
                if self.s.slots > 1:
                    self.text(f"te::add_slots<kSlots, kLanes>(shared_sums, slot, lane, {name});")
                self.text(f"if ({first}) te::store_sums({self.sum_places(t, group, '')}, {name});")

    def sum_places(self, t: Sum, group: str, column: str) -> str:
        """Arguments for the place of a sum: the result where nobody else adds to it, else the partial sums."""
        width = t.width if t.axes & Axes.FEATURE else 1
        sample = f"static_cast<long long>(sample) * {width}" if t.axes & Axes.BATCH else ""
        total = " + ".join(filter(None, [self.pointer["sum", t.name], sample, column]))
        partial = " + ".join(filter(None, [self.pointer["partial", t.name], f"{group} * {width}", column]))
        return f"alone, {total}, {partial}"

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
            self.text(f"const int lane = {self.lane}, slot = {self.slot};")
            if self.d.sums:
                self.text(f"__shared__ float shared_sums[{self.shared_sums}];")
        else:
            self.text("const int lane = threadIdx.x;")

    lane, slot = "threadIdx.x % kLanes", "threadIdx.x / kLanes"  # with several slots
    slots = " * kSlots"  # times so many rows a block does at once
    shared_sums = "kLanes * kSlots * kVector"  # numbers in shared memory while the slots' sums are added up

    def declare_range(self, group: str, groups: str) -> None:
        """The rows of this block: `first`, `step` and `count` of an index that `row_at` turns into a row."""
        slots, all_groups = self.slots if self.s.slots > 1 or self.s.held > 1 else "", groups
        if self.per_sample:
            self.text("// Blocks own samples: the index counts the rows of one sample.")
            self.text(f"const int splits = {groups} / batch_size;")
            self.text(f"const int sample = {group} / splits, split = {group} % splits;")
            self.text("const long long count = te::rows_of_sample(rows, batch_inner, batch_size);")
            group, groups = "split", "splits"
        if self.d.sums:
            only = all(t.axes & Axes.BATCH for t in self.d.sums)
            self.text(f"const bool alone = {'splits' if only else all_groups} == 1;")
        if self.plain_rows:
            return
        if not self.per_sample:
            self.text("const long long count = rows;")
        self.text(f"const long long step = static_cast<long long>({groups}){slots};")
        self.text(f"const long long first = static_cast<long long>({group}){slots};")

    @property
    def plain_rows(self) -> bool:
        """True where a block simply takes every so many rows, one at a time."""
        return self.s.slots == self.s.held == 1 and not (self.per_sample or self.s.owns_columns or self.backwards)

    @property
    def backwards(self) -> bool:
        """True where rows go last to first: the next kernel finds the first in L2."""
        return not (self.d.outputs or self.per_sample) and self.s.kind in (Kind.COLUMNS, Kind.REGISTERS)

    def row_at(self, index: str) -> str:
        """The row with this index."""
        if self.backwards:
            return f"rows - 1 - ({index})"
        return f"te::row_of({index}, sample, batch_inner, batch_size)" if self.per_sample else index


_CONSTANTS = "constants;"
_RESTRICT = " __restrict__"
_PLAIN = ("seed", "seed_value", "seed_offset", "rows", "batch_inner", "batch_size", "place")
SUFFIX = {"partial": "_partial", "stream": "_stream"}
