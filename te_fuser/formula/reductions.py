"""Reductions over the features of each row, taken apart where that saves work; and substitution of nodes by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from te_fuser.formula.expr import (
    MARKS,
    ONE,
    ZERO,
    Axes,
    Expr,
    add,
    broadcast,
    concat,
    const,
    div,
    is_scaled,
    make,
    mul,
    rebuild,
    sub,
    unary,
)
from te_fuser.formula.traversal import Deep, deep, topological


def substitute(roots: Iterable[Expr], replace: Callable[[Expr], Expr | None]) -> list[Expr]:
    """Rebuild `roots` with other nodes by `replace`, below which nothing is visited."""
    roots = list(roots)
    done: dict[int, Expr] = {}

    def is_replaced(node: Expr) -> bool:
        found = replace(node)
        if found is not None:
            done[id(node)] = found
        return found is not None

    for node in topological(roots, is_replaced):
        done[id(node)] = over(node, tuple([done[id(a)] for a in node.args])) if node.args else node
    return [done[id(r)] for r in roots]


def unmarked(e: Expr) -> Expr:
    """The expression without marks of op outputs, broadcast and detached values, which mean nothing to a kernel.

    What is quantized is a product, rounded. What cancels only now was no number before, either: x - x where x is
    infinite.
    """
    for node in topological([e], lambda n: not n.marked or n.unmarked is not None):
        args = tuple([a if a.unmarked is None else a.unmarked for a in node.args])
        if node.op == "quantize":
            node.unmarked = unary(node.attrs[0], mul(*args))
            continue
        made = args[0] if node.op in MARKS else over(node, args)
        if made is ZERO and node is not made:  # as far as the node extends: of a row sum, the sum as it stands
            whole = args[0]
            if node.reduces and whole.has_features:
                whole = make(node.op, (whole,), (), whole.axes & ~Axes.FEATURE, 1)
            made = mul(const(0.0), whole)
        node.unmarked = made
    return e if e.unmarked is None else e.unmarked


def before_quantized(e: Expr) -> Expr:
    """Expression that `e` is before it is quantized, part by part where it is a concatenation."""
    if e.op == "concat":
        return concat([before_quantized(a) for a in e.args], e.width)
    return e.args[0] if e.op == "quantize" else e


def over(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node over other arguments, simplified; over as many features as before."""
    if args == node.args:
        return node
    if node.op == "value" and args[0].op not in ("input", "const"):
        return make("value", args, node.attrs, args[0].axes, args[0].width)
    if node.op == "concat":
        return concat(args, node.width)
    if node.op == "broadcast":
        return broadcast(args[0], node.axes, node.width)
    if node.op == "row_sum":
        return sum_features(args[0], node.args[0].width)
    if node.reduces:
        return extreme(node.op, args[0])
    return rebuild(node.op, args, node.attrs)


def row_sum(e: Expr) -> Expr:
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
