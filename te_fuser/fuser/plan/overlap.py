"""The order of steps around what is under way, as what ranks send: early starts, late waits, and gaps that are filled.

Gradients of parameters, for which no other step waits, run in between: dgrad, start, wgrad, wait. What is gathered once
more for one of them starts as late as it can. Gradients left to `backward_dw` are the last steps of a segment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import PARAMETER_GRADIENT, STARTED, Ref
from te_fuser.fuser.plan.plan import LAMBDA, size_text

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.device import Device
    from te_fuser.fuser.plan.plan import Plan, SegmentPlan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.steps.step import Step

_LEAST = 1e-9  # seconds: what is worth a change of the order
Steps = list["Step"]


def overlap_exchanges(plan: Plan, prices: Prices) -> Plan:
    """The plan with its steps in such an order, and with what waiting takes.

    Later gradients hold what they read for longer: that has to be worth it, by the peak of the call, as kept bytes are.
    """
    if not starts_something(plan):
        return plan
    device, graph = plan.device, plan.graph.rounded()
    orders = [_Order(segment, device, lambda ref: ref.bytes(graph)) for segment in plan.segments]
    late, filled = ([order.backward(fill) for order in orders] for fill in (False, True))
    gain = math.fsum([seconds(a, device) - seconds(b, device) for a, b in zip(late, filled, strict=True)])
    peaks = [max(order.peak(steps) for order, steps in zip(orders, made, strict=True)) for made in (late, filled)]
    memory = prices.problem.options.memory
    weight = LAMBDA["balanced"] if isinstance(memory, int) else LAMBDA[memory]
    worth = gain > weight * (peaks[1] - peaks[0]) / plan.device.bandwidth
    return replace(
        plan,
        segments=tuple(
            replace(order.segment, forward=timed(order.forward(), device), backward=timed(backward, device))
            for order, backward in zip(orders, filled if worth else late, strict=True)
        ),
    )


def retimed(plan: Plan) -> Plan:
    """A plan whose steps were priced anew, in the order that they have."""
    if not starts_something(plan):
        return plan
    return plan.changed(lambda segment, direction: timed(segment.steps(direction), plan.device))


def starts_something(plan: Plan) -> bool:
    """True where an op of a plan starts something for which it waits later."""
    nodes = [n for n in plan.graph.nodes if not n.traits.is_row]
    forward = [n for n in nodes if n.op.op_wait is not None]  # type: ignore[attr-defined]
    return bool(forward or [g for n in nodes for g in n.gradients if g.wait])


def started(step: Step) -> Ref | None:
    """Ref of what a step starts and leaves under way; None where it starts nothing."""
    return next((r for r in step.writes() if r.kind is STARTED), None)


def awaited(step: Step) -> Ref | None:
    """Ref of what a step waits for; None where it waits for nothing."""
    return next((r for r in step.reads() if r.kind is STARTED), None)


def said_of(plan: Plan, step: Step) -> str:
    """Note on a step that sends something, or waits for it; empty for all others."""
    if started(step) and step.cost.sent:
        return f"sends {size_text(step.cost.sent)}, under way for {way_of(step, plan.device) * 1e6:.1f} us"
    if ref := awaited(step):
        takes = max(way_of(s, plan.device) for s in plan.steps if started(s) == ref)
        return f"{(takes - step.seconds) * 1e6:.1f} us of {takes * 1e6:.1f} hidden"
    if step.cost.sent:
        return f"sends {size_text(step.cost.sent)}, {step.cost.beside:.0%} of that time hidden beside its product"
    return ""


# ------------------------------------------------------------------------------------------------------ times


def way_of(step: Step, device: Device) -> float:
    """Seconds for which what a step starts is under way alone."""
    return device.seconds(replace(step.cost, hidden=0.0), "float32")


@dataclass
class _Flight:
    """Something under way: the seconds it takes on a free link, those left, those beside steps."""

    takes: float
    left: float
    beside: float = 0.0


def _flown(steps: Iterable[Step], device: Device) -> tuple[float, dict[Ref, _Flight]]:
    """The seconds of steps in this order, and what was under way.

    One is under way after the other. Of the time that it is beside other steps, these lose what the link does not hide.
    """
    total, flights, queue = 0.0, dict[Ref, _Flight](), deque[tuple[Ref, _Flight]]()
    for step in steps:
        if ref := started(step):
            takes = way_of(step, device)
            flights[ref] = _Flight(takes, takes)
            queue.append((ref, flights[ref]))
        elif ref := awaited(step):
            while any(r == ref for r, _ in queue):
                total += queue.popleft()[1].left
        else:
            left = step.seconds
            total += left
            while left > 0.0 and queue:
                flight = queue[0][1]
                part = min(left, flight.left)
                left, flight.left, flight.beside = left - part, flight.left - part, flight.beside + part
                total += (1.0 - device.link.hidden) * part
                if flight.left <= 0.0:
                    queue.popleft()
    return total, flights


def seconds(steps: Iterable[Step], device: Device) -> float:
    return _flown(steps, device)[0]


def timed(steps: Sequence[Step], device: Device) -> tuple[Step, ...]:
    """The steps, with what is felt of something under way priced where it is waited for."""
    flights = _flown(steps, device)[1]
    if not flights:
        return tuple(steps)
    found = []
    for step in steps:
        if started(step):
            step = replace(step, seconds=0.0)
        elif ref := awaited(step):
            step = replace(step, seconds=flights[ref].takes - device.link.hidden * flights[ref].beside)
        found.append(step)
    return tuple(found)


# ------------------------------------------------------------------------------------------------------ orders


class _Order:
    """The steps of a segment in several orders."""

    def __init__(self, segment: SegmentPlan, device: Device, size: Callable[[Ref], int]) -> None:
        self.segment, self._device, self._size = segment, device, size

    def forward(self) -> Steps:
        """Forward steps, started early and awaited late; none is free to run later."""
        return waiting_late(starting_early(self.segment.forward))

    def backward(self, fill: bool) -> Steps:
        """Backward steps, ordered around what is under way; to `fill` gaps, gradients of parameters wait."""
        steps = self.segment.backward
        if not any(started(s) for s in steps):
            return list(steps)
        parts = _StepsByFreedom.of(steps, self._device)
        where = self._filled(parts) if fill else {}
        in_order = dict(zip(sorted(where), sorted(where.values()), strict=True))
        return min(parts.laid_out(in_order), parts.laid_out(where), key=lambda made: seconds(made, self._device))

    def _filled(self, parts: _StepsByFreedom) -> dict[int, int]:
        """Number of a free step -> the start that it runs behind, where that is a gain.

        First each gap takes of those that could run since the gap before it, then of those that none has taken.
        """
        where: dict[int, int] = {}
        best = seconds(parts.laid_out(where), self._device)
        gaps = parts.gaps()
        before = [0, *(wait for _, wait in gaps)]
        for least in (before, [-1] * len(gaps)):
            for (start, wait), since in zip(gaps, least, strict=False):
                for number in reversed(range(len(parts.free))):
                    if number in where or not since <= parts.own[number] < wait:
                        continue
                    taken = seconds(parts.laid_out({**where, number: start}), self._device)
                    if taken > best - _LEAST:
                        break
                    where[number], best = start, taken
        return where

    def peak(self, steps: Sequence[Step]) -> int:
        """The most bytes that are there at once, of what the segment keeps, gets and makes."""
        held = {r for r in self.segment.returned if r is not None}
        last = {r: k for k, s in enumerate(steps) for r in (*s.reads(), *s.writes())}
        sizes = {r: 0 if r.kind.counts == "parameters" else self._size(r) for r in last}
        for start, wait in _pairs(steps):
            sizes[start] = sum([sizes[r] for r in wait.writes()])  # what arrives is there from the start
            sizes.update(dict.fromkeys(wait.writes(), 0))
            last[start] = max([last[start], *(last[r] for r in wait.writes())])
        made = {r for s in steps for r in s.writes()}
        there = sum([size for r, size in sizes.items() if r not in made])
        most = there
        for k, step in enumerate(steps):
            there += sum([sizes[r] for r in step.writes()])
            most = max(most, there)
            there -= sum([sizes[r] for r, end in last.items() if end == k and r not in held])
        return most


def _pairs(steps: Iterable[Step]) -> list[tuple[Ref, Step]]:
    return [(ref, s) for s in steps if (ref := awaited(s)) is not None]


@dataclass(frozen=True)
class _StepsByFreedom:
    """Steps by how free they are.

    Attributes:
        chain: those on which others wait, in order: starts early, waits late.
        free: gradients of parameters, in the order in which they can run.
        own: for each of these, the place in the chain behind which it runs at once: what it reads is there.
        again: starts and waits of what is gathered once more, for these.
    """

    chain: Steps
    free: Steps
    own: tuple[int, ...]
    again: tuple[tuple[Step, Step], ...]
    device: Device

    @classmethod
    def of(cls, steps: Sequence[Step], device: Device) -> _StepsByFreedom:
        flying = [s for s in steps if not s.chain and (started(s) or awaited(s))]
        free = free_steps(steps)
        apart = {id(s) for s in (*free, *flying)}
        chain = waiting_late(starting_early([s for s in steps if id(s) not in apart]))
        made_by = {r: k for k, s in enumerate(chain) for r in s.writes()}
        ways = {r: s for s in flying if awaited(s) for r in s.writes()}

        def behind(step: Step) -> int:
            return max([behind(ways[r]) if r in ways else made_by.get(r, -1) for r in step.reads()], default=-1)

        begun = {ref: s for s in flying if (ref := started(s)) is not None}
        again = tuple([(begun[ref], s) for ref, s in _pairs(flying)])
        own = [max(behind(s), place) for s, place in zip(free, _before(steps, free, chain), strict=True)]
        return cls(chain, free, tuple(own), again, device)

    def gaps(self) -> list[tuple[int, int]]:
        """Places (start, wait) in the chain of what is under way."""
        starts = {ref: k for k, s in enumerate(self.chain) if (ref := started(s)) is not None}
        return sorted((starts[ref], k) for k, s in enumerate(self.chain) if (ref := awaited(s)) is not None)

    def laid_out(self, where: Mapping[int, int]) -> Steps:
        """All steps, with some of the free ones behind a start, and none before what it reads."""
        placed: dict[int, Steps] = {}
        made_at: dict[Ref, int] = {}
        for number, step in enumerate(self.free):
            at = max(where.get(number, -1), self.own[number])
            while at + 1 < len(self.chain) and number in where and started(self.chain[at + 1]):
                at += 1  # behind all that start there
            at = max([at, *(made_at[r] for r in step.reads() if r in made_at)])
            made_at.update(dict.fromkeys(step.writes(), at))
            placed.setdefault(at, []).append(step)
        found = list(placed.get(-1, []))
        for k, step in enumerate(self.chain):
            found += [step, *placed.get(k, [])]
        for start, wait in self.again:
            _put_in_time(found, start, wait, self.device)
        return found


def free_steps(steps: Sequence[Step]) -> Steps:
    """Steps that give gradients of parameters alone, for which no step waits but others of them."""
    found: Steps = []
    waited_for: set[Ref] = set()  # by steps that are not among them
    for step in reversed(steps):
        made = step.writes()
        alone = all(r.kind is PARAMETER_GRADIENT and r not in waited_for for r in made)
        if made and alone and not awaited(step):
            found.append(step)
        else:
            waited_for.update(step.reads())
    return found[::-1]


def _before(steps: Sequence[Step], free: Steps, chain: Steps) -> list[int]:
    """Place, for each free step, of the last chain step before it that neither starts nor waits."""
    places, freed = {id(s): k for k, s in enumerate(chain)}, {id(s) for s in free}
    found, last = [], -1
    for step in steps:
        if id(step) in freed:
            found.append(last)
        elif id(step) in places and not started(step) and not awaited(step):
            last = places[id(step)]
    return found


def _put_in_time(steps: Steps, start: Step, wait: Step, device: Device) -> None:
    """Put a wait before its first reader, and its start so early that the link has time."""
    at, wanted = _first_reader(steps, wait), way_of(start, device)
    steps.insert(at, wait)
    needed = set(start.reads())
    while at > 0 and wanted > 0.0 and not needed.intersection(steps[at - 1].writes()):
        at -= 1
        wanted -= 0.0 if started(steps[at]) or awaited(steps[at]) else steps[at].seconds
    steps.insert(at, start)


def _first_reader(steps: Sequence[Step], wait: Step) -> int:
    made = set(wait.writes())
    return next((k for k, s in enumerate(steps) if s is not wait and made.intersection(s.reads())), len(steps))


def starting_early(steps: Sequence[Step]) -> Steps:
    """The steps with each that starts something right behind where its input is made."""
    found: Steps = []
    for step in steps:
        at = len(found)
        if started(step):
            read = set(step.reads())
            while at > 0 and not read.intersection(found[at - 1].writes()) and not started(found[at - 1]):
                at -= 1
        found.insert(at, step)
    return found


def waiting_late(steps: Steps) -> Steps:
    """The steps with each that waits for something just before the first that reads what it gives."""
    found = list(steps)
    for step in [s for s in steps if awaited(s)]:
        found = [s for s in found if s is not step]
        found.insert(_first_reader(found, step), step)
    return found


def delay_gradients(plan: Plan, prices: Prices) -> Plan:
    """The plan with what is left for later behind all other steps of its segment: it runs after the whole backward.

    Gradients that come with others, in one step, are there when backward ends.
    """
    if not [g for n in plan.graph.nodes for g in n.gradients if g.delayed]:
        return plan
    segments = []
    for segment in plan.segments:
        late = _late(segment, plan.graph)
        now = [s for s in segment.backward if id(s) not in late]
        later = [s for s in segment.backward if id(s) in late]
        segments.append(replace(segment, backward=(*now, *later), delayed=len(later)))
    found = retimed(replace(plan, segments=tuple(segments)))
    weights = {r.index for s in found.segments for step in s.late for r in step.writes() if r in s.returned}
    names = [plan.graph.parameters[k].name for k in sorted(weights)]
    return found.noted(f"gradients of {', '.join(names)} are left to backward_dw()") if names else found


def _late(segment: SegmentPlan, graph: Graph) -> set[int]:
    """The ids of the steps that run later."""
    weights = {n.parameters[name] for n in graph.nodes for g in n.gradients if g.delayed for name in g.produces}
    late: set[int] = set()
    for step in free_steps(segment.backward):
        if not weights.isdisjoint([r.index for r in step.writes()]):
            late.add(id(step))
    if not late:
        return late
    needed = {r for r in segment.returned if r is not None}
    for step in reversed(segment.backward):  # so does what gathers for these alone
        if id(step) not in late and not step.chain and needed.isdisjoint(step.writes()):
            late.add(id(step))
        if id(step) not in late:
            needed.update(step.reads())
    return late
