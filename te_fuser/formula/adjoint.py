"""Reverse-mode differentiation of expressions.

Adjoints are added at full extent and reduced over the features once, where a node has none; the sum over rows waits
until a leaf, because everything below is linear. Subgradients are torch's (`functions` has the rules).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from te_fuser.formula.expr import ZERO, Expr, add, concat, const, is_const, mul, part
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.reductions import sum_features
from te_fuser.formula.traversal import topological


def _spread(e: Expr, g: Expr) -> Iterable[tuple[Expr, Expr]]:
    """The contributions of a node, as (argument, contribution)."""
    if e.op == "concat":
        width = e.width // len(e.args)
        for k, a in enumerate(e.args):
            yield a, _counted(width, a, part(g, k, len(e.args)))
        return
    for a, contribution in zip(e.args, FUNCTIONS[e.op].adjoint(e, g), strict=True):
        if contribution is not None:
            yield a, _counted(e.width, a, contribution) if e.has_features else contribution


def _counted(width: int, argument: Expr, contribution: Expr) -> Expr:
    """Contribution to an argument that was broadcast: one equal for all features counts for each."""
    if argument.has_features or contribution.has_features:
        return contribution
    return mul(const(width), contribution)


def differentiate(seeds: Mapping[Expr, Expr], wanted: Iterable[Expr]) -> dict[Expr, Expr]:
    """Wanted leaf at full width -> its adjoint, given those of some outputs; not yet summed over rows."""
    order = topological(seeds)
    if split := _read_in_parts(order):
        order = topological([*(piece for pieces in split.values() for piece in pieces), *seeds])
    wanted = list(wanted)
    names = {leaf.attrs[0] for leaf in wanted}
    needs: set[int] = set()
    for node in order:
        if (node.op == "input" and node.attrs[0] in names) or any(id(a) in needs for a in node.args):
            needs.add(id(node))
    collected: dict[int, list[Expr]] = {id(e): [g] for e, g in seeds.items()}
    parts: dict[str, list[tuple[Expr, Expr]]] = {name: [] for name in names}
    for node in reversed(order):
        if id(node) not in needs or id(node) not in collected:
            continue
        g = _total(node, collected.pop(id(node)))
        if is_const(g, 0):
            continue
        if node.op == "input":
            parts[node.attrs[0]].append((node, g))
            continue
        pieces = split.get(node, [])
        among = [(piece, part(g, k, len(pieces))) for k, piece in enumerate(pieces)]
        for argument, contribution in among or _spread(node, g):
            if id(argument) in needs:
                collected.setdefault(id(argument), []).append(contribution)
    return {leaf: _assemble(leaf, parts[leaf.attrs[0]]) for leaf in wanted}


def _read_in_parts(order: Iterable[Expr]) -> dict[Expr, list[Expr]]:
    """Nodes that round their adjoint and are read in smaller parts, too -> these parts, in order.

    An adjoint is rounded once all has been added up, so a larger node hands what it gets to its parts.
    """
    by_scale: dict[tuple[object, ...], list[Expr]] = {}
    for node in order:
        if node.op == "quantize_gradient" and node.has_features:
            by_scale.setdefault((node.attrs, node.args[1]), []).append(node)
    widths = {node: math.gcd(*[n.width for n in nodes]) for nodes in by_scale.values() for node in nodes}
    counts = {node: node.width // width for node, width in widths.items() if width < node.width}
    return {node: [part(node, k, count) for k in range(count)] for node, count in counts.items()}


def _total(node: Expr, contributions: list[Expr]) -> Expr:
    """Add contributions of equal extent, then reduce over features that the node has not."""
    by_width: dict[int, Expr] = {}  # 0: without features; a node without features may meet parts of several widths
    for c in contributions:
        key = c.width if c.has_features else 0
        by_width[key] = _plus(by_width[key], c) if key in by_width else c
    total = by_width.pop(0, ZERO)
    for width, e in by_width.items():
        total = _plus(total, e if node.has_features else sum_features(e, width))
    return total


def _plus(a: Expr, b: Expr) -> Expr:
    """a + b; what cancels is no number where its terms are none."""
    total = add(a, b)
    return mul(const(0.0), a) if total is ZERO and a is not ZERO else total


def _assemble(leaf: Expr, parts: list[tuple[Expr, Expr]]) -> Expr:
    """The adjoint of a whole leaf from the adjoints of the parts of it that were read."""
    total = ZERO
    for piece, g in parts:
        if piece.width != leaf.width:
            pieces, index = leaf.width // piece.width, piece.attrs[1] // piece.width
            g = concat([g if k == index else ZERO for k in range(pieces)], leaf.width)
        total = add(total, g)
    return total
