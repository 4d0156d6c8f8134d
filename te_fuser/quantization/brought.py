"""Amaxes that checkpoints and copies bring, which no update has had yet: the next one does."""

from __future__ import annotations

from te_fuser.look import is_looking
from te_fuser.params.scales import STATES, States, some_wait
from te_fuser.quantization.precision import recipe_for
from te_fuser.quantization.products import device_of, products
from te_fuser.quantization.state import history_length, state_of
from te_fuser.recipe.recipes import DelayedScaling, Recipe


def take_brought(recipe: Recipe) -> bool:
    """Put what waits of products where calls record; whether there was any.

    Args:
        recipe: of the region, by which those run that have run by none.
    """
    if not some_wait[0] or is_looking():
        return False
    some_wait[0], some = False, False
    for weight in products():
        states: States | None = weight.owner.__dict__.get(STATES)
        if states is None or not states.waiting:
            continue
        state, own, device = state_of(weight), recipe_for(weight, recipe), device_of(weight)
        if isinstance(own, DelayedScaling) and device is not None and state.prefix in states.waiting:
            if state.recipe is None:
                state.runs_by(own)
            state.make(history_length(state.recipe or own), device)
            state.record(states.waiting.pop(state.prefix))
            some = True
        some_wait[0] = some_wait[0] or bool(states.waiting)
    return some
