"""The hand-written kernels around attention, run on the CPU by an emulated driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from te_fuser.kernels.attention.blank_rows import BlankRows
from te_fuser.kernels.attention.moved_rows import FindTokens, MoveRows
from tests.fake_cuda import FakeDriver, running

DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def row_kernels(folder: Path) -> Iterator[FakeDriver]:
    """Those that blank rows, find tokens and move them."""
    kernels = [FindTokens(), *(kind(dtype) for kind in (BlankRows, MoveRows) for dtype in DTYPES)]
    with running(kernels, folder) as driver:
        yield driver
