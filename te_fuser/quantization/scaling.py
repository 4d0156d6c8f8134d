"""Scales by recipes: of the amaxes that a product keeps, or of its factors themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_fuser.ops.own_scales import Scaling
from te_fuser.params.narrow import LARGEST
from te_fuser.quantization.amax_slots import ROLES
from te_fuser.recipe.recipes import DelayedScaling, Format, OwnScales, QParams, Recipe


def scalings_of(recipe: Recipe | None) -> tuple[Scaling, Scaling, Scaling] | None:
    """Rules by which x, W and dy get scales from themselves; None of one whose scales are kept."""
    if recipe is None or recipe.own_scales is None:
        return None
    x, weight, dy = [Scaling(o.block, o.by.power_2_scale, o.by.amax_epsilon) for o in recipe.own_scales]
    return x, weight, dy


def how(recipe: Recipe) -> str:
    """Words on the scales of a recipe that keeps none; "" of one that does."""
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
    algo, made = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    amax = amax.float()
    found: torch.Tensor = most / amax / 2.0**recipe.margin if made is None else made(amax, scale, most, recipe)
    return torch.where((amax > 0) & (amax <= LARGEST) & (found > 0), found.float(), scale).clamp(max=LARGEST)


@functools.lru_cache(maxsize=64)
def _most(form: Format, products: int, device: torch.device) -> torch.Tensor:
    """The largest numbers of the formats of so many products' tensors."""
    forward, backward = form.value
    return torch.tensor([forward, forward, backward], dtype=torch.float32, device=device).repeat(products)


@functools.lru_cache(maxsize=64)
def try_recipe(recipe: Recipe) -> None:
    """Look at the scales that a recipe keeps none for, and try its functions on a history of zeros, two products'.

    Raises:
        TypeError: for `own_scales` that are none.
        ValueError: where functions raise, give another shape, or no floating point.
    """
    own: Any = recipe.own_scales
    if own is not None and not (isinstance(own, tuple) and len(own) == 3 and all(map(_is_own, own))):
        raise TypeError(
            f"{type(recipe).__name__}: own_scales are three OwnScales(QParams(..), (rows, columns) or None), of x, W "
            f"and dy, or None where scales are kept, got {own!r}"
        )
    if not isinstance(recipe, DelayedScaling):
        return
    zeros, ones = torch.zeros(recipe.amax_history_len, 2 * len(ROLES)), torch.ones(2 * len(ROLES))
    amax, factor = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    if callable(amax):
        _try("amax_compute_algo(history)", zeros, amax, zeros)
    if factor is not None:
        call = "scaling_factor_compute_algo(amax, scale, fp8_max, recipe)"
        _try(call, zeros, factor, zeros[0], ones, 448.0 * ones, recipe)


def _is_own(found: Any) -> bool:
    """True where this says how a tensor gets its scales."""
    if not (isinstance(found, OwnScales) and isinstance(found.by, QParams)):
        return False
    block = found.block
    is_pair = isinstance(block, tuple) and len(block) == 2
    return block is None or (is_pair and all(type(size) is int and size > 0 for size in block))


def _try(call: str, history: torch.Tensor, function: Callable[..., Any], *given: Any) -> None:
    try:
        with torch.no_grad():
            made = function(*given)
    except Exception as error:
        words = f"raised {type(error).__name__}: {error}; it was tried on zeros, history {list(history.shape)}"
        raise ValueError(f"DelayedScaling: {call} {words}") from error
    if isinstance(made, torch.Tensor) and made.shape == history.shape[1:] and made.is_floating_point():
        return
    got = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else repr(made)
    raise ValueError(
        f"DelayedScaling: {call} gives one number for each tensor, float32 {list(history.shape[1:])} of a history "
        f"{list(history.shape)}, newest first; it gave {got}"
    )
