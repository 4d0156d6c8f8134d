"""Recipes of FP8, as data, and the regions that would run by them."""

from te_fuser.recipe.recipes import DelayedScaling, Format, Recipe
from te_fuser.recipe.region import autocast, fp8_autocast

__all__ = ["DelayedScaling", "Format", "Recipe", "autocast", "fp8_autocast"]
