"""Weights in 8 bits: made anew in each call, kept from micro-batch to micro-batch, or there in 8 bits alone.

Those that are kept are quantized in the first and read in the others; both by one launch for all weights of a list.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.contexts import being
from te_fuser.distributed.dtensor import own_part
from te_fuser.kernels.quantizers import DTYPE, KINDS, Weight8, quantizer_on, weights_by_torch
from te_fuser.ops.base import FusableOperation, revise
from te_fuser.ops.construction import on_construction
from te_fuser.params.binding import Binding, place_of
from te_fuser.params.concatenated_parameter import JoinedBinding
from te_fuser.params.scales import NARROW, HoldsScales, is_narrow, narrow, not_scaled, prefix_of, version_of
from te_fuser.quantization.products import weight_in, weight_of
from te_fuser.quantization.state import Place, State, has_kernel, not_in_capture, say_once, written_by_updates
from te_fuser.recipe import region
from te_fuser.recipe.recipes import DelayedScaling, Recipe

if TYPE_CHECKING:
    from te_fuser.fuser.graph.op_instances import ListedOp

# -------------------------------------------------------------------------------------- of a call, or kept

KEPT = ("weight_data", "weight_turned", "kept_inverse")  # [out, in] and [in, out] of 8 bits, float32 []

# What calls make that find scales in what they quantize: float32 [].
OWN = (
    *[f"{role}_{what}" for role in ("input", "output_gradient") for what in ("scale", "inverse", "amax")],
    "weight_inverse",
)


def keep(found: Sequence[tuple[State, Binding]], records: bool) -> None:
    """Quantize weights in a first micro-batch, or where nothing is kept."""
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
        say_once(
            "is_first_microbatch=False before any True: weights are quantized now, and kept for the calls behind; "
            "begin each step with True"
        )
    with written_by_updates():
        by_device: dict[torch.device, dict[State, torch.Tensor]] = {}
        for state in missing:
            w = own_part(states[state].taken()).detach()
            by_device.setdefault(w.device, {})[state] = w if w.dtype in KINDS else w.float()
        for device, weights in by_device.items():
            wanted, given = [Weight8(w.dtype, records=records) for w in weights.values()], list[torch.Tensor]()
            for state, w in weights.items():
                given += [w, state.numbers["weight_scale"], *[state.numbers["weight_amax"]] * records]
            is_by_kernel = has_kernel(device)
            made = iter(quantizer_on(device, wanted)(*given) if is_by_kernel else weights_by_torch(wanted, *given))
            for state in weights:
                state.kept.update(zip(KEPT, (next(made), next(made), state.numbers["weight_inverse"]), strict=True))
                # The parameters that the weight is made of, and their versions; of one that a module computes none.
                weight = states[state]
                at = [place_of(weight.owner, name.removesuffix(".T")) for name in weight.name.split(", ")]
                of = [(module._parameters, last, module._parameters.get(last)) for module, last in at]
                state.kept_of = tuple([(d, n, weakref.ref(p), version_of(p)) for d, n, p in of if p is not None])
    region.note_used([(state, dict(state.kept), weight.weak()) for state, weight in states.items()])


def leave_blank(state: State, features: tuple[int, int], device: torch.device) -> None:
    """Have calls find what weights [out, in] in 8 bits are like, with NaN for values."""
    if state.blanks and state.blanks[KEPT[0]].device == device:
        return
    with torch.inference_mode(False), _disable_current_modes():  # of an export, which would make one of its own
        blank = torch.zeros((), dtype=torch.int8, device=device).sub_(1).view(DTYPE)  # all bits: NaN
        layouts = [blank.expand(sizes) for sizes in (features[::-1], features)]
        numbers = torch.full((len(OWN),), math.nan, dtype=torch.float32, device=device).unbind()
    state.blanks.update(zip((*KEPT[:2], *OWN), (*layouts, *numbers), strict=True))


# ------------------------------------------------------------------------------------------- in 8 bits alone

# Inside, products whose weights have no values yet; None outside.
_waiting: ContextVar[list[FusableOperation] | None] = ContextVar("te_fuser_quantized_model_init", default=None)


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Context in which constructors make products with weights in 8 bits only, for inference.

    A weight becomes a parameter of float8_e4m3fn, with the scale 448 / amax among the module's buffers (`fp8_scale`),
    by the constructor. Call them in a region of FP8 and without gradients; checkpoints load in 8, 16 or 32 bits.
    Weights whose sizes are no multiple of 16 stay as they are.

    Args:
        enabled: False: weights stay as they are.
        recipe: only checked for being able to run such weights: the region of a call quantizes x by its own recipe.
        preserve_high_precision_init_val: refused, as it is for training.

    Raises:
        TypeError: for what is no recipe, or neither True nor False.
        ValueError: for a recipe by which they cannot run.
        NotImplementedError: for preserve_high_precision_init_val=True.
    """
    for name, flag in (("enabled", enabled), ("preserve_high_precision_init_val", preserve_high_precision_init_val)):
        if not isinstance(flag, bool):
            raise TypeError(f"quantized_model_init: {name} is True or False, got {flag!r}")
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise TypeError(f"quantized_model_init takes a recipe of te_fuser.recipe, DelayedScaling() say, got {recipe!r}")
    if enabled and recipe is not None:
        takes = None if isinstance(recipe, DelayedScaling) else "a recipe that keeps scales, DelayedScaling() say"
        if takes is None and recipe.override_linear_precision[0]:
            takes = "a recipe without override_linear_precision, which has y in the model's own precision"
        if takes is not None:
            raise ValueError(f"quantized_model_init: weights in 8 bits alone take {takes}, got {recipe}")
    if enabled and preserve_high_precision_init_val:
        raise NotImplementedError(
            "quantized_model_init: preserve_high_precision_init_val=True is for training, and weights in 8 bits alone "
            "are for inference: make the model outside and train it in a region of FP8"
        )
    waiting: list[FusableOperation] = []
    with being(_waiting, waiting if enabled else None):
        yield
    for op in waiting:
        _narrow(op)


