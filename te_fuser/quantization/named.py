"""The states of a model's products, by path."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_fuser.quantization.block import ROLES
from te_fuser.quantization.folding import fold, fold_to_look
from te_fuser.quantization.products import products_of
from te_fuser.quantization.state import State, blocks, state_of
from te_fuser.recipe.region import entered


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
    _check(model, "states")
    fold_to_look()
    return {
        _name(path, role): TensorState(state.scale[k].clone(), state.history[:, k].clone())
        for path, state in _states_of(model).items()
        for k, role in enumerate(ROLES)
    }


def not_finite(model: torch.nn.Module) -> dict[str, int]:
    """How often an amax was infinite or NaN, and so moved no scale: by the same names, where that happened at all.

    Raises:
        TypeError: for what is no module.
        RuntimeError: inside of a region, whose amaxes are counted when it was left.
    """
    _check(model, "not_finite")
    if any(entered()):
        raise RuntimeError("not_finite counts what regions recorded that were left: ask outside, and before the step")
    fold(looks=True)
    found = {block: block.not_finite.tolist() for block in blocks()}  # one copy of each, which a GPU is waited for
    counts = {
        _name(path, role): found[state.block][state.row][k]
        for path, state in _states_of(model).items()
        for k, role in enumerate(ROLES)
        if state.block is not None
    }
    return {name: count for name, count in counts.items() if count}


def _check(model: object, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"te_fuser.quantization.{function} takes the model whose products it tells of, a torch.nn.Module, got "
            f"{type(model).__name__}: give what runs in the region"
        )


def _name(path: str, role: str) -> str:
    return f"{path}.{role}" if path else role


def _states_of(model: torch.nn.Module) -> dict[str, State]:
    found = {path: state_of(weight) for path, weight in products_of(model).items()}
    return {path: state for path, state in found.items() if state.has_buffers}
