"""The hand-written kernels around attention, which tests run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.kernels.attention.lengths import BlankRows
from te_fuser.kernels.attention.padding import FindTokens, MoveRows

DTYPES = (torch.bfloat16, torch.float16)


def row_kernels() -> Iterator[TextKernel[Any]]:
    """Kernels that blank rows, find tokens and move them."""
    yield FindTokens()
    yield from (kind(dtype) for kind in (BlankRows, MoveRows) for dtype in DTYPES)
