"""Scales of 8 bits among a module's buffers: strict loads take them, and do without them."""

from __future__ import annotations

from typing import Any

import torch

SCALE, HISTORY = "fp8_scale", "fp8_amax_history"


def before_loading(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Make a module ready for the scales in a checkpoint: it gets buffers for them, and those it has else stay.

    A hook for `register_load_state_dict_pre_hook`; `state_dict` is a copy, which each module of a load gets.
    """
    for key, found in [*state_dict.items()]:
        name = key[len(prefix) :]
        if key.startswith(prefix) and "." not in name and _fits(module, name, found):
            # Another tensor, even where there is one of that shape: who has saved the scales of now keeps them.
            module._buffers[name] = torch.zeros(found.shape, dtype=torch.float32, device=_device(module, found))
    for name, have in module._buffers.items():
        if have is not None and name.endswith((SCALE, HISTORY)):
            state_dict.setdefault(prefix + name, have)


def _fits(module: torch.nn.Module, name: str, found: Any) -> bool:
    """Whether a tensor of a checkpoint is one of those that a module with products has."""
    if not isinstance(found, torch.Tensor) or not any(p is not None and p.dim() > 1 for p in module.parameters()):
        return False
    return (name.endswith(SCALE) and found.shape == (3,)) or (name.endswith(HISTORY) and found.shape[1:] == (3,))


def _device(module: torch.nn.Module, found: torch.Tensor) -> torch.device:
    return next((p.device for p in module.parameters()), found.device)
