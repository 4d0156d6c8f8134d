"""What a call makes of its list of ops: passes, one after the other, each from list to list.

The graph, the reference and verify see the last one's result alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from te_fuser.fuser.graph.autocast import autocast
from te_fuser.fuser.graph.call_context import rewritten
from te_fuser.fuser.graph.distributed import distributed
from te_fuser.fuser.graph.each_rank import each_rank
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.fuser.graph.spread import spread

Pass = Callable[[Sequence[ListedOp], CallSpecs], Sequence[ListedOp]]


def without_idle(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list without the ops that do nothing in this call, as what they work by is not there."""
    known = {*call.named, *[name for item in listed for name in item.names_out]}

    def works(item: ListedOp) -> bool:
        by = item.lowered.op.idles_without
        return not by or any(argument in by and name in known for argument, name in item.names_in.items())

    return [item for item in listed if works(item)]


PASSES: tuple[Pass, ...] = (without_idle, distributed, spread, autocast, each_rank)


def lower(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as it runs in a call.

    Random streams are numbered before any pass, so that what passes add moves no draw.
    """
    found: Sequence[ListedOp] = numbered(listed)
    for run in PASSES:
        found = run(found, call)
    return rewritten(found, call)


def numbered(listed: Sequence[ListedOp]) -> list[ListedOp]:
    """The list with each op's place as the number of its random stream."""
    return [op if op.stream == place else replace(op, stream=place) for place, op in enumerate(listed)]
