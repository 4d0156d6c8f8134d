"""Regions as a pass: MatMuls become products of 8 bits, with what quantizes their factors before and behind them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch

from te_fuser.distributed.dtensor import is_taken_away
from te_fuser.dtypes import text_of
from te_fuser.fake_tensors import is_looking
from te_fuser.formula.evaluate import rounds
from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp
from te_fuser.fuser.graph.passes import CallContext, ReadyList, register
from te_fuser.fuser.run.call import REFERENCE
from te_fuser.guards import Facts
from te_fuser.kernels.cublaslt.products import check_machine, emulated_on
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.casts import Quantize, QuantizeGradient
from te_fuser.ops.collectives import Collective
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.quantized_matmul import OUT_DTYPES
from te_fuser.params.binding import Binding, GivenBinding, Key
from te_fuser.quantization.amax_allreduce import quantized_first
from te_fuser.quantization.products import how, parameter_of, recipe_for, weight_in
from te_fuser.quantization.rerun import (
    ran_outside,
    read_in_capture,
    refuse_another,
    refuse_another_precision,
    refuse_by_hand,
)
from te_fuser.quantization.state import NUMBERS, Numbers, ReadyCheck, State, ensure, say_once, state_of
from te_fuser.quantization.weights import (
    KEPT,
    OWN,
    is_only_narrow,
    keep,
    leave_blank,
    narrow_places,
    refuse_narrow,
    refuse_narrow_weights,
)
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Format, OwnScales, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Form = Mapping[str, Any]  # arguments of the ops that stand for a product

# ----------------------------------------------------------------------------------------------------- numbers

_SUFFIXES = {"numbers": "", "blanks": "_of_this_call", "kept": "_of_microbatches"}


class StateBinding(Binding):
    """A tensor of the state of a product: looked up in each call, never a value of a plan.

    Args:
        held: the dict of the state that has it, of `_SUFFIXES`; in "blanks" stands what each call makes is like.
        number: its name in that.
        time: how many products of the list before it have this weight, of numbers that differ among these.
        in_parts: whether backward makes it again of the weight.
    """

    computed = False

    def __init__(self, state: State, held: str, number: str, time: int | None = None, in_parts: bool = False) -> None:
        there: Numbers = getattr(state, held)
        self.__dict__.update(
            name=f"{state.prefix}{number}{_SUFFIXES[held]}",
            state=state,
            _slot=(there, number),
            _key=(id(there), number if time is None else f"{number}.{time}"),
            written=number.endswith("_amax"),
            made_in_call=time is not None,
            in_parts=in_parts,
        )

    @property
    def owner(self) -> torch.nn.Module:  # type: ignore[override]
        """Raise: no module has it among its parameters."""
        raise ReferenceError(f"{self.name} is kept with a weight, not as a parameter of a module")

    @property
    def key(self) -> Key:
        return self.__dict__["_key"]  # type: ignore[no-any-return]

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        return self.__dict__["_slot"]  # type: ignore[no-any-return]

    def get(self) -> torch.Tensor:
        there, number = self.slot
        return there[number]  # type: ignore[return-value]

    def weak(self) -> StateBinding:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateBinding) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def state_in(item: ListedOp) -> State:
    """The state of which a product in a list has its numbers."""
    return next(b.__dict__["state"] for b in item.lowered.aside.values() if isinstance(b, StateBinding))


def keeps_scales(item: ListedOp) -> bool:
    """True where a product reads scales that are kept from call to call."""
    found = item.lowered.aside.get("input_scale")
    return isinstance(found, StateBinding) and not found.made_in_call


def is_kept(item: ListedOp) -> bool:
    """True where a product's weight is kept in 8 bits from micro-batch to micro-batch."""
    return KEPT[-1] in item.lowered.aside


# ------------------------------------------------------------------------------------------------------ by recipe


def numbers_of(recipe: Recipe, weight: Binding, state: State, key: region.Key, time: int) -> dict[str, Binding]:
    """Numbers that a product may read by a recipe, behind `time` products of its weight."""
    own, (data, turned, _) = recipe.own_scales, KEPT
    if own is None:
        found: dict[str, Binding] = {name: StateBinding(state, "numbers", name) for name in NUMBERS}
        if is_only_narrow(weight):
            return found | {data: weight}
        if key.calibrating or any(recipe.override_linear_precision):
            return found
        if key.says_microbatch and not isinstance(weight, GivenBinding):
            return found | {name: StateBinding(state, "kept", name) for name in KEPT}
    elif _have_blocks(own):
        return {}
    else:
        found = {n: StateBinding(state, "blanks", n, 0 if n.startswith("weight") else time) for n in OWN}
    found[data] = StateBinding(state, "blanks", data)
    found[turned] = StateBinding(state, "blanks", turned, in_parts=_comes_anew(weight))
    return found


