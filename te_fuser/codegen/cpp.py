"""C++ text for a kernel description: the schedule for a CPU core and the words it is written in.

A kernel goes over its rows one after the other. For each row there is one loop over the features for each stage of
row reductions, and a last one that stores and adds to the sums over rows. What several loops need is computed again
when that is cheap; otherwise it is kept in a row buffer, which stays in the core's first cache.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from te_fuser.codegen.description import KernelDescription, Load, Store, Sum, axes_text, item_size
from te_fuser.formula.expr import Axes, Expr, topological

# ------------------------------------------------------------------------------------------------ result


@dataclass(frozen=True)
class CppKernel:
    """The text of one kernel, and what the runtime must know to call it.

    `source` defines `<symbol>_rows` and, when there are sums over rows, `<symbol>_finish`; it needs `te_cpu.h`.
    """

    description: KernelDescription
    symbol: str
    source: str
    dtypes: tuple[str, ...]  # of the tensors: loads, then the seed if there are random streams, stores, sums
    partial_floats: int
    partial_floats_per_sample: int
    scratch_floats: int
    row_elements: int  # how many plain elements the work on one row is worth


def generate(description: KernelDescription) -> CppKernel:
    """Write the kernel.

    Raises:
        ValueError: for a dtype that kernels do not know, float64 above all.
    """
    tensors: tuple[Load | Store | Sum, ...] = (*description.loads, *description.stores, *description.sums)
    for tensor in tensors:
        if tensor.dtype not in _ELEMENTS:
            raise ValueError(
                f"kernel {description.name}: {tensor.name} is {tensor.dtype}; "
                f"generated kernels know {', '.join(_ELEMENTS)}"
            )
    return _Kernel(description).write()


def symbol_of(description: KernelDescription) -> str:
    """The name in the library: role and digest."""
    return f"{_identifier(description.name)}_{description.key}"


# -------------------------------------------------------------------------------------------- the schedule

_ELEMENTS = {"float32": "float", "bfloat16": "te::bf16", "float16": "te::f16"}
_REDUCTIONS = ("row_sum", "row_max")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Rough instruction counts for one vector; a node that is not named costs one.
_COSTS = {
    "const": 0, "div": 8, "exp": 16, "log": 24, "tanh": 28, "erf": 28, "sigmoid": 26, "sqrt": 10, "rsqrt": 16,
    "maximum": 3, "minimum": 3, "clamp": 2, "where": 2, "keep": 3,
}  # fmt: skip
_LOAD_COSTS = {"float32": 1, "bfloat16": 2, "float16": 8}
_BUFFER_ABOVE = 8  # a value this dear is kept for the next loop instead of being computed again
_UNROLL_BELOW = ((12, 4), (60, 2))  # loop cost, how many accumulators a row reduction gets
_PADDING = 16  # floats: the widest vector
_PREFETCH_FROM = 1024  # bytes: the next row of a tensor is fetched early when its rows are at least so long


@dataclass
class _Loop:
    """One pass over the features of a row."""

    reductions: tuple[Expr, ...]
    roots: tuple[Expr, ...]  # everything it computes: arguments of the reductions, parts of stores and sums
    buffered: list[Expr]  # what it keeps for later loops
    last: bool


def _has_features(e: Expr) -> bool:
    return bool(e.axes & Axes.FEATURE)


def _ordered(roots: Iterable[Expr], has_below: Callable[[Expr], bool]) -> list[Expr]:
    """The nodes below `roots`, arguments first, going down only where `has_below` holds; without recursion."""
    order: dict[int, Expr] = {}
    entered: set[int] = set()
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        e, ready = stack.pop()
        if ready:
            order[id(e)] = e
        elif id(e) not in entered:
            entered.add(id(e))
            stack.append((e, True))
            if has_below(e):
                stack.extend((a, False) for a in reversed(e.args))
    return list(order.values())


def _below(roots: Iterable[Expr], stop: Callable[[Expr], bool]) -> list[Expr]:
    """The nodes with features below `roots`, arguments first; what `stop` holds for is the last on its way."""
    return [e for e in _ordered(roots, lambda e: _has_features(e) and not stop(e)) if _has_features(e)]


def _late_reductions(d: KernelDescription, feature_roots: Sequence[Expr]) -> list[Expr]:
    """The row reductions that no loop needs: only numbers of a row depend on them, so the last loop can do them."""
    early = {id(n) for n in topological(feature_roots)}
    candidates = [r for stage in d.reductions for r in stage if id(r) not in early]
    needed = {id(n) for r in candidates for n in topological(r.args)}
    return [r for r in candidates if id(r) not in needed]


def _outputs(d: KernelDescription) -> tuple[Store | Sum, ...]:
    return (*d.stores, *d.sums)


def _loops(d: KernelDescription, cost: Callable[[Expr], int]) -> list[_Loop]:
    feature_roots = [p for item in _outputs(d) if item.axes & Axes.FEATURE for p in item.parts]
    late = _late_reductions(d, feature_roots)
    late_ids = {id(r) for r in late}
    loops = []
    for stage in d.reductions:
        early = tuple(r for r in stage if id(r) not in late_ids)
        if early:
            loops.append(_Loop(early, tuple(r.args[0] for r in early), [], last=False))
    if late or feature_roots:
        roots = (*(r.args[0] for r in late), *feature_roots)
        loops.append(_Loop(tuple(late), roots, [], last=True))
    _choose_buffers(loops, cost)
    return loops


def _choose_buffers(loops: Sequence[_Loop], cost: Callable[[Expr], int]) -> None:
    """Decide which values a later loop finds in a row buffer."""
    first_in: dict[int, _Loop] = {}
    buffered: set[int] = set()
    for loop in loops:
        known = set(first_in)
        for e in _below(loop.roots, lambda e: id(e) in buffered):
            if id(e) in buffered:
                continue
            if id(e) in known and _is_dear(e, buffered, cost) and _is_frontier(e, loop, known, buffered):
                buffered.add(id(e))
                first_in[id(e)].buffered.append(e)
            first_in.setdefault(id(e), loop)


def _is_dear(e: Expr, buffered: set[int], cost: Callable[[Expr], int]) -> bool:
    nodes = _below([e], lambda n: id(n) in buffered)
    return sum(1 if id(n) in buffered else cost(n) for n in nodes) > _BUFFER_ABOVE


def _is_frontier(e: Expr, loop: _Loop, known: set[int], buffered: set[int]) -> bool:
    """Whether something that only this loop computes uses `e`; what lies deeper comes along with its user."""
    if any(e is root for root in loop.roots):
        return True
    nodes = _below(loop.roots, lambda n: id(n) in buffered or id(n) in known)
    return any(e is a for n in nodes if id(n) not in known for a in n.args)


# ------------------------------------------------------------------------------------------------- names

_RESERVED = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const constexpr
const_cast continue co_await co_return co_yield decltype default delete do double dynamic_cast else enum
explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof
static static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename
union unsigned using virtual void volatile wchar_t while xor xor_eq te at launch row row_begin row_end worker
workers sample block_end scratch partial sample_partial share
"""  # C++'s words, and those of the text around the values
_VALUE_NAMES = {"add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "lt": "below", "gt": "above"}


def _identifier(role: str) -> str:
    name = re.sub(r"[^0-9a-zA-Z_]+", "_", role).strip("_") or "value"
    name = re.sub(r"__+", "_", name)
    return f"v{name}" if name[0].isdigit() else name


class _Names:
    """Unique names in one function, made in the order of asking."""

    def __init__(self) -> None:
        self.taken = set(_RESERVED.split())

    def fresh(self, role: str) -> str:
        base = _identifier(role)
        number, name = 1, base
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name

    def numbered(self, role: str) -> str:
        number = 1
        while f"{role}_{number}" in self.taken:
            number += 1
        self.taken.add(f"{role}_{number}")
        return f"{role}_{number}"


def literal(value: float) -> str:
    """A float literal: the shortest that gives this float32."""
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isnan(single):
        return "te::not_a_number"
    if math.isinf(single):
        return "te::infinity" if single > 0 else "-te::infinity"
    candidates = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return f"{next(c for c in candidates if struct.unpack('f', struct.pack('f', c))[0] == single)!r}f"


# ------------------------------------------------------------------------------------------------- lines


class _Lines:
    """Indented text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, *lines: str) -> None:
        self.lines += ["  " * self.depth + line if line else "" for line in lines]

    @contextlib.contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        self(head + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self(end)


# ------------------------------------------------------------------------------------- expressions as text

_ATOM, _PRODUCT, _SUM, _COMPARISON = 3, 2, 1, 0
_INFIX = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT)}
_LONGEST = 64


@dataclass(frozen=True)
class _Text:
    """Part of a C++ expression, how tightly it binds, and whether it is a vec (or a mask) rather than one number."""

    text: str
    binds: int
    vector: bool
    truth: bool = False  # a comparison: a mask or a bool
    named: bool = False

    def within(self, binds: int) -> str:
        return self.text if self.binds >= binds else f"({self.text})"


def _count_uses(roots: Sequence[Expr], nodes: Sequence[Expr]) -> Counter[int]:
    """How often each node is used, so that what is used once is written in its place."""
    return Counter(id(e) for e in (*roots, *(a for n in nodes for a in n.args)))


class _Scope:
    """Writes statements for expressions in one scope: numbers of a row, or vecs in the body of a loop."""

    vectors = False

    def __init__(self, kernel: _Kernel, roots: Sequence[Expr], known: dict[int, _Text]) -> None:
        self.kernel = kernel
        self.known = known  # node -> the text to use for it
        self.uses = _count_uses(roots, [n for n in _ordered(roots, self._is_made_here) if self._is_made_here(n)])

    def _is_made_here(self, e: Expr) -> bool:
        return id(e) not in self.known and e.op not in _REDUCTIONS

    def number(self, e: Expr) -> _Text:
        """`e` as a number or a vec, even when it is a comparison."""
        found = self.value(e)
        return _Text(f"te::truth({found.text})", _ATOM, found.vector) if found.truth else found

    def argument(self, e: Expr) -> str:
        """`e` as the argument of a function: a vec in a loop, a number outside."""
        found = self.number(e)
        return f"te::splat({found.text})" if self.vectors and not found.vector else found.text

    def value(self, e: Expr) -> _Text:
        """`e`, by its name if it has one; the statements that it needs are written first."""
        if id(e) not in self.known:
            for node in _ordered([e], lambda n: self._is_made_here(n)):
                if id(node) not in self.known:
                    self.known[id(node)] = self._write(node)
        return self.known[id(e)]

    def _write(self, e: Expr) -> _Text:
        found = _WRITERS.get(e.op, _Scope._call)(self, e)
        return self.name(e, found) if self._wants_name(e, found) else found

    def _wants_name(self, e: Expr, found: _Text) -> bool:
        return e.op != "const" and (e.op in ("input", "keep") or self.uses[id(e)] > 1 or len(found.text) > _LONGEST)

    def name(self, e: Expr, found: _Text) -> _Text:
        """Write the statement that gives `e` its name."""
        name = self.kernel.value_name(e)
        kinds = ("te::mask", "bool") if found.truth else ("te::vec", "float")
        self.kernel.lines(f"const {kinds[0] if found.vector else kinds[1]} {name} = {found.text};")
        return _Text(name, _ATOM, found.vector, found.truth, named=True)

    def named(self, e: Expr) -> None:
        """Give `e` a name, unless it has one or is a constant."""
        found = self.value(e)
        if e.op != "const" and not found.named:
            self.known[id(e)] = self.name(e, found)

    # -- one writer for each kind of node

    def _const(self, e: Expr) -> _Text:
        return _Text(literal(float(e.attrs[0])), _ATOM, False)

    def _infix(self, e: Expr) -> _Text:
        sign, binds = _INFIX[e.op]
        a, b = (self.number(x) for x in e.args)
        vector = a.vector or b.vector
        if e.op == "mul" and a.text == "-1.0f":
            return _Text(f"-{b.within(_ATOM)}", _PRODUCT, vector)
        return _Text(f"{a.within(binds)} {sign} {b.within(binds + 1)}", binds, vector)

    def _comparison(self, e: Expr) -> _Text:
        a, b = (self.number(x) for x in e.args)
        text = f"{a.within(_SUM)} {_COMPARISONS[e.op]} {b.within(_SUM)}"
        return _Text(text, _COMPARISON, a.vector or b.vector, truth=True)

    def _where(self, e: Expr) -> _Text:
        condition = self.value(e.args[0])
        test = condition.text if condition.truth else f"{condition.within(_SUM)} != 0.0f"
        return self._function("where", test, *(self.argument(x) for x in e.args[1:]))

    def _clamp(self, e: Expr) -> _Text:
        return self._function("clamp", self.argument(e.args[0]), *(literal(x) for x in e.attrs))

    def _call(self, e: Expr) -> _Text:
        return self._function(e.op, *(self.argument(a) for a in e.args))

    def _function(self, name: str, *arguments: str) -> _Text:
        return _Text(f"te::{name}({', '.join(arguments)})", _ATOM, self.vectors)

    def _input(self, e: Expr) -> _Text:
        return _Text(self.kernel.load_text(e), _ATOM, self.vectors)

    def _keep(self, e: Expr) -> _Text:
        return _Text(self.kernel.keep_text(e), _ATOM, self.vectors)


class _LoopScope(_Scope):
    """The body of a loop over the features."""

    vectors = True

    def __init__(self, kernel: _Kernel, loop: _Loop, known: dict[int, _Text]) -> None:
        self.loop = loop
        self.kept = {id(e) for e in loop.buffered}
        super().__init__(kernel, loop.roots, dict(known))

    def _is_made_here(self, e: Expr) -> bool:
        return super()._is_made_here(e) and _has_features(e) and not self._lies_in_buffer(e)

    def _lies_in_buffer(self, e: Expr) -> bool:
        return id(e) in self.kernel.buffers and id(e) not in self.kept

    def _write(self, e: Expr) -> _Text:
        if self._lies_in_buffer(e):
            return self.name(e, _Text(f"te::load_buffer({self.kernel.buffers[id(e)]}, at)", _ATOM, True))
        found = super()._write(e)
        if id(e) in self.kept:
            number = f"te::truth({found.text})" if found.truth else found.text
            self.kernel.lines(f"te::store_buffer({self.kernel.buffers[id(e)]}, at, {number});")
        return found

    def _wants_name(self, e: Expr, found: _Text) -> bool:
        return id(e) in self.kept or super()._wants_name(e, found)


_WRITERS: dict[str, Callable[[_Scope, Expr], _Text]] = {
    "const": _Scope._const,
    "where": _Scope._where,
    "clamp": _Scope._clamp,
    "input": _Scope._input,
    "keep": _Scope._keep,
    **dict.fromkeys(_INFIX, _Scope._infix),
    **dict.fromkeys(_COMPARISONS, _Scope._comparison),
}


# -------------------------------------------------------------------------------------------- the kernel


def _plus(pointer: str, *offsets: int | str) -> str:
    """`pointer` moved by the offsets that are not 0."""
    return " + ".join([pointer, *(str(o) for o in offsets if o not in (0, "0"))])


def _padded(count: int) -> int:
    return -(-count // _PADDING) * _PADDING


@dataclass(frozen=True)
class _RowsSum:
    """One part of a sum over rows, and where its partial sums lie: in a worker's block, or in each sample's share."""

    total: Sum
    part: Expr
    first: int  # the element of the stored tensor (or of its sample's row) where the part begins
    count: int
    offset: int
    name: str

    @property
    def per_sample(self) -> bool:
        return bool(self.total.axes & Axes.BATCH)

    @property
    def has_features(self) -> bool:
        return bool(self.total.axes & Axes.FEATURE)

    @property
    def partial(self) -> str:
        return _plus("sample_partial" if self.per_sample else "partial", self.offset)


def _part_name(name: str, index: int, parts: int) -> str:
    return name if parts == 1 else f"{name}_{index}"


def _place_sums(d: KernelDescription, names: _Names) -> list[_RowsSum]:
    placed: list[_RowsSum] = []
    offsets = {False: 0, True: 0}  # per sample or not -> the floats given away
    for total in d.sums:
        count = d.width if total.axes & Axes.FEATURE else 1
        per_sample = bool(total.axes & Axes.BATCH)
        for index, part in enumerate(total.parts):
            name = names.fresh(_part_name(total.name, index, len(total.parts)) + "_sum")
            placed.append(_RowsSum(total, part, index * count, count, offsets[per_sample], name))
            offsets[per_sample] += 2 * _padded(count)
    return placed


class _Kernel:
    """Everything that is known while one kernel is written."""

    def __init__(self, d: KernelDescription) -> None:
        self.d = d
        self.lines = _Lines()
        self.names = _Names()
        self.loads = {load.name: load for load in d.loads}
        named: tuple[Load | Store | Sum, ...] = (*d.loads, *_outputs(d))
        self.tensors = {id(t): self.names.fresh(f"{t.name}_tensor") for t in named}
        self.sums = _place_sums(d, self.names)
        self.partial_floats, self.partial_floats_per_sample = (
            sum(2 * _padded(s.count) for s in self.sums if s.per_sample == per_sample) for per_sample in (False, True)
        )
        self.loops = _loops(d, self.cost)
        self.long_row = self._is_one_long_row()
        self.value_names: dict[int, str] = {}
        self.preferred = {
            id(p): _part_name(store.name, k, len(store.parts)) for store in d.stores for k, p in enumerate(store.parts)
        }
        self.bits: dict[str, str] = {}  # random stream -> the buffer with a row's bits
        self.buffers: dict[int, str] = {}  # node -> the row buffer that keeps it
        self.scratch_floats = 0

    # -- facts

    def cost(self, e: Expr) -> int:
        return _LOAD_COSTS[self.loads[e.attrs[0]].dtype] if e.op == "input" else _COSTS.get(e.op, 1)

    def _is_one_long_row(self) -> bool:
        """Whether rows mean nothing; then there is one loop over all of them, and no width is an odd one."""
        d = self.d
        tensors: tuple[Load | Store, ...] = (*d.loads, *d.stores)
        simple = all(t.axes == Axes.NONE or (t.axes == Axes.FULL and t.width == d.width) for t in tensors)
        return simple and not (d.sums or d.streams or d.reductions)

    @functools.cached_property
    def uses_samples(self) -> bool:
        leaves = any(n.op in ("input", "keep") and n.axes & Axes.FULL in (2, 6) for n in self.d.nodes)
        return leaves or bool(self.partial_floats_per_sample)

    @functools.cached_property
    def scalar_roots(self) -> list[Expr]:
        """The values without features that loops, stores and sums read."""
        found = [p for item in _outputs(self.d) if not item.axes & Axes.FEATURE for p in item.parts]
        for loop in self.loops:
            found += self.scalars_of(loop)
        return found

    def scalars_of(self, loop: _Loop) -> list[Expr]:
        kept = {id(e) for e in loop.buffered}
        nodes = _below(loop.roots, lambda e: id(e) in self.buffers and id(e) not in kept)
        lying = {id(n) for n in nodes if id(n) in self.buffers and id(n) not in kept}
        found = [a for n in nodes if id(n) not in lying for a in n.args if not _has_features(a)]
        return [*found, *(r for r in loop.roots if not _has_features(r))]

    def row_elements(self) -> int:
        """Work on one row, in elements that are read, changed a little and written."""
        tensors: tuple[Load | Store, ...] = (*self.d.loads, *self.d.stores)
        moved = sum(t.width for t in tensors if t.axes == Axes.FULL) / 2
        computed = sum(self.cost(n) for loop in self.loops for n in _below(loop.roots, lambda e: False)) / 8
        return max(1, round(max(moved, computed * self.d.width)))

    # -- names and leaves

    def value_name(self, e: Expr) -> str:
        """The name of a node, one for all scopes."""
        found = self.value_names.get(id(e))
        if found is None:
            found = self.value_names[id(e)] = self._new_name(e)
        return found

    def _new_name(self, e: Expr) -> str:
        if e.op == "input":
            name, offset, full = e.attrs
            return self.names.fresh(_part_name(name, offset // e.width, full // e.width))
        if e.op == "keep":
            name, _, offset, full = e.attrs
            return self.names.fresh(_part_name(f"{name}_keep", offset // e.width, full // e.width))
        if id(e) in self.preferred:
            return self.names.fresh(self.preferred[id(e)])
        return self.names.numbered(_VALUE_NAMES.get(e.op, e.op))

    def load_text(self, e: Expr) -> str:
        load = self.loads[e.attrs[0]]
        if e.axes & Axes.FEATURE:
            return f"te::load({_plus(self.row_pointer(load), e.attrs[1])}, at)"
        index = "row" if e.axes & Axes.OUTER else "sample" if e.axes & Axes.BATCH else 0
        return f"te::load({_plus(self.tensors[id(load)], index)})"

    def keep_text(self, e: Expr) -> str:
        name, limit, offset, _ = e.attrs
        if e.axes & Axes.FEATURE:
            return f"te::keep({_plus(self.bits[name], offset)}, at, {limit})"
        return f"te::keep_sample(sample, {limit}, {self.streams[name]})"

    def row_pointer(self, tensor: Load | Store) -> str:
        """The pointer that a loop over features starts from."""
        name = self.tensors[id(tensor)]
        whole = self.long_row or not tensor.axes & Axes.ROWS
        return name if whole else name.removesuffix("_tensor") + "_row"

    # -- the text

    def write(self) -> CppKernel:
        self._comment()
        symbol = symbol_of(self.d)
        with self.lines.block(_signature(symbol, "rows", "int64_t row_begin, int64_t row_end, int64_t worker")):
            self._rows_function()
        if self.sums:
            self.lines("")
            with self.lines.block(_signature(symbol, "finish", "int64_t workers")):
                self._finish_function()
        seed = ("int64",) if self.d.streams else ()
        return CppKernel(
            description=self.d,
            symbol=symbol,
            source="\n".join(self.lines.lines) + "\n",
            dtypes=(
                *(t.dtype for t in self.d.loads),
                *seed,
                *(t.dtype for t in _outputs(self.d)),
            ),
            partial_floats=self.partial_floats,
            partial_floats_per_sample=self.partial_floats_per_sample,
            scratch_floats=self.scratch_floats,
            row_elements=self.row_elements(),
        )

    def _comment(self) -> None:
        self.lines(f"// {self.d.name}, {self.d.width} features")
        for kind, items in (("load ", self.d.loads), ("store", self.d.stores), ("sum  ", self.d.sums)):
            for t in items:  # type: ignore[attr-defined]
                self.lines(f"//   {kind} {t.name}: {axes_text(t.axes)} x {t.width} {t.dtype}")

    def _rows_function(self) -> None:
        self._tensor_pointers()
        self._stream_numbers()
        self._divide_scratch()
        scalars = _Scope(self, self.scalar_roots, {})
        for e in self._call_constants():
            scalars.named(e)
        for s in self.sums:
            if s.has_features:
                self.lines(f"te::clear_block({s.name}, {_padded(s.count)});")
            elif not s.per_sample:
                self.lines(f"double {s.name} = 0.0;")
        if self.long_row:
            self._loop(self.loops[-1], scalars)
        elif self.sums:
            self._blocks_of_rows(scalars)
        else:
            with self.lines.block("for (int64_t row = row_begin; row < row_end; ++row)"):
                if self.uses_samples:
                    self._sample_pointers()
                self._row(scalars)
        for s in self.sums:
            if not s.has_features and not s.per_sample:
                self.lines(f"te::store_partial({s.partial}, {s.name});")

    def _tensor_pointers(self) -> None:
        seeds = 1 if self.d.streams else 0
        for index, load in enumerate(self.d.loads):
            self._pointer(load, f"const {_ELEMENTS[load.dtype]}", index)
        for index, store in enumerate(self.d.stores, len(self.d.loads) + seeds):
            self._pointer(store, _ELEMENTS[store.dtype], index)

    def _pointer(self, tensor: Load | Store, element: str, index: int) -> None:
        self.lines(f"{element}* const {self.tensors[id(tensor)]} = te::tensor<{element}>(launch, {index});")

    def _stream_numbers(self) -> None:
        self.streams = {name: self.names.fresh(f"{name}_stream") for name in self.d.streams}
        for number, variable in enumerate(self.streams.values()):
            seed = len(self.d.loads)
            self.lines(f"const te::random_stream {variable} = te::stream_of(launch, {seed}, {number});")

    def _divide_scratch(self) -> None:
        """Give row buffers, the blocks of the sums and the random bits their places."""
        if self.sums:
            self.lines("float* const partial = launch->partials[worker];")
        start = len(self.lines.lines)
        for loop in self.loops:
            for e in loop.buffered:
                self.buffers[id(e)] = self._scratch(f"{self.value_name(e)}_buffer", _padded(self.d.width))
        for s in self.sums:
            if s.has_features:
                self._scratch(s.name, _padded(s.count), fresh=False)
        for name, width in self._drawn_streams().items():
            floats = _padded(-(-width // 8)) * 4 + _PADDING
            self.bits[name] = self._scratch(f"{name}_bits", floats, "uint16_t")
        if self.scratch_floats:
            self.lines.lines.insert(start, "  float* const scratch = launch->scratch[worker];")

    def _scratch(self, role: str, floats: int, element: str = "float", *, fresh: bool = True) -> str:
        name = self.names.fresh(role) if fresh else role
        place = _plus("scratch", self.scratch_floats)
        self.lines(
            f"{element}* const {name} = {place};"
            if element == "float"
            else f"{element}* const {name} = reinterpret_cast<{element}*>({place});"
        )
        self.scratch_floats += floats
        return name

    def _drawn_streams(self) -> dict[str, int]:
        """The streams that are drawn for each element -> the width of their rows."""
        return {n.attrs[0]: n.attrs[-1] for n in self.d.nodes if n.op == "keep" and _has_features(n)}

    def _call_constants(self) -> list[Expr]:
        """What is the same for all rows of a call, as far as something else reads it."""

        def constant(e: Expr) -> bool:
            return e.axes == Axes.NONE and e.depth == 0 and e.op != "const"

        roots = {id(r) for r in self.scalar_roots}
        nodes = [n for n in topological(self.scalar_roots) if not _has_features(n)]
        read = roots | {id(a) for n in nodes if not constant(n) for a in n.args}
        return [n for n in nodes if constant(n) and id(n) in read]

    def _blocks_of_rows(self, scalars: _Scope) -> None:
        end = "block_end_in_sample(row, row_end, launch)" if self.uses_samples else "block_end(row, row_end)"
        with self.lines.block("for (int64_t row = row_begin; row < row_end;)"):
            self.lines(f"const int64_t block_end = te::{end};")
            if self.uses_samples:
                self._sample_pointers()
            batch_sums = [s for s in self.sums if s.per_sample and not s.has_features]
            for s in batch_sums:
                self.lines(f"double {s.name} = 0.0;")
            with self.lines.block("for (; row < block_end; ++row)"):
                self._row(scalars)
            for s in self.sums:
                if s.has_features:
                    self.lines(f"te::flush_block<{_padded(s.count)}>({s.name}, {s.partial});")
            for s in batch_sums:
                self.lines(f"te::add_to_partial({s.partial}, {s.name});")

    def _sample_pointers(self) -> None:
        self.lines("const int64_t sample = te::sample_of(row, launch);")
        if self.partial_floats_per_sample:
            step = f"sample * {self.partial_floats_per_sample}"
            self.lines(f"float* const sample_partial = {_plus('partial', self.partial_floats, step)};")
        for load in self.d.loads:
            if load.axes == Axes.SAMPLE_FEATURES:
                self._row_pointer_line(load, f"const {_ELEMENTS[load.dtype]}", "sample")

    def _row_pointer_line(self, tensor: Load | Store, element: str, index: str) -> None:
        name = self.tensors[id(tensor)]
        self.lines(f"{element}* const {self.row_pointer(tensor)} = {name} + {index} * {tensor.width};")

    def _row(self, outer: _Scope) -> None:
        for load in self.d.loads:
            if load.axes == Axes.FULL:
                self._row_pointer_line(load, f"const {_ELEMENTS[load.dtype]}", "row")
        for store in self.d.stores:
            if store.axes == Axes.FULL:
                self._row_pointer_line(store, _ELEMENTS[store.dtype], "row")
        for name, width in self._drawn_streams().items():
            self.lines(f"te::draw_row({self.bits[name]}, row, {-(-width // 8)}, {self.streams[name]});")
        for loop in self.loops:
            self._loop(loop, outer)
        for store in self.d.stores:
            if not store.axes & Axes.FEATURE:
                self.lines(f"te::store({self.tensors[id(store)]} + row, {outer.number(store.parts[0]).text});")
        for s in self.sums:
            if not s.has_features:
                self.lines(f"{s.name} += {outer.number(s.part).text};")

    def _loop(self, loop: _Loop, outer: _Scope) -> None:
        for e in self.scalars_of(loop):
            outer.named(e)
        unroll = self._unroll(loop)
        parts = {id(r): self.names.fresh(f"{self.value_name(r)}_parts") for r in loop.reductions}
        for r in loop.reductions:
            self.lines(f"te::{r.op}<{unroll}> {parts[id(r)]};")
        head = f"te::features<{self.d.width}, {unroll}>("
        if self.long_row:
            head = f"te::elements(row_begin * {self.d.width}, row_end * {self.d.width}, "
        with self.lines.block(f"{head}[&](te::place at) TE_BODY", "});"):
            body = _LoopScope(self, loop, outer.known)
            for r in loop.reductions:
                self.lines(f"{parts[id(r)]}.add({body.argument(r.args[0])}, at);")
            if loop.last:
                self._stores_and_sums(body)
                self._expect_next_row()
        for r in loop.reductions:
            self.lines(f"const float {self.value_name(r)} = {parts[id(r)]}.total();")
            outer.known[id(r)] = _Text(self.value_name(r), _ATOM, False, named=True)

    def _unroll(self, loop: _Loop) -> int:
        if not loop.reductions:
            return 1
        cost = sum(self.cost(n) for n in _below(loop.roots, lambda e: id(e) in self.buffers))
        return next((slots for limit, slots in _UNROLL_BELOW if cost <= limit), 1)

    def _stores_and_sums(self, body: _LoopScope) -> None:
        for store in self.d.stores:
            for index, part in enumerate(store.parts if store.axes & Axes.FEATURE else ()):
                to = _plus(self.row_pointer(store), index * self.d.width)
                value = body.number(part).text
                self.lines(f"te::store({to}, at, {value});")
        for s in self.sums:
            if s.has_features:
                self.lines(f"te::add_to_buffer({s.name}, at, {body.number(s.part).text});")

    def _expect_next_row(self) -> None:
        tensors: tuple[Load | Store, ...] = (*self.d.loads, *self.d.stores)
        for t in () if self.long_row else tensors:
            if t.axes == Axes.FULL and t.width * item_size(t.dtype) >= _PREFETCH_FROM:
                for offset in range(t.width, 2 * t.width, self.d.width):
                    self.lines(f"te::expect({_plus(self.row_pointer(t), offset)}, at);")

    def _finish_function(self) -> None:
        first = len(self.d.loads) + bool(self.d.streams) + len(self.d.stores)
        for index, total in enumerate(self.d.sums, first):
            element = _ELEMENTS[total.dtype]
            name = self.tensors[id(total)]
            self.lines(f"{element}* const {name} = te::tensor<{element}>(launch, {index});")
        for s in self.sums:
            if not s.per_sample:
                self._finish_line(s, _plus(self.tensors[id(s.total)], s.first), str(s.offset))
        if self.partial_floats_per_sample:
            with self.lines.block("for (int64_t sample = 0; sample < launch->batch_size; ++sample)"):
                share = _plus(f"sample * {self.partial_floats_per_sample}", self.partial_floats)
                self.lines(f"const int64_t share = {share};")
                for s in self.sums:
                    if s.per_sample:
                        row = f"sample * {s.total.width}" if s.has_features else "sample"
                        self._finish_line(s, _plus(self.tensors[id(s.total)], row, s.first), _plus("share", s.offset))

    def _finish_line(self, s: _RowsSum, to: str, offset: str) -> None:
        self.lines(f"te::finish_sum(launch, workers, {to}, {offset}, {s.count}, {_padded(s.count)});")


def _signature(symbol: str, suffix: str, arguments: str) -> str:
    return f'extern "C" void {symbol}_{suffix}(\n    const te_launch* launch, {arguments})'
