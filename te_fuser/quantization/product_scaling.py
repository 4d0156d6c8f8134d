"""Products of 8 bits by their recipe: the numbers that they read, and the ops that stand in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

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
from te_fuser.params.binding import Binding, Key
from te_fuser.params.given import GivenBinding
from te_fuser.quantization.amax_slots import NUMBERS, Numbers
from te_fuser.quantization.model_init import is_only_narrow
from te_fuser.quantization.products import scalings_of, weight_in
from te_fuser.quantization.state import State
from te_fuser.quantization.weight_cache import KEPT, OWN
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Format, Recipe

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
    """The numbers that a product may read which runs by a recipe, by name.

    Args:
        time: how many products of the list before it have the same weight.
    """
    own = scalings_of(recipe)
    if own is None:
        found: dict[str, Binding] = {name: StateBinding(state, "numbers", name) for name in NUMBERS}
        if key.calibrating or any(recipe.override_linear_precision) or is_only_narrow(weight):
            return found
        if key.says_microbatch and not isinstance(weight, GivenBinding):
            return found | {name: StateBinding(state, "kept", name) for name in KEPT}
    elif _have_blocks(own):
        return {}
    else:
        found = {n: StateBinding(state, "blanks", n, 0 if n.startswith("weight") else time) for n in OWN}
    data, turned, _ = KEPT
    found[data] = StateBinding(state, "blanks", data)
    found[turned] = StateBinding(state, "blanks", turned, in_parts=_comes_anew(weight))
    return found


def rewritten(item: ListedOp, recipe: Recipe, form: Form, call: CallSpecs, calibrating: bool) -> Iterator[ListedOp]:
    """The ops that stand in the place of a product; of one that calibrates only where scales are kept."""
    aside, product, own = item.lowered.aside, cast(MatMul, item.lowered.op), scalings_of(recipe)
    if own is not None and (_have_blocks(own) or torch._C._are_functorch_transforms_active()):
        keeps = not _comes_anew(weight_in(item))
        yield in_place(item, OwnScalesMatMul(product, scalings=own, keeps_weight=keeps, **form))
        return
    kept = (True,) * 3 if calibrating else recipe.override_linear_precision
    if own is None and any(kept):
        names = [name for name in aside if call.grad or not name.endswith("_amax")]
        yield in_place(item, PartlyFloat8MatMul(product, kept=kept, **form), names)
        return
    of_input, of_gradient = (None, None) if own is None else (own[0], own[2])
    yield quantizing(item, form["dtype"], call.grad, of_input)
    if is_kept(item):
        read, inverse = [*READ_KEPT, "weight_turned"], {"weight_inverse": aside["kept_inverse"]}
        yield in_place(item, Float8MatMul(product, weight_is_kept=True, **form), read, inverse)
    else:
        read = [*READ_OWN, "weight_inverse", *KEPT[:2]]
        if own is None:
            read = [*READ, *KEPT[:2], *["weight_amax"] * call.grad]
        yield in_place(item, Float8MatMul(product, scalings=own, **form), read)
    if call.grad:
        yield quantizing(item, form["formats"][2], True, of_gradient, of_gradient=True)


def _have_blocks(own: Sequence[Scaling]) -> bool:
    """True where each product quantizes its own factors, along what it sums."""
    return any(scaling.block is not None for scaling in own)


def _comes_anew(weight: Binding) -> bool:
    """True where backward makes W^T again of W: `fully_shard` takes weights away, and callers may."""
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
