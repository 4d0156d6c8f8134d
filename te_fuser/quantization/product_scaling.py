"""Scales of products of 8 bits: one interface, and a class for each kind of recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch

from te_fuser.distributed.dtensor import is_taken_away
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.float8_products import READ, READ_KEPT, READ_OWN
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.own_scales import Scaling
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.params.binding import Binding
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_slots import ROLES
from te_fuser.quantization.bindings import (
    AmaxBinding,
    InverseBinding,
    KeptBinding,
    MadeAgainBinding,
    MadeBinding,
    OwnAmaxBinding,
    OwnBinding,
    ScaleBinding,
)
from te_fuser.quantization.model_init import is_only_narrow
from te_fuser.quantization.products import weight_in
from te_fuser.quantization.scaling import scalings_of
from te_fuser.quantization.state import State
from te_fuser.quantization.weight_cache import KEPT, OWN
from te_fuser.recipe.recipes import Format, Recipe
from te_fuser.recipe.region import Key

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_BINDINGS = {"scale": ScaleBinding, "inverse": InverseBinding, "amax": AmaxBinding}
Form = Mapping[str, Any]  # arguments of the ops that stand for a product


class ProductScaling(ABC):
    """Scales of products that run by a recipe.

    Attributes:
        keeps: whether scales are kept from call to call.
    """

    keeps: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.own: Any = scalings_of(recipe)

    @abstractmethod
    def numbers(self, weight: Binding, state: State, key: Key, time: int) -> Mapping[str, Binding]:
        """The numbers that a product may read, by name.

        Args:
            time: how many products of the list before it have the same weight.
        """

    @abstractmethod
    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        """The ops that stand in the place of a product; of one that calibrates only where scales are kept."""


class Delayed(ProductScaling):
    """Scales of earlier calls."""

    keeps = True

    def numbers(self, weight: Binding, state: State, key: Key, time: int) -> Mapping[str, Binding]:
        scales = {f"{role}_{what}": kind(state, role) for role in ROLES for what, kind in _BINDINGS.items()}
        if key.calibrating or any(self.recipe.override_linear_precision) or is_only_narrow(weight):
            return scales
        if key.says_microbatch and not isinstance(weight, GivenBinding):
            return {**scales, **{name: KeptBinding(state, name) for name in KEPT}}
        return {**scales, **_made_of(weight, state)}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        low, product = item.lowered, cast(MatMul, item.lowered.op)
        kept = (True,) * 3 if calibrating else self.recipe.override_linear_precision
        if any(kept):
            names = [name for name in low.aside if call.grad or not name.endswith("_amax")]
            yield in_place(item, PartlyFloat8MatMul(product, kept=kept, **form), names)
            return
        yield quantizing(item, form["dtype"], call.grad)
        if is_kept(item):
            read, inverse = [*READ_KEPT, "weight_turned"], {"weight_inverse": low.aside["kept_inverse"]}
            yield in_place(item, Float8MatMul(product, weight_is_kept=True, **form), read, inverse)
        else:
            read = [*READ, *KEPT[:2], *(["weight_amax"] if call.grad else [])]
            yield in_place(item, Float8MatMul(product, **form), read)
        if call.grad:
            behind = QuantizeGradient(form["formats"][2], scale=None)
            numbers = {name: low.aside[f"output_gradient_{name}"] for name in ("scale", "amax")}
            yield _listed(item, behind, numbers, ".quantize_gradient")


class Blocks(ProductScaling):
    """Scales of the blocks of what is multiplied: each product quantizes its own factors."""

    def numbers(self, weight: Binding, state: State, key: Key, time: int) -> Mapping[str, Binding]:
        return {}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        weight = weight_in(item)
        keeps = isinstance(weight, GivenBinding) or not is_taken_away(weight.owner)
        product = OwnScalesMatMul(cast(MatMul, item.lowered.op), scalings=self.own, keeps_weight=keeps, **form)
        return (_listed(item, product, item.lowered.bindings),)


class Current(Blocks):
    """One scale of each tensor that is multiplied, from itself."""

    def numbers(self, weight: Binding, state: State, key: Key, time: int) -> Mapping[str, Binding]:
        found: dict[str, Binding] = {}
        for name in OWN:
            kind = OwnAmaxBinding if name.endswith("amax") else OwnBinding
            found[name] = kind(state, name, 0 if name.startswith("weight") else time)
        return {**found, **_made_of(weight, state)}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        if torch._C._are_functorch_transforms_active():
            return super().rewritten(item, form, call, calibrating)
        return self._between_quantizers(item, form, call.grad)

    def _between_quantizers(self, item: ListedOp, form: Form, grad: bool) -> Iterable[ListedOp]:
        aside, (of_input, _, of_gradient) = item.lowered.aside, self.own

        def numbers(role: str) -> Mapping[str, Binding]:
            names = {"own_amax": "amax", "scale": "scale", "inverse": "inverse"}
            return {name: aside[f"{role}_{what}"] for name, what in names.items()}

        quantize = Quantize(E4M3, scale=None, takes=form["dtype"], own=of_input)
        yield _listed(item, quantize, numbers("input"), ".quantize")
        product = Float8MatMul(cast(MatMul, item.lowered.op), scalings=self.own, **form)
        yield in_place(item, product, [*READ_OWN, "weight_inverse", *KEPT[:2]])
        if grad:
            behind = QuantizeGradient(form["formats"][2], scale=None, own=of_gradient)
            yield _listed(item, behind, numbers("output_gradient"), ".quantize_gradient")


def product_scaling(recipe: Recipe) -> ProductScaling:
    """The interface of products that run by a recipe."""
    scalings: tuple[Scaling, ...] | None = scalings_of(recipe)
    if scalings is None:
        return Delayed(recipe)
    return Current(recipe) if all(scaling.block is None for scaling in scalings) else Blocks(recipe)


def _made_of(weight: Binding, state: State) -> dict[str, Binding]:
    """A weight in 8 bits as each call makes it."""
    data, turned, _ = KEPT
    again = not isinstance(weight, GivenBinding) and is_taken_away(weight.owner)
    return {data: MadeBinding(state, data), turned: (MadeAgainBinding if again else MadeBinding)(state, turned)}


def is_kept(item: ListedOp) -> bool:
    """True where a product's weight is kept in 8 bits from micro-batch to micro-batch."""
    return KEPT[-1] in item.lowered.aside


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


def in_place(
    item: ListedOp, op: FusableOperation, names: Iterable[str], others: Mapping[str, Binding] = {}
) -> ListedOp:
    """An op in the place of a product, with its weight and these numbers of its state."""
    low = item.lowered
    return _listed(item, op, {**low.bindings, **{name: low.aside[name] for name in names}, **others})


def quantizing(item: ListedOp, dtype: torch.dtype, records: bool) -> ListedOp:
    """The op that quantizes the input of a product by a kept scale."""
    numbers = {name: item.lowered.aside[f"input_{name}"] for name in ("scale", *(["amax"] if records else []))}
    return _listed(item, Quantize(E4M3, scale=None, takes=dtype), numbers, ".quantize")


def _listed(item: ListedOp, op: FusableOperation, bindings: Mapping[str, Binding], suffix: str = "") -> ListedOp:
    op.train(item.lowered.op.training)
    low = LoweredOp(op, bindings, item.lowered.suffix)
    summed = {name: group for name, group in item.summed.items() if name in bindings}
    return ListedOp(low, item.path + suffix, {}, (), item.scope, {}, item.stream, summed=summed)
