"""Weight gradients that go to a parameter's `main_grad` instead of to autograd, as Megatron keeps them.

A parameter's attributes say how: `main_grad` is the tensor to add to (of the weight's shape, mostly float32), and
`get_main_grad()`, where the parameter has it, gives the tensor instead. `grad_added_to_main_grad`, where there is one,
is set when that is done, and autograd then gets zeros, so that the weight's hooks run; else it gets no gradient.

Written over instead is main_grad where the op whose forward ran says so, which several micro-batches in flight may
differ in, or where the weight's `overwrite_main_grad` is true when backward runs. It means that main_grad holds no
gradient when a backward begins. So the first product of a backward with that weight writes over it, and every later
one adds, also those of other segments and models that use the weight: whoever reads main_grad does so in hooks of the
weight, and autograd runs them once in a backward, after all of its uses.

Of a weight that is joined from several parameters (`te_fuser.params.concatenated_parameter`) each has a main_grad of
its own: one product puts the gradient where these lie one behind the other in one buffer, else one for each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextvars import ContextVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from te_fuser.contexts import being
from te_fuser.dtypes import text_of
from te_fuser.params.concatenated_parameter import in_one_buffer, lie_together, parts_of

_NOTE = "grad_added_to_main_grad"
_ABSENT, _OVER = "_te_fuser_absent", "_te_fuser_written_over"  # attributes of tensors


# Weight -> the backward, by autograd's number for it, that wrote to its main_grad last, and whether it wrote over it.
_written: MutableMapping[torch.Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()


_earlier = ContextVar("_earlier", default=-1)


def of_backward(number: int) -> contextlib.AbstractContextManager[int]:
    """Treat gradients written in here as those of that earlier backward."""
    return being(_earlier, number)


def put_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    over: bool,
    put: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None],
) -> torch.Tensor:
    """Put dy^T x into a weight's main_grad, or into those of its parts, and give what stands for it.

    `put(dy, x, main_grad, over)` adds the product to main_grad, or writes over it, as the op says of this backward.
    """
    parts = parts_of(weight)
    if not parts:
        put(dy, x, *main_grad_to_write(weight, over))
        return gradient_added(weight)
    ends = itertools.accumulate(part.shape[0] for part in parts)
    shares = [
        (slice(end - part.shape[0], end), *main_grad_to_write(part, over))
        for part, end in zip(parts, ends, strict=True)
        # Those of frozen parts take nothing, unless the whole is `caught`.
        if part.requires_grad or _OVER in getattr(held_main_grad(part), "__dict__", {})
    ]
    held, kinds = [t for _, t, _ in shares], {(t.dtype, is_over) for _, t, is_over in shares}
    if len(shares) == len(parts) and len(kinds) == 1 and lie_together(held):
        put(dy, x, in_one_buffer(held), shares[0][2])
    else:
        for rows, main_grad, is_over in shares:
            put(dy[..., rows], x, main_grad, is_over)
    return gradient_added(weight)


def main_grad_to_write(weight: torch.Tensor, over: bool = False) -> tuple[torch.Tensor, bool]:
    """Tensor for a weight's gradient now, and whether to write over it; asking counts as written."""
    held = held_main_grad(weight)
    want = f"{list(weight.shape)} on {weight.device}"
    if held is None:
        raise RuntimeError(
            f"accumulate_into_main_grad: the weight {want} has no main_grad; set weight.main_grad to a tensor of that "
            "shape before backward"
        )
    if held.shape != weight.shape or held.device != weight.device:
        raise RuntimeError(
            f"accumulate_into_main_grad: main_grad must be {want}, as its weight, "
            f"got {list(held.shape)} on {held.device}"
        )
    if not held.dtype.is_floating_point:
        raise RuntimeError(
            f"accumulate_into_main_grad: main_grad holds floating-point numbers, got {text_of(held.dtype)}: "
            "make it in float32, or in the weight's dtype"
        )
    written_over = _writes_over(weight, over)
    if _OVER in held.__dict__:
        held.__dict__[_OVER] = written_over or held.__dict__[_OVER] is True
    return held.detach(), written_over


