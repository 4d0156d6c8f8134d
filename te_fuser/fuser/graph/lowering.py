"""What a call makes of its list of ops: passes, one after the other, each from list to list.

The graph, the reference and verify see the last one's result alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from te_fuser.dtypes import text_of
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.ops import op_table

Pass = Callable[[Sequence[ListedOp], CallSpecs], Sequence[ListedOp]]


def without_idle(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list without the ops that do nothing in this call, as what they work by is not there."""
    rows = {kind: op_table.idles_without.of(kind) for kind in {type(item.lowered.op) for item in listed}}
    if not any(rows.values()):
        return listed
    known = {*call.named, *[name for item in listed for name in item.names_out]}

    def works(item: ListedOp) -> bool:
        by = rows[type(item.lowered.op)]
        return not by or any(argument in by and name in known for argument, name in item.names_in.items())

    return [item for item in listed if works(item)]


def entries(listed: Iterable[ListedOp]) -> Iterable[tuple[str, object]]:
    """Each op as text: its kind, its place and what the call makes of it."""
    for item in listed:
        more = [f"reads {name} in {text_of(dtype)}" for name, dtype in item.casts.items()]
        more += [f"sums the gradient of {name} over {group.size} ranks" for name, group in item.summed.items()]
        more += ["draws for its part"] if item.share is not None else []
        yield "; ".join([f"{item.lowered.op.kind.__name__} {item.path!r}", *more]), item
