"""Recipes that keep nothing: how the factors of a product get their scales from themselves."""

from __future__ import annotations

from te_fuser.ops.own_scales import Scaling
from te_fuser.recipe.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, QParams, Recipe

_BLOCK, _MX_BLOCK = 128, 32


def scalings_of(recipe: Recipe | None) -> tuple[Scaling, Scaling, Scaling] | None:
    """How x, W and dy get scales from themselves by a recipe; None of one whose scales are kept."""
    if isinstance(recipe, Float8CurrentScaling):
        by = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
        return _scaling(by[0], None), _scaling(by[1], None), _scaling(by[2], None)
    if isinstance(recipe, Float8BlockScaling):
        by = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
        row, square = (1, _BLOCK), (_BLOCK, _BLOCK)
        return _scaling(by[0], row), _scaling(by[1], square), _scaling(by[2], row)
    if isinstance(recipe, MXFP8BlockScaling):
        return (Scaling((1, _MX_BLOCK), power_of_two=True),) * 3
    return None


def _scaling(by: QParams, block: tuple[int, int] | None) -> Scaling:
    return Scaling(block, by.power_2_scale, by.amax_epsilon)


def how(recipe: Recipe | None) -> str:
    """What scales are by a recipe that keeps none, in words; "" of one that does."""
    if isinstance(recipe, Float8BlockScaling):
        return f"a scale for each 1 x {_BLOCK} numbers, {_BLOCK} x {_BLOCK} of a weight"
    if isinstance(recipe, MXFP8BlockScaling):
        return f"a scale for each 1 x {_MX_BLOCK} numbers"
    return "scales of now" if isinstance(recipe, Float8CurrentScaling) else ""
