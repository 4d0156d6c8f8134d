"""checkpoint: parts of a model computed again in backward; CudaRNGStatesTracker: random states by name."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.distributed.exchange import Exchange
from te_fuser.distributed.group import Group
from te_fuser.quantization.rerun import Anew, checkpoint_contexts

States = dict[str, torch.Tensor]
# ProcessGroup -> of what its ranks were found to keep parts together.
_compared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Activation checkpointing: function(*args, **kwargs), of which only the arguments are kept for backward.

    Backward runs the function again, with the random numbers of forward (those of the tracker, too), its FP8 region and
    its scales. There are two forms:

        checkpoint(function, *args, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None,
                   use_reentrant=None, **kwargs)
        checkpoint(function, distribute_saved_activations, get_cuda_rng_tracker, tp_group, *args, **kwargs)

    Args:
        function: what to call; called again in backward, it must do the same.
        distribute_saved_activations: each rank keeps only its part of the first argument, which has to be equal on all
            ranks; backward gathers the parts.
        get_rng_state_tracker, get_cuda_rng_tracker: a function that returns an object with `get_states()` and
            `set_states(states)`.
        tp_group: the group of ranks; None: the default group, where there is one.
        use_reentrant, preserve_rng_state: change nothing: it is never re-entrant, and the state is always preserved.

    Raises:
        TypeError: when `function` is not callable, or the argument to distribute is no plain tensor.
        ValueError: when x differs between the ranks, as with `sequence_parallel` of the function.
        RankMismatchError: on all ranks, when they distribute different tensors or run different calls; in backward,
            when a rank is missing.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function first, got {function!r}")
    if args and isinstance(args[0], bool) and len(args) >= 3:
        named = dict(zip(("distribute_saved_activations", "get_rng_state_tracker", "tp_group"), args[:3], strict=True))
        args, kwargs = args[3:], {**kwargs, **named}
    for name in ("use_reentrant", "preserve_rng_state"):
        kwargs.pop(name, None)
    share, tp_group = kwargs.pop("distribute_saved_activations", False), kwargs.pop("tp_group", None)
    if share and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = Group.of("checkpoint", torch.distributed.group.WORLD if tp_group is None else tp_group)
        if group.size > 1 and torch.is_grad_enabled():
            function, args = _keeping_a_part(function, args, group)
    tracker = kwargs.pop("get_rng_state_tracker", None) or kwargs.pop("get_cuda_rng_tracker", None)
    states = {} if tracker is None else dict(tracker().get_states())

    def contexts() -> Any:
        forward, again = checkpoint_contexts()
        return forward, again if tracker is None else Anew(lambda: _with_states(again, tracker(), states))

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keeping_a_part(
    function: Callable[..., Any], args: tuple[Any, ...], group: Group
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of this rank's part of the first argument, which it gathers to run again."""
    x, *others = args or (None,)
    if not isinstance(x, torch.Tensor) or is_dtensor(x):
        raise TypeError(
            f"checkpoint: distribute_saved_activations=True shares the first argument, got {type(x).__name__}: give a "
            "plain tensor first, or leave it out"
        )
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    if any(getattr(module, "sequence_parallel", False) for module in modules):
        raise ValueError(
            "checkpoint: distribute_saved_activations=True takes what all ranks have alike, and by sequence_parallel "
            "each has its own part already: leave it out"
        )
    # All ranks are asked for parts of such an x, once for each shape and dtype: backward would gather others.
    known, line = _compared.setdefault(group.process_group(), set()), f"x {list(x.shape)} {x.dtype}"
    if line not in known:
        consistency.compare([group], [("x", f"checkpoint with distribute_saved_activations of {line}")])
        known.add(line)
    shape, needs_grad, given = x.shape, x.requires_grad, [x]
    # This rank's part in memory of its own; parts are equal, the last ones filled up with zeros.
    size = -(-x.numel() // group.size)
    own = x.detach().reshape(-1)[group.rank * size : (group.rank + 1) * size]
    own = torch.nn.functional.pad(own, (0, size - own.numel())) if own.numel() < size else own.clone()

    def run(part: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        if given:
            return function(given.pop(), *others, **kwargs)
        try:
            with consistency.one_thread([group]):
                gathered = Exchange(join=0).run(part, group)
        except RankMismatchError as error:
            words = f"in the backward pass of a checkpoint, which gathers x {list(shape)}: {error}"
            raise RankMismatchError(words) from error
        return function(gathered[: shape.numel()].view(shape).requires_grad_(needs_grad), *others, **kwargs)

    return run, (own, *others)


@contextlib.contextmanager
def _with_states(again: Any, tracker: Any, states: States) -> Iterator[None]:
    """Context in which a forward runs again, and the tracker has these states."""
    with again:
        now = dict(tracker.get_states())
        tracker.set_states(dict(states))
        try:
            yield
        finally:
            tracker.set_states(now)


class CudaRNGStatesTracker:
    """States of the random generator by name, of the current GPU, or of the CPU where there is none.

    `add("model-parallel-rng", seed)` makes a state. Random numbers inside of `with tracker.fork("model-parallel-rng"):`
    come from it; the generator outside is not advanced.
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
        """Context whose random numbers come from the named state.

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
