"""Regions as a pass: MatMuls become products of 8 bits, with what quantizes their factors before and behind them."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from te_fuser.distributed.dtensor import is_taken_away
from te_fuser.facts import Facts
from te_fuser.formula.rows import rounds
from te_fuser.fuser.graph.call_context import CallContext, ReadyList, register
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.kernels.quantized_matmul import check_machine, emulated_on
from te_fuser.look import is_looking
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.collectives import Collective
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.float8_products import READ, READ_KEPT, READ_OWN
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.own_scales import Scaling
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.quantized_matmul import OUT_DTYPES
from te_fuser.params.binding import Binding
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.bindings import (
    AmaxBinding,
    InverseBinding,
    OwnAmaxBinding,
    OwnBinding,
    ScaleBinding,
    StateBinding,
)
from te_fuser.quantization.block import ROLES
from te_fuser.quantization.checkpointing import ran_outside, ran_within, refuse_another_precision
from te_fuser.quantization.exchanged import agreeing, quantized_first
from te_fuser.quantization.graphs import refuse_by_hand
from te_fuser.quantization.kept import (
    KEPT,
    OWN,
    KeptBinding,
    MadeAgainBinding,
    MadeBinding,
    keep,
    kept_facts,
    leave_blank,
)
from te_fuser.quantization.only import AsTheyWere, is_only_narrow, narrow_places, refuse_narrow, refuse_narrow_weights
from te_fuser.quantization.precision import recipe_for
from te_fuser.quantization.products import device_of, weight_in
from te_fuser.quantization.refusing import refuse_dtype
from te_fuser.quantization.scaling import how, scalings_of
from te_fuser.quantization.snapshots import read_in_capture
from te_fuser.quantization.state import (
    AsPut,
    State,
    ensure,
    has_been_asked,
    look_up,
    state_of,
)
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Format, Recipe

_NAMED = 6  # products that a note names
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_BINDINGS = {"scale": ScaleBinding, "inverse": InverseBinding, "amax": AmaxBinding}


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
        _prepare_products([item for item in listed if why_not(item, key.recipe) is None], key, reads)
        keep([(state_in(item), weight_in(item)) for item in listed if _is_kept(item)], _records() and not reads)
        return ReadyList(listed, not reads, functools.partial(_facts, listed))

    def rewrite(self, listed: Sequence[ListedOp], call: CallSpecs, key: region.Key) -> Sequence[ListedOp]:
        call.notes.extend(_notes(listed, key, call.x.device, call.capability))
        made = [new for item in listed for new in _lowered(item, call, key)]
        if not any(isinstance(item.lowered.op, Collective) for item in listed):
            return made
        return quantized_first(made, agreeing(), lambda item: _reduces(recipe_for(weight_in(item), key.recipe)))


def _prepare_outside(products: Sequence[ListedOp]) -> None:
    """Refuse products that cannot run outside of regions, and note that the others do."""
    now = region.current()
    for item in products:
        if now is not None and why_not(item, now.recipe) is None:  # calls in float64 are surrounded by nothing
            refuse_dtype(item.path, "x", torch.float64)
        refuse_narrow(item, "runs outside of regions of FP8: call it in te_fuser.fp8_autocast(enabled=True)")
    if has_been_asked() and not is_looking():
        ran_outside([weight_in(item) for item in products])


def _prepare_products(products: Sequence[ListedOp], key: region.Key, reads: bool) -> None:
    """Have products of 8 bits find what they read, and note by which recipes they run."""
    found = [(w, _recipe_of(item, key.recipe), _device_in(w)) for item in products for w in [weight_in(item)]]
    if any(scalings_of(recipe) is None for _, recipe, _ in found):
        refuse_by_hand()
        if key.calibrating and not (_records() or reads or any(is_only_narrow(w) for w, _, _ in found)):
            _say_once()
    for device, kind in {(device, recipe.scales) for _, recipe, device in found} if not key.calibrating else ():
        check_machine(device, kind)
    for weight, recipe, device in [] if reads else found:
        ran_within(weight, recipe)
        if scalings_of(recipe) is None:
            ensure(weight, recipe, device) if _records() else look_up(weight, device)
    for item, (_, _, device) in zip(products, found, strict=True):
        if KEPT[0] in item.lowered.aside:
            leave_blank(state_in(item), cast(MatMul, item.lowered.op).own_features, device)


def _facts(listed: Sequence[ListedOp]) -> Facts:
    """Conditions under which a list stays ready."""
    states = [state_in(item) for item in listed if _keeps_scales(item)]
    recipes = tuple([(vars(state), "recipe", state.recipe) for state in states])
    places = [place for item in listed if _is_product(item) for place in narrow_places(weight_in(item))]
    calls = (
        (AsPut(states, _records()), True),
        (region.is_capturing, False),
        *([(AsTheyWere(places), True)] if places else ()),
    )
    made = Facts(items=recipes, calls=calls)
    return Facts.of([made, kept_facts([state_in(item) for item in listed if _is_kept(item)])])


@functools.cache
def _say_once() -> None:
    warnings.warn(
        "calibrating=True without gradients records nothing: call the model outside of torch.no_grad()", stacklevel=2
    )


def _records() -> bool:
    """Whether calls need more than to read scales; a graph that records nothing may be replayed when there are some."""
    return torch.is_grad_enabled() or read_in_capture() is not None


def why_not(item: ListedOp, recipe: Recipe) -> str | None:
    """Why an op is no product of 8 bits in a region of that recipe, in words where it is a product; None: it is one."""
    if not _is_product(item):
        return ""
    product, chosen = cast(MatMul, item.lowered.op), recipe_for(weight_in(item), recipe)
    if chosen is None:
        return "te.precision says so"
    for name, size in zip(("in_features", "out_features"), product.own_features, strict=True):
        if size % chosen.step:
            return f"its {name}, {size}, are no multiple of {chosen.step}"
    return None


def _recipe_of(item: ListedOp, around: Recipe) -> Recipe:
    """What a product of 8 bits runs by."""
    return cast(Recipe, recipe_for(weight_in(item), around))


def _has_numbers(item: ListedOp, recipe: Recipe) -> bool:
    """Whether an op is a product of 8 bits with a scale for each factor: one that is kept, or that calls make."""
    if why_not(item, recipe) is not None:
        return False
    scalings = scalings_of(recipe_for(weight_in(item), recipe))
    return scalings is None or _are_of_tensors(scalings)


def _are_of_tensors(scalings: tuple[Scaling, ...]) -> bool:
    """Whether each factor has one scale."""
    return all(scaling.block is None for scaling in scalings)


def state_in(item: ListedOp) -> State:
    """The state of which a product in a list has its numbers."""
    return next(b.state for b in item.lowered.aside.values() if isinstance(b, StateBinding))


def _keeps_scales(item: ListedOp) -> bool:
    """Whether a product reads scales that are kept from call to call."""
    return isinstance(item.lowered.aside.get("input_scale"), ScaleBinding)


def _reduces(recipe: Recipe | None) -> bool:
    """Whether ranks agree on what a recipe keeps."""
    return recipe is not None and recipe.reduce_amax


def _is_product(item: ListedOp) -> bool:
    return item.lowered.op.kind is MatMul and "weight" in item.lowered.bindings


def _is_kept(item: ListedOp) -> bool:
    """Whether a product's weight is kept in 8 bits from micro-batch to micro-batch."""
    return KEPT[-1] in item.lowered.aside


