"""What a plan says of itself: tables of its steps, what it keeps, what it did not take and why, generated code."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from te_fuser.dtypes import name_of, text_of
from te_fuser.fuser.graph.refs import RECOMPUTED, SEED, VALUE, Ref
from te_fuser.fuser.plan.overlap import awaited, said_of
from te_fuser.fuser.plan.plan import Kept, Plan, Refusal, size_text

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.show.measure import Measured
    from te_fuser.fuser.steps.step import Step

_WIDTH = 110
_STEP_WIDTH = 39
_FEW_REFUSALS = 12


@dataclass(frozen=True)
class StepRow:
    """One step as it is shown.

    Attributes:
        ops: the first and the last op it covers.
        covers: those ops by kind and place in the model.
        what: "kernel" (generated), "formula" (by PyTorch operations), "op" (its own code), "fusion", "torch" (a cast or
            a sum of gradients), "no kernel:" (an alias).
        read, written: predicted bytes.
        seconds: predicted time; `measured` is None where nothing was measured.
        limit: the resource that bounds it: "memory", "products", "arithmetic", "launch", on a CPU also the "host", for
            what ranks send the "link"; "stated" by a fusion.
        share: least time for that resource over the time it takes (measured, else predicted); None if stated.
        keeps: what it makes that is kept for backward.
        again: what it computes again in backward.
        over: which outputs may be stored over which inputs, in the names of the kernel.
        transposed: what else it stores transposed.
        algorithm: what the body of a fusion says that it runs by; empty where that is not known.
        sends: what it sends to other ranks, or what of the wait for that is hidden.
    """

    ops: tuple[int, int]
    covers: tuple[str, ...]
    what: str
    name: str
    read: float
    written: float
    launches: int
    seconds: float
    measured: float | None
    limit: str
    share: float | None
    keeps: tuple[str, ...]
    again: tuple[str, ...]
    transposed: tuple[str, ...]
    algorithm: str = ""
    over: tuple[str, ...] = ()
    sends: str = ""


def step_rows(plan: Plan, direction: str, measured: Measured | None = None) -> list[StepRow]:
    """The steps of one direction ("forward", "backward") in running order."""
    steps = plan.forward if direction == "forward" else plan.backward
    times: Sequence[float | None] = measured.of(direction) if measured else [None] * len(steps)
    kept = {k.ref: k for k in plan.kept} if direction == "forward" else {}
    return [_row(plan, step, seconds, kept) for step, seconds in zip(steps, times, strict=True)]


def _row(plan: Plan, step: Step, measured: float | None, kept: dict[Ref, Kept]) -> StepRow:
    nodes = [plan.graph.nodes[k] for k in step.task.ops or range(step.start, step.stop)]
    limit, least = _limit(plan, step, nodes[0])
    taken = step.seconds if measured is None else measured
    return StepRow(
        (step.start, step.stop - 1),
        tuple(_place(n) for n in nodes),
        _what(plan, step),
        step.name,
        step.cost.read,
        step.cost.written,
        step.cost.launches,
        step.seconds,
        measured,
        limit,
        least / taken if limit != "stated" and taken > 0 and not awaited(step) else None,
        _keeps([kept[r] for r in step.writes() if r in kept]),
        tuple(r.label(plan.graph) for r in step.writes() if r.kind is RECOMPUTED),
        tuple(r.label(plan.graph) for r in step.writes() if _is_said(r, kept)),
        step.task.runs_by(),
        _over(step),
        said_of(plan, step),
    )


def _is_said(ref: Ref, kept: dict[Ref, Kept]) -> bool:
    """Whether a layout is to be named that nothing else names."""
    return ref.form.layout != "rows" and ref.kind is not RECOMPUTED and ref not in kept


def _over(step: Step) -> tuple[str, ...]:
    description = step.task.description
    return tuple(f"{store} over {load}" for store, load in description.overwrites) if description else ()


def _place(node: Node) -> str:
    # "1.0.matmul" is the MatMul of the Linear at 1.0: the kind says as much.
    kind = node.op.kind.__name__
    path = node.path.removesuffix("." + kind.lower())
    return f"{kind} {path}" if path else kind


def _what(plan: Plan, step: Step) -> str:
    if step.task.description is None:
        return step.task.what
    if step.cost.launches == 0:
        return "no kernel:"
    return "formula" if plan.target == "torch" else step.task.what


def _limit(plan: Plan, step: Step, first: Node) -> tuple[str, float]:
    if awaited(step):
        return "link", 0.0
    if step.cost.seconds is not None:
        return "stated", step.cost.seconds
    dtype = name_of(plan.graph.arithmetic(first))
    limits = plan.device.limits(step.cost, dtype)
    calls = {"launch": limits.pop("launch")}
    if plan.device.kind == "cpu":
        calls = {"host": step.host}
    together = limits | calls
    # A launch or a call is a cost, not a limit to come near to: the share is that of the work.
    return max(together, key=lambda name: together[name]), max(limits.values())


def _keeps(entries: Sequence[Kept]) -> tuple[str, ...]:
    statistics = [k for k in entries if k.owner == "statistic"]
    found = [f"{k.name.rpartition(': ')[2]} ({size_text(k.bytes)})" for k in entries if k.owner != "statistic"]
    if statistics:
        found.append(f"{_count(len(statistics), 'statistic')} of each row")
    return tuple(found)


# ------------------------------------------------------------------------------------------------- the whole


class Explanation:
    """The plans of one call, to be printed.

    Attributes:
        plans: one for each group of ops between plain modules.
        measured: times of their steps, where they were asked for.
        unseen: what it takes to know the plans that come after these; empty where these are all.
    """

    def __init__(
        self, plans: Sequence[Plan], source: bool = False, measured: Sequence[Measured] = (), unseen: str = ""
    ) -> None:
        self.plans = list(plans)
        self.source = source
        self.measured = list(measured)
        self.unseen = unseen

    def __str__(self) -> str:
        """Plain text, 110 columns wide."""
        page = io.StringIO()
        console = Console(file=page, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(self, crop=False)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for k, plan in enumerate(self.plans):
            of = f" of {len(self.plans)}" if not self.unseen else ""
            number = f"Plan {k + 1}{of}: " if len(self.plans) > 1 or self.unseen else "Plan: "
            if k:
                yield Text("")
            yield from _plan_page(plan, self.measured[k] if self.measured else None, number)
        if self.unseen:
            yield Text(f"\nNo plan is known from here on: {self.unseen}.")
        if self.source:
            for title, text in self.sources().items():
                yield Text(f"\n{title}", style="bold")
                # Code is code: a broken line would not compile.
                yield Text(text.rstrip(), no_wrap=True, overflow="ignore")

    def sources(self) -> dict[str, str]:
        """Heading -> generated code, of each distinct kernel of the plans; equal kernels come once."""
        found: dict[str, tuple[Plan, KernelDescription, list[str]]] = {}
        for plan in self.plans:
            for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
                for step in steps:
                    d = step.task.description
                    if d is None or d.key not in plan.generated:
                        continue
                    _, _, users = found.setdefault(d.key, (plan, d, []))
                    users.append(f"{direction}, {_range(step.start, step.stop - 1)}")
        return {f"{d.name}: {'; '.join(_few(users, 4))}": _source(plan, d) for plan, d, users in found.values()}


def _source(plan: Plan, description: KernelDescription) -> str:
    return _WRITERS[plan.target](plan, description)


def _cpp_source(plan: Plan, description: KernelDescription) -> str:
    from te_fuser.codegen.compiler import source_of

    return source_of(description)


def _cuda_source(plan: Plan, description: KernelDescription) -> str:
    from te_fuser.codegen.cuda import generate
    from te_fuser.codegen.nvrtc import arch_of

    return generate(description, arch_of(plan.device.capability or (8, 0))).source


# What row kernels run as -> the text of one.
_WRITERS: dict[str, Callable[[Plan, KernelDescription], str]] = {
    "cpp": _cpp_source,
    "cuda": _cuda_source,
    "torch": lambda plan, description: str(description),
}
_TARGETS = {"cpp": "generated C++", "cuda": "generated CUDA C++", "torch": "PyTorch operations"}


# --------------------------------------------------------------------------------------------------- one plan


def _plan_page(plan: Plan, measured: Measured | None, number: str) -> Iterable[Any]:
    x = plan.graph.values[0].spec
    dtype = text_of(x.dtype)
    device = f"{plan.device.name} (estimated)" if plan.device.estimate else plan.device.name
    yield Text(
        f"{number}{_count(len(plan.graph.nodes), 'op')}, input {list(x.shape)} {dtype}, on {device}, "
        f"row kernels by {_TARGETS[plan.target]}, memory {plan.memory}",
        style="bold",
    )
    yield from _readings(plan)
    for direction in ("forward", "backward"):
        rows = step_rows(plan, direction, measured)
        if rows:
            yield _table(direction, rows)
    if not plan.backward:
        yield Text("\nNo backward: nothing in this call needs a gradient.")
    yield from _kept_page(plan)
    yield from _refused_page(plan)
    yield from _totals_page(plan, measured)
    for note in plan.notes:
        yield Text(f"Note: {note}")


def _readings(plan: Plan) -> Iterable[Text]:
    """How ops read their inputs, where that can be misread."""
    nodes = [(n, n.op.reading(plan.graph.values[n.input].spec)) for n in plan.graph.nodes]
    for text, entries in _grouped([e for e in nodes if e[1]], lambda e: e[1]).items():
        more = f" and {_count(len(entries) - 1, 'other')} like it" if len(entries) > 1 else ""
        verb = "read" if more else "reads"
        yield Text(f"Layout: {_place(entries[0][0])}{more} {verb} {text}")


def _table(direction: str, rows: list[StepRow]) -> Group:
    size_unit, size = _size_unit(max(r.read + r.written for r in rows))
    times = [t for r in rows for t in (r.seconds, r.measured) if t is not None]
    time_unit, tick = ("ms", 1e-3) if max(times) >= 0.1 else ("us", 1e-6)
    with_measured = rows[0].measured is not None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column("ops", no_wrap=True)
    table.add_column("what they are", ratio=1, overflow="fold")
    table.add_column("step", width=_STEP_WIDTH, overflow="fold")
    numbers = [f"read\n{size_unit}", f"written\n{size_unit}", f"predicted\n{time_unit}"]
    numbers += [f"measured\n{time_unit}"] if with_measured else []
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit, share", no_wrap=True)
    for block in _folded(rows):
        if isinstance(block, _Again):
            table.add_row(_span(block.ops), "", block.text)
            continue
        cells = [f"{block.read / size:.2f}", f"{block.written / size:.2f}", f"{block.seconds / tick:.1f}"]
        cells += [f"{(block.measured or 0.0) / tick:.1f}"] if with_measured else []
        share = "" if block.share is None else f" {block.share:.0%}"
        table.add_row(_span(block.ops), ", ".join(block.covers), _step_text(block), *cells, f"{block.limit}{share}")
    return Group(Text(f"\n{direction.capitalize()}", style="bold"), table)


def _step_text(row: StepRow) -> Group:
    lines: list[Any] = [Text(f"{row.what} {row.name}", overflow="fold")]
    algorithm = (row.algorithm,) if row.algorithm else ()
    lists = (
        ("computes again", row.again),
        ("stores", row.transposed),
        ("keeps", row.keeps),
        ("may store", row.over),
        ("algorithm:", algorithm),
        ("", (row.sends,) if row.sends else ()),
    )
    for verb, names in lists:
        if names:
            lines.append(Padding(Text(f"{verb} {', '.join(names)}".lstrip()), (0, 0, 0, 2)))
    return Group(*lines)


@dataclass(frozen=True)
class _Again:
    """Rows that are like those before them."""

    ops: tuple[int, int]
    text: str


def _folded(rows: list[StepRow]) -> Iterable[StepRow | _Again]:
    """The rows, with runs of equal blocks (the layers of a model) shown once."""
    keys = [(r.name, r.read, r.written, r.seconds, r.again, r.transposed, r.keeps, r.algorithm, r.over) for r in rows]
    at = 0
    while at < len(rows):
        period, times = _repetition(keys, at)
        yield from rows[at : at + period]
        if times > 1:
            last = rows[at + period : at + period * times]
            more = "once more" if times == 2 else f"{times - 1} times more"
            ops = min(r.ops[0] for r in last), max(r.ops[1] for r in last)
            yield _Again(ops, f"... the same {_count(period, 'step')} {more}")
        at += period * times


def _repetition(keys: Sequence[Any], at: int) -> tuple[int, int]:
    """(length, count) of the block at `at` whose repetition right after it spares the most rows."""
    best = (1, 1)
    for period in range(1, (len(keys) - at) // 2 + 1):
        times = 1
        while keys[at : at + period] == keys[at + period * times : at + period * (times + 1)]:
            times += 1
        if period * (times - 1) > max(best[0] * (best[1] - 1), 2):
            best = (period, times)
    return best


# ------------------------------------------------------------------------------------------------ what is kept


def _kept_page(plan: Plan) -> Iterable[Any]:
    if not plan.kept:
        return
    yield Text("\nKept for backward", style="bold")
    grid = _sized_lines()
    unsorted = [k for k in plan.kept if k.owner == "activation"]
    activations = sorted(unsorted, key=lambda k: (-k.bytes, _kept_at(plan, k)))
    for (_, size), entries in _grouped(activations, lambda k: (_kept_name(plan, k)[0], k.bytes)).items():
        name, place = _kept_name(plan, entries[0])
        where = f" of {place}" if place else ""
        more = f" and {_count(len(entries) - 1, 'other')} like it" if len(entries) > 1 else ""
        times = f"{len(entries)} x " if len(entries) > 1 else ""
        grid.add_row(f"{times}{size_text(size)}", f"{name}{where}{more}")
    grid.add_row(size_text(plan.kept_bytes()), "activations together", style="bold")
    for owner, words in _OTHERS.items():
        entries = [k for k in plan.kept if k.owner == owner]
        if entries:
            text = words.format(_count(sum(k.ref != SEED for k in entries), owner))
            seed = " and the seed of random draws" if any(k.ref == SEED for k in entries) else ""
            grid.add_row(size_text(plan.kept_bytes(owner)), text + seed)
    yield Padding(grid, (0, 0, 0, 2))
    if plan.choices:
        yield Text("\nKept, or computed again in backward (predicted)", style="bold")
        choices = _grouped(plan.choices, str)
        yield Padding(Text("\n".join(_times(len(c)) + text for text, c in choices.items())), (0, 0, 0, 2))


# Owner -> whose memory it is; none of it is counted as activations.
_OTHERS = {
    "statistic": "{} of rows",
    "input": "{} of the call, the caller's memory",
    "parameter": "{}, the model's memory",
    "tensor": "{} that each call makes of parameters",
}


def _kept_at(plan: Plan, kept: Kept) -> int:
    number = kept.ref.index
    return (plan.graph.producer(number) or 0) if kept.ref.kind is VALUE else number


def _kept_name(plan: Plan, kept: Kept) -> tuple[str, str]:
    """What a kept tensor is, and the op that makes it."""
    makers = {"values": plan.graph.producer, "nodes": lambda number: number}
    made_by = makers.get(kept.ref.kind.counts)
    maker = None if made_by is None else made_by(kept.ref.index)
    return kept.ref.label(plan.graph), "" if maker is None else f"op {maker} ({_place(plan.graph.nodes[maker])})"


# ------------------------------------------------------------------------------------- what was not taken, totals


def _refused_page(plan: Plan) -> Iterable[Any]:
    if not plan.refusals:
        return
    yield Text("\nConsidered and not taken", style="bold")
    groups = _grouped(plan.refusals, lambda r: r.reason)
    lines = [_refusal_text(entries) for entries in groups.values()]
    left = len(lines) - _FEW_REFUSALS
    if left > 1:
        lines = [*lines[:_FEW_REFUSALS], f"... and {left} more; all are in plan.refusals"]
    yield Padding(Text("\n".join(lines)), (0, 0, 0, 2))


def _refusal_text(entries: Sequence[Refusal]) -> str:
    """A line for what was refused for one reason; where that is several fusions, their names stand for the places."""
    names = list(dict.fromkeys(r.name for r in entries))
    if len(names) > 1:
        return f"{', '.join(names)}: {entries[0].reason}"
    ranges = list(dict.fromkeys(_range(r.start, r.stop - 1) for r in entries))
    direction = {"joint": "both ways"}.get(entries[0].direction, entries[0].direction)
    return f"{entries[0].name} ({direction}; {'; '.join(_few(ranges, 3))}): {entries[0].reason}"


def _totals_page(plan: Plan, measured: Measured | None) -> Iterable[Any]:
    yield Text("\nTotals", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    predicted = ["predicted ms", "device ms", "host ms"]
    headings = ["", *predicted, *(["measured ms"] if measured else []), "predicted bytes", "steps", "launches"]
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k else "left", no_wrap=True)
    found = {direction: step_rows(plan, direction, measured) for direction in ("forward", "backward")}
    for name, rows in {**found, "both": [*found["forward"], *found["backward"]]}.items():
        directions = () if name == "both" else (name,)
        predictions = (plan.seconds(*directions), plan.device_seconds(*directions), plan.host_seconds(*directions))
        cells = [f"{seconds * 1e3:.3f}" for seconds in predictions]
        cells += [f"{sum(r.measured or 0.0 for r in rows) * 1e3:.3f}"] if measured else []
        cells += [size_text(sum(r.read + r.written for r in rows)), str(len(rows)), str(sum(r.launches for r in rows))]
        table.add_row(name, *cells)
    yield Padding(table, (0, 0, 0, 2))
    recorded = sum(s.recorded for s in plan.segments)
    own = f"autograd: {_count(len(plan.segments) - recorded, 'node')} of its own, else PyTorch's"
    nodes = own if recorded else "autograd nodes"
    text = f"{_count(len(plan.segments), 'segment')} ({nodes}), {size_text(plan.kept_bytes())} of activations kept"
    sums = _segments_with_sums(plan)
    text += f"; column sums are added up by at most {_count(sums, 'launch', 'es')} more" if sums else ""
    yield Padding(Text(text), (0, 0, 0, 2))


def _segments_with_sums(plan: Plan) -> int:
    """Segments that end with a launch which adds up the column sums of their kernels."""
    with_sums = sum(any(s.sums() for s in segment.backward) for segment in plan.segments)
    return with_sums if plan.target == "cuda" else 0


# ------------------------------------------------------------------------------------------------------- words


def _sized_lines() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    return grid


def _grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def _size_unit(largest: float) -> tuple[str, float]:
    """MiB, or KiB where that would show little."""
    return ("MiB", 2.0**20) if largest >= 2**20 else ("KiB", 2.0**10)


def _count(number: int, noun: str, ending: str = "s") -> str:
    if number == 1:
        return f"1 {noun}"
    first, _, rest = noun.partition(" ")
    return f"{number} {first}{ending}{' ' + rest if rest else ''}"


def _times(number: int) -> str:
    return f"{number} x " if number > 1 else ""


def _span(ops: tuple[int, int]) -> str:
    return str(ops[0]) if ops[0] == ops[1] else f"{ops[0]}-{ops[1]}"


def _range(first: int, last: int) -> str:
    return f"op {first}" if first == last else f"ops {first}-{last}"


def _few(texts: Sequence[str], most: int) -> list[str]:
    return list(texts) if len(texts) <= most else [*texts[:most], f"{len(texts) - most} more places"]
