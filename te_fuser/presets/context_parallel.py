"""Presets whose sequences ranks cut, by Transformer Engine's arguments."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from te_fuser import ops
from te_fuser.ops.context import Context
from te_fuser.presets.arguments import check_choice, stacklevel_of_user
from te_fuser.presets.base import Preset

WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


class ContextParallel(Preset):
    """A preset with an attention in it, or one itself, which alone sees whole sequences."""

    _context: Context = Context()

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = "p2p"
    ) -> None:
        """Let the ranks of a group cut the sequences; x and the output are this rank's part.

        Of 2 n equal blocks of a sequence rank r of n has the blocks r and 2 n - 1 - r, as `te_fuser.parallel
        .cut_sequence(x, group, dim, balanced=True)` gives them; "thd" is refused: of its tokens ranks have one block
        by `te_fuser.parallel.parallelize(model, context=group)`. Masks, lengths and angles are of whole sequences.
        Gradients of parameters are those of this rank's part: whoever averages them over samples does so over these
        ranks, too.

        Args:
            cp_group: the ranks; None: this process alone.
            cp_global_ranks: what torch.distributed says of the group in any case.
            cp_stream: changes nothing: exchanges run on the group's own stream.
            cp_comm_type: "a2a" is what runs: heads are exchanged for positions. "p2p", "all_gather" and "a2a+p2p" give
                the same results, so they are taken, with a warning.

        Raises:
            TypeError, ValueError: for what is no group, or a hierarchy of several; for other ranks than the group's;
                for an unknown cp_comm_type.
        """
        set_context(self, context_of(type(self).__name__, cp_group, cp_global_ranks, cp_comm_type))


def context_of(who: str, cp_group: Any, cp_global_ranks: Any, cp_comm_type: Any) -> Context:
    """What Transformer Engine's arguments say of how sequences are cut.

    Raises:
        TypeError, ValueError: see `ContextParallel.set_context_parallel_group`.
    """
    way = "a2a" if cp_comm_type is None else check_choice("cp_comm_type", cp_comm_type, WAYS)
    if cp_group is None:
        return Context()
    if isinstance(cp_group, (list, tuple)):
        if len(cp_group) != 1:
            raise ValueError(
                f"{who}: cp_group is {len(cp_group)} groups, a hierarchy of exchanges that te_fuser does not have: "
                "give one group of all these ranks"
            )
        (cp_group,) = cp_group
    group = ops.Group.of("cp_group", cp_group)
    ranks = torch.distributed.get_process_group_ranks(group.process_group())
    if cp_global_ranks is not None and list(cp_global_ranks) != ranks:
        raise ValueError(f"{who}: cp_global_ranks={list(cp_global_ranks)}, but cp_group has {ranks}: leave them out")
    if way != "a2a" and group.size > 1:
        warnings.warn(
            f"{who}: cp_comm_type={way!r} runs as 'a2a', which exchanges heads for positions: the results are the "
            "same, and key/value heads have to be cut into equal parts; give 'a2a'",
            stacklevel=stacklevel_of_user(),
        )
    return Context(group, balanced=True)


def set_context(model: torch.nn.Module, context: Context) -> int:
    """Let attentions in a model run on sequences that are cut so; gives how many there are."""
    found = 0
    for module in model.modules():
        op = module.op if isinstance(module, ops.Bound) else module
        if isinstance(op, ops.OfPositions):
            op.context, op.balanced = context.group, context.balanced
            found += isinstance(op, ops.DotProductAttention)
        if isinstance(module, ContextParallel):
            module._context = context
        if isinstance(module, Preset):
            module._made_from = []  # variants are made anew
        if isinstance(module, ops.FusableOperation):
            module.revision += 1  # lists around look at the preset again
    return found
