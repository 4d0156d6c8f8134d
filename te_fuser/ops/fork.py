"""Fork: a name for a value that a later op reads."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import check_name
from te_fuser.ops.row_op import RowOp


class Fork(RowOp):
    """Hand the input through and give it a name for later ops of the list, `Add` or others: y = x, name = x.

    Args:
        name: what they call it.
        may_stay_unread: whether it is no error where none does: as in a list that stands in others, or alone.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    def __init__(self, name: str, may_stay_unread: bool = False) -> None:
        super().__init__()
        self.name = check_name(name)
        if may_stay_unread:
            self.may_stay_unread = True

    def named_outputs(self) -> tuple[str, ...]:
        return (self.name,)

    def compute(self, x: Any) -> Any:
        return x
