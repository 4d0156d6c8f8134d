"""Scales and histories as users see them: by path, in a state_dict and in copies."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from te_fuser.params.narrow import HISTORY, SCALE
from te_fuser.params.scales import saved_numbers
from te_fuser.quantization.amax_allreduce import agreement_in
from te_fuser.quantization.amax_slots import ROLES, blocks, is_transformed, not_in_capture
from te_fuser.quantization.products import products_of
from te_fuser.quantization.scale_update import recorded, upcoming, update
from te_fuser.quantization.state import State, state_of, written_by_updates
from te_fuser.recipe.region import entered, in_backward


class TensorState(NamedTuple):
    """The scale of a tensor in 8 bits, float32 [], and the amaxes of its last calls.

    Attributes:
        amax_history: newest first, float32 [amax_history_len].
    """

    scale: torch.Tensor
    amax_history: torch.Tensor


def states(model: torch.nn.Module) -> dict[str, TensorState]:
    """The scales of a model's tensors in 8 bits and their amaxes, all that was recorded included.

    Inside of a region or a backward they are those that its calls go by, and what these record comes later. Where ranks
    agree on amaxes, all of them call this together.

    Returns:
        path of a product + ".input", ".weight" or ".output_gradient", for a model that is one product these alone
        without the dot -> (scale, amax_history); of products that have run in a region, and whose weights are the
        model's own: those of weights that come with a call are kept with its list.

    Raises:
        TypeError: for what is no module.
    """
    found = _states_of(model, "states", updates=not (any(entered()) or in_backward()))
    numbers = numbers_now([*found.values()])
    return {
        f"{path}{role}": TensorState(numbers[state][0][k].clone(), numbers[state][1][:, k].clone())
        for path, state in found.items()
        for k, role in enumerate(ROLES)
    }


def numbers_now(states: Sequence[State]) -> dict[State, tuple[torch.Tensor, torch.Tensor]]:
    """Scale and history of products, as the next update would make them of what was recorded; nothing is written.

    Inside of a region with gradients or a backward, and where ranks agree on amaxes, they are those of the last update.
    """
    not_in_capture("amaxes are folded")
    found = {state: (state.scale, state.history) for state in states}
    inside = recorded.is_new and (any(entered()) or in_backward())
    if inside or is_transformed() or agreement_in(recorded.region) is not None:
        return found
    with written_by_updates():
        for _, (alike, history, scales) in upcoming(states):
            found.update({state: (scales[k], history[:, k]) for k, state in enumerate(alike)})
    return found


def _saved(state: State, saves: bool) -> dict[str, torch.Tensor]:
    """Tensors that saves and copies have in place of a product's buffers; where there are none its amaxes go along."""
    if agreement_in(recorded.region) is not None and saves and recorded.is_new:
        warnings.warn(
            "ranks have not agreed yet on the amaxes of FP8 of the last step: what is saved now has those of this "
            "rank, and goes on exactly where each rank loads its own; to save on one rank for all, call "
            "te_fuser.quantization.states(model) on all ranks before",
            stacklevel=2,
        )
    if not state.has_buffers or state.block is None or is_transformed() or not any(state.recorded()):
        return {}
    now = numbers_now([state])[state]
    return {} if now[0] is state.scale else dict(zip((state.prefix + SCALE, state.prefix + HISTORY), now, strict=True))


def not_finite(model: torch.nn.Module) -> dict[str, int]:
    """Counts of amaxes that were infinite or NaN, and so moved no scale: by the same names, where that happened at all.

    Raises:
        TypeError: for what is no module.
        RuntimeError: inside of a region, whose amaxes are counted when it was left.
    """
    if any(entered()):
        raise RuntimeError("not_finite counts what regions recorded that were left: ask outside, and before the step")
    states = _states_of(model, "not_finite", updates=True)
    found = {block: (block.not_finite + ~block.amaxes.isfinite()).tolist() for block in blocks()}  # a GPU is waited for
    counts = {
        f"{path}{role}": found[state.block][state.row][k]
        for path, state in states.items()
        for k, role in enumerate(ROLES)
        if state.block is not None
    }
    return {name: count for name, count in counts.items() if count}


def _states_of(model: torch.nn.Module, function: str, updates: bool) -> dict[str, State]:
    """The states of a model's products that have numbers, by path with a dot behind; "" of one that is the model.

    Args:
        updates: whether ranks that agree on amaxes do so first.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"te_fuser.quantization.{function} takes the model whose products it tells of, a torch.nn.Module, got "
            f"{type(model).__name__}: give what runs in the region"
        )
    if updates and agreement_in(recorded.region) is not None:
        update()
    found = {f"{path}." if path else "": state_of(weight) for path, weight in products_of(model).items()}
    return {path: state for path, state in found.items() if state.has_buffers}


saved_numbers.append(_saved)
