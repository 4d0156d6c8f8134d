"""Steps made ready to run: refs become slots, tasks become steps, and running is a loop in the native runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from te_fuser import _native
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.fuser.graph.refs import DOUBLED, Ref
from te_fuser.fuser.steps.step import Bench, KernelFunction, Runner, SlotMap, Slots, Step

# What runs in a step's place, given it, its runner and the slots of refs; how verify sees every step.
Wrapper = Callable[[Step, Runner, SlotMap], Runner]


@dataclass(frozen=True)
class Author:
    """Whose code a step runs, and the refs and slots of what that makes."""

    name: str
    made: tuple[tuple[Ref, int], ...]


@dataclass(frozen=True)
class Program:
    """Steps in order, and after each the slots nobody reads any more.

    Slots are the inputs in their order, then what the steps make, and a last one that stays empty. `run` takes
    them, whether outputs may be stored over what dies (by default they may), and who watches.

    Attributes:
        names: each step with the ops that it covers.
        made: the names and slots of what each step makes.
        authors: of each step that runs an op's or a fusion's code; None of one whose kernel is generated.
    """

    run: Callable[..., None]
    size: int
    blank: tuple[None, ...]
    names: tuple[str, ...] = ()
    made: tuple[tuple[tuple[str, int], ...], ...] = ()
    authors: tuple[Author | None, ...] = ()

    def slots(self, tensors: Iterable[torch.Tensor | None]) -> Slots:
        """Slots that hold the inputs."""
        return [*tensors, *self.blank]


@dataclass(frozen=True)
class Loaded:
    """What programs are built of.

    Attributes:
        kernels: description key -> the kernel.
        wrap: what runs in each step's place.
        sums: adds up all column sums at the end that no step reads; without it each kernel adds up its own.
        labels: what the ops of the plan are called.
    """

    kernels: Mapping[str, KernelFunction]
    wrap: Wrapper | None = None
    sums: _native.ColumnSums | None = None
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
    may_wait = []
    for k, step in enumerate(() if wrap else steps):
        sums = [slots[r] for r in step.sums()]
        if sums and all(slot in held and last[slot] == k for slot in sums):  # results that no later step reads
            may_wait.append(k)
    ops = [", ".join(loaded.labels[s.start : s.stop]) for s in steps]
    names = tuple(f"{s.name}: {labels}" for s, labels in zip(steps, ops, strict=True))
    runners = [_naming(s.name, o, r) if s.task.waits else r for s, o, r in zip(steps, ops, runners, strict=True)]
    native = _native.Program(
        [(r, dead.get(k, [])) for k, r in enumerate(runners)], loaded.sums if may_wait else None, may_wait
    )
    blank = (None,) * (len(slots) - given + 1)
    made = tuple(tuple((name, slots[r]) for name, r in s.outputs) for s in steps)
    authors: list[Author | None] = []
    for step, labels in zip(steps, ops, strict=True):
        name = f"fusion {step.name!r} over {labels}" if step.task.what == "fusion" else labels
        author = Author(name, tuple((ref, slots[ref]) for ref in step.writes()))
        authors.append(author if step.task.description is None else None)
    return Program(native.run, len(slots), blank, names, made, tuple(authors)), slots


def _naming(name: str, ops: str, runner: Runner) -> Runner:
    """A step that waits for other ranks, by name where they do not come."""

    def run(slots: Slots) -> None:
        try:
            runner(slots)
        except RankMismatchError as error:
            raise RankMismatchError(f"step {name!r} of {ops}: {error}") from error

    return run
