"""Regions as a pass: MatMuls become products of 8 bits, with what quantizes their factors before and behind them."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn, cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.facts import Facts
from te_fuser.formula.rows import rounds
from te_fuser.fuser.graph.call_context import CallContext, ReadyList, register
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.fuser.run.call import REFERENCE
from te_fuser.kernels.cublaslt.products import check_machine, emulated_on
from te_fuser.look import is_looking
from te_fuser.ops.collectives import Collective
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.float8_products import READ_KEPT
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.quantized_matmul import OUT_DTYPES
from te_fuser.params.binding import Binding
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_allreduce import quantized_first
from te_fuser.quantization.amax_slots import NUMBERS
from te_fuser.quantization.checkpointing import ran_outside, ran_within, read_in_capture, refuse_another_precision
from te_fuser.quantization.graphs import refuse_by_hand
from te_fuser.quantization.model_init import is_only_narrow, narrow_places, refuse_narrow, refuse_narrow_weights
from te_fuser.quantization.product_scaling import (
    form_of,
    in_place,
    is_kept,
    keeps_scales,
    numbers_of,
    quantizing,
    rewritten,
    state_in,
)
from te_fuser.quantization.products import device_of, how, parameter_of, recipe_for, scalings_of, weight_in
from te_fuser.quantization.state import ReadyCheck, State, ensure, state_of
from te_fuser.quantization.weight_cache import KEPT, OWN, keep, leave_blank
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Format, Recipe

_NAMED = 6  # products that a note names


class Regions(CallContext):
    """Regions of recipes as a context of calls."""

    key = staticmethod(region.current_key)

    def prepare(self, listed: Sequence[ListedOp], key: region.Key | None, reads: bool) -> ReadyList:
        products = [item for item in listed if _is_product(item)]
        if key is None:
            _prepare_outside(products)
            return ReadyList(listed)
        refuse_narrow_weights(products)
        for item in products:
            refuse_another_precision(weight_in(item), item.path, key.recipe)
        looks = is_looking() or any(_is_meta(weight_in(item)) for item in products)
        if looks or reads or not any(item.lowered.aside for item in products):
            listed = _bound(listed, key, looks, reads)
        if looks:  # plans say what a device would refuse
            return ReadyList(listed, lasts=False)
        _prepare_products(_in_8_bits(listed, key.recipe), key, reads)
        keep([(state_in(item), weight_in(item)) for item in listed if is_kept(item)], _records() and not reads)
        return ReadyList(listed, not reads, functools.partial(_facts, listed))

    def rewrite(self, listed: Sequence[ListedOp], call: CallSpecs, key: region.Key) -> Sequence[ListedOp]:
        call.notes.extend(_notes(listed, key, call.x.device, call.capability))
        made = [new for item in listed for new in _lowered(item, call, key)]
        is_cut = any(isinstance(item.lowered.op, Collective) for item in listed)
        return quantized_first(made, key.recipe) if is_cut else made


def _is_product(item: ListedOp) -> bool:
    return item.lowered.op.kind is MatMul and "weight" in item.lowered.bindings


def _recipe_of(item: ListedOp, around: Recipe) -> Recipe | str:
    """The recipe by which a product runs in 8 bits in a region; else why it does not, "" of what is no product."""
    if not _is_product(item):
        return ""
    product, chosen = cast(MatMul, item.lowered.op), recipe_for(weight_in(item), around)
    if chosen is None:
        return "te.precision says so"
    for name, size in zip(("in_features", "out_features"), product.own_features, strict=True):
        if size % chosen.step:
            return f"its {name}, {size}, are no multiple of {chosen.step}"
    return chosen


def _in_8_bits(listed: Sequence[ListedOp], around: Recipe) -> list[tuple[ListedOp, Recipe]]:
    """The products that run so, and by which recipes."""
    found = ((item, _recipe_of(item, around)) for item in listed)
    return [(item, recipe) for item, recipe in found if not isinstance(recipe, str)]


def _prepare_outside(products: Sequence[ListedOp]) -> None:
    """Refuse products that cannot run outside of regions, and note that the others do."""
    now = region.current()
    for item in products:
        if now is not None and not isinstance(_recipe_of(item, now.recipe), str):  # nothing surrounds calls in float64
            _refuse_dtype(item.path, "x", torch.float64)
        refuse_narrow(item, "runs outside of regions of FP8: call it in te_fuser.fp8_autocast(enabled=True)")
    if not is_looking():
        ran_outside([weight_in(item) for item in products])


def _prepare_products(products: Sequence[tuple[ListedOp, Recipe]], key: region.Key, reads: bool) -> None:
    """Have products of 8 bits find what they read, and note by which recipes they run."""
    found = [(item, weight_in(item), recipe, _device_in(weight_in(item))) for item, recipe in products]
    keeping = [weight for _, weight, recipe, _ in found if scalings_of(recipe) is None]
    if keeping:
        refuse_by_hand()
        if key.calibrating and not (_records() or reads or any(is_only_narrow(weight) for _, weight, _, _ in found)):
            _say_once()
    if not key.calibrating:
        for device, scales in {(device, recipe.scales) for _, _, recipe, device in found}:
            check_machine(device, scales)
    for item, weight, recipe, device in found:
        if not reads:
            ran_within(weight, recipe)
        if not reads and scalings_of(recipe) is None:
            ensure(weight, recipe, device) if _records() else state_of(weight).read(device)
        if KEPT[0] in item.lowered.aside:
            leave_blank(state_in(item), cast(MatMul, item.lowered.op).own_features, device)


def _facts(listed: Sequence[ListedOp]) -> Facts:
    """Conditions under which a list stays ready."""
    states = [state_in(item) for item in listed if keeps_scales(item)]
    kept = [state_in(item) for item in listed if is_kept(item)]
    narrow = [place for item in listed if _is_product(item) for place in narrow_places(weight_in(item))]
    items = [(vars(state), "recipe", state.recipe) for state in states] + [(vars(s), "is_kept", True) for s in kept]
    calls = (ReadyCheck(states, _records(), kept, narrow), True), (region.is_capturing, False)
    return Facts(items=tuple(items), calls=calls)


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "calibrating=True without gradients records nothing: call the model outside of torch.no_grad()", stacklevel=2
    )


def _records() -> bool:
    """True where calls need more than to read scales; a graph without gradients may be replayed with them."""
    return torch.is_grad_enabled() or read_in_capture() is not None


def _is_meta(weight: Binding) -> bool:
    """True where it is on the meta device, so that a call can only be planned."""
    found = parameter_of(weight)
    return found is not None and found.is_meta


def _device_in(weight: Binding) -> torch.device:
    """The device of the weight of a call."""
    return device_of(weight) or weight.get().device


def _apart(weight: Binding, product: MatMul, reads: bool) -> State:
    """A state that belongs to nobody: for a reference with the numbers of a product, else without values."""
    state = State(torch.nn.Module(), weight.name)
    if reads:
        own = state_of(weight)
        own.read(_device_in(weight))
        for held in ("numbers", "blanks", "kept"):
            vars(state)[held].update(vars(own)[held])
        state.is_kept, state.kept_of = own.is_kept, own.kept_of
        return state
    device = torch.device("meta") if _is_meta(weight) else _device_in(weight)
    number = torch.empty((), dtype=torch.float32, device=device)
    data = torch.empty(product.parameter_shapes()["weight"], dtype=torch.float8_e4m3fn, device=device)
    for like in (state.kept, state.blanks):
        like.update(zip(KEPT, (data, data.new_empty(data.shape[::-1]), number), strict=True))
    state.numbers.update(dict.fromkeys(NUMBERS, number))
    state.blanks.update(dict.fromkeys(OWN, number))
    return state


def _bound(listed: Sequence[ListedOp], key: region.Key, looks: bool, reads: bool) -> list[ListedOp]:
    """A list whose products have the numbers that they may read, of their states or of their calls."""
    times, states = Counter[Hashable](), dict[Hashable, State]()  # by weight
    found: list[ListedOp] = []
    for item in listed:
        if not isinstance(recipe := _recipe_of(item, key.recipe), str):
            weight = weight_in(item)
            if weight.key not in states:
                product, apart = cast(MatMul, item.lowered.op), looks or reads
                states[weight.key] = _apart(weight, product, not looks) if apart else state_of(weight)
            aside = numbers_of(recipe, weight, states[weight.key], key, times[weight.key])
            item = replace(item, lowered=replace(item.lowered, aside=aside))
            times[weight.key] += 1
        found.append(item)
    return found


def _lowered(item: ListedOp, call: CallSpecs, key: region.Key) -> Iterable[ListedOp]:
    """The ops that stand in an op's place."""
    recipe = _recipe_of(item, key.recipe)
    if isinstance(recipe, str):
        if recipe:
            refuse_narrow(item, f"is no product of 8 bits here: {recipe}")
        return (item,)
    weight = weight_in(item)
    if is_only_narrow(weight):
        return _of_narrow(item, call, key, recipe)
    if key.calibrating and scalings_of(recipe) is not None:
        return (item,)
    own = call.parameters[weight.key].spec.dtype
    exact = own == torch.float64 and not rounds()  # references of which give float64, whatever is said here
    own = torch.float32 if exact else own
    dtype = item.casts.get("weight", own)
    for given in (own, dtype):
        if given not in OUT_DTYPES:
            _refuse_dtype(item.path, "its weight", given)
    return rewritten(item, recipe, form_of(recipe, dtype, own), call, key.calibrating)


