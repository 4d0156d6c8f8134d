"""Checkpointing in regions: a forward that runs again has the regions and the scales that it had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from te_fuser.params.binding import Binding
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_slots import ROLES
from te_fuser.quantization.precision import any_since, is_another_since, now
from te_fuser.quantization.scaling import scalings_of
from te_fuser.quantization.state import Numbers, Snapshot, State, known_state_of, lock, of_capture, snapshot, state_of
from te_fuser.quantization.weight_cache import reading
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Recipe

_REMEDY = "what computes it again takes context_fn=te_fuser.quantization.checkpoint_contexts, or is te_fuser.checkpoint"


def checkpoint_contexts() -> tuple[Any, Any]:
    """For `torch.utils.checkpoint.checkpoint(.., use_reentrant=False, context_fn=checkpoint_contexts)`.

    What is computed again in backward runs in the regions of its forward by the scales of then, and amaxes count once.
    `te_fuser.checkpoint` does so by itself.

    Returns:
        A context for forward, and one for what runs again, which may be entered for each backward.
    """
    kept = _Kept()
    return kept.forward(), Anew(kept.again)


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


class _Kept:
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
    def forward(self) -> Iterator[None]:
        with region.noting_used() as self._used:
            yield
        if self._around is None:
            self.scales = snapshot()  # of now: a region that was entered in here has folded
            self.entries.add(region.entries())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if any_since(self.precision):
            region.settings_changed()  # so that calls are looked at again, each with its products
        micro_batch, token = region.microbatch(self._is_first), _running_again.set(self)
        try:
            with region.recomputed(self._regions), _by(self.scales, self.entries), micro_batch, reading(self._used):
                yield
        finally:
            _running_again.reset(token)


_running_again: ContextVar[_Kept | None] = ContextVar("te_fuser_running_again", default=None)


@contextlib.contextmanager
def _by(scales: Snapshot | None, entries: set[int]) -> Iterator[None]:
    """In here products that were called in regions of these numbers have these scales, and no fold gives them others.

    Those of other threads are left alone. What forward records goes nowhere, as it was folded.
    """
    with lock:
        region.hold(entries)
        before = _put_back(scales, entries)
    is_captured = scales is not None and scales.is_captured
    try:
        with of_capture(scales) if is_captured else contextlib.nullcontext():
            yield
    finally:
        with lock:
            region.let_go(entries)
            for state, kept, inverses, slots in before:
                state.scales.update(kept)
                state.inverses.update(inverses)
                state.amaxes.update(slots)


def _put_back(scales: Snapshot | None, entries: set[int]) -> list[tuple[State, Numbers, Numbers, Numbers]]:
    """Have products find these scales, and slots that nobody reads; each with what it finds else."""
    if scales is None or scales.scales is None:  # as it is now: the same amaxes once more change nothing
        return []
    kept = [k for k in scales.scales if scales.is_captured or not entries.isdisjoint(k.entries)]
    found = [(state, k) for k in kept if (state := k.state()) is not None]
    before = [(state, {**state.scales}, {**state.inverses}, {**state.amaxes}) for state, _ in found]
    for state, then in found:
        nowhere = torch.zeros(2, dtype=torch.float32, device=then.scales["input"].device)
        state.scales.update(then.scales)
        state.inverses.update(then.inverses)
        state.amaxes.update(zip(ROLES[:2], nowhere.unbind(), strict=True))  # its gradients are recorded but now
    return before


def ran_within(weight: Binding, recipe: Recipe) -> None:
    """Note that a product runs in a region now, by that recipe; as `refuse_another`."""
    state = state_of(weight)
    refuse_another(state, recipe)
    if not region.recomputing():
        state.ran_by, state.ran_in = recipe, region.entries()


def refuse_another(state: State, recipe: Recipe) -> None:
    """Refuse what computes a forward again in another region than it ran in.

    By recipes that keep scales it is another one where it was entered anew, by others where the recipe is another one.

    Raises:
        RuntimeError: so.
    """
    is_same = state.ran_by == recipe and (scalings_of(recipe) is not None or state.ran_in == region.entries())
    if not is_same and region.runs_again():
        raise RuntimeError(f"a forward runs inside of a backward, in another region than it ran in before: {_REMEDY}")


def refuse_another_precision(weight: Binding, path: str, recipe: Recipe) -> None:
    """Refuse to compute a forward again in which a product ran by another recipe than is chosen for it now.

    Raises:
        RuntimeError: naming the product's path.
    """
    kept = _running_again.get()
    if kept is None or isinstance(weight, GivenBinding) or not is_another_since(weight, kept.precision, recipe):
        return
    raise RuntimeError(
        f"{path or 'MatMul'}: te_fuser.precision was called between a forward and its backward, which computes that "
        "forward again, in which this product ran otherwise: call it before the forward, or behind the backward"
    )


def ran_outside(weights: Iterable[Binding]) -> None:
    """Note that products run outside of all regions now.

    Raises:
        RuntimeError: inside of a backward, where they ran in a region before: what runs again has lost its own.
    """
    for state in filter(None, map(known_state_of, weights)):
        if state.ran_by is not None and region.runs_again():
            raise RuntimeError(
                f"a forward runs inside of a backward, without the region that it ran in before: {_REMEDY}"
            )
        state.ran_by = None
