"""Output: a value that the caller can ask for by name."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import check_name
from te_fuser.ops.row_op import RowOp


class Output(RowOp):
    """Hand the input through and offer it to the caller: y = x, given by `model(x, outputs=(name,))`.

    Its gradient is added to the others of x and rounded with them, once. Where x is the list's input, or another
    result, the caller gets a view of it: the memory is shared.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    exports = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_outputs(self) -> tuple[str, ...]:
        return (self.name,)

    def compute(self, x: Any) -> Any:
        return x