def _is_given(item: ListedOp) -> bool:
    """Whether a product's weight comes with the call."""
    return isinstance(weight_in(item), GivenBinding)


def _is_meta(weight: Binding) -> bool:
    """Whether it is on the meta device, so that a call can only be planned."""
    owned = weight.owner._parameters
    found = next(weight.owner.parameters(), None) if owned.get(weight.name) is None else owned[weight.name]
    return found is not None and found.is_meta


def _device_in(weight: Binding) -> torch.device:
    """The device of the weight of a call."""
    return device_of(weight) or weight.get().device


def _apart(weight: Binding, product: MatMul, reads: bool) -> State:
    """A state that belongs to nobody: for a reference with the numbers of a product, else without values."""
    state = State(torch.nn.Module(), weight.name)
    if reads:
        own = look_up(weight, _device_in(weight))
        for mine, its in zip(state.held(), own.held(), strict=True):
            mine.update(its)
        state.is_kept, state.kept_of = own.is_kept, own.kept_of
        return state
    device = torch.device("meta") if _is_meta(weight) else _device_in(weight)
    number = torch.empty((), dtype=torch.float32, device=device)
    data = torch.empty(product.parameter_shapes()["weight"], dtype=E4M3, device=device)
    for like in (state.kept, state.blanks):
        like.update(zip(KEPT, (data, data.new_empty(data.shape[::-1]), number), strict=True))
    for numbers in (state.scales, state.inverses, state.amaxes):
        numbers.update(dict.fromkeys(ROLES, number))
    state.blanks.update(dict.fromkeys(OWN, number))
    return state


