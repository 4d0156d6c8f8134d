"""Weight gradients that go to a parameter's `main_grad` instead of to autograd, as Megatron keeps them.

A parameter's attributes say how: `main_grad` is the tensor to add to (of the weight's shape, mostly float32), with
`overwrite_main_grad` true it is written over, and `grad_added_to_main_grad`, where there is one, is set when that is
done. `get_main_grad()`, where the parameter has it, gives the tensor instead.
"""

from __future__ import annotations

import functools

import torch


def main_grad_of(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The tensor that takes a weight's gradient, and whether it is written over.

    Raises:
        RuntimeError: when the weight has none, or one of another shape or device.
    """
    getter = getattr(weight, "get_main_grad", None)
    held = getattr(weight, "main_grad", None) if getter is None else getter()
    want = f"{list(weight.shape)} on {weight.device}"
    if not isinstance(held, torch.Tensor):
        raise RuntimeError(
            f"accumulate_into_main_grad: the weight {want} has no main_grad; set weight.main_grad to a tensor of that "
            "shape before backward, and give the weight in the dtype of the product (under autocast it is another one)"
        )
    if held.shape != weight.shape or held.device != weight.device:
        raise RuntimeError(
            f"accumulate_into_main_grad: main_grad must be {want}, as its weight, "
            f"got {list(held.shape)} on {held.device}"
        )
    return held.detach(), bool(getattr(weight, "overwrite_main_grad", False))


def gradient_added(weight: torch.Tensor) -> torch.Tensor:
    """Note that a weight's gradient is in its main_grad, and give what autograd gets in its place: zeros."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    # A tensor of its own over memory that all share: autograd would copy one that somebody else holds.
    return _zeros(tuple(weight.shape), weight.dtype, weight.device).detach()


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
