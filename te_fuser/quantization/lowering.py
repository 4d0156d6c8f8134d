"""Regions as a pass: MatMuls become products of 8 bits, with what quantizes their factors before and behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from te_fuser.fuser.graph import surroundings
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.kernels.quantized_matmul import check_machine
from te_fuser.look import is_looking
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.binding import Binding
from te_fuser.ops.facts import Facts
from te_fuser.ops.float8_matmul import Float8MatMul, PartlyFloat8MatMul
from te_fuser.ops.float8_products import READ, READ_KEPT
from te_fuser.ops.given import GivenBinding
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.quantized_matmul import OUT_DTYPES, STEP
from te_fuser.ops.rows import rounds
from te_fuser.quantization.bindings import AmaxBinding, InverseBinding, ScaleBinding
from te_fuser.quantization.checkpointing import ran_outside
from te_fuser.quantization.graphs import refuse_by_hand
from te_fuser.quantization.kept import KEPT, KeptBinding, keep, kept_facts, kept_undisturbed
from te_fuser.quantization.precision import recipe_for
from te_fuser.quantization.products import device_of
from te_fuser.quantization.state import ROLES, AsPut, State, blocks, ensure, known_state_of, state_of
from te_fuser.recipe import region
from te_fuser.recipe.recipes import DelayedScaling, Format, Recipe

_NAMED = 6  # products that a note names
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_BINDINGS = {"scale": ScaleBinding, "inverse": InverseBinding, "amax": AmaxBinding}


class Regions(surroundings.Surrounding):
    """Regions of recipes as what surrounds calls."""

    key = staticmethod(region.current_key)
    refuse_tracing = staticmethod(region.refuse_tracing)

    def listed(self, listed: Sequence[ListedOp], key: Hashable) -> list[ListedOp]:
        recipe = _said(key)[0]
        return [_with_state(item, key) if why_not(item, recipe) is None else item for item in listed]

    def lasts(self, listed: Sequence[ListedOp]) -> bool:
        return not any(map(_is_planned_alone, _weights(listed)))

    def entered(self, listed: Sequence[ListedOp], key: Hashable) -> None:
        recipe, calibrating = _said(key)
        weights = [weight for weight in _weights(listed) if not _is_planned_alone(weight)]
        if weights:
            refuse_by_hand()
        devices = [device_of(weight) or weight.get().device for weight in weights]
        for device in {*devices} if not calibrating else ():
            check_machine(device)
        for weight, device in zip(weights, devices, strict=True) if not is_looking() else ():
            ensure(weight, cast(Recipe, recipe_for(weight, recipe)), device)
        keep([weight for weight in _kept(listed) if not _is_planned_alone(weight)])

    def left(self, listed: Sequence[ListedOp]) -> None:
        if blocks() and not is_looking():
            ran_outside([item.lowered.bindings["weight"] for item in listed if _is_product(item)])

    def facts(self, listed: Sequence[ListedOp]) -> Facts:
        states = [state_of(weight) for weight in _weights(listed)]
        recipes = tuple([(vars(state), "recipe", state.recipe) for state in states])
        made = Facts(items=recipes, calls=((AsPut(states), True), (region.is_capturing, False)))
        return Facts.of([made, kept_facts([state_of(weight) for weight in _kept(listed)])])

    def lowered(self, listed: Sequence[ListedOp], call: CallSpecs, key: Hashable) -> Sequence[ListedOp]:
        return [new for item in listed for new in _lowered(item, call, key)]

    def notes(self, listed: Sequence[ListedOp], key: Hashable, device: torch.device) -> Iterable[str]:
        return notes(listed, key, device)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        before = [(block, block.amaxes.clone()) for block in blocks()]
        known = {id(block) for block, _ in before}
        noted = {state: state.noted for block, _ in before for state in block.states()}
        try:
            with kept_undisturbed():
                yield
        finally:
            with torch.no_grad():
                for block, amaxes in before:
                    block.amaxes.copy_(amaxes)
                for block in blocks():
                    if id(block) not in known:
                        block.amaxes.zero_()
                    for state in block.states():
                        state.noted = noted.get(state, (None, False, -1))


def why_not(item: ListedOp, recipe: Recipe) -> str | None:
    """Why an op is no product of 8 bits in a region of that recipe, in words where it is a product; None: it is one."""
    if not _is_product(item):
        return ""
    product = cast(MatMul, item.lowered.op)
    for name, size in zip(("in_features", "out_features"), product.own_features, strict=True):
        if size % STEP:
            return f"its {name}, {size}, are no multiple of {STEP}"
    return "te.precision says so" if recipe_for(item.lowered.bindings["weight"], recipe) is None else None


def _is_product(item: ListedOp) -> bool:
    return item.lowered.op.kind is MatMul and "weight" in item.lowered.bindings


def _quantized(listed: Iterable[ListedOp]) -> list[ListedOp]:
    return [item for item in listed if item.lowered.aside]


def _weights(listed: Iterable[ListedOp]) -> list[Binding]:
    return [item.lowered.bindings["weight"] for item in _quantized(listed)]


def _kept(listed: Iterable[ListedOp]) -> list[Binding]:
    return [item.lowered.bindings["weight"] for item in listed if KEPT[0] in item.lowered.aside]


def _is_meta(weight: Binding) -> bool:
    """Whether it is on the meta device, so that a call can only be planned."""
    owned = weight.owner._parameters
    found = next(weight.owner.parameters(), None) if owned.get(weight.name) is None else owned[weight.name]
    return found is not None and found.is_meta


def _is_planned_alone(weight: Binding) -> bool:
    """Whether a call of its product is only planned, and leaves it no state: on the meta device, or in a first look."""
    if _is_meta(weight):
        return True
    state = known_state_of(weight) if is_looking() else None
    return is_looking() and (state is None or state.block is None)


def _without_values(weight: Binding, product: MatMul) -> State:
    """The state of a product that is only planned: it belongs to nobody."""
    device = device_of(weight) or torch.device("meta")
    state, number = State(torch.nn.Module(), weight.name), torch.empty((), dtype=torch.float32, device=device)
    data = torch.empty(product.parameter_shapes()["weight"], dtype=E4M3, device=device)
    state.kept.update(zip(KEPT, (data, data.new_empty(data.shape[::-1]), number), strict=True))
    for numbers in (state.scales, state.inverses, state.amaxes):
        numbers.update(dict.fromkeys(ROLES, number))
    return state


def _keeps(item: ListedOp, key: Hashable) -> bool:
    """Whether a product's weight is kept in 8 bits from micro-batch to micro-batch."""
    (around, calibrating), weight = _said(key), item.lowered.bindings["weight"]
    recipe = cast(DelayedScaling, recipe_for(weight, around))
    wide = calibrating or any(recipe.override_linear_precision)
    return _is_in_microbatch(key) and not wide and not isinstance(weight, GivenBinding)


