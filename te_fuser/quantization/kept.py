"""Weights that are kept in 8 bits from micro-batch to micro-batch: quantized in the first, read in the others."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from te_fuser.kernels.quantize_weights import DTYPE, KINDS, Quantized, quantize_weight
from te_fuser.look import is_looking
from te_fuser.ops.binding import Binding
from te_fuser.ops.facts import Facts
from te_fuser.quantization.bindings import StateBinding
from te_fuser.quantization.state import State, blocks, lock, not_in_capture, state_of
from te_fuser.recipe import region

KEPT = ("weight_data", "weight_turned", "kept_inverse")  # [out, in] and [in, out] of 8 bits, float32 []


class KeptBinding(StateBinding):
    """What is kept of a weight: one of `KEPT`. A later first micro-batch puts others in place, and writes to none."""

    what = "of_microbatches"

    def _held(self) -> dict[str, torch.Tensor]:
        return self.__dict__["state"].kept  # type: ignore[no-any-return]


def keep(weights: Sequence[Binding]) -> None:
    """Quantize weights where calls are of a first micro-batch, or where nothing is kept that they could read."""
    if not weights:
        return
    states = {state_of(weight): weight for weight in weights}
    for state, weight in states.items():
        _keep(state, weight)
    region.note_used([(state, dict(state.kept), weight.weak()) for state, weight in states.items()])


def _keep(state: State, weight: Binding) -> None:
    looks = is_looking()
    first = region.is_first_microbatch() and not (looks or region.recomputing())
    if not first and (state.is_kept or looks and state.kept) and _lies_beside(state):
        return
    not_in_capture("weights are quantized to be kept")
    if not (first or looks):
        _say_once()
    amax = state.amaxes["weight"] if torch.is_grad_enabled() else None
    with lock, torch.inference_mode(False), torch.no_grad():
        w = weight.taken().detach()
        w = w if w.dtype in KINDS else w.float()
        made = _like(w) if looks else quantize_weight(w, state.scales["weight"], amax)
        state.kept.update(zip(KEPT, (*made, state.inverses["weight"]), strict=True))
        state.is_kept = not looks


def _like(w: torch.Tensor) -> Quantized:
    """What a plan is made by that nobody runs."""
    return w.new_empty(w.shape, dtype=DTYPE), w.new_empty(w.shape[::-1], dtype=DTYPE)


def _lies_beside(state: State) -> bool:
    """Whether what is kept is on the device of the scales."""
    return state.kept[KEPT[0]].device == state.scales["weight"].device


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "is_first_microbatch=False before any True: weights are quantized now, and kept for the calls behind; "
        "begin each step with True",
        stacklevel=2,
    )


def kept_facts(states: Iterable[State]) -> Facts:
    """What holds while calls read what is kept of these, and nothing else is to be done."""
    kept = tuple([(vars(state), "is_kept", True) for state in states])
    if not kept:
        return Facts()
    return Facts(items=kept, calls=((region.keeps_or_notes, False),))


@contextlib.contextmanager
def reading(used: Iterable[tuple[State, dict[str, torch.Tensor], Binding]]) -> Iterator[None]:
    """In here calls read what was kept when it was noted."""
    before = [(state, dict(state.kept), state.is_kept, then) for state, then, _ in used]
    for state, _, _, then in before:
        _put(state, then, True)
    try:
        yield
    finally:
        for state, kept, is_kept, _ in before:
            _put(state, kept, is_kept)


@contextlib.contextmanager
def kept_undisturbed() -> Iterator[None]:
    """Afterwards there is kept of each weight what was kept before."""
    before = [(state, dict(state.kept), state.is_kept) for block in blocks() for state in block.states()]
    try:
        yield
    finally:
        for state, kept, is_kept in before:
            _put(state, kept, is_kept)


def _put(state: State, kept: dict[str, torch.Tensor], is_kept: bool) -> None:
    with lock:
        state.kept.clear()
        state.kept.update(kept)
        state.is_kept = is_kept
