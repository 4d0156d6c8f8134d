"""Amaxes that checkpoints and copies bring, which no region has folded yet: the next one does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from te_fuser.ops.binding import Binding
from te_fuser.ops.narrow import prefix_of
from te_fuser.ops.scales import some_wait, states_of
from te_fuser.quantization.precision import recipe_for
from te_fuser.quantization.products import device_of, products
from te_fuser.quantization.state import history_length, state_of
from te_fuser.recipe.recipes import DelayedScaling, Recipe


def waiting(recipe: Recipe) -> list[Binding]:
    """The products that keep amaxes in a region of a recipe, and of which some wait."""
    if not some_wait[0]:
        return []
    found = [w for w in products() if prefix_of(w.name) in states_of(w.owner).waiting]
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
        state.record(states_of(weight.owner).waiting.pop(state.prefix))


def say_that_ranks_differ() -> None:
    """Warn who saves or copies before ranks have agreed on the last step: what comes of it is one rank's."""
    warnings.warn(
        "ranks have not agreed yet on the amaxes of FP8 of the last step: what is saved or copied now has those of "
        "this rank, and goes on exactly where each rank loads its own; to save on one rank for all, call "
        "te_fuser.quantization.states(model) on all ranks before",
        stacklevel=2,
    )
