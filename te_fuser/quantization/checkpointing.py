"""Checkpointing in regions: a forward that runs again has the regions and the scales that it had."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_fuser.params.binding import Binding, GivenBinding
from te_fuser.quantization.products import any_since, is_another_since, now, scalings_of
from te_fuser.quantization.state import AMAXES, Numbers, State, all_states, known_state_of, lock, state_of
from te_fuser.quantization.weight_cache import reading
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Recipe

_LOST = (
    "a forward runs inside of a backward, {}: what computes it again takes "
    "context_fn=te_fuser.quantization.checkpoint_contexts, or is te_fuser.checkpoint"
)


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
    """A context that is made each time it is entered.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._entered.append(made)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class _Forward:
    """The regions and scales of a forward; of one inside of another that runs again they are that one's."""

    def __init__(self) -> None:
        self._around = _running_again.get()
        self._regions = region.entered()
        self._is_first = region.is_first_microbatch()
        self._used: list[Any] = []
        self.precision: int = now() if self._around is None else self._around.precision
        self.scales: Snapshot | None = None if self._around is None else self._around.scales
        self.entries: set[int] = {region.entries()} if self._around is None else self._around.entries

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with region.noting_used() as self._used:
            yield
        if self._around is None:
            self.scales = snapshot()  # of now: a region that was entered in here has updated
            self.entries.add(region.entries())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if any_since(self.precision):
            region.settings_changed()  # so that calls are looked at again, each with its products
        micro_batch, runs_again = region.microbatch(self._is_first), region.being(_running_again, self)
        with runs_again, region.recomputed(self._regions), self._by_its_scales(), micro_batch, reading(self._used):
            yield

    @contextlib.contextmanager
    def _by_its_scales(self) -> Iterator[None]:
        """Context in which products that were called in its regions have the scales of then, and keep them in updates.

        Those of other threads are left alone. What forward records goes nowhere, as it was folded.
        """
        with lock:
            region.hold(self.entries)
            scales = Snapshot() if self.scales is None else self.scales  # without any: they are as they were
            kept = [k for k in scales.scales or () if scales.is_captured or not self.entries.isdisjoint(k.entries)]
            before = [SavedScales.of(state) for k in kept if (state := k.state()) is not None]
            for k in kept:
                k.put_back(records=False)
        try:
            with of_capture(scales) if scales.is_captured else contextlib.nullcontext():
                yield
        finally:
            with lock:
                region.hold(self.entries, -1)
                for k in before:
                    k.put_back()


_running_again: ContextVar[_Forward | None] = ContextVar("te_fuser_running_again", default=None)

# ------------------------------------------------------------------------------------------- scales between updates


class SavedScales(NamedTuple):
    """The scales and slots of a product between two updates, and the numbers of the regions that it was called in."""

    state: weakref.ref[State]
    numbers: Numbers
    entries: frozenset[int]

    @classmethod
    def of(cls, state: State) -> SavedScales:
        """Scales and slots of a product now."""
        return cls(weakref.ref(state), {**state.numbers}, frozenset((state.entry, state.ran_in)))

    def put_back(self, records: bool = True) -> None:
        """Have the product find them; where it is to record nothing of x and W, slots that nobody reads."""
        if (state := self.state()) is None:
            return
        state.numbers.update(self.numbers)
        if not records:
            nowhere = torch.zeros(2, dtype=torch.float32, device=self.numbers["input_scale"].device)
            state.numbers.update(zip(AMAXES[:2], nowhere.unbind(), strict=True))  # its gradients are recorded but now


@dataclass(eq=False)
class Snapshot:
    """The scales between two updates, for what computes a forward again.

    Attributes:
        scales: of each product; None while they are what it has.
        is_captured: whether they are copies that a CUDA graph makes.
    """

    scales: list[SavedScales] | None = None
    is_captured: bool = False


_snapshot: list[Any] = [lambda: None]  # a weak reference to that of now, where somebody keeps one
_captured: ContextVar[Snapshot | None] = ContextVar("te_fuser_captured_scales", default=None)
read_in_capture = _captured.get  # the copies of scales that calls here read, which a CUDA graph makes at each replay


def of_capture(scales: Snapshot) -> contextlib.AbstractContextManager[None]:
    """Context in which `read_in_capture` gives these scales."""
    return region.being(_captured, scales)


def snapshot() -> Snapshot:
    """The scales of now."""
    with lock:
        found: Snapshot | None = _captured.get() or _snapshot[0]()
        if found is None:
            found = Snapshot()
            _snapshot[0] = weakref.ref(found)
        return found


def keep_snapshot() -> None:
    """Leave the scales, which are about to change, to who asked for those of now."""
    kept: Snapshot | None = _snapshot[0]()
    if kept is not None:
        kept.scales = [SavedScales.of(state) for state in all_states()]
    _snapshot[0] = lambda: None


# ---------------------------------------------------------------------------------------- where products run, and ran


def ran_within(weight: Binding, recipe: Recipe) -> None:
    """Note that a product runs in a region now, by that recipe; as `refuse_another`."""
    state = state_of(weight)
    refuse_another(state, recipe)
    if not region.recomputing():
        state.ran_by, state.ran_in = recipe, region.entries()


def refuse_another(state: State, recipe: Recipe) -> None:
    """Refuse what computes a forward again in another region than it ran in.

    By recipes that keep scales it is another one where it was entered anew, by others where the recipe is another one.
    """
    is_same = state.ran_by == recipe and (scalings_of(recipe) is not None or state.ran_in == region.entries())
    if not is_same and region.runs_again():
        raise RuntimeError(_LOST.format("in another region than it ran in before"))


def ran_outside(weights: Iterable[Binding]) -> None:
    """Note that products run outside of all regions now; refused where what runs again has lost its own."""
    for state in filter(None, map(known_state_of, weights)):
        if state.ran_by is not None and region.runs_again():
            raise RuntimeError(_LOST.format("without the region that it ran in before"))
        state.ran_by = None


def refuse_another_precision(weight: Binding, path: str, recipe: Recipe) -> None:
    """Refuse to compute a forward again in which a product ran by another recipe than is chosen for it now."""
    kept = _running_again.get()
    if kept is None or isinstance(weight, GivenBinding) or not is_another_since(weight, kept.precision, recipe):
        return
    raise RuntimeError(
        f"{path or 'MatMul'}: te_fuser.precision was called between a forward and its backward, which computes that "
        "forward again, in which this product ran otherwise: call it before the forward, or behind the backward"
    )