def rewritten(item: ListedOp, recipe: Recipe, form: Form, call: CallSpecs, calibrating: bool) -> Iterator[ListedOp]:
    """The ops in a product's place; of one that calibrates only where scales are kept."""
    product, own = cast(MatMul, item.lowered.op), recipe.own_scales
    bindings, aside = item.lowered.bindings, item.lowered.aside
    if own is not None and (_have_blocks(own) or torch._C._are_functorch_transforms_active()):
        keeps = not _comes_anew(weight_in(item))
        yield _listed(item, OwnScalesMatMul(product, scalings=own, keeps_weight=keeps, **form), bindings)
        return
    is_narrow, kept = is_only_narrow(weight_in(item)), (True,) * 3 if calibrating else recipe.override_linear_precision
    if own is None and any(kept) and not is_narrow:
        numbers = {name: b for name, b in aside.items() if call.grad or not name.endswith("_amax")}
        yield _listed(item, PartlyFloat8MatMul(product, kept=kept, **form), {**bindings, **numbers})
        return
    of_input, _, of_gradient = own or (None, None, None)
    records = call.grad and not is_narrow
    op = Float8MatMul(product, scalings=own, weight_is_kept=is_narrow or is_kept(item), **form)
    of_weight = ("weight_inverse", *KEPT[:2], *["weight_amax"] * (records and not is_kept(item)))
    numbers = {name: aside[name] for name in dict.fromkeys((*op.form.reads, *of_weight)) if name in aside}
    if is_kept(item):
        numbers["weight_inverse"] = aside["kept_inverse"]
    yield quantizing(item, Quantize(E4M3, scale=None, takes=form["dtype"], own=of_input), records)
    yield _listed(item, op, {**bindings, **numbers})
    if records:
        yield quantizing(item, QuantizeGradient(form["formats"][2], scale=None, own=of_gradient), True)


def _have_blocks(own: Sequence[OwnScales]) -> bool:
    """True where each product quantizes its own factors, along what it sums."""
    return any(scaling.block is not None for scaling in own)


def _comes_anew(weight: Binding) -> bool:
    """True where backward makes W^T again of W, as `fully_shard` takes weights away."""
    return not isinstance(weight, GivenBinding) and is_taken_away(weight.owner)


# --------------------------------------------------------------------------------------------------------- ops


def form_of(recipe: Recipe, dtype: torch.dtype, weight_dtype: torch.dtype) -> Form:
    """Arguments that the ops of products have of a recipe."""
    gradients = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3
    split = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    return {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "formats": (E4M3, E4M3, gradients),
        "fast": tuple([not params.use_split_accumulator for params in split]),
    }


def quantizing(item: ListedOp, op: Quantize | QuantizeGradient, records: bool) -> ListedOp:
    """The op that quantizes a product's input, or dy; `records`: the amax of a kept scale."""
    is_gradient = isinstance(op, QuantizeGradient)
    role, suffix = ("output_gradient", ".quantize_gradient") if is_gradient else ("input", ".quantize")
    ends = {"scale": "scale", **({"amax": "amax"} if records else {})}
    ends = ends if op.own is None else {"own_amax": "amax", "scale": "scale", "inverse": "inverse"}
    return _listed(item, op, {name: item.lowered.aside[f"{role}_{end}"] for name, end in ends.items()}, suffix)


def _listed(item: ListedOp, op: FusableOperation, bindings: Mapping[str, Binding], suffix: str = "") -> ListedOp:
    op.train(item.lowered.op.training)
    low = LoweredOp(op, bindings, item.lowered.suffix)
    summed = {name: group for name, group in item.summed.items() if name in bindings}
    return ListedOp(low, item.path + suffix, {}, (), item.scope, {}, item.stream, summed=summed)


# ------------------------------------------------------------------------------------------------------------ the pass


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
        looks = is_looking() or any(_device_in(weight_in(item)).type == "meta" for item in products)
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
    """The recipe by which a product runs in 8 bits; else why not."""
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
    keeping = [weight for _, weight, recipe, _ in found if recipe.own_scales is None]
    if keeping:
        refuse_by_hand()
        if key.calibrating and not (_records() or reads or any(is_only_narrow(weight) for _, weight, _, _ in found)):
            say_once("calibrating=True without gradients records nothing: call the model outside of torch.no_grad()")
    if not key.calibrating:
        for device, scales in {(device, recipe.scales) for _, _, recipe, device in found}:
            check_machine(device, scales)
    for item, weight, recipe, device in found:
        if not reads:
            state = state_of(weight)
            refuse_another(state, recipe)
            if not region.recomputing():
                state.ran_by, state.ran_in = recipe, region.entries()
            if recipe.own_scales is None:
                ensure(weight, recipe, device) if _records() else state.read(device)
        if KEPT[0] in item.lowered.aside:
            leave_blank(state_in(item), cast(MatMul, item.lowered.op).own_features, device)


