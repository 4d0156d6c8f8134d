"""The hand-written kernels around attention, run on the CPU by an emulated driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from te_fuser.kernels.attention import blank_rows, moved_rows
from te_fuser.kernels.attention.blank_rows import BlankRows
from te_fuser.kernels.attention.moved_rows import FindTokens, MoveRows
from tests.codegen import cuda_on_cpu
from tests.fake_cuda import CXX, FakeDriver, compile_driver, in_place

DTYPES = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def row_kernels(folder: Path) -> Iterator[FakeDriver]:
    """Those that blank rows, find tokens and move them."""
    blanks, moves = [BlankRows(dtype) for dtype in DTYPES], [FindTokens(), *(MoveRows(dtype) for dtype in DTYPES)]
    names = [["blank_rows"]] * len(blanks) + [["find_tokens", "move_rows"]]
    sources = [*(kernel.text() for kernel in blanks), moved_rows.text()]
    texts = [
        SimpleNamespace(source=source, launches=[SimpleNamespace(symbol=symbol) for symbol in symbols])
        for source, symbols in zip(sources, names, strict=True)
    ]
    assert CXX is not None
    built = cuda_on_cpu.build(CXX, texts, folder)  # type: ignore[arg-type]
    codes = [f"{b.library._name}:{b.number}".encode() for b in built]
    native = {kernel: blank_rows.native_kernel(kernel, code) for kernel, code in zip(blanks, codes[:-1], strict=True)}
    moving = {kernel: moved_rows.native_kernel(kernel, codes[-1]) for kernel in moves}
    with pytest.MonkeyPatch.context() as patch, in_place(compile_driver(folder)) as driver:
        for module, kernels in ((blank_rows, native), (moved_rows, moving)):
            patch.setattr(module, "_kernel", lambda k, arch, cache, kernels=kernels: kernels[k])
            patch.setattr(module, "_arch", lambda device: "sm_90a")
            module._ready.cache_clear()
        yield driver
    for module in (blank_rows, moved_rows):
        module._ready.cache_clear()
