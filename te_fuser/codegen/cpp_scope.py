"""Expressions as C++ statements: numbers of a row outside the loops, vecs in the body of a loop over the features."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from te_fuser.codegen.cpp_schedule import CpuSchedule, Loop, has_features
from te_fuser.codegen.description import KernelDescription, Load, Store
from te_fuser.codegen.text import COMPARISONS, Lines, RoleNames, part_name, shortest, to_float32
from te_fuser.dtypes import TABLE
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.traversal import topological

ELEMENTS = {name: row.cpp for name, row in TABLE.items() if row.cpp}
ATOM, PRODUCT, SUM, COMPARISON = 3, 2, 1, 0  # how tightly an operation binds


class CppNames(RoleNames):
    """Unique names in one function, made in the order of asking."""

    own_words = """
    at launch row row_begin row_end worker workers sample block_end scratch partial sample_partial share
    """


@dataclass(frozen=True)
class Fragment:
    """Part of a C++ expression, how tightly it binds, and whether it is a vec or a mask."""

    text: str
    binds: int
    vector: bool
    truth: bool = False  # a comparison: a mask or a bool
    named: bool = False

    def within(self, binds: int) -> str:
        """The text inside an operation that binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


def literal(value: float) -> str:
    """A float literal: the shortest that gives this float32."""
    single = to_float32(value)
    if math.isnan(single):
        return "te::not_a_number"
    if math.isinf(single):
        return "te::infinity" if single > 0 else "-te::infinity"
    return f"{float(shortest(single))!r}f"


def plus(pointer: str, *offsets: int | str) -> str:
    """`pointer` moved by the offsets that are not 0."""
    return " + ".join([pointer, *(str(o) for o in offsets if o not in (0, "0"))])


