"""Gradients of weights that a backward left for later; `backward_dw` computes them.

They wait at their parameters, in the order of the backwards: a pipeline's schedule fills its gaps with them.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from te_fuser.contexts import being
from te_fuser.distributed.dtensor import is_taken_away
from te_fuser.ops.checks import described
from te_fuser.params.concatenated_parameter import parts_of
from te_fuser.params.main_grad import of_backward

_WAITING, _FOR = "_te_fuser_waiting", "_te_fuser_for"  # attributes of parameters, and of what stands for them
_MANY = 64  # backwards, of which a schedule has no more under way at once
_at_once = ContextVar("at_once", default=False)

Gradients = Callable[[], Sequence[torch.Tensor | None]]


@contextmanager
def at_once() -> Iterator[None]:
    """The backward of calls in here leaves nothing."""
    with being(_at_once, True):
        yield


def handed_in(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Sequence[torch.Tensor]:
    """Tensors for autograd to see: at `places`, leaves that stand for weights whose gradients may come later.

    With the weights themselves, backward would run their hooks without a gradient. One that is no parameter is refused:
    nobody would ask for its gradient.
    """
    if _at_once.get() or not torch.is_grad_enabled():
        return tensors
    found = list(tensors)
    for place in places:
        weight = found[place]
        if not all(part.is_leaf for part in parts_of(weight) or (weight,)):
            raise RuntimeError(
                f"delay_wgrad_compute takes parameters, and a weight {list(weight.shape)} was computed of others (a "
                "parametrization, say): set it to False"
            )
        found[place] = weight.detach().requires_grad_()
        found[place].__dict__[_FOR] = weight
    return found


def themselves(
    tensors: tuple[torch.Tensor, ...], places: Sequence[int]
) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
    """The tensors with the weights that were meant, and these, where their gradients may come later."""
    weights = [tensors[k].__dict__[_FOR] for k in places if _FOR in tensors[k].__dict__]
    if not weights:
        return tensors, ()
    found = list(tensors)
    for place, weight in zip(places, weights, strict=True):
        found[place] = weight
    return tuple(found), weights


class _Queue(deque["Waiting"]):
    """Queue of what waits at a parameter; pickles have an empty set, which runs no code, instead."""

    def __reduce__(self) -> Any:
        return set, ()

    def whole(self) -> _Queue:
        """Drop what a backward that raised has left, as far as a later one shows it; returns the queue."""
        while len(self) > 1 and not self[0].ended and any(later.ended for later in self):
            self.popleft()
        return self


class Waiting:
    """Weight gradients that one backward has left of a segment; made once, on its stream."""

    def __init__(self, weights: Sequence[torch.Tensor], gradients: Gradients) -> None:
        self.backward = torch._C._current_graph_task_id()
        self._weights, self._gradients = weights, gradients
        self._stream = torch.cuda.current_stream(weights[0].device) if weights[0].is_cuda else None
        self._ran = self.ended = False
        for p in [p for weight in weights for p in parts_of(weight) or (weight,) if p.requires_grad]:
            queue = p.__dict__.get(_WAITING)
            if not isinstance(queue, _Queue):
                queue = p.__dict__[_WAITING] = _Queue()
            queue.append(self)
            if len(queue.whole()) == _MANY:
                _warn_many()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.ended = True

    def run(self) -> None:
        """Give each weight its gradient, by autograd, so that its hooks see it."""
        if self._ran:
            return
        self._ran = True
        with torch.cuda.stream(self._stream):
            with torch.no_grad(), of_backward(self.backward):
                made = zip(self._weights, self._gradients(), strict=True)
            found = [(weight, gradient) for weight, gradient in made if gradient is not None and weight.requires_grad]
            if found:
                torch.autograd.backward([weight for weight, _ in found], [gradient for _, gradient in found])
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        del self._weights, self._gradients


@functools.cache
def _warn_many() -> None:
    warnings.warn(
        f"{_MANY} backwards wait at one weight for backward_dw(), and what they hold is not freed: call it behind "
        "each, or set delay_wgrad_compute to False",
        RuntimeWarning,
        stacklevel=2,
    )


def backward_dw(module: torch.nn.Module) -> None:
    """Compute the weight gradients that the oldest backward of a module with `delay_wgrad_compute` has left.

    They are added to `grad` or `main_grad`, as by backward. If ranks share the module, all have to call it in the same
    order.

    Raises:
        RuntimeError: for a module of `fully_shard`, which reduces gradients before this.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"backward_dw takes a module, got {described(module)}")
    if is_taken_away(module):
        raise RuntimeError(
            "backward_dw: fully_shard reduces the gradients of this module in backward, before those of its weights: "
            "set delay_wgrad_compute to False on its products"
        )
    queues = [q.whole() for p in module.parameters() if isinstance(q := p.__dict__.get(_WAITING), _Queue) and q]
    waiting = dict.fromkeys(entry for q in queues for entry in q if entry.backward == q[0].backward)
    for entry in waiting:  # what is behind one that raises stays for another call
        for queue in (q for q in queues if entry in q):
            queue.remove(entry)
        entry.run()
    for p in module.parameters():
        if not p.__dict__.get(_WAITING, True):
            del p.__dict__[_WAITING]
