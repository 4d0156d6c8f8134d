"""te.precision: which products of a model run by another recipe than the region's, or in their own precision."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from te_fuser.params.binding import Binding
from te_fuser.params.scales import Aside
from te_fuser.quantization.products import products_of
from te_fuser.quantization.scaling import try_recipe
from te_fuser.recipe.recipes import Recipe
from te_fuser.recipe.region import settings_changed

_KEY = "_fp8_precision"  # of a module's attributes
_UNSAID = object()
_REMEMBERED = 16
_count, _latest = itertools.count(1), [0]
# Module -> weight's name -> when the recipe was changed, the last times, and what was said before.
_changed: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, deque[tuple[int, object]]]] = weakref.WeakKeyDictionary()


class Chosen(dict[str, Recipe | None], Aside):  # type: ignore[misc]
    """Weight's name -> the recipe that was chosen for it, or None."""


def precision(model: torch.nn.Module, recipes: Mapping[str, Recipe | None]) -> None:
    """Have products of a model run by recipes of their own: `precision(model, {"*.fc2": recipe, "lm_head": None})`.

    Where a region is on, that is. It holds until it is said again, for copies of the model, too, and is in no
    `state_dict`.

    Args:
        recipes: pattern, as in file names -> the recipe of the products whose path, or that of a module around them,
            it matches; None: their own precision. The last pattern that matches counts.

    Raises:
        TypeError: for what is no module, no pattern, no recipe.
        ValueError: for a pattern that matches nothing, naming the nearest paths; for functions that give no scales.
    """
    found = _matched(model, recipes)
    for weight, recipe in found:
        chosen = weight.owner.__dict__.setdefault(_KEY, Chosen())
        before = chosen.get(weight.name, _UNSAID)
        if before != recipe:
            changed = _changed.setdefault(weight.owner, {}).setdefault(weight.name, deque(maxlen=_REMEMBERED))
            _latest[0] = now()
            changed.append((_latest[0], before))
        chosen[weight.name] = recipe
    settings_changed()


def _matched(model: Any, recipes: Any) -> list[tuple[Binding, Recipe | None]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"precision takes a module and a mapping, got {type(model).__name__} as the module: give a model"
        )
    if not isinstance(recipes, Mapping):
        raise TypeError(
            "precision takes a module and a mapping, pattern -> recipe or None, got "
            f'{type(recipes).__name__} as the mapping: {{"*": recipe}} is for all products'
        )
    named = products_of(model)
    found = []
    for pattern, recipe in recipes.items():
        if not isinstance(pattern, str) or not (recipe is None or isinstance(recipe, Recipe)):
            raise TypeError(
                f"precision takes a pattern and a recipe or None, got {pattern!r}: {recipe!r}; make a recipe of "
                "te_fuser.recipe, DelayedScaling() say"
            )
        if recipe is not None:
            try_recipe(recipe)
        paths = [path for path in named if _matches(path, pattern)]
        if not paths:
            raise ValueError(f"precision: {pattern!r} matches no product; {_near(pattern, [*named])}")
        found += [(named[path], recipe) for path in paths]
    return found


def _matches(path: str, pattern: str) -> bool:
    """True where a pattern matches a path or the beginning of it, up to a dot."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _near(pattern: str, paths: list[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
    return f"near it: {', '.join(map(repr, near))}" if near else "this model has none whose sizes are multiples of 16"


def now() -> int:
    """A number for `any_since` and `is_another_since`."""
    return next(_count)


def any_since(then: int) -> bool:
    """True where a recipe of any product was changed since then."""
    return _latest[0] > then


def is_another_since(weight: Binding, then: int, recipe: Recipe) -> bool:
    """True where a product runs by another recipe than it would have then, in a region of this one."""
    since = [before for when, before in _changed.get(weight.owner, {}).get(weight.name, ()) if when > then]
    return bool(since) and (recipe if since[0] is _UNSAID else since[0]) != recipe_for(weight, recipe)


def recipe_for(weight: Binding, recipe: Recipe) -> Recipe | None:
    """The recipe that a product runs by in a region of this one; None: in its own precision."""
    chosen: Mapping[str, Recipe | None] = weight.owner.__dict__.get(_KEY, {})
    return chosen.get(weight.name, recipe)