def _own_numbers(weight: Binding, state: State, time: int) -> dict[str, Binding]:
    """What each call makes: scales of what it quantizes, their reciprocals, amaxes; and the weight in 8 bits, once."""
    found: dict[str, Binding] = {}
    for name in OWN:
        kind = OwnAmaxBinding if name.endswith("amax") else OwnBinding
        found[name] = kind(state, name, 0 if name.startswith("weight") else time)
    return {**found, **_made_of(weight, state)}


def _made_of(weight: Binding, state: State) -> dict[str, Binding]:
    """A weight in 8 bits as each call makes it."""
    data, turned, _ = KEPT
    again = not isinstance(weight, GivenBinding) and is_taken_away(weight.owner)
    return {data: MadeBinding(state, data), turned: (MadeAgainBinding if again else MadeBinding)(state, turned)}


def _weight_bindings(weight: Binding, state: State, key: region.Key) -> dict[str, Binding]:
    """A weight in 8 bits, as it is kept or as each call makes it; nothing where a product is not all of 8 bits."""
    recipe = cast(Recipe, recipe_for(weight, key.recipe))
    if key.calibrating or any(recipe.override_linear_precision) or is_only_narrow(weight):
        return {}
    if key.says_microbatch and not isinstance(weight, GivenBinding):
        return {name: KeptBinding(state, name) for name in KEPT}
    return _made_of(weight, state)


def _bound(listed: Sequence[ListedOp], key: region.Key, looks: bool, reads: bool) -> list[ListedOp]:
    """A list whose products have the numbers that they may read, of their states or of their calls."""
    times = Counter[Hashable]()
    found: list[ListedOp] = []
    for item in listed:
        if _has_numbers(item, key.recipe):
            weight = weight_in(item)
            apart = looks or reads
            state = _apart(weight, cast(MatMul, item.lowered.op), reads and not looks) if apart else state_of(weight)
            aside = _numbers(weight, state, key, times[weight.key])
            item = replace(item, lowered=replace(item.lowered, aside=aside))
            times[weight.key] += 1
        found.append(item)
    return found


def _numbers(weight: Binding, state: State, key: region.Key, time: int) -> Mapping[str, Binding]:
    """The numbers of a product by name.

    Args:
        time: how many products of the list before it have the same weight.
    """
    if scalings_of(recipe_for(weight, key.recipe)) is not None:
        return _own_numbers(weight, state, time)
    scales = {f"{role}_{what}": kind(state, role) for role in ROLES for what, kind in _BINDINGS.items()}
    return {**scales, **_weight_bindings(weight, state, key)}


