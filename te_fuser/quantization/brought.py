"""Amaxes that checkpoints and copies bring, which no region has folded yet: the next one does."""

from __future__ import annotations

from collections.abc import Sequence

from te_fuser.look import is_looking
from te_fuser.params.binding import Binding
from te_fuser.params.narrow import prefix_of
from te_fuser.params.scales import STATES, States, some_wait
from te_fuser.quantization.precision import recipe_for
from te_fuser.quantization.products import device_of, products
from te_fuser.quantization.state import history_length, state_of
from te_fuser.recipe.recipes import DelayedScaling, Recipe


def waiting(recipe: Recipe) -> list[Binding]:
    """The products that keep amaxes in a region of a recipe, and of which some wait."""
    if not some_wait[0] or is_looking():
        return []
    found = [w for w in products() if prefix_of(w.name) in _waiting_at(w)]
    some_wait[0] = bool(found)
    return [w for w in found if isinstance(recipe_for(w, recipe), DelayedScaling) and device_of(w) is not None]


def take(weights: Sequence[Binding], recipe: Recipe) -> None:
    """Put what waits of products where calls record, so that the next fold has it.

    Args:
        recipe: of the region, by which those run that have run by none.
    """
    for weight in weights:
        state = state_of(weight)
        if state.recipe is None:
            state.runs_by(recipe_for(weight, recipe) or recipe)
        state.make(history_length(state.recipe or recipe), device_of(weight))  # type: ignore[arg-type]
        amaxes = _waiting_at(weight).pop(state.prefix, None)
        if amaxes is not None:  # which another thread has taken
            state.record(amaxes)


def _waiting_at(weight: Binding) -> dict[str, list[float]]:
    states: States | None = weight.owner.__dict__.get(STATES)
    return {} if states is None else states.waiting
