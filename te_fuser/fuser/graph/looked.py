"""What a look at a call sees instead of tensors: computed parameters and results that have no values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.look import NotSeenError, looking

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.ops.binding import Binding


def looked_at(bindings: Iterable[Binding], last: Graph | None) -> list[torch.Tensor]:
    """Parameters as they are now, and what stands for those that are computed.

    Args:
        last: the graph of the last call, which knows what cannot be told without computing it.

    Raises:
        NotSeenError: where there was no call yet.
    """
    return [_look_at(b, k, last) if b.computed else b.get() for k, b in enumerate(bindings)]


def _look_at(binding: Binding, number: int, last: Graph | None) -> torch.Tensor:
    owner = binding.owner
    with looking() as look:
        try:
            return look.computed(owner, binding.name)
        except Exception as error:  # of a user's module, which takes no tensors without values
            if last is None:
                raise NotSeenError(
                    f"{binding.name} of {type(owner).__name__} is computed in each call, and what it will be cannot be "
                    f"told without values ({type(error).__name__}: {error}); call the model once, then look again"
                ) from error
        spec = last.parameter_specs[number]
        needs = torch.is_grad_enabled() and any(p.requires_grad for p in owner.parameters())
        return look.made(spec.shape, spec.dtype, spec.device, needs)


def results_like(graph: Graph, outputs: Sequence[str], device: torch.device) -> Any:
    """What stands for the results of a call, where x is on `device`: y, or (y, *outputs)."""
    values = [graph.values[v] for v in (graph.output, *(graph.named_outputs[n] for n in outputs))]
    with looking() as look:
        made = tuple(look.made(v.spec.shape, v.spec.dtype, device, v.needs_grad) for v in values)
    return made if outputs else made[0]