def _narrow(op: FusableOperation, waiting: list[FusableOperation] | None = None) -> None:
    """Put a product's weight into 8 bits; where it comes with calls or is computed, nothing happens.

    `waiting` takes the op where the weight is not there yet, or without values, as of an op that will be bound.
    """
    weight = weight_of(op)
    places = [] if weight is None else _places(weight)
    if waiting is not None and (not places or any(p.is_meta for _, _, p in places)):
        waiting.append(op)
        return
    if weight is None or not places or any(is_narrow(p) for _, _, p in places):
        return
    owner = weight.owner
    narrow(owner, tuple([name for _, name, _ in places]), prefix_of(weight.name))
    if isinstance(owner, FusableOperation):
        revise(owner)
    settle = getattr(owner, "_settle", None)
    if settle is not None:
        settle()


def _places(weight: Binding) -> list[Place]:
    """Parameters that a weight is made of, where one module has them that can keep scales."""
    try:
        owner = weight.owner
    except ReferenceError:
        return []
    names = weight.names if isinstance(weight, JoinedBinding) else (weight.name,)
    found: list[Place] = [
        (owner._parameters, name, p) for name in names if (p := owner._parameters.get(name)) is not None
    ]
    return found if isinstance(owner, HoldsScales) and len(found) == len(names) else []


def is_only_narrow(weight: Binding) -> bool:
    """True where a weight is in 8 bits alone."""
    return bool(narrow_places(weight))


def narrow_places(weight: Binding) -> list[Place]:
    """Parameters of a weight that is in 8 bits alone: among which, by what name, which."""
    found = _places(weight)
    return found if found and NARROW in weight.owner.__dict__ and is_narrow(found[0][2]) else []


def refuse_narrow(item: ListedOp, why: str) -> None:
    """Refuse a product whose weight is in 8 bits alone, with why in words."""
    if is_only_narrow(weight_in(item)):
        raise RuntimeError(f"{item.path or 'MatMul'}: its weight is in 8 bits alone, and it {why}")


def refuse_narrow_weights(products: Iterable[ListedOp]) -> None:
    """Refuse weights in 8 bits alone that several modules have, or that somebody has written to."""
    there: dict[int, Hashable] = {}
    for item in products:
        weight = weight_in(item)
        for owned, _, part in narrow_places(weight):
            if there.setdefault(id(part), weight.key) != weight.key:
                refuse_narrow(item, "is another product's, too, which has a scale of its own: list one product twice")
            if (why := not_scaled(part, owned)) is not None:
                refuse_narrow(item, why)


def _when_made(op: FusableOperation) -> None:
    waiting = _waiting.get()
    if waiting is not None:
        _narrow(op, waiting)


on_construction(_when_made)
