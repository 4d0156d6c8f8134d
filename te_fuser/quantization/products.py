"""The products that there are, in the order of their construction, and the recipe that each runs by: `precision`."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bound import Bound
from te_fuser.ops.construction import in_order
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.quantized_matmul import STEP
from te_fuser.params.binding import Binding
from te_fuser.params.scales import Aside, prefix_of
from te_fuser.recipe.recipes import DelayedScaling, OwnScales, QParams, Recipe
from te_fuser.recipe.region import settings, settings_changed

if TYPE_CHECKING:
    from te_fuser.fuser.graph.op_instances import ListedOp

# --------------------------------------------------------------------------------------------------- which there are


def products() -> list[Binding]:
    """The weights of all products, each once, in the order of their construction."""
    found: dict[object, Binding] = {}
    for op in in_order():
        weight = weight_of(op)
        if weight is not None:
            found.setdefault(weight.key, weight.weak())
    return list(found.values())


def weight_of(op: FusableOperation) -> Binding | None:
    """The weight of a product; None of other ops, and where that is gone or not read as it is."""
    product = op.op if isinstance(op, Bound) else op
    if not (isinstance(product, MatMul) and product.kind is MatMul):
        return None
    try:
        if any(size % STEP for size in product.own_features):
            return None
        return next((low.bindings["weight"] for low in op.lower() if "weight" in low.bindings), None)
    except (AttributeError, ReferenceError, TypeError, ValueError):
        return None  # an owner that is gone, a hook, features that ranks cannot cut so: calls say it, if there are any


def weight_in(item: ListedOp) -> Binding:
    """The binding of the weight of a product in a list."""
    return item.lowered.bindings["weight"]


def products_of(model: torch.nn.Module) -> dict[str, Binding]:
    """The products of a model by path of the weight's owner, and prefix of its name: `mlp.fc1`."""
    paths = {id(module._parameters): path for path, module in model.named_modules()}
    found = {}
    for weight in products():
        path = paths.get(id(weight.owner._parameters))
        if path is not None:
            found[".".join(filter(None, (path, prefix_of(weight.name).rstrip("_"))))] = weight
    return found


def parameter_of(weight: Binding) -> torch.Tensor | None:
    """A weight, or a parameter beside a computed one; None of one that is gone, or given in calls."""
    try:
        owner = weight.owner
    except ReferenceError:
        return None
    found = owner._parameters.get(weight.name)
    return next(owner.parameters(), None) if found is None else found


def device_of(weight: Binding) -> torch.device | None:
    """The device of a weight, where it has one."""
    found = parameter_of(weight)
    return None if found is None or found.is_meta else found.device


# ------------------------------------------------------------------------------------------------ by which recipes

_KEY = "_fp8_precision"  # of a module's attributes
_UNSAID = object()
_REMEMBERED = 16
_TENSORS = 6  # of two products, on which the functions of a recipe are tried
# Module -> weight's name -> the `settings` with which the recipe was changed, the last times, and what was said before.
_changed: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, deque[tuple[int, object]]]] = weakref.WeakKeyDictionary()


class Chosen(dict[str, Recipe | None], Aside):  # type: ignore[misc]
    """Weight's name -> the recipe that was chosen for it, or None."""


def precision(model: torch.nn.Module, recipes: Mapping[str, Recipe | None]) -> None:
    """Give products of a model recipes of their own: `precision(model, {"*.fc2": recipe, "lm_head": None})`.

    They apply inside of regions, until `precision` is called again, to copies, too, and are in no `state_dict`.

    Args:
        recipes: {pattern with * and ?: recipe}, for products whose path, or that of a module around them, matches;
            None: the model's dtype. The last matching pattern counts.

    Raises:
        TypeError: for what is no module, no pattern, no recipe.
        ValueError: for a pattern that matches nothing, naming the nearest paths; for functions that give no scales.
    """
    found = _matched(model, recipes)
    settings_changed()
    for weight, recipe in found:
        chosen = weight.owner.__dict__.setdefault(_KEY, Chosen())
        before = chosen.get(weight.name, _UNSAID)
        if before != recipe:
            changed = _changed.setdefault(weight.owner, {}).setdefault(weight.name, deque(maxlen=_REMEMBERED))
            changed.append((settings(), before))
        chosen[weight.name] = recipe


def _matched(model: Any, recipes: Any) -> list[tuple[Binding, Recipe | None]]:
    takes = "precision takes a module and a mapping"
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{takes}, got {type(model).__name__} as the module: give a model")
    if not isinstance(recipes, Mapping):
        got = f"got {type(recipes).__name__} as the mapping"
        raise TypeError(f'{takes}, pattern -> recipe or None, {got}: {{"*": recipe}} is for all products')
    named, found = products_of(model), []
    for pattern, recipe in recipes.items():
        if not isinstance(pattern, str) or not (recipe is None or isinstance(recipe, Recipe)):
            raise TypeError(
                f"precision takes a pattern and a recipe or None, got {pattern!r}: {recipe!r}; make a recipe of "
                "te_fuser.recipe, DelayedScaling() say"
            )
        if recipe is not None:
            try_recipe(recipe)
        # A pattern matches a path or the beginning of it, up to a dot.
        heads = {path: itertools.accumulate(path.split("."), "{}.{}".format) for path in named}
        paths = [path for path in named if any(fnmatch.fnmatchcase(head, pattern) for head in heads[path])]
        if not paths:
            near = ", ".join(map(repr, difflib.get_close_matches(pattern, named, n=3, cutoff=0.0)))
            near = f"near it: {near}" if near else "this model has none whose sizes are multiples of 16"
            raise ValueError(f"precision: {pattern!r} matches no product; {near}")
        found += [(named[path], recipe) for path in paths]
    return found


def is_another_since(weight: Binding, then: int, recipe: Recipe) -> bool:
    """True where a product runs by another recipe than with those `settings`, in such a region."""
    since = [before for when, before in _changed.get(weight.owner, {}).get(weight.name, ()) if when > then]
    return bool(since) and (recipe if since[0] is _UNSAID else since[0]) != recipe_for(weight, recipe)


def recipe_for(weight: Binding, recipe: Recipe) -> Recipe | None:
    """The recipe that a product runs by in a region of this one; None: in its own precision."""
    chosen: Mapping[str, Recipe | None] = weight.owner.__dict__.get(_KEY, {})
    return chosen.get(weight.name, recipe)


# ---------------------------------------------------------------------------------------------- what these are


def how(recipe: Recipe) -> str:
    """Words on the scales of a recipe that keeps none; "" of one that does."""
    if recipe.own_scales is None:
        return ""
    x, weight, _ = [own.block and " x ".join(map(str, own.block)) for own in recipe.own_scales]
    if x is None:
        return "scales of now"
    return f"a scale for each {x} numbers" + (f", {weight} of a weight" if weight != x else "")


@functools.lru_cache(maxsize=64)
def try_recipe(recipe: Recipe) -> None:
    """Check the scales of a recipe that keeps none, and try its functions on two products' zeros."""
    own: Any = recipe.own_scales
    if own is not None and not (isinstance(own, tuple) and len(own) == 3 and all(map(_is_own, own))):
        raise TypeError(
            f"{type(recipe).__name__}: own_scales are three OwnScales(QParams(..), (rows, columns) or None), of x, W "
            f"and dy, or None where scales are kept, got {own!r}"
        )
    if not isinstance(recipe, DelayedScaling):
        return
    zeros, ones = torch.zeros(recipe.amax_history_len, _TENSORS), torch.ones(_TENSORS)
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
