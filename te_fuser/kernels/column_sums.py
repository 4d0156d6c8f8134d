"""The kernel that adds up the partial sums of several kernels at once, at the end of a program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from te_fuser.codegen.written import TextKernel

if TYPE_CHECKING:
    from te_fuser import _native


@dataclass(frozen=True)
class ColumnSumsKernel(TextKernel["_native.ColumnSums"]):
    """The kernel as plans compile it beside their generated ones."""

    name: ClassVar[str] = "column_sums"

    def text(self) -> str:
        """The CUDA text."""
        return Path(__file__).with_suffix(".cu").read_text()

    def native(self, cubin: bytes) -> _native.ColumnSums:
        """The kernel as the native runtime takes it."""
        from te_fuser import _native

        return _native.ColumnSums(cubin)
