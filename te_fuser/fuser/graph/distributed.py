"""DTensors that do not lie as the ops take them, as a pass that refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from te_fuser.ops.unfused_operation import marked_parameters
from te_fuser.sharding.rule import rule_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_fuser.distributed.dtensor import Lies
    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp


def distributed(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as it is, if each DTensor lies as its op takes it: each rank runs on its own part.

    Raises:
        TypeError: naming the op, this rank and what to do.
    """
    there = {key: (*p.joined, *([] if p.lies is None else [p.lies])) for key, p in call.parameters.items()}
    if not any(there.values()):
        return listed
    for place, item in enumerate(listed):
        for name, binding in item.lowered.bindings.items():
            for lies in there[binding.key]:
                _check(place, item, name, lies)
    return listed


def _check(place: int, item: ListedOp, name: str, lies: Lies) -> None:
    op, here = item.lowered.op, f"op {place} ({item.lowered.op.kind.__name__} {item.path!r}), on rank {dist.get_rank()}"
    if name in marked_parameters(op, tuple(item.lowered.bindings)):
        raise TypeError(
            f"{here}: accumulate_into_main_grad takes plain parameters, and {name} is a DTensor: leave it out, and "
            "autograd gives its gradient"
        )
    cut = rule_of(op).cuts(op).get(name)
    if lies.is_whole() if cut is None else lies.is_cut(*cut):
        return
    takes = "whole in each rank" if cut is None else f"cut along dimension {cut[0]} by the ranks of {cut[1].title}"
    raise TypeError(
        f"{here}: parameter {name} is a DTensor on {lies.mesh} with {list(lies.placements)}, and the op takes "
        f"it {takes}: te_fuser.parallelize(model, mesh['tp']) cuts both alike; what fully_shard cut is whole in "
        "a call of the module that it was given, and after its unshard()"
    )
