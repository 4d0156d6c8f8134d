"""Folding: what calls recorded becomes history, and history becomes scales."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from te_fuser.quantization.agreement import Agreement, agreement_of
from te_fuser.quantization.state import ROLES, Block, State, before_saving, blocks, lock
from te_fuser.quantization.trial import try_recipe
from te_fuser.recipe.recipes import DelayedScaling, Recipe
from te_fuser.recipe.region import Region, on_entry

_LARGEST = torch.finfo(torch.float32).max
_last: list[Region | None] = [None]  # the last one from outside of all, in which gradients were on


class Snapshot:
    """The scales between two folds, for what computes a forward again.

    Attributes:
        scales: of each product what it had; None while that is what it has.
    """

    scales: list[tuple[weakref.ref[State], torch.Tensor]] | None = None


_snapshot: list[Any] = [lambda: None]  # a weak reference to that of now, where somebody keeps one


def snapshot() -> Snapshot:
    """The scales of now."""
    with lock:
        found: Snapshot | None = _snapshot[0]()
        if found is None:
            found = Snapshot()
            _snapshot[0] = weakref.ref(found)
        return found


def fold() -> None:
    """Make history and scales of what was recorded since the last fold; ranks of a group, all of them, together.

    It runs at the entry of each region from outside of all, and before states are read. For each tensor whose amax is
    finite and above 0, the largest of the group where its recipe reduces:

        history = [amax, *history without the oldest]
        scale = largest of the format / amax(history) / 2^margin    in float32; infinite: the largest one

    Raises:
        RuntimeError: on all ranks of a group where they have different numbers of products.
    """
    with lock, torch.inference_mode(False), torch.no_grad():
        last = _last[0]
        agreement = _agreement(last)
        if last is not None and agreement is not None:
            agreement.make(last.recipe)
        seen = {block: block.amaxes.clone() for block in blocks()}
        if last is not None and agreement is not None:
            agreement.reduce(seen, last.recipe)
        _keep_snapshot()
        for block, amaxes in seen.items():
            block.amaxes.zero_()
            block.not_finite += ~amaxes.isfinite()
            _fold_block(block, amaxes)


def fold_alone() -> None:
    """The same where no other rank has to be asked, and something was recorded."""
    if _agreement(_last[0]) is None and any(bool(block.amaxes.any()) for block in blocks()):
        fold()


def _agreement(region: Region | None) -> Agreement | None:
    """What ranks agree on, where a region has several."""
    if region is None or not getattr(region.recipe, "reduce_amax", False):
        return None
    return agreement_of(region.group)


def _fold_block(block: Block, amaxes: torch.Tensor) -> None:
    by_recipe: dict[Recipe, list[State]] = {}
    for state in block.states():
        if state.recipe is not None:
            by_recipe.setdefault(state.recipe, []).append(state)
    for recipe, states in by_recipe.items():
        if isinstance(recipe, DelayedScaling):
            _update(recipe, states, amaxes[[state.row for state in states]])


def _update(recipe: DelayedScaling, states: Sequence[State], seen: torch.Tensor) -> None:
    """Put what was seen, [states, 3], into histories and scales of states that run by one recipe, all at once."""
    for state in states:
        state.make(recipe.amax_history_len, seen.device)
    old = torch.stack([state.history for state in states], 1)  # [length, states, 3]
    scales = torch.stack([state.scale for state in states])
    moved = seen.isfinite() & (seen > 0)
    history = torch.where(moved, torch.cat([seen[None], old[:-1]]), old)
    scale = torch.where(moved, scales_of(recipe, history.flatten(1), scales.flatten()).view_as(scales), scales)
    made = [(torch.empty_like(s.scale), torch.empty_like(s.history)) for s in states]
    torch._foreach_copy_([s for s, _ in made], list(scale.unbind()))
    torch._foreach_copy_([h for _, h in made], list(history.unbind(1)))
    for state, (new_scale, new_history), inverse in zip(states, made, scale.reciprocal().unbind(), strict=True):
        state.put(new_scale, new_history, inverse)


def scales_of(recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """New scales by a recipe, float32 [tensors]: of a history [length, tensors] newest first, and the scales of before.

    The tensors are those of products one behind the other, each as `ROLES`. Where the amax is not finite and above 0,
    or a function gives NaN or no number above 0, the scale stays.
    """
    largest = torch.tensor(recipe.fp8_format.value, dtype=torch.float32, device=history.device)
    most = largest[[0, 0, 1]].repeat(history.shape[1] // len(ROLES))
    algo = recipe.amax_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    made = recipe.scaling_factor_compute_algo
    found: torch.Tensor = most / amax / 2.0**recipe.margin if made is None else made(amax, scale, most, recipe)
    return torch.where(amax.isfinite() & (amax > 0) & (found > 0), found, scale).clamp(max=_LARGEST)


def _keep_snapshot() -> None:
    """Leave the scales, which are about to change, to who asked for those of now."""
    kept: Snapshot | None = _snapshot[0]()
    if kept is not None:
        kept.scales = [(weakref.ref(s), s.scale) for block in blocks() for s in block.states() if s.has_buffers]
    _snapshot[0] = lambda: None


def _at_entry(region: Region) -> None:
    """Fold what earlier regions left. Ranks are asked where gradients are on: who evaluates alone waits for nobody."""
    try_recipe(region.recipe)
    if not torch.is_grad_enabled():
        fold_alone()
        return
    if _last[0] is not None:
        fold()
    agreement = _agreement(region)
    if agreement is not None:
        agreement.begin(region.recipe)
    _last[0] = region


on_entry(_at_entry)
before_saving.append(fold_alone)
