"""8 bits that ranks exchange: quantized before they are gathered, where all ranks quantize by one scale.

What a product takes is gathered first where ranks cut its rows (`sequence_parallel`), and so is the gradient of what
another one gives. In 8 bits that is half the bytes or less, and the same numbers, as ranks that agree on amaxes have
one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from te_fuser.fuser.graph.listed import ListedOp, with_attributes
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.collectives import AllGather, Carried, ReduceScatter
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_allreduce import agreeing_ranks
from te_fuser.quantization.products import recipe_for, weight_in
from te_fuser.quantization.state import known_state_of
from te_fuser.recipe.recipes import Recipe

Kinds = tuple[type[FusableOperation], type[FusableOperation]]


def quantized_first(listed: Sequence[ListedOp], around: Recipe) -> list[ListedOp]:
    """The list with what quantizes before what gathers, forward and backward, where ranks have one scale.

    Each has its own of products whose recipe, in a region of this one, or an update before says so, and of weights that
    come with calls.
    """
    found, ranks = list(listed), agreeing_ranks()

    def exchange(at: int, kinds: Kinds, carried: Carried) -> None:
        """Exchange two neighbours of these kinds, of which others read nothing by name, nor do they of others."""
        pair = found[max(at, 0) : at + 2]
        if [None if i.names_in or i.names_out else i.lowered.op.kind for i in pair] != [*kinds]:
            return
        item = pair[1] if kinds[1] is ReduceScatter else pair[0]
        op: Any = item.lowered.op
        if op.group.size > 1 and ranks.issuperset(dist.get_process_group_ranks(op.group.process_group())):
            op = with_attributes(op, {**op.__dict__, "carried": carried})
            moved = replace(item, lowered=replace(item.lowered, op=op))
            found[at : at + 2] = [moved, pair[0]] if item is pair[1] else [pair[1], moved]

    for at, item in enumerate(listed if ranks else ()):
        product = item.lowered.op
        if not isinstance(product, Float8MatMul) or isinstance(weight := weight_in(item), GivenBinding):
            continue
        state, recipe = known_state_of(weight), recipe_for(weight, around)
        if recipe is None or not recipe.reduce_amax:
            continue
        if state is None or state.alike is None or state.alike.issuperset(ranks):
            x, _, dy = product.form.formats
            exchange(at - 2, (AllGather, Quantize), Carried(x, product.form.dtype))
            exchange(at + 1, (QuantizeGradient, ReduceScatter), Carried(product.form.dtype, dy))
    return found
