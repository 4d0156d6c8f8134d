"""Forwards that run again: computed anew in a backward, by their regions and scales, or replayed by a CUDA graph."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from te_fuser.contexts import being
from te_fuser.guards import Facts, still_hold
from te_fuser.params.binding import Binding, GivenBinding
from te_fuser.quantization.products import is_another_since, products_of
from te_fuser.quantization.state import (
    AMAXES,
    SCALED,
    Numbers,
    ReadyCheck,
    State,
    all_states,
    blocks,
    history_length,
    known_state_of,
)
from te_fuser.quantization.weights import keep
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Recipe
from te_fuser.recipe.region import lock

_LOST = (
    "a forward runs inside of a backward, {}: what computes it again takes "
    "context_fn=te_fuser.quantization.checkpoint_contexts, or is te_fuser.checkpoint"
)

# ------------------------------------------------------------------------------------------- scales between updates

Found = tuple[Numbers, Numbers]  # where calls look numbers up, and what they find there
# Those of a product between two updates, and the numbers of the regions that it was called in.
Scales = tuple[Numbers, Numbers, frozenset[int]]
_captured: ContextVar[list[Scales] | None] = ContextVar("te_fuser_captured_scales", default=None)
read_in_capture = _captured.get  # the copies of scales that calls here read, which a CUDA graph makes at each replay


def scales_of(states: Iterable[State]) -> list[Scales]:
    """Scales and slots of products now."""
    return [(s.numbers, {**s.numbers}, frozenset((s.entry, s.ran_in))) for s in states]


@contextlib.contextmanager
def _finding(numbers: Sequence[Found]) -> Iterator[None]:
    """Context in which calls find these numbers."""
    with lock:
        before = [(there, {**there}) for there, _ in numbers]
        _put(numbers)
    try:
        yield
    finally:
        with lock:
            _put(before)


def _put(numbers: Iterable[Found]) -> None:
    for there, found in numbers:
        there.update(found)  # at no time are there none, which another thread may look up
        for name in there.keys() - found.keys():
            del there[name]


# -------------------------------------------------------------------------------------------------- computed anew


def checkpoint_contexts() -> tuple[Any, Any]:
    """Contexts for `torch.utils.checkpoint.checkpoint(.., use_reentrant=False, context_fn=checkpoint_contexts)`.

    The recomputation in backward then has the region and the scales of forward, and amaxes count once.
    `te_fuser.checkpoint` needs no such contexts.

    Returns:
        A context for forward, and one for what runs again, which may be entered for each backward.
    """
    forward = _Forward()
    return forward.first(), Anew(forward.again)


class Anew(contextlib.AbstractContextManager[None]):
    """A context that is made each time it is entered."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, list[contextlib.ExitStack]()

    def __enter__(self) -> None:
        self._entered.append(contextlib.ExitStack())
        self._entered[-1].enter_context(self._make())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class _Forward:
    """The regions and scales of a forward; of one inside of another that runs again the scales are that one's.

    Attributes:
        whole: that one, else itself.
        precision: how often what modules run by had been changed.
        entries: the numbers of its regions from outside of all.
        captured: the copies of scales that it read, where a CUDA graph made some.
        scales: of all products, once they have others; None before.
    """

    def __init__(self) -> None:
        around = _running_again.get()
        self.whole: _Forward = self if around is None else around.whole
        self._regions, self._is_first = region.entered(), region.is_first_microbatch()
        self._used: list[Any] = []
        self.precision, self.entries = region.settings(), {region.entries()}
        self.captured: list[Scales] | None = None
        self.scales: list[Scales] | None = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with region.noting_used() as self._used:
            yield
        if self.whole is self:
            self.entries.add(region.entries())  # a region that was entered in here has updated
            self.captured = self.scales = read_in_capture()
            with lock:
                _by_scales_of_now.update([self] if self.scales is None else [])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if region.settings() > self.whole.precision:
            region.settings_changed()  # so that calls are looked at again, each with its products
        with (
            being(_running_again, self),
            being(_captured, self.whole.captured),
            region.recomputed(self._regions),
            region.held(self.whole.entries),
            _finding(self.whole._found()),
            region.microbatch(self._is_first),
            _finding([(state.kept, then) for state, then, _ in self._used]),
        ):
            yield

    def _found(self) -> list[Found]:
        """Scales of then of products that were called in its regions; those of other threads are left alone.

        Amaxes of forward go nowhere, as they were folded; gradients are recorded but now.
        """
        found: list[Found] = []
        for there, then, entries in self.scales or ():  # without any: they are as they were
            if self.captured is not None or not self.entries.isdisjoint(entries):
                nowhere = torch.zeros(2, dtype=torch.float32, device=then["input_scale"].device)
                found.append((there, {**then, **dict(zip(AMAXES[:2], nowhere.unbind(), strict=True))}))
        return found