def _with_state(item: ListedOp, key: Hashable) -> ListedOp:
    """A product with the numbers of its state that it may read."""
    weight = item.lowered.bindings["weight"]
    product = cast(MatMul, item.lowered.op)
    state = _without_values(weight, product) if _is_planned_alone(weight) else state_of(weight)
    aside = {f"{role}_{what}": kind(state, role) for role in ROLES for what, kind in _BINDINGS.items()}
    if _keeps(item, key):
        aside |= {name: KeptBinding(state, name) for name in KEPT}
    return replace(item, lowered=replace(item.lowered, aside=aside))


def _said(key: Hashable) -> tuple[Recipe, bool]:
    """What a region says of itself: its recipe, and whether it is calibrating."""
    (recipe, calibrating, *_), _ = cast(tuple[Any, ...], key)
    return recipe, calibrating


def _is_in_microbatch(key: Hashable) -> bool:
    """Whether calls say which micro-batch they are."""
    return bool(cast(tuple[Any, ...], key)[1])


def _lowered(item: ListedOp, call: CallSpecs, key: Hashable) -> Iterable[ListedOp]:
    """What stands in an op's place."""
    low = item.lowered
    if not low.aside:
        return (item,)
    own = call.parameters[low.bindings["weight"].key].spec.dtype
    exact = own == torch.float64 and not rounds()  # references of which give float64, whatever is said here
    own = torch.float32 if exact else own
    dtype = item.casts.get("weight", own)
    if dtype not in OUT_DTYPES or own not in OUT_DTYPES:
        return (item,)
    around, calibrating = _said(key)
    recipe = cast(DelayedScaling, recipe_for(low.bindings["weight"], around))
    kept = (True,) * 3 if calibrating else recipe.override_linear_precision
    gradients = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3
    split = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    form = {
        "dtype": dtype,
        "weight_dtype": own,
        "formats": (E4M3, E4M3, gradients),
        "fast": tuple([not params.use_split_accumulator for params in split]),
    }
    product = cast(MatMul, low.op)
    amaxes = ROLES if call.grad else ()
    if any(kept):
        partly = PartlyFloat8MatMul(product, kept=kept, **form)  # type: ignore[arg-type]
        numbers = [name for name in low.aside if not name.endswith("_amax")]
        return (_in_place(item, partly, "", [*numbers, *[f"{role}_amax" for role in amaxes]]),)
    found = [_quantizing(item, Quantize(E4M3, scale=None, takes=dtype), ".quantize", "input", call.grad)]
    if KEPT[0] in low.aside:
        read, inverse = [*READ_KEPT, "weight_turned"], {"weight_inverse": low.aside["kept_inverse"]}
        op = Float8MatMul(product, weight_is_kept=True, **form)  # type: ignore[arg-type]
        found.append(_in_place(item, op, "", read, inverse))
    else:
        read = [*READ, *[f"{role}_amax" for role in amaxes if role == "weight"]]
        found.append(_in_place(item, Float8MatMul(product, **form), "", read))  # type: ignore[arg-type]
    if call.grad:
        back = QuantizeGradient(gradients, scale=None)
        found.append(_quantizing(item, back, ".quantize_gradient", "output_gradient", True))
    return found