_INFIX = {"add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT)}
_LONGEST = 64  # characters of an expression before it gets a name of its own
_VALUE_NAMES = {"add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "lt": "below", "gt": "above"}


class CppKernelText:
    """State shared by the scopes of one kernel: lines, names of values, reading of tensors."""

    def __init__(self, description: KernelDescription) -> None:
        self.d = description
        self.schedule = CpuSchedule(description)
        self.lines = Lines()
        self.names = CppNames()
        # tensor -> its pointer
        self.tensors = {id(t): self.names.fresh(f"{t.name}_tensor") for t in description.tensors}
        self.streams: dict[str, str] = {}  # random stream -> the variable that holds it
        self.places: dict[str, str] = {}  # where what is drawn for lies in the whole -> the variables that say it
        self.bits: dict[str, str] = {}  # random stream -> the buffer with a row's bits
        self.buffers: dict[int, str] = {}  # node -> the row buffer that keeps it
        self._loads = {load.name: load for load in description.loads}
        self._value_names: dict[int, str] = {}
        self._preferred = {
            id(p): part_name(store.name, k, len(store.parts))
            for store in description.stores
            for k, p in enumerate(store.parts)
        }

    def value_name(self, e: Expr) -> str:
        """The name of a node, one for all scopes."""
        if id(e) not in self._value_names:
            self._value_names[id(e)] = self._new_name(e)
        return self._value_names[id(e)]

    def _new_name(self, e: Expr) -> str:
        if e.op == "input":
            name, offset, full = e.attrs
            return self.names.fresh(part_name(name, offset // e.width, full // e.width))
        if e.op == "keep":
            name, _, offset, full = e.attrs
            return self.names.fresh(part_name(f"{name}_keep", offset // e.width, full // e.width))
        if id(e) in self._preferred:
            return self.names.fresh(self._preferred[id(e)])
        return self.names.numbered(_VALUE_NAMES.get(e.op, e.op))

    def load_text(self, e: Expr) -> str:
        """A number or a vec of a tensor."""
        load = self._loads[e.attrs[0]]
        if e.axes & Axes.FEATURE:
            return f"te::load({plus(self.row_pointer(load), e.attrs[1])}, at)"
        index = "row" if e.axes & Axes.OUTER else "sample" if e.axes & Axes.BATCH else 0
        return f"te::load({plus(self.tensors[id(load)], index)})"

    def keep_text(self, e: Expr) -> str:
        """The kept elements of a random stream, as 1 and 0."""
        name, limit, offset, _ = e.attrs
        if e.axes & Axes.FEATURE:
            return f"te::keep({plus(self.bits[name], offset)}, at, {limit})"
        shared = self.d.share_of(name)
        by_samples = shared is not None and shared.samples
        sample = f"sample + launch->batch_size * {self.places['row_rank']}" if by_samples else "sample"
        return f"te::keep_sample({sample}, {limit}, {self.streams[name]})"

    def row_pointer(self, tensor: Load | Store) -> str:
        """The pointer that a loop over features starts from."""
        name = self.tensors[id(tensor)]
        whole = self.schedule.is_one_long_row or not tensor.axes & Axes.ROWS
        return name if whole else name.removesuffix("_tensor") + "_row"


class Scope:
    """Writes statements for expressions in one scope: numbers of a row, or vecs in the body of a loop."""

    vectors = False

    def __init__(self, kernel: CppKernelText, roots: Sequence[Expr], known: dict[int, Fragment]) -> None:
        self.kernel = kernel
        self.known = known  # node -> the text to use for it
        made = topological(roots, self._lies_elsewhere)
        self.uses = Counter(id(e) for e in (*roots, *(a for n in made for a in n.args)))  # one use is written in place

    def _lies_elsewhere(self, e: Expr) -> bool:
        return id(e) in self.known or e.reduces

    def number(self, e: Expr) -> Fragment:
        """`e` as a number or a vec, even when it is a comparison."""
        found = self.value(e)
        return Fragment(f"te::truth({found.text})", ATOM, found.vector) if found.truth else found

    def argument(self, e: Expr) -> str:
        """`e` as the argument of a function: a vec in a loop, a number outside."""
        found = self.number(e)
        return f"te::splat({found.text})" if self.vectors and not found.vector else found.text

    def value(self, e: Expr) -> Fragment:
        """`e`, by its name if it has one; the statements that it needs are written first."""
        if id(e) not in self.known:
            for node in topological([e], self._lies_elsewhere, stops=True):
                if id(node) not in self.known:
                    self.known[id(node)] = self._write(node)
        return self.known[id(e)]

    def _write(self, e: Expr) -> Fragment:
        found = _WRITERS.get(e.op, Scope._call)(self, e)
        return self.name(e, found) if self._wants_name(e, found) else found

    def _wants_name(self, e: Expr, found: Fragment) -> bool:
        return e.op != "const" and (e.op in ("input", "keep") or self.uses[id(e)] > 1 or len(found.text) > _LONGEST)

    def name(self, e: Expr, found: Fragment) -> Fragment:
        """Write the statement that gives `e` its name."""
        name = self.kernel.value_name(e)
        kinds = ("te::mask", "bool") if found.truth else ("te::vec", "float")
        self.kernel.lines(f"const {kinds[0] if found.vector else kinds[1]} {name} = {found.text};")
        return Fragment(name, ATOM, found.vector, found.truth, named=True)

    def named(self, e: Expr) -> None:
        """Give `e` a name, unless it has one or is a constant."""
        found = self.value(e)
        if e.op != "const" and not found.named:
            self.known[id(e)] = self.name(e, found)

    # -- one writer for each kind of node

    def _infix(self, e: Expr) -> Fragment:
        sign, binds = _INFIX[e.op]
        a, b = (self.number(x) for x in e.args)
        vector = a.vector or b.vector
        if e.op == "mul" and a.text == "-1.0f":
            return Fragment(f"-{b.within(ATOM)}", PRODUCT, vector)
        return Fragment(f"{a.within(binds)} {sign} {b.within(binds + 1)}", binds, vector)

    def _comparison(self, e: Expr) -> Fragment:
        a, b = (self.number(x) for x in e.args)
        text = f"{a.within(SUM)} {COMPARISONS[e.op]} {b.within(SUM)}"
        return Fragment(text, COMPARISON, a.vector or b.vector, truth=True)

    def _where(self, e: Expr) -> Fragment:
        condition = self.value(e.args[0])
        test = condition.text if condition.truth else f"{condition.within(SUM)} != 0.0f"
        return self._function("where", test, *(self.argument(x) for x in e.args[1:]))

    def _call(self, e: Expr) -> Fragment:
        return self._function(e.op, *(self.argument(a) for a in e.args), *(literal(x) for x in e.attrs))

    def _function(self, name: str, *arguments: str) -> Fragment:
        return Fragment(f"te::{name}({', '.join(arguments)})", ATOM, self.vectors)


class LoopScope(Scope):
    """The body of a loop over the features."""

    vectors = True

    def __init__(self, kernel: CppKernelText, loop: Loop, known: dict[int, Fragment]) -> None:
        self.loop = loop
        self.kept = {id(e) for e in loop.buffered}
        super().__init__(kernel, loop.roots, dict(known))

    def _lies_elsewhere(self, e: Expr) -> bool:
        return super()._lies_elsewhere(e) or not has_features(e) or self._lies_in_buffer(e)

    def _lies_in_buffer(self, e: Expr) -> bool:
        return id(e) in self.kernel.buffers and id(e) not in self.kept

    def _write(self, e: Expr) -> Fragment:
        if self._lies_in_buffer(e):
            return self.name(e, Fragment(f"te::load_buffer({self.kernel.buffers[id(e)]}, at)", ATOM, True))
        found = super()._write(e)
        if id(e) in self.kept:
            number = f"te::truth({found.text})" if found.truth else found.text
            self.kernel.lines(f"te::store_buffer({self.kernel.buffers[id(e)]}, at, {number});")
        return found

    def _wants_name(self, e: Expr, found: Fragment) -> bool:
        return id(e) in self.kept or super()._wants_name(e, found)


_WRITERS: dict[str, Callable[[Scope, Expr], Fragment]] = {
    "const": lambda scope, e: Fragment(literal(float(e.attrs[0])), ATOM, False),
    "where": Scope._where,
    "input": lambda scope, e: Fragment(scope.kernel.load_text(e), ATOM, scope.vectors),
    "keep": lambda scope, e: Fragment(scope.kernel.keep_text(e), ATOM, scope.vectors),
    **dict.fromkeys(_INFIX, Scope._infix),
    **dict.fromkeys(COMPARISONS, Scope._comparison),
}
