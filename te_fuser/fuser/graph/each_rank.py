"""Ops that ranks share, as a pass: the part of each rank, and what ranks exchange around it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.spread import shared
from te_fuser.ops.base import LoweredOp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp


def each_rank(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as each rank runs it.

    Raises:
        ValueError: when an op cannot be cut into equal parts.
    """
    if not shared(listed):
        return listed
    return [new for place, item in enumerate(listed) for new in _of_rank(place, item)]


def _of_rank(place: int, item: ListedOp) -> Iterable[ListedOp]:
    op = item.lowered.op
    try:
        ops = op.each_rank()
    except ValueError as error:
        raise ValueError(f"op {place} ({op.kind.__name__} {item.path!r}): {error}") from error
    if ops == (op,):
        yield item
        return
    read = {given.name: item.names_in[argument] for argument, given in op.named_inputs().items()}
    for one in ops:
        names_in = {
            argument: read.get(given.name, f"{item.path}//{given.name}")
            for argument, given in one.named_inputs().items()
        }
        if one.kind is op.kind:
            yield replace(item, lowered=replace(item.lowered, op=one), names_in=names_in)
            continue
        one.train(op.training)
        names_out = tuple([f"{item.path}//{name}" for name in one.named_outputs()])
        lowered, path = LoweredOp(one, {}), f"{item.path}.{one.kind.role}"
        yield replace(item, lowered=lowered, path=path, names_in=names_in, names_out=names_out, casts={}, summed={})
