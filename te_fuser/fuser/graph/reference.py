"""The unfused reference: op after op by its meaning, recorded by autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch

from te_fuser.distributed.dtensor import recorded_part
from te_fuser.distributed.shard import Share, stream_of
from te_fuser.ops.base import FusableOperation, OpCall, outputs_by_name
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.params.gradient_sums import with_sum

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.graph.op_instances import ListedOp
    from te_fuser.params.binding import Binding


def reference_run(
    lowered: Sequence[ListedOp],
    x: torch.Tensor,
    values: MutableMapping[str, torch.Tensor],
    given: Mapping[Binding, torch.Tensor],
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a list op by op, behind its passes; named tensors that ops bind are added to `values`."""
    tensors = {
        b.key: torch.full_like(t, math.nan, requires_grad=False) if b.made_in_call else recorded_part(t)
        for b, t in given.items()
    }
    narrow: dict[str, torch.dtype] = {}  # named values that are stored in 8 bits
    stored: dict[str, torch.dtype] = {}
    # What autocast casts is in the list; it must not cast once more inside the ops.
    with torch.autocast(x.device.type, enabled=False):
        for item in lowered:
            parameters = {name: tensors[binding.key] for name, binding in item.lowered.bindings.items()}
            parameters |= {name: with_sum(parameters[name], group) for name, group in item.summed.items()}
            parameters |= {name: parameters[name].to(dtype) for name, dtype in item.casts.items()}
            named = {argument: values.get(name) for argument, name in item.names_in.items()}
            op = item.lowered.op
            made, stored = run_op(op, item.stream, x, {**parameters, **named}, seed, item.share, fresh=True)
            x = made["output"]
            for name, own in zip(item.names_out, op.named_outputs(), strict=True):
                values[name] = made[own]
                narrow |= {name: stored[own]} if own in stored else {}
    values.update((name, values[name].to(dtype)) for name, dtype in narrow.items())
    return x.to(stored["output"]) if "output" in stored else x


def run_nodes(
    nodes: Iterable[Node],
    values: MutableMapping[int, torch.Tensor],
    parameters: Mapping[int, torch.Tensor],
    seed: torch.Tensor | None,
    exact: bool,
) -> None:
    """Run some nodes of a graph op by op; what they make is added to `values`, of 8 bits as wider numbers.

    Where it is `exact` everything is float64, and parameters stay so where the plan casts them.
    """
    for node in nodes:
        tensors: dict[str, torch.Tensor | None] = {}
        for name, number in node.parameters.items():
            cast = None if exact else node.casts.get(name)
            tensors[name] = parameters[number] if cast is None else parameters[number].to(cast)
        tensors.update({argument: values[v] for argument, v in node.named_in.items()})
        made, _ = run_op(node.op, node.draw.stream, values[node.input], tensors, seed, node.draw.share)
        values[node.output] = made["output"]
        values.update((v, made[name]) for v, name in zip(node.named_out, node.op.named_outputs(), strict=True))


def run_op(
    op: FusableOperation,
    stream: int,
    x: torch.Tensor,
    tensors: Mapping[str, torch.Tensor | None],
    seed: torch.Tensor | None,
    share: Share | None = None,
    fresh: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """The outputs of one op by its meaning, and the dtypes of those that are stored in 8 bits and come wider.

    Args:
        share: what this rank has of x; None: all.
        fresh: whether what each call makes of what it quantizes is still to be made, and put into the tensors given.
    """
    call = OpCall({**tensors, "input": x}, fresh=fresh)
    if op.draws():
        if seed is None:
            raise RuntimeError(f"{op.kind.__name__} draws random numbers: give the call's seed")
        call.random = stream_of(seed, stream, x.shape, op.batch_dim(), share)
    made = op.reference(call, x)
    if not isinstance(op, UnfusedOperation):
        found = made if isinstance(made, Mapping) else {"output": made}
        return {**dict.fromkeys(op.named_outputs(), found["output"]), **found}, call.stored
    given = outputs_by_name(op, made, "its reference")
    return {name: y.detach() if name in op.non_differentiable else y for name, y in given.items()}, call.stored
