"""Sums over ranks of parameters' gradients, of which each rank has a term."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fuser.distributed.exchange import ByProcessGroup, Exchange, UnderWay, exchanged
from te_fuser.distributed.group import Group
from te_fuser.params.concatenated_parameter import parts_of

Sums = list[tuple[list[int], UnderWay]]  # which of some tensors, and what was started of them, flat
LEFT = "sequence_parallel"  # attribute of a parameter whose gradient the engine that trains adds up over the ranks


def is_left(parameter: torch.Tensor) -> bool:
    """True where the engine adds up a parameter's gradient, as its mark says."""
    marks = {bool(getattr(part, LEFT, False)) for part in parts_of(parameter) or (parameter,)}
    if len(marks) > 1:
        raise ValueError(
            f"of parameters that are read as one some have {LEFT}=True: call te_fuser.parallel.leave_sums_to_engine("
            "model), which marks all of them"
        )
    return marks.pop()


def start_sums(gradients: Sequence[torch.Tensor], group: Group) -> Sums:
    """Start sums over the ranks: one collective for each dtype."""
    found = []
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        places = [k for k, g in enumerate(gradients) if g.dtype == dtype]
        if len(places) == 1:
            found.append((places, Exchange().start(gradients[places[0]], group)))
            continue
        flat = torch.cat([gradients[k].reshape(-1) for k in places])
        found.append((places, UnderWay(flat, ByProcessGroup(group).add_up(flat))))
    return found


def wait_for_sums(under_way: Sums, gradients: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The sums of these tensors, which were started."""
    found = list(gradients)
    for places, flat in under_way:
        made = Exchange().wait(flat, group)
        if len(places) == 1:
            found[places[0]] = made
            continue
        pieces = made.split([gradients[k].numel() for k in places])
        for k in places:
            found[k] = torch.empty_like(gradients[k], memory_format=torch.contiguous_format)
        torch._foreach_copy_([found[k].view(-1) for k in places], pieces)
    return found


def with_sum(parameter: torch.Tensor, group: Group) -> torch.Tensor:
    """Parameter whose gradient autograd sums over ranks, unless that is left to the engine."""
    if group.size == 1 or is_left(parameter):
        return parameter
    return exchanged(parameter, None, Exchange(), group)
