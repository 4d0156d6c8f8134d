"""Checkpoints as one safetensors file: everything that a run needs to go on exactly where it stopped, and no pickle.

model.<key>                  the model's state_dict
optimizer.<key>.<state>      AdamW's exp_avg, exp_avg_sq and step of each parameter
random.<stream>              states of the random generators: torch, cuda (on a GPU), batches
curve.<name>                 the losses so far
metadata                     step, settings (JSON), fingerprint of the text
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "te_fuser train_gpt 1"


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a file; tensors are on the CPU."""

    step: int
    settings: Mapping[str, Any]
    fingerprint: str
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    random: dict[str, torch.Tensor]
    curve: dict[str, torch.Tensor]


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write the file; a reader sees the old one or the whole new one."""
    tensors = {
        f"{group}.{key}": tensor.detach().cpu().contiguous()
        for group in ("model", "optimizer", "random", "curve")
        for key, tensor in getattr(checkpoint, group).items()
    }
    metadata = {
        "format": FORMAT,
        "step": str(checkpoint.step),
        "settings": json.dumps(checkpoint.settings),
        "fingerprint": checkpoint.fingerprint,
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    os.replace(unfinished, path)


def load(path: Path) -> Checkpoint:
    """Read a file that `save` wrote.

    Raises:
        ValueError: when it is something else.
    """
    try:
        return _load(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _load(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is no checkpoint of train_gpt (its format is {metadata.get('format')!r})")
        groups: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "random": {}, "curve": {}}
        for name in file.keys():  # noqa: SIM118 - not a dict
            group, key = name.split(".", 1)
            groups[group][key] = file.get_tensor(name)
    return Checkpoint(int(metadata["step"]), json.loads(metadata["settings"]), metadata["fingerprint"], **groups)


# ----------------------------------------------------------------------------------------------- optimizer


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as tensors called by the parameters' names."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Undo `optimizer_tensors`, on a new optimizer of the same parameter groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, name in enumerate(order):
        keys = [key for key in tensors if key.rpartition(".")[0] == name]
        if keys:
            state[index] = {key.rpartition(".")[2]: tensors[key] for key in keys}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
