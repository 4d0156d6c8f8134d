"""Which ops are alike, so that what is asked of one need not be asked of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser.formula.expr import Axes, leaf
from te_fuser.fuser.graph.checks import check_kind
from te_fuser.ops import op_table
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.unfused_operation import UnfusedOperation
from te_fuser.params.scales import Aside

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from te_fuser.ops.base import FusableOperation, Gradient, NamedInput, Spec
    from te_fuser.params.binding import Binding

_OF_EVERY_MODULE = {*vars(torch.nn.Module()), "revision"}


def likeness(op: FusableOperation) -> Hashable:
    """Equal for ops of one class with equal attributes, whatever their parameters are; else it is the op's own."""
    own = [(name, type(value), value) for name, value in vars(op).items() if name not in _OF_EVERY_MODULE]
    found = [what for what in own if Aside not in what[1].__mro__]
    buffers = set(op._buffers)
    if buffers:  # without those that are no part of what an op is
        buffers.difference_update(*[value.buffers() for _, _, value in own if isinstance(value, Aside)])
    if op._modules or buffers:
        return id(op)
    try:
        hash(tuple(found))
    except TypeError:
        return id(op)
    return type(op), op.training, *found


@dataclass(frozen=True, eq=False)
class Traits:
    """Traits of the ops of a list that are alike and have parameters of the same names.

    Attributes:
        number: their own in the list.
        role: for kernel text: "gelu".
        is_row: whether a formula gives it.
        reads: its named inputs by argument, also those that are not given.
        gradient_dtype: its row in `ops.op_table`.
    """

    number: int
    role: str
    draws: bool
    is_row: bool
    reads: Mapping[str, NamedInput]
    gradient_dtype: Callable[[Any, torch.dtype], torch.dtype] | None
    _gradients: dict[tuple[str, ...], tuple[Gradient, ...]] = field(default_factory=dict)

    def gradients(self, op: FusableOperation, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """The nodes of the backward of an opaque one that reads parameters and named inputs of these names."""
        if names not in self._gradients:
            self._gradients[names] = tuple(op.gradients(names)) if isinstance(op, UnfusedOperation) else ()
        return self._gradients[names]


class Kinds:
    """Traits of the ops of a list; of ops that are alike the first is checked for all of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Traits] = {}

    def of(self, label: str, op: FusableOperation, bindings: Mapping[str, Binding]) -> Traits:
        """That of an op.

        Raises:
            TypeError, ValueError: when it says of itself what cannot be.
        """
        key = likeness(op), tuple(op._parameters), tuple(bindings)
        found = self._known.get(key)
        if found is None:
            check_kind(label, op, bindings)
            said = op.kind.role, op.draws(), isinstance(op, RowOp), op.named_inputs()
            found = self._known[key] = Traits(len(self._known), *said, op_table.gradient_dtype.of(type(op)))
        return found


class Inferred(NamedTuple):
    """What is known of the outputs of ops that are alike: the specs, and which can have gradients.

    Attributes:
        same: whether the output is the input.
    """

    specs: Mapping[str, Spec]
    differentiable: frozenset[str]
    same: bool


def is_identity(op: RowOp, given: Spec) -> bool:
    """Whether the formula hands its input through (Identity, Dropout in eval, Cast to the same dtype)."""
    if op_table.hands_through.of(type(op)):
        return True
    if op.arguments():
        return False
    x = leaf("x", Axes.FULL, given.features)
    try:
        return op.compute(x) is x and op.output_dtype(given.dtype) == given.dtype
    except (ValueError, TypeError, AttributeError):
        return False