_running_again: ContextVar[_Forward | None] = ContextVar("te_fuser_running_again", default=None)
_by_scales_of_now: weakref.WeakSet[_Forward] = weakref.WeakSet()


def keep_scales() -> None:
    """Leave scales that are about to change to forwards that ran by them and may run again."""
    scales = scales_of(all_states()) if _by_scales_of_now else []
    for forward in _by_scales_of_now:
        forward.scales = scales
    _by_scales_of_now.clear()


# ---------------------------------------------------------------------------------------- where products run, and ran


def refuse_another(state: State, recipe: Recipe) -> None:
    """Refuse a forward that runs again in another region: a new one, or by another recipe."""
    is_same = state.ran_by == recipe and (recipe.own_scales is not None or state.ran_in == region.entries())
    if not is_same and region.runs_again():
        raise RuntimeError(_LOST.format("in another region than it ran in before"))


def ran_outside(weights: Iterable[Binding]) -> None:
    """Note that products run outside of regions; refused where what runs again has lost its own."""
    for state in filter(None, map(known_state_of, weights)):
        if state.ran_by is not None and region.runs_again():
            raise RuntimeError(_LOST.format("without the region that it ran in before"))
        state.ran_by = None


def refuse_another_precision(weight: Binding, path: str, recipe: Recipe) -> None:
    """Refuse to run a forward again whose product ran by another recipe than is chosen now."""
    kept = _running_again.get()
    if kept is None or isinstance(weight, GivenBinding) or not is_another_since(weight, kept.whole.precision, recipe):
        return
    raise RuntimeError(
        f"{path or 'MatMul'}: te_fuser.precision was called between a forward and its backward, which computes that "
        "forward again, in which this product ran otherwise: call it before the forward, or behind the backward"
    )


# ------------------------------------------------------------------------------------------------- in CUDA graphs

_THERE = "capture again there, or call the model itself"
# Part of the key of a region in which that of a capture differs, and what it is there -> words.
_DIFFER: dict[str, dict[Any, str]] = {
    "recipe": {None: "this graph was captured in a region by {then}, and is called in one by {now}"},
    "calibrating": {None: "this graph was captured with calibrating={then}, and is called with {now}"},
    "says_microbatch": {
        True: "this graph was captured in quantization.microbatch(True), and is called without saying which "
        "micro-batch it is: replay it in quantization.microbatch(True or False)",
        False: "this graph was captured outside of quantization.microbatch(True), and quantizes weights in each "
        "replay, but is called in one: replay it without, or capture in quantization.microbatch(True)",
    },
    "agrees": {None: "this graph was captured where other ranks agree on amaxes than here"},
    "settings": {None: "te_fuser.precision was called since the capture, and the graph goes by what was before"},
}


