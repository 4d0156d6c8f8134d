"""Tuning: other choices, measured in the running model; what makes the whole faster is kept, also on disk.

Fusions that were not taken are tried, others left out: one place after the other, against the best so far in
alternating rounds, as a kernel may win alone and lose in a model. Then schedules of generated kernels, on a GPU, and
algorithms of libraries. All must first compute what the plan by prices alone does (`check`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.codegen.cache_files import tuned_folder
from te_fuser.distributed.consistency import gather_values, shared_errors
from te_fuser.fuser.pipeline import make_plan, with_questions
from te_fuser.fuser.plan.plan import Plan, size_text
from te_fuser.fuser.plan.problem import Options, find_matches, match_at
from te_fuser.fuser.plan.tuned import OFF, ON, Choices, device_name, list_key, place_of, signature, store_for
from te_fuser.fuser.run.loading import Executable, execute, load, unhooked
from te_fuser.fuser.tune.check import Check, reason_of_any
from te_fuser.fuser.tune.schedules import tune_schedules
from te_fuser.fusions.registry import libraries
from te_fuser.kernels.tuning_trials import Deciding, Trial, dropped

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.pipeline import Fuser
    from te_fuser.fuser.steps.step import KernelFunction

_WARM_UP = 3
_MORE_MEMORY = 1.02  # what a choice may keep over the plan it is to replace, unless memory="fast"


@dataclass(frozen=True)
class Effort:
    """Settings of a measurement; `margin` is the share of the time that a choice must gain."""

    rounds: int = 7
    seconds: float = 0.2
    margin: float = 0.005

    def __post_init__(self) -> None:
        if not (isinstance(self.rounds, int) and self.rounds > 0):
            raise ValueError(f"rounds says how often each plan has its turn, 1 or more; got {self.rounds!r}")
        if not (isinstance(self.seconds, Real) and 0.0 < self.seconds < math.inf):
            raise ValueError(f"seconds says how long a turn lasts, more than 0; got {self.seconds!r}")
        if not (isinstance(self.margin, Real) and 0.0 <= self.margin < 1.0):
            raise ValueError(f"margin is a share of the time, in [0, 1); got {self.margin!r}")


@dataclass(frozen=True)
class TuneReport:
    """Report of what was tried; prints as a table.

    Attributes:
        trials: in order.
        ratios: for each group of ops between plain modules, the time of the plan that was found over that of the plan
            that the prices alone give.
    """

    trials: tuple[Trial, ...]
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, reports: Sequence[TuneReport]) -> TuneReport:
        return cls(tuple(t for r in reports for t in r.trials), tuple(x for r in reports for x in r.ratios))

    def __str__(self) -> str:
        width = max([len("place"), *(len(t.place) for t in self.trials)])
        lines = [f"{'place':{width}} {'':4} {'ratio':8}"]
        for t in self.trials:
            ratio = "" if t.ratio is None else f"{t.ratio:.4f}"
            outcome = "; ".join(filter(None, ("taken", t.reason))) if t.taken else t.reason or "no gain"
            lines.append(f"{t.place:{width}} {t.choice:4} {ratio:8} {outcome}")
        found = ", ".join(f"{ratio:.4f}" for ratio in self.ratios)
        return "\n".join([*lines, f"time over that of the plan by prices alone: {found}"])


# contest(first, second, effort) -> seconds of the second over seconds of the first
Contest = Callable[[Callable[[], None], Callable[[], None], Effort], float]


@dataclass(frozen=True)
class _Rounds:
    """Plans of one call, prepared and measured against each other."""

    x: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    parameters: Sequence[torch.Tensor]
    outputs: tuple[str, ...]
    effort: Effort
    contest: Contest
    groups: tuple[Group, ...]

    def prepared(self, plan: Plan, kernels: Mapping[str, KernelFunction] | None = None) -> Executable:
        """A plan ready to run on all ranks, some of its kernels by other ones."""
        made = load(plan, self.outputs, instead=kernels)
        gather_values(self.groups, "tune: a plan is ready", None)
        return made

    def call(self, prepared: Executable) -> Callable[[], None]:
        return _call(prepared, self.x, self.inputs, self.parameters)

    def ratio(self, first: Callable[[], None], second: Callable[[], None]) -> float:
        """Seconds of the second over seconds of the first, on the rank that decides."""
        seconds = self.contest(first, second, self.effort)
        return float(gather_values(self.groups, "tune: how two plans compare", seconds)[0])

    def between(self, first: Plan, second: Plan) -> float:
        """Seconds of the second plan over seconds of the first, on the rank that decides."""
        return self.ratio(self.call(self.prepared(first)), self.call(self.prepared(second)))


def tune(
    fuser: Fuser,
    x: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    outputs: tuple[str, ...] = (),
    effort: Effort = Effort(),  # noqa: B008 - frozen
    contest: Contest | None = None,
) -> tuple[TuneReport, Any]:
    """Tune the plan of a call like this one; (report, what the call returns).

    Ranks that share ops of the list go by the first one: how often each plan has its turn, how plans compare, which
    choices are tried and taken. What one of them refuses all do; what one raises all do.
    """
    groups = fuser.call(x, inputs, outputs).ops.groups
    with shared_errors(groups):
        return _tune(fuser, x, inputs, outputs, effort, contest, groups)


def _tune(
    fuser: Fuser,
    x: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    outputs: tuple[str, ...],
    effort: Effort,
    contest: Contest | None,
    groups: tuple[Group, ...],
) -> tuple[TuneReport, Any]:
    store = store_for(device_name(x.device))
    store.check()  # now, not after minutes of measuring
    if groups:  # their ranks compare what they run, as in a call
        gather_values(groups, f"tune: {effort} for x {list(x.shape)}", None)
        fuser.prepare(x, inputs, outputs)
    deciding = _deciding(groups)
    call = fuser.call(x, inputs, outputs)
    graph, options = with_questions(lambda questions: fuser.plan_inputs(call, questions))
    parameters = [unhooked(p) for p in call.parameters]
    rounds = _Rounds(x, inputs, parameters, outputs, effort, contest or _contest_on(x.device, groups), groups)
    # What an earlier tuning left out is a candidate again.
    options = dataclasses.replace(options, tuned={})
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        search = _Search(graph, options, rounds)
        for place, choice in _candidates(search.first, options):
            search.look_at(place, choice)
        total = search.conclude()
        trials, best = search.trials, search.best
        if best.target == "cuda":
            trials += _schedule_trials(best, rounds, search.check, deciding)
        for library in libraries():
            prepared = rounds.prepared(best)
            reason_not = functools.partial(search.check.reason, prepared)
            trials += library.tune(rounds.call(prepared), rounds.ratio, effort.margin, reason_not, deciding)
        result = execute(rounds.prepared(best), x, inputs, parameters)
    if deciding.writes:
        store.put(list_key(graph, fuser.memory, fuser.kernels), search.choices, total)
    gather_values(groups, "tune: what was found is on disk", None)
    fuser.forget_plans()
    return TuneReport(tuple(trials), (total,)), result


def _deciding(groups: tuple[Group, ...]) -> Deciding:
    """The first rank decides; of those that have one folder on one machine the first writes."""
    own = [socket.gethostname(), str(tuned_folder()), os.getpid()]
    found = gather_values(groups, "tune: where measured choices lie", own)
    writer = next(place for place in found if place[:2] == own[:2])
    return Deciding(lambda what, value: gather_values(groups, f"tune: {what}", value)[0], writer == own)


class _Search:
    """Choices of fusions, one after the other, each against the best plan so far."""

    def __init__(self, graph: Graph, options: Options, rounds: _Rounds) -> None:
        self._graph, self._options, self._rounds = graph, options, rounds
        self.choices: dict[str, str] = {}
        self.trials: list[Trial] = []
        self.first = self.best = self._plan({})
        self.check = self._checked_by(rounds.prepared(self.first))

    def look_at(self, place: str, choice: str) -> None:
        """Take a choice if it fits, computes the same and gains."""
        plan = self._plan({**self.choices, place: choice})
        rounds = self._rounds
        unfit, kept, most = "", plan.kept_bytes(), _MORE_MEMORY * self.best.kept_bytes()
        if signature(plan) == signature(self.best):
            unfit = "gives the same plan"
        elif self._options.memory != "fast" and kept > most:
            unfit = f"keeps {size_text(kept - self.best.kept_bytes())} more for backward"
        unfit = reason_of_any(rounds.groups, f"{place} {choice}", unfit)
        if unfit:
            self.trials.append(Trial(place, choice, None, False, unfit))
            return
        candidate = rounds.prepared(plan)
        reason = self.check.reason(candidate)
        if reason:
            self.trials.append(Trial(place, choice, None, False, reason))
            return
        ratio = rounds.ratio(rounds.call(rounds.prepared(self.best)), rounds.call(candidate))
        taken = ratio < 1 - rounds.effort.margin
        note = self.check.note(candidate) if taken else ""
        self.trials.append(Trial(place, choice, ratio, taken, note))
        if taken:
            self.choices[place], self.best = choice, plan
        if note:  # what follows draws as this one does
            self.check = self._checked_by(candidate)

    def conclude(self) -> float:
        """The best plan's time over the first's; nothing is taken where all together gains nothing."""
        total = self._rounds.between(self.first, self.best) if self.choices else 1.0
        if total >= 1:
            self.trials = dropped(self.trials)
            self.choices, self.best, total = {}, self.first, 1.0
        found = self._rounds.prepared(self.best)
        if self.check.note(found):  # the last one that was taken is not in it
            self.check = self._checked_by(found)
        return total

    def _plan(self, choices: Choices) -> Plan:
        return make_plan(self._graph, dataclasses.replace(self._options, tuned=choices))

    def _checked_by(self, prepared: Executable) -> Check:
        rounds = self._rounds
        return Check(prepared, rounds.x, rounds.inputs, rounds.parameters, rounds.groups)


def _schedule_trials(plan: Plan, rounds: _Rounds, check: Check, deciding: Deciding) -> list[Trial]:
    """Other schedules of the plan's generated kernels."""

    def reason_not(kernels: Mapping[str, KernelFunction]) -> str:
        return check.reason(rounds.prepared(plan, kernels))

    def compare(before: Mapping[str, KernelFunction], after: Mapping[str, KernelFunction]) -> float:
        first, second = (rounds.call(rounds.prepared(plan, kernels)) for kernels in (before, after))
        return rounds.ratio(first, second)

    return tune_schedules(plan, compare, rounds.effort.margin, reason_not, deciding)


