"""Expressions as text, for people and for the names of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from te_fuser.formula.traversal import topological

if TYPE_CHECKING:
    from te_fuser.formula.expr import Expr

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_READABLE = 60  # nodes, counted as often as they are written


def render(e: Expr) -> str:
    """The expression as one line of text; what a long one uses more than once gets a name, t0, t1, ..., before it."""
    steps, (text,) = render_together([e])
    return "; ".join([*steps, text])


def render_together(roots: Iterable[Expr]) -> tuple[list[str], list[str]]:
    """Each expression as text, over names t0, t1, ... for what long ones use or share: ("t0 = ...", ...), texts."""
    roots = list(roots)
    order = topological(roots)
    sizes: dict[int, int] = {}
    uses: dict[int, int] = {}
    for node in order:
        sizes[id(node)] = 1 + sum(sizes[id(a)] for a in node.args)
    for a in itertools.chain(roots, *(node.args for node in order)):
        uses[id(a)] = uses.get(id(a), 0) + 1
    named = sum(sizes[id(r)] for r in roots) > _READABLE
    texts: dict[int, str] = {}
    steps: list[str] = []
    for node in order:
        texts[id(node)] = _text(node, [texts[id(a)] for a in node.args])
        if named and node.args and uses[id(node)] > 1:
            steps.append(f"t{len(steps)} = {texts[id(node)]}")
            texts[id(node)] = f"t{len(steps) - 1}"
    return steps, [texts[id(r)] for r in roots]


def _text(e: Expr, args: list[str]) -> str:
    if e.op == "const":
        return str(e.attrs[0])
    if e.op in ("input", "keep", "value"):
        name, offset = e.attrs[0], e.attrs[-2]
        text = f"{name}[{offset}:{offset + e.width}]" if e.is_part else name
        return text if e.op == "input" else f"{e.op}({text})"
    if e.op in _INFIX:
        return f"({args[0]} {_INFIX[e.op]} {args[1]})"
    return f"{e.op}({', '.join([*args, *map(str, e.attrs)])})"
