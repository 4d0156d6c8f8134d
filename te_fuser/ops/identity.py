"""Identity: nothing happens."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.row_op import RowOp


class Identity(RowOp):
    """Hand the input through: y = x."""

    def compute(self, x: Any) -> Any:
        return x
