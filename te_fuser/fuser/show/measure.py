"""Runs that only measure: a model and random generators left as they were, a clock at each step of a plan."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.distributed.consistency import gather_values
from te_fuser.fuser.run import delayed
from te_fuser.fuser.run.loading import execute, load, unhooked
from te_fuser.params.scales import asides

if TYPE_CHECKING:
    from te_fuser.fuser.pipeline import Fuser
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.steps.step import Runner, SlotMap, Slots, Step


@contextmanager
def undisturbed(model: torch.nn.Module, x: Any) -> Iterator[None]:
    """Runs in here see copies of the model's buffers, and random generators and what is kept on modules are set back.

    Nothing is copied back, so that buffers keep their versions, which graphs of earlier calls look at.
    """
    modules = list(model.modules())
    devices = [t.device for t in (x, *model.parameters(), *model.buffers()) if isinstance(t, torch.Tensor)]
    generators = {g for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)}
    states = [(g, g.get_state()) for g in generators]
    copies = {id(b): b.detach().clone().requires_grad_(b.requires_grad) for b in model.buffers()}
    before = [(m, dict(m._buffers)) for m in modules]
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    with delayed.at_once(), asides_undisturbed(), pythons_draws_undone(), torch.random.fork_rng(gpus):
        try:
            for m, held in before:
                _hold(m, {name: b if b is None else copies[id(b)] for name, b in held.items()})
            yield
        finally:
            for m, held in before:
                _hold(m, held)
            for generator, state in states:
                generator.set_state(state)


def _hold(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # its dict of buffers only shows them
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    else:
        for name in [name for name in module._buffers if name not in buffers]:
            del module._buffers[name]
        module._buffers.update(buffers)


@contextmanager
def asides_undisturbed() -> Iterator[None]:
    """Set all that is kept on modules beside their parameters (`Aside`) back afterwards."""
    then = [(aside, aside.now()) for aside in asides()]
    try:
        yield
    finally:
        before = {id(aside): noted for aside, noted in then}
        for aside in asides():
            aside.put_back(before.get(id(aside)))


@contextmanager
def pythons_draws_undone() -> Iterator[None]:
    """Set Python's random generator back afterwards."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


_WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, in the order of the plan's steps: the median of the runs."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def of(self, direction: str) -> tuple[float, ...]:
        return self.forward if direction == "forward" else self.backward


def measured_run(
    fuser: Fuser,
    x: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    outputs: tuple[str, ...] = (),
    *,
    repeats: int = 5,
) -> tuple[Plan, Measured, Any]:
    """Run a call a few times, forward and backward, with a clock at each step.

    Gradients that tensors hold and PyTorch's random generators are left as they are; what runs otherwise is not
    slowed down, since the clocks are in programs of this call's own. Ranks that share ops run it together, as often.

    Returns:
        The plan, the times, and what the call returns.
    """
    groups = fuser.call(x, inputs, outputs).ops.groups
    gather_values(groups, f"explain(measure=True) of x {list(x.shape)}", None)
    prepared, call = fuser.prepare(x, inputs, outputs)
    plan, parameters = prepared.plan, [unhooked(p) for p in call.parameters]
    clock = _CudaClock() if x.device.type == "cuda" else _Clock()
    timed = load(plan, outputs, wrap=clock.wrap)
    wanted = [t for t in (x, *inputs.values(), *parameters) if t.requires_grad]
    result: Any = None
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        for run in range(_WARM_UP + repeats):
            clock.recording = run >= _WARM_UP
            result = execute(timed, x, inputs, parameters)
            if timed.with_grad:
                made = [t for t in (result if isinstance(result, tuple) else (result,)) if t.requires_grad]
                torch.autograd.grad(made, wanted, [torch.ones_like(t) for t in made], allow_unused=True)
    times = clock.medians()
    measured = Measured(*(tuple(times.get(id(s), 0.0) for s in steps) for steps in (plan.forward, plan.backward)))
    return fuser.plan(x, inputs, outputs), measured, result  # the same steps, priced for this shape


class _Clock:
    """Times by the host's clock."""

    def __init__(self) -> None:
        self.recording = False
        self.marks: dict[int, list[tuple[Any, Any]]] = {}

    def wrap(self, step: Step, runner: Runner, slots: SlotMap) -> Runner:
        marks = self.marks.setdefault(id(step), [])

        def timed(values: Slots) -> None:
            start = self.now()
            runner(values)
            if self.recording:
                marks.append((start, self.now()))

        return timed

    def now(self) -> Any:
        return time.perf_counter()

    def between(self, start: Any, stop: Any) -> float:
        return float(stop - start)

    def medians(self) -> dict[int, float]:
        """Seconds by the id of the step; 0 for one that never ran."""
        return {
            step: statistics.median([self.between(*pair) for pair in pairs]) if pairs else 0.0
            for step, pairs in self.marks.items()
        }


class _CudaClock(_Clock):
    """Times on the GPU, by events in its stream."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3
