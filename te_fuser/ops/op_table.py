"""OpTable: what one feature knows of ops, a row for each class; ops themselves know nothing of the feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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

    Example:
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
        """Give classes of ops a row."""
        for one in classes:
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
