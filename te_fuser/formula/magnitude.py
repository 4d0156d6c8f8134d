"""Bounds of an expression's magnitude in cheaper terms: without those functions that have a largest value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from te_fuser.formula.expr import ONE, Expr, const, may_move, mul
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.traversal import topological

Known = TypeVar("Known")


class _Monomial(NamedTuple):
    """A number times leaves."""

    number: float
    leaves: tuple[Expr, ...] = ()


def bound_of(e: Expr) -> Expr | None:
    """An expression b with |e| <= |b| for leaves of which none is infinite or NaN; None where no cheaper one is known.

    b is a number times one leaf or two, NaN or infinite where a leaf is: |x sigmoid(x)| <= |x|. What is computed
    exceeds it by less than 1% where b is neither infinite nor below 1e-30.
    """
    nodes = topological([e])
    if not any(_bound_alone(n) is not None for n in nodes):
        return None
    found: dict[int, _Monomial | None] = {}
    for n in nodes:
        found[id(n)] = _largest(n, found)
    most = found[id(e)]
    read = {id(n) for n in nodes if n.op in ("input", "keep")}
    if most is None or not 1 <= len(most.leaves) <= 2 or read != {id(leaf) for leaf in most.leaves}:
        return None
    product = ONE
    for leaf in most.leaves:
        product = mul(product, leaf)
    return mul(const(most.number), product)


def _bound_alone(n: Expr) -> float | None:
    """The largest magnitude that a function has anywhere, of what is no NaN."""
    rises = FUNCTIONS[n.op].rises
    return max(map(abs, rises)) if rises is not None and _sign_of(n.args[0]) is not None else None


def _largest(n: Expr, of: Mapping[int, _Monomial | None]) -> _Monomial | None:
    alone = _bound_alone(n)
    if alone is not None:
        return _Monomial(alone)
    if n.op == "const":
        return _Monomial(abs(float(n.attrs[0]))) if may_move(n.attrs[0]) else None
    if n.op == "input":
        return _Monomial(1.0, (n,))
    a, b = _operands(n, of)
    if a is None or b is None:
        return None
    if n.op == "mul":
        return _Monomial(a.number * b.number, (*a.leaves, *b.leaves))
    return _Monomial(a.number + b.number) if not (a.leaves or b.leaves) else None


def _operands(n: Expr, of: Mapping[int, Known | None]) -> tuple[Known | None, Known | None]:
    """Findings of the two operands of a sum, a difference or a product, else None."""
    first, second = n.args if n.op in ("add", "sub", "mul") else (None, None)
    return (None, None) if first is None or second is None else (of[id(first)], of[id(second)])


class _Sign(NamedTuple):
    """Sign of a polynomial's terms in one leaf: a number's, times the leaf's in odd degrees."""

    negative: bool
    odd: bool
    leaf: Expr | None


def _sign_of(e: Expr) -> _Sign | None:
    """Sign of a polynomial in one leaf whose terms share one; else None."""
    found: dict[int, _Sign | None] = {}
    for n in topological([e]):
        found[id(n)] = _sign(n, found)
    return found[id(e)]


def _sign(n: Expr, of: Mapping[int, _Sign | None]) -> _Sign | None:
    if n.op == "const":
        return _Sign(n.attrs[0] < 0, False, None) if may_move(n.attrs[0]) else None
    if n.op == "input":
        return _Sign(False, True, n)
    a, b = _operands(n, of)
    if a is None or b is None:
        return None
    leaf = b.leaf if a.leaf is None else a.leaf
    if a.leaf is not None and b.leaf is not None and a.leaf is not b.leaf:
        return None
    if n.op == "mul":
        return _Sign(a.negative != b.negative, a.odd != b.odd, leaf)
    b = b._replace(negative=b.negative != (n.op == "sub"))
    return a._replace(leaf=leaf) if (a.negative, a.odd) == (b.negative, b.odd) else None


# ----------------------------------------------------------------------------------------- of many numbers at once


class Slope(NamedTuple):
    """e = x g(x) for a leaf x, where g is nowhere negative and nowhere falls; and g(0).

    So of numbers between low <= 0 and high >= 0, |e| is at most e(high) and g(0) |low|, whichever is larger.
    """

    leaf: Expr
    at_zero: float


def slope_of(e: Expr) -> Slope | None:
    """The slope of such an expression; None where it is none."""
    factors, waiting = list[Expr](), [e]
    while waiting:
        n = waiting.pop()
        if n.op == "mul":
            waiting += n.args
        else:
            factors.append(n)
    leaves = [f for f in factors if f.op == "input"]
    others = [f for f in factors if f.op != "input"]
    rising: dict[int, _Rising | None] = {}
    for n in topological(others):
        rising[id(n)] = _rising(n, rising)
    at_zero = 1.0
    for f in others:
        found = rising[id(f)]
        if found is None or found.least < 0 or found.leaf is not None and found.leaf not in leaves:
            return None
        at_zero *= found.at_zero
    return Slope(leaves[0], at_zero) if len(leaves) == 1 and len(factors) > 1 else None


class _Rising(NamedTuple):
    """The least value of what nowhere falls as a leaf grows, and that where it is 0."""

    least: float
    at_zero: float
    leaf: Expr | None = None


def _rising(n: Expr, of: Mapping[int, _Rising | None]) -> _Rising | None:
    if n.op == "const":
        value = float(n.attrs[0])
        return _Rising(value, value) if may_move(n.attrs[0]) else None
    rises = FUNCTIONS[n.op].rises
    if rises is not None:
        sign = _sign_of(n.args[0])
        rising = sign is not None and sign.odd and not sign.negative
        return _Rising(rises[0], rises[1], sign.leaf) if sign is not None and rising else None
    a, b = _operands(n, of)
    if n.op == "sub" or a is None or b is None or (a.leaf is not None and b.leaf is not None):
        return None
    if n.op == "add":
        return _Rising(a.least + b.least, a.at_zero + b.at_zero, b.leaf if a.leaf is None else a.leaf)
    number, other = (a, b) if a.leaf is None else (b, a)
    return _Rising(number.least * other.least, number.at_zero * other.at_zero, other.leaf) if number.least > 0 else None