def _in_place(
    item: ListedOp, op: FusableOperation, suffix: str, names: Iterable[str], others: Mapping[str, Binding] = {}
) -> ListedOp:
    """An op in the place of a product, with its weight and these numbers of its state."""
    low = item.lowered
    return _listed(item, op, suffix, {**low.bindings, **{name: low.aside[name] for name in names}, **others})


def _quantizing(item: ListedOp, op: FusableOperation, suffix: str, role: str, records: bool) -> ListedOp:
    """What quantizes a factor of a product, before it or behind it."""
    aside = item.lowered.aside
    amax = {"amax": aside[f"{role}_amax"]} if records else {}
    return _listed(item, op, suffix, {"scale": aside[f"{role}_scale"], **amax})


def _listed(item: ListedOp, op: FusableOperation, suffix: str, bindings: Mapping[str, Binding]) -> ListedOp:
    op.train(item.lowered.op.training)
    low = LoweredOp(op, bindings, item.lowered.suffix)
    summed = {name: group for name, group in item.summed.items() if name in bindings}
    return ListedOp(low, item.path + suffix, {}, (), item.scope, {}, item.stream, summed=summed)


def notes(listed: Sequence[ListedOp], key: Hashable, device: torch.device) -> Iterator[str]:
    """What plans say of the precision of each product, and why one stays in its own."""
    around, calibrating = _said(key)
    alike: dict[tuple[bool, tuple[bool, ...]], list[str]] = {}
    for item in _quantized(listed):
        recipe = cast(DelayedScaling, recipe_for(item.lowered.bindings["weight"], around))
        form = recipe.fp8_format is Format.HYBRID, recipe.override_linear_precision
        alike.setdefault(form, []).append(item.path)
    for (hybrid, kept), paths in alike.items():
        if calibrating:
            yield f"calibrating: the largest magnitudes of {_names(paths)} are recorded, and nothing is quantized"
            continue
        how = "E4M3, gradients in E5M2" if hybrid else "E4M3"
        own = [product for product, keeps in zip(("y", "dx", "dW"), kept, strict=True) if keeps]
        but = f"; but {', '.join(own)} in its own precision, as override_linear_precision says" if own else ""
        emulated = "" if device.type == "cuda" else f", emulated on {device.type}: multiplied in float32"
        yield f"products in 8 bits ({how}){emulated}: {_names(paths)}{but}"
    if once := [item.path for item in listed if KEPT[0] in item.lowered.aside]:
        yield f"weights are quantized in the first micro-batch alone, and kept in 8 bits: {_names(once)}"
    if given := [item.path for item in _quantized(listed) if isinstance(item.lowered.bindings["weight"], GivenBinding)]:
        yield f"weights come with the call, so their scales are among no states() and in no state_dict: {_names(given)}"
    for item in listed:
        if why := why_not(item, around):
            yield f"{item.path} stays in its own precision: {why}"


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= _NAMED else f"{', '.join(paths[:_NAMED])} and {len(paths) - _NAMED} more"


surroundings.register(Regions())
