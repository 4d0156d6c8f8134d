"""Scales by recipes: of the amaxes that a product keeps, or of its factors themselves."""

from __future__ import annotations

import functools

import torch

from te_fuser.ops.own_scales import Scaling
from te_fuser.params.narrow import LARGEST
from te_fuser.quantization.block import ROLES
from te_fuser.recipe.recipes import DelayedScaling, Format, OwnScales, Recipe


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


def scales_of(recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """New scales by a recipe, float32 [tensors]: of a history [length, tensors] newest first, and the scales of before.

    The tensors are those of products one behind the other, each as `ROLES`. Where the amax is not finite and above 0,
    or a function gives NaN or no number above 0, the scale stays. What functions give in another dtype is converted.
    """
    most = _most(recipe.fp8_format, history.shape[1] // len(ROLES), history.device)
    algo = recipe.amax_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    made = recipe.scaling_factor_compute_algo
    amax = amax.float()
    found: torch.Tensor = most / amax / 2.0**recipe.margin if made is None else made(amax, scale, most, recipe)
    return torch.where((amax > 0) & (amax <= LARGEST) & (found > 0), found.float(), scale).clamp(max=LARGEST)


@functools.lru_cache(maxsize=64)
def _most(form: Format, products: int, device: torch.device) -> torch.Tensor:
    """The largest numbers of the formats of so many products' tensors."""
    forward, backward = form.value
    return torch.tensor([forward, forward, backward], dtype=torch.float32, device=device).repeat(products)
