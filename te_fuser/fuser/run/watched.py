"""Who watches a program's steps.

PyTorch's profiler sees each by name, anomaly mode hears which step gave a NaN, and in a plan's first call each tensor
that an op's or a fusion's own code made is held against the plan: later calls cost nothing, and nothing else is known
to be of another size before a kernel reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.dtypes import text_of
from te_fuser.fuser.graph.refs import GRADIENT, PARAMETER_GRADIENT, RECOMPUTED, VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.run.program import Program
    from te_fuser.fuser.steps.step import Slots


def run(
    program: Program,
    slots: Slots,
    may_overwrite: bool = True,
    backward: bool = False,
    promised: Graph | None = None,
) -> None:
    """Run a program, and tell who watches.

    Args:
        promised: what the values of this call are to be; None: nobody looks.

    Raises:
        ValueError, TypeError: when a step makes what is not as promised, naming op or fusion.
        RuntimeError: in backward under torch.autograd.set_detect_anomaly, naming the step that gave a NaN and its ops.
    """
    checks = backward and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if not (checks or promised is not None or profiler._is_profiler_enabled):
        program.run(slots, may_overwrite)
        return
    watch = _Watch(program, slots, checks, promised)
    try:
        program.run(slots, may_overwrite, watch)
    finally:
        watch.close()


def refuse_check(gradients: Iterable[torch.Tensor | None]) -> None:
    """Say in words what anomaly mode is about to fail at, where PyTorch cannot look for NaN in these.

    Raises:
        NotImplementedError: under torch.autograd.set_detect_anomaly, for DTensors.
    """
    found = next((g for g in gradients if g is not None and is_dtensor(g)), None)
    if found is None or not torch.is_anomaly_check_nan_enabled():
        return
    try:
        torch.ops.aten._is_any_true(found.isnan())
    except NotImplementedError as error:
        raise NotImplementedError(
            "torch.autograd.set_detect_anomaly looks for NaN in all gradients, and PyTorch cannot do that in DTensors: "
            "no step of te_fuser's backward gave one here; for the traceback of what raises elsewhere call "
            "set_detect_anomaly(True, check_nan=False), and for NaN run the model without parallelize"
        ) from error


class _Watch:
    """Called with its number before each step, and after the last with the number of steps."""

    def __init__(self, program: Program, slots: Slots, checks: bool, promised: Graph | None) -> None:
        self._program, self._slots, self._checks, self._promised = program, slots, checks, promised
        self._open: profiler.record_function | None = None

    def __call__(self, number: int) -> None:
        self.close()
        if self._promised is not None and number:
            self._hold_to_promise(number - 1, self._promised)
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

    def _hold_to_promise(self, number: int, promised: Graph) -> None:
        author = self._program.authors[number]
        for ref, slot in author.made if author is not None else ():
            found = self._slots[slot]
            other = misshapen(promised, ref, found) if isinstance(found, torch.Tensor) else None
            if author is not None and other is not None:
                spec = ref.spec(promised)
                error = TypeError if spec is not None and tuple(found.shape) == spec.shape else ValueError
                raise error(f"{author.name}: {other}; that is what infer() and gradients are held to")

    def _check(self, number: int) -> None:
        for name, slot in self._program.made[number]:
            t = self._slots[slot]
            if isinstance(t, torch.Tensor) and t.is_floating_point() and bool(t.isnan().any()):
                raise RuntimeError(f"step '{self._program.names[number]}' of te_fuser's backward gave NaN in {name}")


_SPECIFIED = (VALUE, RECOMPUTED, GRADIENT, PARAMETER_GRADIENT)


def misshapen(graph: Graph, ref: Ref, found: torch.Tensor) -> str | None:
    """How a tensor is not what was planned, in words: in shape, device, or dtype; None where it is."""
    spec = ref.spec(graph) if ref.kind in _SPECIFIED else None
    if spec is None:
        return None
    # Of a parameter's gradient autograd makes the parameter's dtype.
    same = found.device == spec.device and (ref.kind is PARAMETER_GRADIENT or found.dtype == spec.dtype)
    if tuple(found.shape) == spec.shape and same:
        return None
    made, wanted = (f"{text_of(t.dtype)} {list(t.shape)} {t.device}" for t in (found, spec))
    return f"{ref.label(graph)} is {made}, the plan says {wanted}"
