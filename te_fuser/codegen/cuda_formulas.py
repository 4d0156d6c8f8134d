"""Formulas as a GPU likes them: the same kernel with fewer instructions, and without cancellation in tanh's tails.

Rules that only move factors are kept where they make the kernel cheaper.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from te_fuser.codegen.description import KernelDescription, Maximum, Store, Sum
from te_fuser.codegen.schedule import instructions
from te_fuser.codegen.text import COMPARISONS
from te_fuser.formula import expr
from te_fuser.formula.expr import Axes, Expr

Rule = Callable[[Expr], "Expr | None"]
Item = TypeVar("Item", Store, Sum, Maximum)


def rewrite(description: KernelDescription) -> KernelDescription:
    """Rewrite a kernel in cheaper and more accurate terms."""
    for rules in (_RULES, _PRECISE_RULES if is_precise(description) else _FAST_RULES):
        description = _everywhere(description, rules)
    return _everywhere(_cheaper(description), _LAST_RULES)


def is_precise(description: KernelDescription) -> bool:
    """True where a reader could see the last bits of float32."""
    stored = [t.dtype for t in description.stores if t.axes & Axes.FEATURE]
    read = [t.dtype for t in description.loads if t.axes & Axes.FEATURE and t.axes & Axes.OUTER]
    return "float32" in (stored or read or ["float32"])


def is_boolean(e: Expr) -> bool:
    return e.op in (*COMPARISONS, "keep")


def _everywhere(description: KernelDescription, rules: Sequence[Rule]) -> KernelDescription:
    """The description with the first rule that answers applied to each node, arguments first."""
    done: dict[int, Expr] = {}
    for node in description.nodes:
        args = tuple(done[id(a)] for a in node.args)
        new = node
        if any(x is not y for x, y in zip(args, node.args, strict=True)):
            if not node.reduces:
                new = expr.rebuild(node.op, args, node.attrs)
            elif args[0].axes & Axes.FEATURE:  # it stays what it is, because schedules know it by its stage
                new = expr.make(node.op, args, node.attrs, node.axes, node.width)
            else:
                new = args[0]
        done[id(node)] = next((found for rule in rules if (found := rule(new)) is not None), new)

    def renewed(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(dataclasses.replace(t, parts=tuple(done[id(p)] for p in t.parts)) for t in items)

    d = description
    return dataclasses.replace(d, stores=renewed(d.stores), sums=renewed(d.sums), maxima=renewed(d.maxima))


# ------------------------------------------------------------------------------------------- functions


def _plus_tanh(e: Expr) -> Expr | None:
    """1 + tanh(u) = 2 sigmoid(2u), 1 - tanh(u) = 2 sigmoid(-2u): nothing cancels in the negative tail."""
    if e.op not in ("add", "sub") or not expr.is_const(e.args[0], 1) or e.args[1].op != "tanh":
        return None
    sign = 2 if e.op == "add" else -2
    return 2 * expr.unary("sigmoid", sign * e.args[1].args[0])


def _square_tanh(e: Expr) -> Expr | None:
    """1 - tanh(u)^2 = 4 s (1 - s) with s = sigmoid(2u), which the value itself needs too."""
    if e.op != "sub" or not expr.is_const(e.args[0], 1) or e.args[1].op != "mul":
        return None
    a, b = e.args[1].args
    if a is not b or a.op != "tanh":
        return None
    s = expr.unary("sigmoid", 2 * a.args[0])
    return 4 * (s * (1 - s))


def _other_sigmoid(e: Expr) -> Expr | None:
    """1 - sigmoid(u) = sigmoid(-u), which does not cancel; where 16 bits are stored, nobody sees that."""
    if e.op != "sub" or not expr.is_const(e.args[0], 1) or e.args[1].op != "sigmoid":
        return None
    return expr.unary("sigmoid", -e.args[1].args[0])


def _base_two(e: Expr) -> Expr | None:
    """exp and sigmoid of u in base two, where log2(e) joins the factor that u has already."""
    names = {"exp": "exp2", "sigmoid": "sigmoid2"}
    return expr.unary(names[e.op], math.log2(math.e) * e.args[0]) if e.op in names else None


def _masked(e: Expr) -> Expr | None:
    """c (mask x) = x (mask ? c : 0): one multiplication less."""
    if e.op != "mul" or e.args[0].op != "const" or e.args[1].op != "mul":
        return None
    a, b = e.args[1].args
    mask, rest = (a, b) if is_boolean(a) else (b, a)
    return expr.pointwise("masked", rest, mask, attrs=e.args[0].attrs) if is_boolean(mask) else None


def _is_multiple(e: Expr) -> bool:
    """True where a node is a number times something, and the number may be joined with other factors."""
    return e.op == "mul" and e.args[0].op == "const" and not expr.is_scaled(e)


def _row_scale(e: Expr) -> Expr | None:
    """c (r x) = (c r) x where r is one number a row: that product is not one for each element."""
    if not _is_multiple(e) or e.args[1].op != "mul" or expr.is_scaled(e.args[1]):
        return None
    a, b = e.args[1].args
    row, rest = (a, b) if not a.axes & Axes.FEATURE else (b, a)
    if row.axes & Axes.FEATURE or not rest.axes & Axes.FEATURE or is_boolean(row):
        return None
    return expr.pointwise("mul", e.args[0] * row, rest)


_RULES: tuple[Rule, ...] = (_plus_tanh, _square_tanh)
_PRECISE_RULES: tuple[Rule, ...] = (_other_sigmoid,)
_FAST_RULES: tuple[Rule, ...] = (_base_two,)
_LAST_RULES: tuple[Rule, ...] = (_masked, _row_scale)

# ---------------------------------------------------------------------------------- sums of products


_MOST_NODES = 500


def _cheaper(description: KernelDescription) -> KernelDescription:
    """Factor sums out where that saves instructions, one sum after the other."""
    if len(description.nodes) > _MOST_NODES:  # each sum looks at all nodes again, and its terms are found by recursion
        return description
    cost = instructions(description)
    tried: set[str] = set()
    while True:
        untried = [n for n in description.nodes if n.axes & Axes.FEATURE and n.digest not in tried]
        node = next((n for n in untried if n.op in ("add", "sub") or _is_multiple(n)), None)
        if node is None:
            return description
        tried.add(node.digest)
        uses = Counter(id(a) for n in description.nodes for a in n.args)
        once = {i for i, count in uses.items() if count == 1}
        if _is_multiple(node):
            form = _scaled_inside(node, once)
        else:
            form = _joined(_merged(_terms(node, expr.ONE, {*once, id(node)})))
        if form is None or form is node:
            continue

        def swapped(e: Expr, old: Expr = node, new: Expr = form) -> Expr | None:
            return new if e is old else None

        other = _everywhere(description, (swapped,))
        if instructions(other) < cost:
            description, cost = other, instructions(other)


@dataclass(frozen=True)
class Term:
    """scale * product of factors: one number a row (or a constant), one each element."""

    scale: Expr
    factors: tuple[Expr, ...]

    def without(self, factor: Expr) -> Term:
        at = next(k for k, f in enumerate(self.factors) if f is factor)
        return Term(self.scale, (*self.factors[:at], *self.factors[at + 1 :]))


def _scaled_inside(e: Expr, once: set[int]) -> Expr | None:
    """c f (1 + k g) = f (c + c k g): a constant that the sum takes in for nothing; `once` are used once."""
    factors = list(_factors(e.args[1]))
    for at, f in enumerate(factors):
        if f.op in ("add", "sub") and id(f) in once:
            inside = _joined(_merged(_terms(f, e.args[0], once)))
            return _product(Term(expr.ONE, (*factors[:at], *factors[at + 1 :], inside)))
    return None


def _terms(e: Expr, scale: Expr, once: set[int]) -> Iterator[Term]:
    """The sum `scale * e` as products; a sum that others use as well stays whole."""
    if not e.axes & Axes.FEATURE:
        yield Term(scale * e, ())
    elif e.op in ("add", "sub") and id(e) in once:
        yield from _terms(e.args[0], scale, once)
        yield from _terms(e.args[1], scale if e.op == "add" else -scale, once)
    elif _is_multiple(e) and e.args[1].op in ("add", "sub") and id(e) in once:
        yield from _terms(e.args[1], scale * e.args[0], once)
    else:
        rows = [f for f in _factors(e) if not f.axes & Axes.FEATURE]
        for f in rows:
            scale = scale * f
        yield Term(scale, tuple(f for f in _factors(e) if f.axes & Axes.FEATURE))


def _factors(e: Expr) -> Iterator[Expr]:
    if e.op == "mul" and not expr.is_scaled(e):
        for a in e.args:
            yield from _factors(a)
    else:
        yield e


def _merged(terms: Iterable[Term]) -> list[Term]:
    found: dict[tuple[str, ...], Term] = {}
    for t in terms:
        key = tuple(sorted(f.digest for f in t.factors))
        found[key] = Term(expr.add(found[key].scale, t.scale), found[key].factors) if key in found else t
    return [t for t in found.values() if t.scale is not expr.ZERO]


def _joined(terms: Sequence[Term]) -> Expr:
    """The sum of the terms, with the factor that most of them share pulled out, and so on."""
    shared = Counter(f.digest for t in terms for f in {f.digest: f for f in t.factors}.values())
    factor = next((f for t in terms for f in t.factors if shared[f.digest] == max(shared.values())), None)
    if factor is None or shared[factor.digest] < 2:
        total = expr.ZERO
        for t in terms:
            total = total + _product(t)
        return total
    having = [t for t in terms if any(f is factor for f in t.factors)]
    rest = [t for t in terms if all(f is not factor for f in t.factors)]
    return factor * _joined([t.without(factor) for t in having]) + _joined(rest)


def _product(t: Term) -> Expr:
    counts = Counter(f.digest for f in t.factors)
    total = expr.ONE
    for f in sorted(t.factors, key=lambda f: -counts[f.digest]):
        total = total * f
    return t.scale * total
