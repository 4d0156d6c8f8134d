"""The unfused reference: op after op by its meaning, recorded by autograd."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.fuser.graph import ListedOp
from te_fuser.ops.base import OpCall, batch_layout


def reference_run(
    listed: Iterable[ListedOp],
    x: torch.Tensor,
    values: MutableMapping[str, torch.Tensor],
    seed: torch.Tensor | None = None,
    parameters: MutableMapping[tuple[int, str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run a flattened list op by op.

    Args:
        values: named tensors; those that ops bind are added.
        seed: (seed, offset) of the call's random draws.
        parameters: tensors to use in place of parameters, by (id of the owner, name).
    """
    for index, item in enumerate(listed):
        op = item.lowered.op
        call = OpCall()
        for name, binding in item.lowered.bindings.items():
            replacement = parameters.get((id(binding.owner), binding.name)) if parameters is not None else None
            call.tensors[name] = binding.get() if replacement is None else replacement
        for argument, name in item.names_in.items():
            call.tensors[argument] = values.get(name)
        call.tensors["input"] = x
        if op.draws():
            if seed is None:
                raise RuntimeError(f"op {index} ({op.kind.__name__}) draws random numbers: give the call's seed")
            value, offset = seed.tolist()
            call.random = RandomStream(value, offset, index, *batch_layout(x.shape, op.batch_dim()))
        x = op.reference(call, x)
        for name in item.names_out:
            values[name] = x
    return x
