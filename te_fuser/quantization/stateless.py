"""Recipes that keep nothing: how the factors of a product get their scales from themselves."""

from __future__ import annotations

from te_fuser.ops.own_scales import Scaling
from te_fuser.recipe.recipes import OwnScales, Recipe


def scalings_of(recipe: Recipe | None) -> tuple[Scaling, Scaling, Scaling] | None:
    """How x, W and dy get scales from themselves by a recipe; None of one whose scales are kept."""
    if recipe is None or recipe.own_scales is None:
        return None
    x, weight, gradient = map(_scaling, recipe.own_scales)
    return x, weight, gradient


def _scaling(own: OwnScales) -> Scaling:
    return Scaling(own.block, own.by.power_2_scale, own.by.amax_epsilon)


def how(recipe: Recipe) -> str:
    """What scales are by a recipe that keeps none, in words; "" of one that does."""
    if recipe.own_scales is None:
        return ""
    x, weight, _ = [own.block and " x ".join(map(str, own.block)) for own in recipe.own_scales]
    if x is None:
        return "scales of now"
    return f"a scale for each {x} numbers" + (f", {weight} of a weight" if weight != x else "")
