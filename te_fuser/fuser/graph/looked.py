"""What a look at a call sees instead of tensors: computed parameters and results that have no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.look import LastCall, NotSeenError, looking, maker_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.ops.binding import Binding


class Parameters:
    """The parameters of a list: those that are there, and those that each call computes."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self.bindings = tuple(bindings)
        self._last = {b.key: LastCall() for b in bindings if b.computed}

    def get(self) -> list[torch.Tensor]:
        """The parameters as they are now; those that are computed are computed anew."""
        found = [b.get() for b in self.bindings]
        for b, t in zip(self.bindings, found, strict=True):
            if b.key in self._last:
                self._last[b.key].note(maker_of(b.owner, b.name), (), (), (t,))
        return found

    def looked_at(self) -> list[torch.Tensor]:
        """The parameters as they are now, and what stands for those that are computed.

        Raises:
            NotSeenError: where that takes a real call.
        """
        return [self._look_at(b) if b.computed else b.get() for b in self.bindings]

    def _look_at(self, binding: Binding) -> torch.Tensor:
        owner, name = binding.owner, binding.name
        gave = self._last[binding.key].gave(maker_of(owner, name), (), ()) if binding.key in self._last else None
        with looking() as look:
            if gave is not None:
                return look.made(*gave[0])
            try:
                return look.computed(owner, name)
            except Exception as error:  # whatever a user's module raises that looks at values
                raise NotSeenError(
                    f"{name} of {type(owner).__name__} is computed in each call, and what it will be cannot be told "
                    f"without values ({type(error).__name__}: {error}); call the model once, then look"
                ) from error


def results_like(graph: Graph, outputs: Sequence[str], device: torch.device) -> Any:
    """What stands for the results of a call, where x is on `device`: y, or (y, *outputs)."""
    values = [graph.values[v] for v in (graph.output, *(graph.named_outputs[n] for n in outputs))]
    with looking() as look:
        made = tuple(look.made(v.spec.shape, v.spec.dtype, device, v.needs_grad) for v in values)
    return made if outputs else made[0]
