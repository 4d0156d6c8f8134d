"""How large an expression can be at most, in cheaper terms: without those functions that have a largest value."""

from __future__ import annotations

import math
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

    b is a number times one leaf or two, and NaN or infinite where a leaf of e is so: |x sigmoid(x)| <= |x|. What is
    computed exceeds it by less than 1% where b is neither infinite nor below 1e-30.
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
    """The largest magnitude that a function has anywhere, where what it is of is no NaN while leaves are finite."""
    most = FUNCTIONS[n.op].at_most
    return most if most < math.inf and len(n.args) == 1 and _keeps_sign(n.args[0]) else None


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
    """What is known of the two of a sum, a difference or a product."""
    first, second = n.args if n.op in ("add", "sub", "mul") else (None, None)
    return (None, None) if first is None or second is None else (of[id(first)], of[id(second)])


class _Sign(NamedTuple):
    """That of all terms of a polynomial in one leaf: a number's, or the leaf's times it; a leaf and its own number."""

    negative: bool
    odd: bool
    leaf: Expr | None


def _keeps_sign(e: Expr) -> bool:
    """Whether an expression is a polynomial in one leaf whose terms have one sign: no difference of infinities."""
    found: dict[int, _Sign | None] = {}
    for n in topological([e]):
        found[id(n)] = _sign(n, found)
    return found[id(e)] is not None


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
