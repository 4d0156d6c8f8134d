"""Functions of a recipe, tried before anything runs by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_fuser.recipe.recipes import DelayedScaling, Recipe

_TENSORS = 6  # as of two products


@functools.lru_cache(maxsize=64)
def try_recipe(recipe: Recipe) -> None:
    """Try the functions of a recipe on a history of zeros, two products' tensors.

    Raises:
        ValueError: where they raise, give another shape, or no floating point.
    """
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
