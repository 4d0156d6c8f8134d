"""What a look at a call sees instead of tensors: computed parameters and results that have no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.look import LastCall, NotSeenError, looking, maker_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.params.binding import Binding


class Parameters:
    """The parameters of a list: those that are there, and those that each call computes."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self.bindings = tuple(bindings)
        told = [k for k, b in enumerate(bindings) if b.computed and not b.tells]
        self._last = {number: LastCall() for number in told}

    def get(self) -> list[torch.Tensor]:
        """The parameters as they are now; those that are computed are computed anew."""
        found = [b.taken() for b in self.bindings]
        for number, last in self._last.items():
            binding = self.bindings[number]
            last.note(maker_of(binding.owner, binding.name), (), (), (found[number],))
        return found

    def looked_at(self) -> list[torch.Tensor]:
        """The parameters as they are now, and what stands for those that are computed.

        Raises:
            NotSeenError: where that takes a real call.
        """
        return [self._look_at(b, k) if b.computed else b.get() for k, b in enumerate(self.bindings)]

    def _look_at(self, binding: Binding, number: int) -> torch.Tensor:
        owner, name = binding.owner, binding.name
        last = self._last.get(number)
        gave = None if last is None else last.gave(maker_of(owner, name), (), ())
        with looking() as look:
            if (known := binding.look(look.made)) is not None:
                return known
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
