"""Recipes of FP8, as data, and the regions that run by them."""

from te_fuser.recipe.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    OwnScales,
    QParams,
    Recipe,
)
from te_fuser.recipe.region import autocast, fp8_autocast

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "OwnScales",
    "QParams",
    "Recipe",
    "autocast",
    "fp8_autocast",
]
__dir__ = __all__.copy
