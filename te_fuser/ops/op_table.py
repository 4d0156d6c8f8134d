"""OpTable: what one feature knows of ops, a row for each class; ops themselves know nothing of the feature.

Those that single features ask of few ops stand here: `@op_table.exports.row(True)` above a class gives it a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from te_fuser.ops.base import FusableOperation, Spec
from te_fuser.ops.checks import described

Row = TypeVar("Row")
Kind = TypeVar("Kind", bound=type)


class OpTable(Generic[Row]):
    """Rows of a feature by class of op; a class without one has that of its nearest base, else the default.

    A row lies in the class itself, under an attribute of the table's: so it goes where the class goes, and classes that
    `register_parametrization` and `fully_shard` put before an op's have the row of the op's.

    Args:
        feature: a name that no other table has.
        default: the row of ops that have none.
        inherited: whether a class without a row has its nearest base's.

    Examples:
        >>> limits = OpTable("limit", default=1.0)
        >>> @limits.row(2.0)
        ... class Doubled(te_fuser.ops.RowOp): ...
        >>> limits.of(Doubled)
        2.0
    """

    def __init__(self, feature: str, default: Row, inherited: bool = True) -> None:
        self._attribute = f"_{feature}_row"
        self._default, self._inherited = default, inherited

    def add(self, row: Row, *classes: type) -> None:
        """Give classes of ops a row; TypeError for anything else."""
        for one in classes:
            if not (isinstance(one, type) and issubclass(one, FusableOperation)):
                raise TypeError(f"a row of {self._attribute[1:-4]} is of a class of ops, got {described(one)}")
            setattr(one, self._attribute, row)

    def row(self, row: Row) -> Callable[[Kind], Kind]:
        """Decorator that gives a class of ops a row."""

        def decorated(kind: Kind) -> Kind:
            self.add(row, kind)
            return kind

        return decorated

    def of(self, kind: type) -> Row:
        """The row of a class of ops."""
        if not self._inherited:
            return kind.__dict__.get(self._attribute, self._default)  # type: ignore[no-any-return]
        found: Row = getattr(kind, self._attribute, self._default)
        return found


# Names: whether named outputs go to the caller rather than to later ops, and whether later ops need not read them.
exports: OpTable[bool] = OpTable("exports", False)
may_stay_unread: OpTable[Callable[[Any], bool]] = OpTable("may_stay_unread", lambda op: False)

# No-ops: named inputs without any of which an op gives x as it is, and ops that do so whatever they make of gradients.
idles_without: OpTable[tuple[str, ...]] = OpTable("idles_without", ())
hands_through: OpTable[bool] = OpTable("hands_through", False)

# Keys of plans: a switch of PyTorch's, or of the user's own, that plans of the op look at.
global_state: OpTable[Callable[[], Hashable] | None] = OpTable("global_state", None)

# Gradients: the dtype in which an op gives that of an input of a dtype; None: in that.
gradient_dtype: OpTable[Callable[[Any, torch.dtype], torch.dtype] | None] = OpTable("gradient_dtype", None)

# explain(): how an op reads x where that can be taken for something else, with the sizes; mostly empty.
reading: OpTable[Callable[[Any, Spec], str]] = OpTable("reading", lambda op, x: "")
