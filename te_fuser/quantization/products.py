"""The products that there are: in the order of their construction, and those of a model by path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bound import Bound
from te_fuser.ops.construction import in_order
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.quantized_matmul import STEP
from te_fuser.params.binding import Binding
from te_fuser.params.narrow import prefix_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.listed import ListedOp


def products() -> list[Binding]:
    """The weights of all products that there are, each once, those that were made first before others."""
    found: dict[object, Binding] = {}
    for op in in_order():
        weight = weight_of(op)
        if weight is not None:
            found.setdefault(weight.key, weight.weak())
    return list(found.values())


def _fits(product: MatMul) -> bool:
    """True where a rank's product is one that 8 bits take."""
    try:
        return not any(size % STEP for size in product.own_features)
    except ValueError:  # which ranks cannot cut so: calls say it
        return False


def weight_of(op: FusableOperation) -> Binding | None:
    """The weight of a product; None of other ops, and where that is gone or another module reads it otherwise."""
    product = op.op if isinstance(op, Bound) else op
    if not (isinstance(product, MatMul) and product.kind is MatMul and _fits(product)):
        return None
    try:
        return next((low.bindings["weight"] for low in op.lower() if "weight" in low.bindings), None)
    except (AttributeError, ReferenceError, TypeError):  # an owner that is gone, a hook: such an op runs nowhere
        return None


def weight_in(item: ListedOp) -> Binding:
    """The binding of the weight of a product in a list."""
    return item.lowered.bindings["weight"]


def products_of(model: torch.nn.Module) -> dict[str, Binding]:
    """The products of a model by path: that of the weight's owner, and what its name has before "weight": `mlp.fc1`."""
    paths = {id(module._parameters): path for path, module in model.named_modules()}
    found = {}
    for weight in products():
        path = paths.get(id(weight.owner._parameters))
        if path is not None:
            found[".".join(filter(None, (path, prefix_of(weight.name).rstrip("_"))))] = weight
    return found


def parameter_of(weight: Binding) -> torch.Tensor | None:
    """A weight, or a parameter beside one that is computed; None of one that is gone, or comes with each call."""
    try:
        owner = weight.owner
    except ReferenceError:
        return None
    found = owner._parameters.get(weight.name)
    return next(owner.parameters(), None) if found is None else found


def device_of(weight: Binding) -> torch.device | None:
    """The device of a weight; None of one that is gone, comes with each call, or has no values."""
    found = parameter_of(weight)
    return None if found is None or found.is_meta else found.device