def _refuse_dtype(path: str, what: str, dtype: torch.dtype) -> NoReturn:
    """Refuse a product of which this is in another dtype than those that products of 8 bits give."""
    raise TypeError(
        f"{path or 'MatMul'}: {what} is in {text_of(dtype)}, but products in FP8 give float32, bfloat16 or float16: "
        'convert model and x, leave the region, or exempt it by te.precision(model, {"path": None}); '
        f"{REFERENCE} takes float64"
    )


def _of_narrow(item: ListedOp, call: CallSpecs, key: region.Key, recipe: Recipe) -> Iterable[ListedOp]:
    """A product whose weight is in 8 bits alone: y in the dtype of autocast, or of the call's x."""
    dtype = item.casts.get("weight", call.x.dtype) if rounds() else torch.float32
    trains = call.grad and (call.x_needs_grad or any(p.requires_grad for p in call.parameters.values()))
    is_wide = key.calibrating or recipe.override_linear_precision[0]
    refused = {
        "takes a recipe that keeps scales, DelayedScaling() say": scalings_of(recipe) is not None,
        "is to run in another precision: leave out calibrating and override_linear_precision": is_wide,
        "is for inference: call it under torch.no_grad(), or train a model with weights of its own": trains,
        f"gives float32, bfloat16 or float16, not {dtype}: convert x": dtype not in OUT_DTYPES,
    }
    if why := next((why for why, holds in refused.items() if holds), None):
        refuse_narrow(item, why)
    form = form_of(recipe, dtype, dtype)
    op = Float8MatMul(cast(MatMul, item.lowered.op), weight_is_kept=True, **form)
    numbers = [name for name in READ_KEPT if name in item.lowered.aside]
    return quantizing(item, dtype), in_place(item, op, numbers, {"weight_data": weight_in(item)})


