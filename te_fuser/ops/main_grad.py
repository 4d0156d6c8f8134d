"""Weight gradients that go to a parameter's `main_grad` instead of to autograd, as Megatron keeps them.

A parameter's attributes say how: `main_grad` is the tensor to add to (of the weight's shape, mostly float32), with
`overwrite_main_grad` true it is written over, and `grad_added_to_main_grad`, where there is one, is set when that is
done. `get_main_grad()`, where the parameter has it, gives the tensor instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch


def main_grad_of(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The tensor that takes a weight's gradient, and whether it is written over.

    Raises:
        RuntimeError: when the weight has none, or one of another shape or device.
    """
    held = _held(weight)
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


@contextlib.contextmanager
def spared(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Backwards in here leave main_grad, and the note that it was added to, as they are: for runs that only measure.

    Where a weight has a main_grad, memory that nobody reads takes its place; weights of one shape share it.
    """
    unread: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for weight in weights:
            held = _held(weight)
            if isinstance(held, torch.Tensor):
                key = held.shape, held.dtype, held.device
                unread[key] = unread[key] if key in unread else torch.zeros_like(held)
                stack.enter_context(_replaced(weight, unread[key], "grad_added_to_main_grad"))
        yield


@contextlib.contextmanager
def caught(weight: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """What a backward in here gives to main_grad, by itself; main_grad has it afterwards. None: there is none."""
    held = _held(weight)
    if not isinstance(held, torch.Tensor):
        yield None
        return
    alone = torch.zeros_like(held)
    with _replaced(weight, alone):
        yield alone
    held.copy_(alone) if getattr(weight, "overwrite_main_grad", False) else held.add_(alone)


@contextlib.contextmanager
def _replaced(weight: torch.Tensor, main_grad: torch.Tensor, *restored: str) -> Iterator[None]:
    """Another tensor as main_grad; further attributes are put back with it."""
    names = ("main_grad", "get_main_grad", *restored)
    before = {name: weight.__dict__[name] for name in names if name in weight.__dict__}
    weight.__dict__.pop("get_main_grad", None)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            weight.__dict__.pop(name, None)
        weight.__dict__.update(before)


def _held(weight: torch.Tensor) -> object:
    getter = getattr(weight, "get_main_grad", None)
    return getattr(weight, "main_grad", None) if getter is None else getter()


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
