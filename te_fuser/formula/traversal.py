"""Walks over expressions: arguments first, deeper than Python's own stack, and as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from te_fuser.formula.expr import Expr


def topological(
    roots: Iterable[Expr], stop: Callable[[Expr], bool] | None = None, *, stops: bool = False
) -> list[Expr]:
    """Every node below `roots`, arguments first, in an order that depends on structure alone.

    Nodes for which `stop` holds, and what only they lead to, are left out; with `stops` they are there themselves.
    """
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[Expr | None] = [*reversed(list(roots))]
    while stack:
        node = stack.pop()
        if node is None:  # what is below the next one is in the order
            order.append(stack.pop())  # type: ignore[arg-type]
        elif node not in seen:
            seen.add(node)
            if stop is not None and stop(node):
                order += [node] if stops else []
            elif node.args:
                stack += (node, None, *node.args[::-1])
            else:
                order.append(node)
    return order


# A walk that would call itself hands what it would call to `deep`, by `yield`, and gets the result from there: so
# formulas may be deeper than Python's own stack.
Found = TypeVar("Found")
Deep = Generator[Any, Any, Found]


def deep(walk: Deep[Found]) -> Found:
    """Run a walk, and those that it yields, and return its result."""
    waiting: list[Deep[Any]] = [walk]
    found: Any = None
    while waiting:
        try:
            further = waiting[-1].send(found)
        except StopIteration as end:
            found = end.value
            waiting.pop()
        else:
            found = None
            waiting.append(further)
    return found  # type: ignore[no-any-return]


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_READABLE = 60  # nodes, counted as often as they are written


def render(e: Expr) -> str:
    """The expression as one line; what a long one uses more than once is t0, t1, ...."""
    steps, (text,) = render_together([e])
    return "; ".join([*steps, text])


def render_together(roots: Iterable[Expr]) -> tuple[list[str], list[str]]:
    """Expressions as texts, and lines "t0 = ..." for what long ones use or share."""
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
