"""Steps as programs: refs become slots, tasks become steps, and running is a loop in the native runtime.

PyTorch's profiler and anomaly mode watch steps by name; in a plan's first call tensors of other code are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from te_fuser import _native
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.dtypes import text_of
from te_fuser.fuser.graph.refs import DOUBLED, GRADIENT, PARAMETER_GRADIENT, RECOMPUTED, VALUE, Ref
from te_fuser.fuser.steps.step import Bench, KernelFunction, Runner, SlotMap, Slots, Step

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph

# What runs in a step's place, given it, its runner and the slots of refs; how verify sees every step.
Wrapper = Callable[[Step, Runner, SlotMap], Runner]


@dataclass(frozen=True)
class WatchedStep:
    """A step for who watches a program, with its ops and what it makes, as (name, ref, slot)."""

    name: str
    author: str  # of its code: an op or a fusion; empty for a generated kernel
    made: tuple[tuple[str, Ref, int], ...]


@dataclass(frozen=True)
class Program:
    """Steps in order, and after each the slots nobody reads any more.

    Slots are the inputs in their order, then what the steps make, and a last one that stays empty. `run` takes
    them, whether outputs may be stored over what dies (by default they may), and who watches.
    """

    run: Callable[..., None]
    size: int
    blank: tuple[None, ...]
    steps: tuple[WatchedStep, ...] = ()

    def slots(self, tensors: Iterable[torch.Tensor | None]) -> Slots:
        return [*tensors, *self.blank]


@dataclass(frozen=True)
class Loaded:
    """Kernels by description key, and what the ops of the plan are called."""

    kernels: Mapping[str, KernelFunction]
    wrap: Wrapper | None = None
    labels: Sequence[str] = ()


def build_program(
    steps: Sequence[Step], inputs: Iterable[Ref], outputs: Iterable[Ref], loaded: Loaded
) -> tuple[Program, SlotMap]:
    """Steps as a program whose first slots are `inputs`; `outputs` are never dropped."""
    slots, wrap = SlotMap(), loaded.wrap
    # Two inputs may be one tensor under two names; nobody reads the second.
    given = len([slots[Ref(DOUBLED, k) if r in slots else r] for k, r in enumerate(inputs)])
    held = {slots[r] for r in outputs}
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for ref in (*step.reads(), *step.writes()):
            last[slots[ref]] = k
    dead: dict[int, list[int]] = {}
    for slot, k in last.items():
        if slot not in held:
            dead.setdefault(k, []).append(slot)
    # What stands in a step's place may run it again, or look at what it has read.
    dying = (() if wrap else dead.get(k, ()) for k in range(len(steps)))
    runners = [s.task.runner(s, Bench(slots, loaded.kernels, d)) for s, d in zip(steps, dying, strict=True)]
    if wrap is not None:
        runners = [wrap(s, r, slots) for s, r in zip(steps, runners, strict=True)]
    ops = [", ".join(loaded.labels[s.start : s.stop]) for s in steps]
    runners = [_naming(s.name, o, r) if s.task.waits else r for s, o, r in zip(steps, ops, runners, strict=True)]
    native = _native.Program([(r, dead.get(k, [])) for k, r in enumerate(runners)])
    blank = (None,) * (len(slots) - given + 1)
    watched = []
    for step, labels in zip(steps, ops, strict=True):
        author = f"fusion {step.name!r} over {labels}" if step.task.what == "fusion" else labels
        made = tuple([(name, ref, slots[ref]) for name, ref in step.outputs])
        watched.append(WatchedStep(f"{step.name}: {labels}", "" if step.task.description else author, made))
    return Program(native.run, len(slots), blank, tuple(watched)), slots


def _naming(name: str, ops: str, runner: Runner) -> Runner:
    """A step that waits for other ranks, by name where they do not come."""

    def run(slots: Slots) -> None:
        try:
            runner(slots)
        except RankMismatchError as error:
            raise RankMismatchError(f"step {name!r} of {ops}: {error}") from error

    return run


def run_program(
    program: Program, slots: Slots, may_overwrite: bool = True, backward: bool = False, promised: Graph | None = None
) -> None:
    """Run a program, and tell who watches; values are held against what `promised` has of them, if anybody looks.

    Under torch.autograd.set_detect_anomaly backward raises naming the step that gave a NaN and its ops.
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
    """Say in words that anomaly mode cannot look for NaN in these, as in DTensors."""
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
    """Callback before each step, with its number, and after the last, with the number of steps."""

    def __init__(self, program: Program, slots: Slots, checks: bool, promised: Graph | None) -> None:
        self._program, self._slots, self._checks, self._promised = program, slots, checks, promised
        self._open: profiler.record_function | None = None

    def __call__(self, number: int) -> None:
        self.close()
        if self._promised is not None and number:
            self._hold_to_promise(number - 1, self._promised)
        if self._checks and number:
            self._check(number - 1)
        if profiler._is_profiler_enabled and number < len(self._program.steps):
            self._open = profiler.record_function(self._program.steps[number].name)
            self._open.__enter__()

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def _hold_to_promise(self, number: int, promised: Graph) -> None:
        step = self._program.steps[number]
        for _, ref, slot in step.made if step.author else ():
            found = self._slots[slot]
            other = misshapen(promised, ref, found) if isinstance(found, torch.Tensor) else None
            if other is not None:
                spec = ref.spec(promised)
                error = TypeError if spec is not None and tuple(found.shape) == spec.shape else ValueError
                raise error(f"{step.author}: {other}; that is what infer() and gradients are held to")

    def _check(self, number: int) -> None:
        step = self._program.steps[number]
        for name, _, slot in step.made:
            t = self._slots[slot]
            if isinstance(t, torch.Tensor) and t.is_floating_point() and bool(t.isnan().any()):
                raise RuntimeError(f"step '{step.name}' of te_fuser's backward gave NaN in {name}")


_SPECIFIED = (VALUE, RECOMPUTED, GRADIENT, PARAMETER_GRADIENT)


def misshapen(graph: Graph, ref: Ref, found: torch.Tensor) -> str | None:
    """Difference of a tensor's shape, device or dtype from the plan, in words, if any."""
    spec = ref.spec(graph) if ref.kind in _SPECIFIED else None
    if spec is None:
        return None
    # Of a parameter's gradient autograd makes the parameter's dtype.
    same = found.device == spec.device and (ref.kind is PARAMETER_GRADIENT or found.dtype == spec.dtype)
    if tuple(found.shape) == spec.shape and same:
        return None
    made, wanted = (f"{text_of(t.dtype)} {list(t.shape)} {t.device}" for t in (found, spec))
    return f"{ref.label(graph)} is {made}, the plan says {wanted}"
