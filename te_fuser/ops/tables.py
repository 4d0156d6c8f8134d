"""What single features ask of few ops, a table each: `@tables.exports.row(True)` above a class gives it a row."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from te_fuser.ops.base import Spec
from te_fuser.ops.op_table import OpTable

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