def _notes(
    listed: Sequence[ListedOp], key: region.Key, device: torch.device, capability: tuple[int, int] | None
) -> Iterator[str]:
    """Lines of plans on each product's precision; the capability is that of a GPU that is only named."""
    alike: dict[tuple[str, str], list[ListedOp]] = {}
    for item, recipe in _in_8_bits(listed, key.recipe):
        formats = "E4M3, gradients in E5M2" if recipe.fp8_format is Format.HYBRID else "E4M3"
        said = "; ".join(filter(None, (formats, how(recipe))))
        kept = [name for name, k in zip(("y", "dx", "dW"), recipe.override_linear_precision, strict=True) if k]
        but = f"; but {', '.join(kept)} in its own precision, as override_linear_precision says" if kept else ""
        alike.setdefault((f"({said}){emulated_on(device, capability, recipe.scales)}", but), []).append(item)
    for (said, but), items in alike.items():
        if not key.calibrating:
            yield f"products in 8 bits {said}: {_names(items)}{but}"
        elif has := [*filter(keeps_scales, items)]:
            yield f"calibrating: the largest magnitudes of {_names(has)} are recorded, and nothing is quantized"
        else:
            yield f"calibrating: scales of {_names(items)} need no earlier calls, and nothing is quantized"
    if once := [*filter(is_kept, listed)]:
        yield f"weights are quantized in the first micro-batch alone, and kept in 8 bits: {_names(once)}"
    if given := [item for item in listed if keeps_scales(item) and isinstance(weight_in(item), GivenBinding)]:
        yield f"weights come with the call, so their scales are among no states() and in no state_dict: {_names(given)}"
    if narrow := [item for item in listed if _is_product(item) and is_only_narrow(weight_in(item))]:
        yield f"weights in 8 bits alone: {_names(narrow)}"
    for item in listed:
        if (why := _recipe_of(item, key.recipe)) and isinstance(why, str):
            yield f"{item.path} stays in its own precision: {why}"


def _names(items: Sequence[ListedOp]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join([item.path for item in items[:_NAMED]]) + more


register(Regions())
