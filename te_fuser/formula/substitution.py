"""Other expressions in the place of some nodes, and what stands above them built again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from te_fuser.formula.expr import MARKS, ZERO, Axes, Expr, broadcast, concat, const, make, mul, rebuild, unary
from te_fuser.formula.reductions import extreme, sum_features
from te_fuser.formula.traversal import topological


def substitute(roots: Iterable[Expr], replace: Callable[[Expr], Expr | None]) -> list[Expr]:
    """Rebuild `roots` with every node for which `replace` gives another; its arguments are then not visited."""
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

    What is quantized is a product, rounded to a dtype: its gradient is nobody's concern any more. What cancels only now
    was no number before, either, as x and an op's output -x are none together where x is infinite.
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
    """The node over other arguments, simplified; over as many features as before, where it has some of its own."""
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