def _facts(listed: Sequence[ListedOp]) -> Facts:
    """Conditions under which a list stays ready."""
    states = [state_in(item) for item in listed if keeps_scales(item)]
    kept = [state_in(item) for item in listed if is_kept(item)]
    narrow = [place for item in listed if _is_product(item) for place in narrow_places(weight_in(item))]
    items = [(vars(state), "recipe", state.recipe) for state in states]
    calls = (ReadyCheck(states, _records(), kept, narrow), True), (region.is_capturing, False)
    return Facts(items=tuple(items), calls=calls)


def _records() -> bool:
    """True where calls do more than to read scales, or may in replays."""
    return torch.is_grad_enabled() or read_in_capture() is not None


def _device_in(weight: Binding) -> torch.device:
    """The device of the weight of a call; on the meta device it is planned alone."""
    found = parameter_of(weight)
    return (weight.get() if found is None else found).device


def _apart(weight: Binding, product: MatMul, reads: bool) -> State:
    """A state of nobody: with a product's numbers, else without values."""
    state = State(torch.nn.Module(), weight.name)
    if reads:
        own = state_of(weight)
        own.read(_device_in(weight))
        for held in ("numbers", "blanks", "kept"):
            vars(state)[held].update(vars(own)[held])
        state.kept_of = own.kept_of
        return state
    device = _device_in(weight)
    number = torch.empty((), dtype=torch.float32, device=device)
    data = torch.empty(product.parameter_shapes()["weight"], dtype=torch.float8_e4m3fn, device=device)
    for like in (state.kept, state.blanks):
        like.update(zip(KEPT, (data, data.new_empty(data.shape[::-1]), number), strict=True))
    state.numbers.update(dict.fromkeys(NUMBERS, number))
    state.blanks.update(dict.fromkeys(OWN, number))
    return state


def _bound(listed: Sequence[ListedOp], key: region.Key, looks: bool, reads: bool) -> list[ListedOp]:
    """A list whose products have the numbers that they may read."""
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
    if is_only_narrow(weight_in(item)):  # y in the dtype of autocast, or of the call's x
        dtype = own = item.casts.get("weight", call.x.dtype) if rounds() else torch.float32
        _check_narrow(item, call, key, recipe, dtype)
    elif key.calibrating and recipe.own_scales is not None:
        return (item,)
    else:
        own = call.parameters[weight_in(item).key].spec.dtype
        exact = own == torch.float64 and not rounds()  # references of which give float64, whatever is said here
        own = torch.float32 if exact else own
        dtype = item.casts.get("weight", own)
        for given in (own, dtype):
            if given not in OUT_DTYPES:
                _refuse_dtype(item.path, "its weight", given)
    return rewritten(item, recipe, form_of(recipe, dtype, own), call, key.calibrating)


def _refuse_dtype(path: str, what: str, dtype: torch.dtype) -> NoReturn:
    """Refuse a product whose weight or x is in a dtype that no product of 8 bits gives."""
    raise TypeError(
        f"{path or 'MatMul'}: {what} is in {text_of(dtype)}, but products in FP8 give float32, bfloat16 or float16: "
        'convert model and x, leave the region, or exempt it by te.precision(model, {"path": None}); '
        f"{REFERENCE} takes float64"
    )


def _check_narrow(item: ListedOp, call: CallSpecs, key: region.Key, recipe: Recipe, dtype: torch.dtype) -> None:
    """Refuse a product whose weight is in 8 bits alone, where it cannot run so."""
    trains = call.grad and (call.x_needs_grad or any(p.requires_grad for p in call.parameters.values()))
    is_wide = key.calibrating or recipe.override_linear_precision[0]
    refused = {
        "takes a recipe that keeps scales, DelayedScaling() say": recipe.own_scales is not None,
        "is to run in another precision: leave out calibrating and override_linear_precision": is_wide,
        "is for inference: call it under torch.no_grad(), or train a model with weights of its own": trains,
        f"gives float32, bfloat16 or float16, not {dtype}: convert x": dtype not in OUT_DTYPES,
    }
    if why := next((why for why, holds in refused.items() if holds), None):
        refuse_narrow(item, why)


def _notes(
    listed: Sequence[ListedOp], key: region.Key, device: torch.device, capability: tuple[int, int] | None
) -> Iterator[str]:
    """Lines on each product's precision."""
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
