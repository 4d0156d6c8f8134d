"""Reductions over the features of each row: sums, which are taken apart where that saves work, and extremes."""

from __future__ import annotations

from te_fuser.formula.expr import (
    ONE,
    ZERO,
    Axes,
    Expr,
    add,
    const,
    div,
    is_scaled,
    make,
    mul,
    sub,
)
from te_fuser.formula.traversal import Deep, deep, topological


def row_sum(e: Expr) -> Expr:
    """The sum over the features of each row; a value without a feature axis is its own sum."""
    return sum_features(e, e.width) if e.has_features else e


def sum_features(e: Expr, width: int) -> Expr:
    """The sum of `e`, broadcast to `width` features, over them.

    Factors without features are pulled out; a sum is distributed only if that removes a stage or a reduction.
    """
    return deep(_sum_once(e, width, {}))


def _sum_once(e: Expr, width: int, done: dict[tuple[Expr, int], Expr]) -> Deep[Expr]:
    key = (e, width)
    if key not in done:
        done[key] = yield _sum(e, width, done)
    return done[key]


def _sum(e: Expr, width: int, done: dict[tuple[Expr, int], Expr]) -> Deep[Expr]:
    if not e.has_features:
        return mul(const(width), e)
    if e.op == "broadcast":
        return (yield _sum_once(e.args[0], width, done))
    if e.op == "concat":
        total = ZERO
        for p in e.args:
            total = add(total, (yield _sum_once(p, width // len(e.args), done)))
        return total
    outer, inner = yield _separate(e, {})
    if outer is not ONE:
        return mul(outer, (yield _sum_once(inner, width, done)))
    plain = make("row_sum", (e,), (), e.axes & ~Axes.FEATURE, 1)
    if e.op in ("add", "sub"):
        combine = add if e.op == "add" else sub
        left, right = (yield _sum_once(e.args[0], width, done)), (yield _sum_once(e.args[1], width, done))
        spread = combine(left, right)
        if _reduction_cost(spread) < _reduction_cost(plain):
            return spread
    return plain


def _separate(e: Expr, done: dict[int, tuple[Expr, Expr]]) -> Deep[tuple[Expr, Expr]]:
    """`e` as (factor without features) * (rest)."""
    if id(e) not in done:
        done[id(e)] = yield _factor_out(e, done)
    return done[id(e)]


def _factor_out(e: Expr, done: dict[int, tuple[Expr, Expr]]) -> Deep[tuple[Expr, Expr]]:
    if not e.has_features:
        return e, ONE
    if is_scaled(e):
        return ONE, e
    if e.op == "mul":
        (oa, ia), (ob, ib) = (yield _separate(e.args[0], done)), (yield _separate(e.args[1], done))
        if oa is ONE and ob is ONE:
            return ONE, e
        return mul(oa, ob), mul(ia, ib)
    if e.op == "div" and not e.args[1].has_features:
        outer, inner = yield _separate(e.args[0], done)
        return div(outer, e.args[1]), inner
    return ONE, e


def _reduction_cost(e: Expr) -> tuple[int, int]:
    nodes = topological([e], lambda n: not n.depth)  # where the depth is 0 there is no reduction below
    return e.depth, sum(n.reduces for n in nodes)


def extreme(op: str, e: Expr) -> Expr:
    """row_max or row_min: the feature of each row that the reduction `op` picks."""
    if not e.has_features:
        return e
    if e.op == "broadcast":
        return extreme(op, e.args[0])
    return make(op, (e,), (), e.axes & ~Axes.FEATURE, 1)
