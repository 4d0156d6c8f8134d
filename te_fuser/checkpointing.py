"""checkpoint: parts of a model computed again in backward; CudaRNGStatesTracker: random states by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fuser.quantization.checkpointing import checkpoint_contexts

States = dict[str, torch.Tensor]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), of which backward keeps the arguments alone and computes the rest again.

    Random numbers are drawn again as in forward, those of the tracker, too; it runs again in the regions of FP8 of its
    forward, with the scales of then. There are two forms:

        checkpoint(function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None,
                   use_reentrant=None, **kwargs)
        checkpoint(function, distribute_saved_activations, get_cuda_rng_tracker, tp_group, *args, **kwargs)

    Args:
        function: what to call; called again in backward, it must do the same.
        distribute_saved_activations: whether ranks would share what is kept; in a group of one rank they do not.
        get_rng_state_tracker, get_cuda_rng_tracker: gives an object with `get_states()` and `set_states(states)`.
        tp_group: the group of ranks.
        use_reentrant, preserve_rng_state: taken for the sake of scripts; it is never re-entrant, and always preserved.

    Raises:
        TypeError: when `function` is no function.
        NotImplementedError: where several ranks are to share what is kept.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function first, got {function!r}")
    if args and isinstance(args[0], bool) and len(args) >= 3:
        named = dict(zip(("distribute_saved_activations", "get_rng_state_tracker", "tp_group"), args[:3], strict=True))
        args, kwargs = args[3:], {**kwargs, **named}
    for name in ("use_reentrant", "preserve_rng_state"):
        kwargs.pop(name, None)
    _check_not_distributed(kwargs.pop("distribute_saved_activations", False), kwargs.pop("tp_group", None))
    tracker = kwargs.pop("get_rng_state_tracker", None) or kwargs.pop("get_cuda_rng_tracker", None)
    states = {} if tracker is None else dict(tracker().get_states())

    def contexts() -> Any:
        forward, again = checkpoint_contexts()
        return forward, again if tracker is None else _both(again, _with_states(tracker(), states))

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


def _check_not_distributed(share: Any, tp_group: Any) -> None:
    if share and tp_group is not None and torch.distributed.get_world_size(tp_group) > 1:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations=True asks ranks to share what is kept, which te_fuser does not "
            "do: leave it out"
        )


@contextlib.contextmanager
def _with_states(tracker: Any, states: States) -> Iterator[None]:
    """In here the tracker has these states."""
    now = dict(tracker.get_states())
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(now)


class CudaRNGStatesTracker:
    """States of the random generator by name, of the current GPU, or of the CPU where there is none.

    `add("model-parallel-rng", seed)` makes one; random numbers drawn inside `with tracker.fork("model-parallel-rng"):`
    come from it, and the generator outside goes on as if nothing had been drawn.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: States = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> States:
        """The states by name, in a dictionary of its own."""
        return dict(self.states_)

    def set_states(self, states: States) -> None:
        """Put these in place of all states.

        Raises:
            TypeError: when it is no dictionary.
        """
        if not isinstance(states, dict):
            raise TypeError(f"set_states takes a dictionary, name -> state, as get_states gives it, got {states!r}")
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from a seed.

        Raises:
            TypeError: for what is no name, or no whole number.
            ValueError: for a name or a seed that there is already.
        """
        if not isinstance(name, str) or not hasattr(seed, "__index__"):
            raise TypeError(f"CudaRNGStatesTracker.add takes a text and a whole number, got {name!r}, {seed!r}")
        for what, known in (("name", name in self.states_), ("seed", seed in self.seeds_)):
            if known:
                raise ValueError(
                    f"CudaRNGStatesTracker.add: there is a state of this {what} already, {name!r}, {seed}: use another"
                )
        before = _state()
        torch.cuda.manual_seed(seed) if torch.cuda.is_available() else torch.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """In here random numbers are drawn from the state of that name.

        Raises:
            KeyError: when there is none.
        """
        if name not in self.states_:
            known = ", ".join(map(repr, self.states_)) or "none"
            raise KeyError(
                f"CudaRNGStatesTracker.fork: no state {name!r} (there are: {known}); add(name, seed) makes one"
            )
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state) if torch.cuda.is_available() else torch.set_rng_state(state)
