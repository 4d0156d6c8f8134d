"""8 bits that ranks exchange: quantized before they are gathered, where all ranks quantize by one scale.

What a product takes is gathered first where ranks cut its rows (`sequence_parallel`), and so is the gradient of what
another one gives. In 8 bits that is half the bytes or less, and the same numbers, as ranks that agree on amaxes have
one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from te_fuser.distributed.group import has_ranks
from te_fuser.fuser.graph.listed import ListedOp, with_attributes
from te_fuser.ops.collectives import AllGather, Carried, ReduceScatter
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_allreduce import agreement_in
from te_fuser.quantization.products import weight_in
from te_fuser.quantization.state import known_state_of
from te_fuser.recipe import region


def agreeing() -> tuple[int, ...]:
    """The ranks that have one scale for each product in the regions that are on; none where each has its own."""
    outermost = next(filter(None, region.entered()), None)
    agreement = agreement_in(outermost) if has_ranks() else None
    return () if agreement is None or agreement.differs else tuple(sorted(agreement.ranks))


def quantized_first(
    listed: Sequence[ListedOp], ranks: Sequence[int], reduces: Callable[[ListedOp], bool]
) -> list[ListedOp]:
    """The list with what quantizes before what gathers, forward and backward, where these ranks have one scale.

    Args:
        ranks: that agree on amaxes.
        reduces: whether they do on those of a product; where a fold before did not, its scales are each rank's own.
    """
    found = list(listed)
    for at in range(len(found)):
        item = found[at]
        product = item.lowered.op
        if not isinstance(product, Float8MatMul) or not ranks:
            continue
        weight = weight_in(item)
        if isinstance(weight, GivenBinding) or not reduces(item):  # scales of the former are each rank's own
            continue
        state = known_state_of(weight)
        if state is not None and state.alike is not None and not state.alike.issuperset(ranks):
            continue
        before, behind = found[max(at - 2, 0) : at], found[at + 1 : at + 3]
        if [_kind(i) for i in before] == [AllGather, Quantize] and _in(before[0], ranks):
            carried = Carried(product.form.formats[0], product.form.dtype)
            found[at - 2 : at] = before[1], _carrying(before[0], carried)
        if [_kind(i) for i in behind] == [QuantizeGradient, ReduceScatter] and _in(behind[1], ranks):
            carried = Carried(product.form.dtype, product.form.formats[2])
            found[at + 1 : at + 3] = _carrying(behind[1], carried), behind[0]
    return found


def _kind(item: ListedOp) -> Any:
    """An op's; None where others read what it gives by name, or it reads theirs."""
    return None if item.names_in or item.names_out else item.lowered.op.kind


def _in(item: ListedOp, ranks: Sequence[int]) -> bool:
    """True where all ranks of a collective are among these."""
    op: Any = item.lowered.op
    return op.group.size > 1 and set(dist.get_process_group_ranks(op.group.process_group())) <= set(ranks)


def _carrying(item: ListedOp, carried: Carried) -> ListedOp:
    op: Any = item.lowered.op
    return replace(item, lowered=replace(item.lowered, op=with_attributes(op, {**op.__dict__, "carried": carried})))