def _candidates(plan: Plan, options: Options) -> Iterator[tuple[str, str]]:
    """(place, choice) of every fusion that fits somewhere: the other choice than the plan's."""
    taken = {(s.name, s.start, s.stop) for s in plan.steps if s.task.what == "fusion"}
    found: dict[str, str] = {}
    for fusion, start, stop in find_matches(plan.graph, options)[0]:
        place = place_of(fusion, match_at(plan.graph, options, start, stop))
        step = (fusion.name, *fusion.covers("backward" if fusion.has_backward else "forward", start, stop))
        if place not in found or step in taken:
            found[place] = OFF if step in taken else ON
    return iter(found.items())


def _call(
    prepared: Executable, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """One forward and, where there is one, backward; gradients that tensors hold are left alone."""
    wanted = [t for t in (x, *inputs.values(), *parameters) if t.requires_grad]

    def run() -> None:
        result = execute(prepared, x, inputs, parameters)
        if prepared.with_grad:
            made = [t for t in (result if isinstance(result, tuple) else (result,)) if t.requires_grad]
            torch.autograd.grad(made, wanted, [torch.ones_like(t) for t in made], allow_unused=True)

    return run


def _contest_on(device: torch.device, groups: Sequence[Group] = ()) -> Contest:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def turn(call: Callable[[], None], times: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return (time.perf_counter() - start) / times

    def contest(first: Callable[[], None], second: Callable[[], None], effort: Effort) -> float:
        for call in (first, second):
            turn(call, _WARM_UP)
        times = max(1, round(effort.seconds / max(turn(first, _WARM_UP), 1e-9)))
        times = gather_values(groups, "tune: how often", times)[0]
        ratios = []
        for k in range(effort.rounds):  # who begins changes, so that neither always follows a pause
            if k % 2:
                after, before = turn(second, times), turn(first, times)
            else:
                before, after = turn(first, times), turn(second, times)
            ratios.append(after / before)
        return statistics.median(ratios)

    return contest