def _lowered(item: ListedOp, call: CallSpecs, key: region.Key) -> Iterable[ListedOp]:
    """What stands in an op's place."""
    low, calibrating = item.lowered, key.calibrating
    why = why_not(item, key.recipe)
    if why is not None:
        if why:
            refuse_narrow(item, f"is no product of 8 bits here: {why}")
        return (item,)
    recipe = _recipe_of(item, key.recipe)
    scalings = scalings_of(recipe)
    if is_only_narrow(weight_in(item)):
        if scalings is not None:
            refuse_narrow(item, "takes a recipe that keeps scales, DelayedScaling() say")
        return _of_narrow(item, call, key)
    if calibrating and scalings is not None:
        return (item,)
    own = call.parameters[weight_in(item).key].spec.dtype
    exact = own == torch.float64 and not rounds()  # references of which give float64, whatever is said here
    own = torch.float32 if exact else own
    dtype = item.casts.get("weight", own)
    for given in (own, dtype):
        if given not in OUT_DTYPES:
            refuse_dtype(item.path, "its weight", given)
    form = _form(recipe, dtype, own)
    if scalings is not None and _are_of_tensors(scalings) and not torch._C._are_functorch_transforms_active():
        return _between_quantizers(item, {**form, "scalings": scalings}, call.grad)
    if scalings is not None:
        weight = weight_in(item)
        keeps = isinstance(weight, GivenBinding) or not is_taken_away(weight.owner)
        product = OwnScalesMatMul(cast(MatMul, low.op), scalings=scalings, keeps_weight=keeps, **form)
        return (_listed(item, product, "", low.bindings),)
    kept = (True,) * 3 if calibrating else recipe.override_linear_precision
    if any(kept):
        partly = PartlyFloat8MatMul(cast(MatMul, low.op), kept=kept, **form)
        numbers = [name for name in low.aside if call.grad or not name.endswith("_amax")]
        return (_in_place(item, partly, "", numbers),)
    return _between_quantizers(item, form, call.grad)


def _form(recipe: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, Any]:
    """What the ops of products say of a recipe."""
    gradients = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3
    split = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    return {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "formats": (E4M3, E4M3, gradients),
        "fast": tuple([not params.use_split_accumulator for params in split]),
    }


def _between_quantizers(item: ListedOp, form: Mapping[str, Any], records: bool) -> Iterable[ListedOp]:
    """A product of factors that come in 8 bits by one scale each, and what quantizes these before and behind it."""
    low, gradients, scalings = item.lowered, form["formats"][2], form.get("scalings")
    of_input, _, of_gradient = scalings or (None,) * 3
    quantize = Quantize(E4M3, scale=None, takes=form["dtype"], own=of_input)
    yield _quantizing(item, quantize, ".quantize", "input", records)
    product = cast(MatMul, low.op)
    if scalings is not None:
        read = [*READ_OWN, "weight_inverse", *KEPT[:2]]
        yield _in_place(item, Float8MatMul(product, **form), "", read)
    elif _is_kept(item):
        read, inverse = [*READ_KEPT, "weight_turned"], {"weight_inverse": low.aside["kept_inverse"]}
        yield _in_place(item, Float8MatMul(product, weight_is_kept=True, **form), "", read, inverse)
    else:
        read = [*READ, *KEPT[:2], *(["weight_amax"] if records else [])]
        yield _in_place(item, Float8MatMul(product, **form), "", read)
    if records:
        behind = QuantizeGradient(gradients, scale=None, own=of_gradient)
        yield _quantizing(item, behind, ".quantize_gradient", "output_gradient", True)


def _of_narrow(item: ListedOp, call: CallSpecs, key: region.Key) -> Iterable[ListedOp]:
    """A product whose weight is in 8 bits alone: y in the dtype of autocast, or of the call's x."""
    low = item.lowered
    recipe = _recipe_of(item, key.recipe)
    if key.calibrating or recipe.override_linear_precision[0]:
        refuse_narrow(item, "is to run in another precision: leave out calibrating and override_linear_precision")
    if call.grad and (call.x_needs_grad or any(p.requires_grad for p in call.parameters.values())):
        refuse_narrow(item, "is for inference: call it under torch.no_grad(), or train a model with weights of its own")
    exact = torch.float64 if not rounds() else None
    dtype = item.casts.get("weight", call.x.dtype)
    if (exact or dtype) not in (*OUT_DTYPES, exact):
        refuse_narrow(item, f"gives float32, bfloat16 or float16, not {dtype}: convert x")
    form = _form(recipe, torch.float32 if exact else dtype, torch.float32 if exact else dtype)
    op = Float8MatMul(cast(MatMul, low.op), weight_is_kept=True, **form)
    yield _quantizing(item, Quantize(E4M3, scale=None, takes=form["dtype"]), ".quantize", "input", False)
    numbers = [name for name in READ_KEPT if name in low.aside]
    yield _in_place(item, op, "", numbers, {"weight_data": weight_in(item)})


