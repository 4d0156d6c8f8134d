"""What a recipe of somebody's own gives, tried before anything runs by it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_fuser.recipe.recipes import DelayedScaling, OwnScales, QParams, Recipe

_TENSORS = 6  # as of two products


@functools.lru_cache(maxsize=64)
def try_recipe(recipe: Recipe) -> None:
    """Look at the scales that a recipe keeps none for, and try its functions on a history of zeros, two products'.

    Raises:
        TypeError: for `own_scales` that are none.
        ValueError: where functions raise, give another shape, or no floating point.
    """
    _check_own_scales(recipe)
    if not isinstance(recipe, DelayedScaling):
        return
    zeros, ones = torch.zeros(recipe.amax_history_len, _TENSORS), torch.ones(_TENSORS)
    with torch.no_grad():
        if callable(recipe.amax_compute_algo):
            _check_given("amax_compute_algo(history)", zeros, recipe.amax_compute_algo, zeros)
        if recipe.scaling_factor_compute_algo is not None:
            given = zeros[0], ones, 448.0 * ones, recipe
            call = "scaling_factor_compute_algo(amax, scale, fp8_max, recipe)"
            _check_given(call, zeros, recipe.scaling_factor_compute_algo, *given)


def _check_own_scales(recipe: Recipe) -> None:
    found: Any = recipe.own_scales
    if found is None or isinstance(found, tuple) and len(found) == 3 and all(map(_is_own, found)):
        return
    raise TypeError(
        f"{type(recipe).__name__}: own_scales are three OwnScales(QParams(..), (rows, columns) or None), of x, W "
        f"and dy, or None where scales are kept, got {found!r}"
    )


def _is_own(found: Any) -> bool:
    """Whether this says how a tensor gets its scales."""
    if not (isinstance(found, OwnScales) and isinstance(found.by, QParams)):
        return False
    block = found.block
    return block is None or (
        isinstance(block, tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    )


def _check_given(call: str, history: torch.Tensor, function: Callable[..., Any], *given: Any) -> None:
    try:
        made = function(*given)
    except Exception as error:
        raise ValueError(
            f"DelayedScaling: {call} raised {type(error).__name__}: {error}; it was tried on zeros, history "
            f"{list(history.shape)}"
        ) from error
    if isinstance(made, torch.Tensor) and made.shape == history.shape[1:] and made.is_floating_point():
        return
    got = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else repr(made)
    raise ValueError(
        f"DelayedScaling: {call} gives one number for each tensor, float32 {list(history.shape[1:])} of a history "
        f"{list(history.shape)}, newest first; it gave {got}"
    )
