"""What is known of the gradients of a graph's values: whether one can come, and in which dtype it arrives."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from te_fuser.dtypes import FLOATING
from te_fuser.fuser.graph.checks import check_dtype, plain
from te_fuser.fuser.graph.refs import Ref, parameter_ref
from te_fuser.ops.unfused_operation import UnfusedOperation

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node, Value
    from te_fuser.ops.base import FusableOperation, Spec


def is_differentiable(op: FusableOperation, name: str, spec: Spec) -> bool:
    """Whether an output of an op can have a gradient."""
    declared = isinstance(op, UnfusedOperation) and name in op.non_differentiable
    return spec.dtype.is_floating_point and not declared


def with_gradients(nodes: Sequence[Node], values: Sequence[Value], leaving: set[int]) -> list[Value]:
    """The values with what their readers say of their gradients; those in `leaving` go to the caller.

    A gradient that nobody gives is none. It arrives in the dtype in which its reader gives it, of several the widest,
    where the op that makes the value takes it so; what the caller gets has its gradient in its own dtype.
    """
    able: dict[Hashable, tuple[str, ...]] = {}
    given = {}
    for node in nodes:
        like = node.traits.number, tuple(node.named_in)
        if like not in able:
            able[like] = _able(node)
        given[node.index] = _values(node, able[like])
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for value in given[node.index]:
            readers.setdefault(value, []).append(node)
    reached = _reached(nodes, values, given, leaving)
    found = [v if v.index in reached else replace(v, needs_grad=False) for v in values]
    makers = {v: node for node in nodes for v in (node.output, *node.named_out) if v not in leaving}
    known: dict[Hashable, torch.dtype] = {}
    for value in readers.keys() & makers.keys():
        own, op = values[value].spec.dtype, makers[value].op
        # The dtypes that it takes beside its own; None: any, as formulas do.
        taken = op.takes_gradients_in if isinstance(op, UnfusedOperation) else None
        what = own, taken, *[node.traits.number for node in readers[value]]
        if what not in known:
            known[what] = _arriving(own, readers[value], taken or ())
        dtype = known[what]
        if dtype != own and (taken is None or dtype in taken):
            found[value] = replace(found[value], gradient=dtype)
    return found


def check_gives_gradients(nodes: Sequence[Node], asked: Mapping[str, int]) -> None:
    """Refuse a named input (name -> value) that a gradient is asked for, and whose readers give none.

    Raises:
        TypeError: naming it and who reads it.
    """
    for name, value in asked.items():
        readers = [node for node in nodes if value in node.named_in.values()]
        if readers and not any(value in _given(node) for node in readers):
            raise TypeError(
                f"{readers[0].label}: {plain(name)!r} requires a gradient, and {readers[0].op.kind.__name__} gives it "
                f"none: give {plain(name)}.detach()"
            )


def _given(node: Node) -> list[int]:
    """The values of which an op gives the gradient, each once."""
    return _values(node, _able(node))


def _able(node: Node) -> tuple[str, ...]:
    """What an op calls those; the same for all that are alike and read inputs of the same names."""
    names = ("input", *[n for n in node.named_in if node.traits.reads[n].gradient])
    if node.traits.is_row:
        return names
    produced = [name for gradient in node.gradients for name in gradient.produces]
    return tuple([n for n in names if n in produced])


def _values(node: Node, names: Iterable[str]) -> list[int]:
    return list(dict.fromkeys([node.input if n == "input" else node.named_in[n] for n in names]))


def marked_refs(nodes: Iterable[Node]) -> set[Ref]:
    """The parameters whose attributes some op reads."""
    return {parameter_ref(n.parameters[a]) for n in nodes for g in n.gradients for a in g.by_attributes}


def stops_gradients(node: Node) -> bool:
    """Whether an op hands no gradient on to its main input, though its own code may be such that autograd would."""
    declared = isinstance(node.op, UnfusedOperation) and "output" in node.op.non_differentiable
    return declared or node.input not in _given(node)


def _reached(
    nodes: Sequence[Node], values: Sequence[Value], given: Mapping[int, list[int]], leaving: set[int]
) -> set[int]:
    """The values to which a gradient comes, from the caller or from an op behind them."""
    found = set(leaving)
    for node in reversed(nodes):
        if [v for v in (node.output, *node.named_out) if v in found and values[v].needs_grad]:
            found.update(given[node.index])
    return found


def _arriving(own: torch.dtype, readers: Iterable[Node], taken: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype in which the gradient of a value comes from its readers.

    Args:
        taken: the dtypes in which the op that makes it takes gradients beside its own.
    """
    found: dict[torch.dtype, None] = {}
    for node in readers:
        dtype = own if node.traits.gradient_dtype is None else node.gradient_dtype(own)
        if dtype != own:
            check_dtype(f"{node.label}: gradient_dtype", dtype)
        found[dtype] = None
    if len(found) == 1 and dtype in taken:
        return dtype
    # A narrow dtype that is none of these, as those of 8 bits, promotes to nothing.
    known = [dtype for dtype in found if dtype in FLOATING.values()]
    return functools.reduce(torch.promote_types, known) if known else own
