"""Sequences that the ranks of a group cut: which part of a tensor is this rank's."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.distributed.group import Group
from te_fuser.ops.checks import no_tensor
from te_fuser.ops.sharing import Context
from te_fuser.presets.attention_base import set_context


def cut_sequence(x: torch.Tensor, group: Any, dim: int = 0, balanced: bool = False) -> torch.Tensor:
    """Take this rank's part of a tensor with whole sequences: inputs, labels, or `torch.arange(positions)`.

    Args:
        x: the same on all ranks.
        group: the ranks that cut sequences: `mesh["cp"]`, or a ProcessGroup.
        dim: the dimension of the positions.
        balanced: of 2 n equal blocks rank r of n has the blocks r and 2 n - 1 - r, as presets take them that have their
            group by `set_context_parallel_group`; else of n blocks the block r, as `parallelize(model, context=..)`
            says.

    Returns:
        [.., positions / ranks, ..]; a view where it is one block, which keeps all of x: clone it where that is large.

    Raises:
        ValueError: when the ranks cannot cut it into equal blocks, or it has no such dimension.
    """
    if not isinstance(x, torch.Tensor):
        raise no_tensor("cut_sequence", x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"cut_sequence: an input of shape {list(x.shape)} has no dimension {dim!r} to cut along")
    context = Context(Group.of("cut_sequence", group), balanced)
    context.check("cut_sequence", x.shape[dim])
    return context.own(x, x.shape[dim] // context.group.size, dim)


def share_context(model: torch.nn.Module, group: Group) -> None:
    """Let attentions in a model run on a block of the sequence for each rank; ValueError when there is none."""
    if not set_context(model, Context(group)):
        raise ValueError(
            "parallelize: context= cuts the sequence that attention sees, and this model has no DotProductAttention: "
            "leave it out; attentions of converted models and other libraries know no context"
        )