def _in_place(
    item: ListedOp, op: FusableOperation, suffix: str, names: Iterable[str], others: Mapping[str, Binding] = {}
) -> ListedOp:
    """An op in the place of a product, with its weight and these numbers of its state."""
    low = item.lowered
    return _listed(item, op, suffix, {**low.bindings, **{name: low.aside[name] for name in names}, **others})


def _quantizing(item: ListedOp, op: FusableOperation, suffix: str, role: str, records: bool) -> ListedOp:
    """What quantizes a factor of a product, before it or behind it."""
    aside = item.lowered.aside
    if not _keeps_scales(item):
        numbers = {"own_amax": "amax", "scale": "scale", "inverse": "inverse"}
        return _listed(item, op, suffix, {name: aside[f"{role}_{what}"] for name, what in numbers.items()})
    amax = {"amax": aside[f"{role}_amax"]} if records else {}
    return _listed(item, op, suffix, {"scale": aside[f"{role}_scale"], **amax})


def _listed(item: ListedOp, op: FusableOperation, suffix: str, bindings: Mapping[str, Binding]) -> ListedOp:
    op.train(item.lowered.op.training)
    low = LoweredOp(op, bindings, item.lowered.suffix)
    summed = {name: group for name, group in item.summed.items() if name in bindings}
    return ListedOp(low, item.path + suffix, {}, (), item.scope, {}, item.stream, summed=summed)


def _notes(
    listed: Sequence[ListedOp], key: region.Key, device: torch.device, capability: tuple[int, int] | None
) -> Iterator[str]:
    """What plans say of each product's precision; the capability is that of a GPU that is only named."""
    around, calibrating = key.recipe, key.calibrating
    alike: dict[tuple[str, str, str], list[str]] = {}
    for item in listed:
        if why_not(item, around) is None:
            recipe = _recipe_of(item, around)
            alike.setdefault((*_precision(recipe), recipe.scales), []).append(item.path)
    for (said, but, scales), paths in alike.items():
        if not calibrating:
            yield f"products in 8 bits ({said}){emulated_on(device, capability, scales)}: {_names(paths)}{but}"
        elif has := [path for item in listed if (path := item.path) in paths and _keeps_scales(item)]:
            yield f"calibrating: the largest magnitudes of {_names(has)} are recorded, and nothing is quantized"
        else:
            yield f"calibrating: scales of {_names(paths)} need no earlier calls, and nothing is quantized"
    if once := [item.path for item in listed if _is_kept(item)]:
        yield f"weights are quantized in the first micro-batch alone, and kept in 8 bits: {_names(once)}"
    if given := [item.path for item in listed if _keeps_scales(item) and _is_given(item)]:
        yield f"weights come with the call, so their scales are among no states() and in no state_dict: {_names(given)}"
    products = filter(_is_product, listed)
    if narrow := [item.path for item in products if is_only_narrow(weight_in(item))]:
        yield f"weights in 8 bits alone: {_names(narrow)}"
    for item in listed:
        if why := why_not(item, around):
            yield f"{item.path} stays in its own precision: {why}"


def _precision(recipe: Recipe) -> tuple[str, str]:
    """Formats and scales of a recipe, in words, and which products have none of it."""
    formats = "E4M3, gradients in E5M2" if recipe.fp8_format is Format.HYBRID else "E4M3"
    kept = zip(("y", "dx", "dW"), recipe.override_linear_precision, strict=True)
    own = [product for product, keeps in kept if keeps]
    but = f"; but {', '.join(own)} in its own precision, as override_linear_precision says" if own else ""
    return "; ".join(filter(None, (formats, how(recipe)))), but


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= _NAMED else f"{', '.join(paths[:_NAMED])} and {len(paths) - _NAMED} more"


register(Regions())
