"""Folding: what calls recorded becomes history, and history becomes scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fuser.quantization.state import ROLES, State, blocks
from te_fuser.recipe.recipes import DelayedScaling
from te_fuser.recipe.region import Region, on_entry

_LARGEST = torch.finfo(torch.float32).max


def fold() -> None:
    """Make history and scales of what was recorded since the last fold: at the entry of each outermost region.

    Where the recorded amax is finite and above 0:

        history = [amax, *history without the oldest]
        scale = largest of the format / amax(history) / 2^margin    in float32; infinite: the largest float32
    """
    with torch.inference_mode(False), torch.no_grad():
        for block in blocks():
            alive = [(row, state) for row, state in block.alive() if state.recipe is not None and state.is_made]
            by_recipe: dict[DelayedScaling, list[tuple[int, State]]] = {}
            for row, state in alive:
                assert isinstance(state.recipe, DelayedScaling)
                by_recipe.setdefault(state.recipe, []).append((row, state))
            seen = block.amaxes.clone()
            block.amaxes.zero_()
            block.skipped += ~seen.isfinite()
            for recipe, found in by_recipe.items():
                _update(recipe, [state for _, state in found], seen[[row for row, _ in found]])


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
    inverses = scale.reciprocal().unbind()
    for state, (new_scale, new_history), inverse in zip(states, made, inverses, strict=True):
        state.put(new_scale, new_history, inverse)


def scales_of(recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """New scales by a recipe, float32 [tensors]: of a history [length, tensors] newest first, and the scales of before.

    The tensors are those of products one behind the other, each as `ROLES`.
    """
    largest = torch.tensor(recipe.fp8_format.value, dtype=torch.float32, device=history.device)
    most = largest[[0, 0, 1]].repeat(history.shape[1] // len(ROLES))
    algo = recipe.amax_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    if recipe.scaling_factor_compute_algo is not None:
        found: torch.Tensor = recipe.scaling_factor_compute_algo(amax, scale, most, recipe)
    else:
        found = most / amax / 2.0**recipe.margin
    found = torch.where(amax.isfinite() & (amax > 0), found, scale)
    return found.clamp(max=_LARGEST)


def _at_entry(region: Region) -> None:
    fold()


on_entry(_at_entry)
