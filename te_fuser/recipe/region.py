"""Regions in which a model would run in FP8: so far they run nothing so, and refuse to be switched on."""

from __future__ import annotations

import contextlib
from typing import Any

from te_fuser.recipe.recipes import Recipe


class Region(contextlib.ContextDecorator):
    """A region that changes nothing: a context, or a decorator."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def fp8_autocast(
    enabled: bool = False,
    calibrating: bool | Recipe = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> Region:
    """A region in which nothing is computed in FP8: `with fp8_autocast(enabled=False):`.

    Args:
        enabled: whether it would be; only False is possible.
        calibrating: whether scales would be recorded; only False is possible. A recipe in this place is `fp8_recipe`.
        fp8_recipe: how it would be.
        fp8_group: the ranks that would agree on scales.

    Raises:
        NotImplementedError: for `enabled` or `calibrating`.
        TypeError: for what is no recipe.
    """
    if isinstance(calibrating, Recipe):
        fp8_group = fp8_recipe if fp8_group is None else fp8_group
        fp8_recipe, calibrating = calibrating, False
    return _region("fp8_autocast", enabled, calibrating, fp8_recipe)


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
) -> Region:
    """The same under its newer name, on by default: `with autocast(enabled=False):`.

    Raises:
        NotImplementedError: for `enabled` or `calibrating`.
        TypeError: for what is no recipe.
    """
    return _region("autocast", enabled, calibrating, recipe)


def _region(name: str, enabled: Any, calibrating: Any, recipe: Any) -> Region:
    for argument, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not (value is None or isinstance(value, bool)):
            raise TypeError(f"{name}: {argument} is True or False, got {value!r}")
        if value:
            raise NotImplementedError(f"{name}({argument}=True): te_fuser has no FP8 yet; use {name}(enabled=False)")
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise TypeError(f"{name} takes a recipe of te_fuser.recipe, DelayedScaling() say, got {recipe!r}")
    return Region()
