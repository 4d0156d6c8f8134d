"""Who watches a program's steps: PyTorch's profiler sees each by name, anomaly mode hears which step gave a NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

if TYPE_CHECKING:
    from te_fuser.fuser.run.program import Program
    from te_fuser.fuser.steps.step import Slots


def run(program: Program, slots: Slots, may_overwrite: bool = True, backward: bool = False) -> None:
    """Run a program, and tell who watches.

    Raises:
        RuntimeError: in backward under torch.autograd.set_detect_anomaly, naming the step that gave a NaN and its ops.
    """
    checks = backward and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if not (checks or profiler._is_profiler_enabled):
        program.run(slots, may_overwrite)
        return
    watch = _Watch(program, slots, checks)
    try:
        program.run(slots, may_overwrite, watch)
    finally:
        watch.close()


class _Watch:
    """Called with its number before each step, and after the last with the number of steps."""

    def __init__(self, program: Program, slots: Slots, checks: bool) -> None:
        self._program, self._slots, self._checks = program, slots, checks
        self._open: profiler.record_function | None = None

    def __call__(self, number: int) -> None:
        self.close()
        if self._checks and number:
            self._check(number - 1)
        if profiler._is_profiler_enabled and number < len(self._program.names):
            self._open = profiler.record_function(self._program.names[number])
            self._open.__enter__()

    def close(self) -> None:
        """End what is being recorded."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _check(self, number: int) -> None:
        for name, slot in self._program.made[number]:
            t = self._slots[slot]
            if isinstance(t, torch.Tensor) and t.is_floating_point() and bool(t.isnan().any()):
                raise RuntimeError(f"step '{self._program.names[number]}' of te_fuser's backward gave NaN in {name}")