class GraphedRegion:
    """The region that a model is captured in, and the products that ran there.

    A captured forward begins with a copy of the scales of then, which it and its backward read; amaxes go where those
    of calls go. Weights that are kept from micro-batch to micro-batch lie where they lay at the capture: a first
    micro-batch quantizes them before its replay.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._key = region.current_key()
        self._has_products = bool(products_of(model))
        self._records = torch.is_grad_enabled()
        self._device = device
        self._products: list[tuple[State, Recipe]] = []
        self._facts = Facts()
        self._kept: dict[State, tuple[dict[str, torch.Tensor], Binding]] = {}
        self._copied: dict[State, Any] = {}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which a forward warms up, or is captured."""
        if self._key is None:
            yield
            return
        said = None if region.is_first_microbatch() is None else not region.is_capturing()
        copied, micro_batch = _copied(self._device), region.microbatch(said)
        with region.counted_alone() as entry, copied, micro_batch, region.noting_used() as used:
            yield
        ran = [state for state in all_states() if state.ran_in == entry]
        for state in ran:
            state.ran_in = state.entry = region.entries()
        self._products = [(state, state.recipe) for state in ran if state.recipe is not None]
        recipes = tuple([(vars(state), "recipe", recipe) for state, recipe in self._products])
        self._facts = Facts(items=recipes, calls=((ReadyCheck(ran, records=True), True),))
        self._kept = {state: (kept, weight) for state, kept, weight in used}

    def run(self, replay: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Replay in the region of now, which must be like that of the capture."""
        self._check()
        if not self._products:
            return replay(*tensors)
        if not still_hold(self._facts):
            self._renew()
        if self._kept:
            self._keep()
        if torch.is_grad_enabled() or not self._records:
            return replay(*tensors)
        before = [(block.amaxes, block.amaxes.clone()) for block in {s.block for s, _ in self._products} if block]
        try:
            return replay(*tensors)
        finally:
            for amaxes, then in before:
                amaxes.copy_(then)

    def _check(self) -> None:
        """Refuse another region than the capture's, where products ran in it, or may have."""
        then, now = self._key, region.current_key()
        has_no_states = then is None or then.recipe.own_scales is not None
        if now == then or not (self._products or (self._has_products and has_no_states)):
            return
        if now is None:
            raise ValueError(
                "this graph was captured in a region of FP8, and is called outside of all: replay it in one by the "
                f"same recipe, whose entry makes scales; for the model's own precision {_THERE}"
            )
        if then is None:
            raise ValueError(
                f"this graph was captured outside of regions of FP8, and is called in one: {_THERE}; for replays in "
                "the model's own precision leave the region, or enter autocast(enabled=False)"
            )
        name = next(name for name in _DIFFER if getattr(then, name) != getattr(now, name))
        of = {"then": getattr(then, name), "now": getattr(now, name)}
        words = _DIFFER[name].get(None) or _DIFFER[name][of["then"]]
        raise ValueError(f"{words.format(**of)}: {_THERE}")

    def _renew(self) -> None:
        """Have scales where buffers are others, and recipes that were others since."""
        for state, recipe in self._products:
            refuse_another(state, recipe)
            if not state.runs_by(recipe):
                raise ValueError(
                    f"a product of this graph ran by a second recipe in this region, {state.recipe}, and its replay "
                    f"goes by {recipe}: leave the region between the two"
                )
            assert state.block is not None
            state.make(history_length(recipe), state.block.device)

    def _keep(self) -> None:
        """Have weights of 8 bits where the graph reads them."""
        keep([(state, weight) for state, (_, weight) in self._kept.items()], torch.is_grad_enabled())
        for state, (there, _) in self._kept.items():
            if self._copied.get(state) is not state.kept["weight_data"]:
                with torch.no_grad():
                    to, of = ([t.view(t.shape or 1).view(torch.uint8) for t in k.values()] for k in (there, state.kept))
                    torch._foreach_copy_(to, of)
                self._copied[state] = state.kept["weight_data"]


@contextlib.contextmanager
def _copied(device: torch.device) -> Iterator[None]:
    """Context in which calls read copies of the scales of a device, made here."""
    copies: list[Scales] = []
    with lock, torch.no_grad():
        for block in [block for block in blocks() if block.device == device]:
            states = block.states()
            for state in states if not region.is_capturing() else ():
                if state.has_buffers and state.scale.device == device:  # somebody may have put others in place
                    state.make(None, device)
            found = block.made_live().clone()[:, :, 0]
            copies += [
                (there, {**now, **dict(zip(SCALED, found[state.row].unbind(), strict=True))}, entries)
                for state, (there, now, entries) in zip(states, scales_of(states), strict=True)
            ]
    with _finding([copy[:2] for copy in copies]), being(_captured, copies):
        yield


def refuse_by_hand() -> None:
    """Refuse calls that a CUDA graph by hand would capture with the scales of now."""
    if region.is_capturing() and read_in_capture() is None:
        raise NotImplementedError(
            "a model runs in a region of FP8 while a CUDA graph is captured by hand: replays would go on by the scales "
            "of the capture; te_fuser.cuda_graph(model, x) in the region captures one that reads those of its replay"
        )
