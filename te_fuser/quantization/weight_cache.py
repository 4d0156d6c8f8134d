"""Weights in 8 bits: made anew in each call, or kept from micro-batch to micro-batch.

Those that are kept are quantized in the first and read in the others; both by one launch for all weights of a list.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.distributed.dtensor import own_part
from te_fuser.kernels.quantizers import DTYPE, KINDS, Weight8, quantizer_on, weights_by_torch
from te_fuser.params.binding import Binding, place_of
from te_fuser.params.fp8_only_weights import version_of
from te_fuser.quantization.state import State, has_kernel, not_in_capture, written_by_updates
from te_fuser.recipe import region

KEPT = ("weight_data", "weight_turned", "kept_inverse")  # [out, in] and [in, out] of 8 bits, float32 []

# What calls make that find scales in what they quantize: float32 [].
OWN = (
    *[f"{role}_{what}" for role in ("input", "output_gradient") for what in ("scale", "inverse", "amax")],
    "weight_inverse",
)


def keep(found: Sequence[tuple[State, Binding]], records: bool) -> None:
    """Quantize weights where calls are of a first micro-batch, or where nothing is kept that they could read.

    Args:
        found: the states of products and what their weights are.
        records: whether their amaxes are recorded.
    """
    if not found:
        return
    states = dict(found)
    renews = not region.recomputing()
    first = renews and region.is_first_microbatch()
    compares = renews and not region.is_capturing()  # replays do
    there = {s for s in states if s.kept and s.kept[KEPT[0]].device == s.numbers["weight_scale"].device}
    missing = [s for s in states if first or s not in there or (compares and s.keeps_another())]
    if missing:
        not_in_capture("weights are quantized to be kept")
    if not (first or all(s.kept for s in missing)):
        _say_once()
    with written_by_updates():
        taken = [own_part(states[s].taken()).detach() for s in missing]
        by_device: dict[torch.device, list[tuple[State, torch.Tensor]]] = {}
        for state, w in zip(missing, taken, strict=True):
            by_device.setdefault(w.device, []).append((state, w if w.dtype in KINDS else w.float()))
        for device, pairs in by_device.items():
            wanted = [Weight8(w.dtype, records=records) for _, w in pairs]
            by_torch = functools.partial(weights_by_torch, wanted)
            quantize = quantizer_on(device, wanted) if has_kernel(device) else by_torch
            given = [
                (w, state.numbers["weight_scale"], state.numbers["weight_amax"])[: 2 + records] for state, w in pairs
            ]
            made = iter(quantize(*[t for each in given for t in each]))
            for state, _ in pairs:
                state.kept.update(zip(KEPT, (next(made), next(made), state.numbers["weight_inverse"]), strict=True))
                # The parameters that the weight is made of, and their versions; of one that a module computes none.
                weight = states[state]
                at = [place_of(weight.owner, name.removesuffix(".T")) for name in weight.name.split(", ")]
                of = [(module._parameters, last, module._parameters.get(last)) for module, last in at]
                state.kept_of = tuple([(d, n, weakref.ref(p), version_of(p)) for d, n, p in of if p is not None])
    region.note_used([(state, dict(state.kept), weight.weak()) for state, weight in states.items()])


def leave_blank(state: State, features: tuple[int, int], device: torch.device) -> None:
    """Have calls find what they make is like, as the weight in 8 bits; who reads the numbers finds NaN.

    Args:
        features: of a row of its input, and of its output.
    """
    if state.blanks and state.blanks[KEPT[0]].device == device:
        return
    with torch.inference_mode(False), _disable_current_modes():  # of an export, which would make one of its own
        blank = torch.zeros((), dtype=torch.int8, device=device).sub_(1).view(DTYPE)  # all bits: NaN
        layouts = [blank.expand(sizes) for sizes in (features[::-1], features)]
        numbers = torch.full((len(OWN),), math.nan, dtype=torch.float32, device=device).unbind()
    state.blanks.update(zip((*KEPT[:2], *OWN), (*layouts, *numbers), strict=True))


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "is_first_microbatch=False before any True: weights are quantized now, and kept for the calls behind; "
        "begin each step with True",
        stacklevel=2,
    )
