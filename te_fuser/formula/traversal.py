"""Ways through expressions that may be deeper than Python's own stack."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from te_fuser.formula.expr import Expr


def topological(
    roots: Iterable[Expr], stop: Callable[[Expr], bool] | None = None, *, stops: bool = False
) -> list[Expr]:
    """Every node below `roots`, arguments first, in an order that depends on structure alone.

    Args:
        stop: which nodes are left out, and with them what only they lead to.
        stops: whether these nodes are in the order nevertheless, without what they lead to.
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