def _writes_over(weight: torch.Tensor, over: bool) -> bool:
    """True where a gradient replaces what main_grad holds."""
    over = over or getattr(weight, "overwrite_main_grad", False)
    backward = max(torch._C._current_graph_task_id(), _earlier.get())
    if backward < 0:
        return over
    last, wrote_over = _written.get(weight, (-1, False))
    if last != backward:
        _written[weight] = backward, over
        return over
    if over and not wrote_over:
        raise RuntimeError(
            f"the main_grad of a weight {list(weight.shape)} is to be written over in a backward that has added to it: "
            "run the backward of each micro-batch by itself, the first one's first"
        )
    return False


def gradient_added(weight: torch.Tensor) -> torch.Tensor:
    """Note that a gradient is in main_grad, and give what stands for it: zeros, or `is_absent`."""
    shape, dtype, device = tuple(weight.shape), weight.dtype, weight.device
    of = [part for part in parts_of(weight) if part.requires_grad] or [weight]
    noted = [part for part in of if hasattr(part, _NOTE)]
    if not noted:
        return _absent(shape, dtype, device)
    if len(noted) < len(of):
        raise RuntimeError(
            f"accumulate_into_main_grad: {len(noted)} of {len(of)} weights that are joined have {_NOTE}: give it to "
            "all of them, or to none"
        )
    for part in noted:
        setattr(part, _NOTE, True)
    # A tensor of its own over memory that all share: autograd would copy one that somebody else holds.
    return _zeros(shape, dtype, device).detach()


def is_absent(gradient: torch.Tensor) -> bool:
    """True where a tensor only stands for a gradient in main_grad, and autograd gets none."""
    return _ABSENT in gradient.__dict__


@contextlib.contextmanager
def spared(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Backwards in here leave main_grad, and the note that it was added to, as they are."""
    unread: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for weight in weights:
            held = held_main_grad(weight)
            if held is not None:
                key = held.shape, held.dtype, held.device
                unread[key] = unread[key] if key in unread else torch.zeros_like(held)
                stack.enter_context(_replaced(weight, unread[key], _NOTE))
        yield


@contextlib.contextmanager
def restored(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which backwards write to main_grad itself, which is put back afterwards."""
    before = [(weight, held, held.clone()) for weight in weights if (held := held_main_grad(weight)) is not None]
    notes = [weight.__dict__.get(_NOTE) for weight, _, _ in before]
    try:
        yield
    finally:
        for (weight, held, copy), note in zip(before, notes, strict=True):
            with torch.no_grad():
                held.copy_(copy)
            if note is not None:
                weight.__dict__[_NOTE] = note


@contextlib.contextmanager
def caught(weight: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Yield what a backward in here gives to main_grad; None: there is none."""
    parts = parts_of(weight) or (weight,)
    held = [held_main_grad(part) for part in parts]
    first = next((t for t in held if t is not None), None)
    if first is None:
        yield None
        return
    alone = torch.zeros(weight.shape, dtype=first.dtype, device=first.device)
    pieces = alone.split([part.shape[0] for part in parts])
    with contextlib.ExitStack() as stack:
        for part, piece in zip(parts, pieces, strict=True):
            piece.__dict__[_OVER] = None
            stack.enter_context(_replaced(part, piece))
        yield alone
    for part, main_grad, piece in zip(parts, held, pieces, strict=True):
        if main_grad is not None and part.requires_grad:
            over = piece.__dict__[_OVER]
            over = _writes_over(part, False) if over is None else over  # whoever wrote did not ask
            main_grad.copy_(piece) if over else main_grad.add_(piece)


@contextlib.contextmanager
def _replaced(weight: torch.Tensor, main_grad: torch.Tensor, *also: str) -> Iterator[None]:
    """Context of another main_grad; further attributes are put back with it."""
    names = ("main_grad", "get_main_grad", *also)
    before = {name: weight.__dict__[name] for name in names if name in weight.__dict__}
    weight.__dict__.pop("get_main_grad", None)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            weight.__dict__.pop(name, None)
        weight.__dict__.update(before)


def held_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """A weight's main_grad, whether it fits or not; None where there is none."""
    getter = getattr(weight, "get_main_grad", None)
    held = getattr(weight, "main_grad", None) if getter is None else getter()
    return held if isinstance(held, torch.Tensor) else None


def has_main_grad(weight: torch.Tensor) -> bool:
    """True where a weight, or one that it was joined from, has a main_grad."""
    return any(held_main_grad(p) is not None for p in parts_of(weight) or (weight,))


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@functools.cache
def _absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = torch.zeros((), dtype=dtype, device=device).expand(shape)
    found.__dict__[_ABSENT] = True
    return found
