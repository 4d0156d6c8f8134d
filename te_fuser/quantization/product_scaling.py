"""Scales of products of 8 bits: one interface, a class for each kind of recipe, and the numbers that products read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch

from te_fuser.distributed.dtensor import is_taken_away
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.casts import Quantize, QuantizeGradient
from te_fuser.ops.float8_matmul import READ, READ_KEPT, READ_OWN, Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.matmul import MatMul
from te_fuser.params.binding import Binding, GivenBinding, Key
from te_fuser.quantization.amax_slots import ROLES
from te_fuser.quantization.model_init import is_only_narrow
from te_fuser.quantization.products import scalings_of, weight_in
from te_fuser.quantization.state import State
from te_fuser.quantization.weight_cache import KEPT, OWN
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Format, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Form = Mapping[str, Any]  # arguments of the ops that stand for a product

# ----------------------------------------------------------------------------------------------------- numbers

# Dict of a state -> end of the names of what it has.
_SCALES = {"scales": "scale", "inverses": "inverse", "amaxes": "amax"}
_ENDS = {**_SCALES, "blanks": "of_this_call", "kept": "of_microbatches"}


class StateBinding(Binding):
    """A tensor of the state of a product: looked up in each call, never a value of a plan.

    Args:
        held: the dict that has it there, of `_ENDS`; in "blanks" stands what a number that each call makes is like.
        role: its name in that.
        time: how many products of the list before it have this weight, of numbers that differ among these.
        in_parts: whether backward makes it again of the weight.
    """

    def __init__(self, state: State, held: str, role: str, time: int | None = None, in_parts: bool = False) -> None:
        self.__dict__.update(
            name=f"{state.prefix}{role}_{_ENDS[held]}",
            state=state,
            held=held,
            _slot=(getattr(state, held), role),
            _key=(id(getattr(state, held)), role if time is None else f"{role}.{time}"),
            written=held == "amaxes" or (time is not None and role.endswith("amax")),
            made_in_call=time is not None,
            in_parts=in_parts,
        )

    @property
    def owner(self) -> torch.nn.Module:  # type: ignore[override]
        """Raise, as no module has it among its parameters.

        Raises:
            ReferenceError: whenever it is asked for.
        """
        raise ReferenceError(f"{self.name} is kept with a weight, not as a parameter of a module")

    @property
    def key(self) -> Key:
        return self.__dict__["_key"]  # type: ignore[no-any-return]

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        return self.__dict__["_slot"]  # type: ignore[no-any-return]

    @property
    def computed(self) -> bool:
        return False

    def get(self) -> torch.Tensor:
        there, role = self.slot
        return there[role]  # type: ignore[return-value]

    def weak(self) -> StateBinding:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateBinding) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _made_of(weight: Binding, state: State) -> dict[str, Binding]:
    """A weight in 8 bits that each call makes; `fully_shard` takes weights away, so backward makes W^T again of it."""
    data, turned, _ = KEPT
    again = not isinstance(weight, GivenBinding) and is_taken_away(weight.owner)
    return {data: StateBinding(state, "blanks", data), turned: StateBinding(state, "blanks", turned, in_parts=again)}


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


# ----------------------------------------------------------------------------------------------------- recipes


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
    def numbers(self, weight: Binding, state: State, key: region.Key, time: int) -> Mapping[str, Binding]:
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

    def numbers(self, weight: Binding, state: State, key: region.Key, time: int) -> Mapping[str, Binding]:
        scales: dict[str, Binding] = {
            f"{role}_{what}": StateBinding(state, held, role) for role in ROLES for held, what in _SCALES.items()
        }
        if key.calibrating or any(self.recipe.override_linear_precision) or is_only_narrow(weight):
            return scales
        if key.says_microbatch and not isinstance(weight, GivenBinding):
            return {**scales, **{name: StateBinding(state, "kept", name) for name in KEPT}}
        return {**scales, **_made_of(weight, state)}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        aside, product = item.lowered.aside, cast(MatMul, item.lowered.op)
        kept = (True,) * 3 if calibrating else self.recipe.override_linear_precision
        if any(kept):
            names = [name for name in aside if call.grad or not name.endswith("_amax")]
            yield in_place(item, PartlyFloat8MatMul(product, kept=kept, **form), names)
            return
        yield quantizing(item, form["dtype"], call.grad)
        if is_kept(item):
            read, inverse = [*READ_KEPT, "weight_turned"], {"weight_inverse": aside["kept_inverse"]}
            yield in_place(item, Float8MatMul(product, weight_is_kept=True, **form), read, inverse)
        else:
            read = [*READ, *KEPT[:2], *(["weight_amax"] if call.grad else [])]
            yield in_place(item, Float8MatMul(product, **form), read)
        if call.grad:
            yield quantizing(item, form["formats"][2], True, of_gradient=True)


class Blocks(ProductScaling):
    """Scales of the blocks of what is multiplied: each product quantizes its own factors."""

    def numbers(self, weight: Binding, state: State, key: region.Key, time: int) -> Mapping[str, Binding]:
        return {}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        weight = weight_in(item)
        keeps = isinstance(weight, GivenBinding) or not is_taken_away(weight.owner)
        product = OwnScalesMatMul(cast(MatMul, item.lowered.op), scalings=self.own, keeps_weight=keeps, **form)
        return (in_place(item, product),)


class Current(Blocks):
    """Current scaling: one scale of each tensor that is multiplied, from itself."""

    def numbers(self, weight: Binding, state: State, key: region.Key, time: int) -> Mapping[str, Binding]:
        own = {n: StateBinding(state, "blanks", n, 0 if n.startswith("weight") else time) for n in OWN}
        return {**own, **_made_of(weight, state)}

    def rewritten(self, item: ListedOp, form: Form, call: CallSpecs, calibrating: bool) -> Iterable[ListedOp]:
        if torch._C._are_functorch_transforms_active():
            yield from super().rewritten(item, form, call, calibrating)
            return
        of_input, _, of_gradient = self.own
        yield quantizing(item, form["dtype"], own=of_input)
        product = Float8MatMul(cast(MatMul, item.lowered.op), scalings=self.own, **form)
        yield in_place(item, product, [*READ_OWN, "weight_inverse", *KEPT[:2]])
        if call.grad:
            yield quantizing(item, form["formats"][2], own=of_gradient, of_gradient=True)


def product_scaling(recipe: Recipe) -> ProductScaling:
    """The interface of products that run by a recipe."""
    scalings = scalings_of(recipe)
    if scalings is None:
        return Delayed(recipe)
    return Current(recipe) if all(scaling.block is None for scaling in scalings) else Blocks(recipe)


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


def in_place(
    item: ListedOp, op: FusableOperation, names: Iterable[str] = (), others: Mapping[str, Binding] = {}
) -> ListedOp:
    """An op in the place of a product, with its weight and these numbers of its state."""
    low = item.lowered
    return _listed(item, op, {**low.bindings, **{name: low.aside[name] for name in names}, **others})


def quantizing(
    item: ListedOp, dtype: torch.dtype, records: bool = False, own: Any = None, of_gradient: bool = False
) -> ListedOp:
    """The op that quantizes the input of a product in a dtype, or the gradient of its output to that.

    Args:
        records: whether the amax is recorded, where the scale is kept.
        own: how the scale follows from the tensor itself; None: it is kept.
    """
    role, suffix = ("output_gradient", ".quantize_gradient") if of_gradient else ("input", ".quantize")
    ends = {"scale": "scale", "amax": "amax"} if records else {"scale": "scale"}
    ends = {"own_amax": "amax", "scale": "scale", "inverse": "inverse"} if own is not None else ends
    numbers = {name: item.lowered.aside[f"{role}_{end}"] for name, end in ends.items()}
    op = (
        QuantizeGradient(dtype, scale=None, own=own)
        if of_gradient
        else Quantize(E4M3, scale=None, takes=dtype, own=own)
    )
    return _listed(item, op, numbers, suffix)


def _listed(item: ListedOp, op: FusableOperation, bindings: Mapping[str, Binding], suffix: str = "") -> ListedOp:
    op.train(item.lowered.op.training)
    low = LoweredOp(op, bindings, item.lowered.suffix)
    summed = {name: group for name, group in item.summed.items() if name in bindings}
    return ListedOp(low, item.path + suffix, {}, (), item.scope, {}, item.stream, summed=summed)
