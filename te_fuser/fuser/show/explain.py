"""Explanation of a plan: tables of its steps, what it keeps, what it did not take and why, generated code."""

from __future__ import annotations

import io
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement, measure_renderables
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from te_fuser.dtypes import text_of
from te_fuser.fuser.graph.refs import SEED, VALUE
from te_fuser.fuser.plan.plan import Plan, SavedTensor, size_text
from te_fuser.fuser.show.html_page import fragment, page
from te_fuser.fuser.show.step_rows import (
    Gain,
    StepRow,
    and_others,
    count,
    few,
    gains,
    grouped,
    last_attempt,
    layouts,
    makers_of_steps,
    multiple,
    pass_page,
    place,
    range_of,
    rows_of,
    sources,
    span,
    totals,
)

if TYPE_CHECKING:
    from te_fuser.fuser.graph.passes import PassRecord
    from te_fuser.fuser.show.measure import Measured

_WIDTH, _SHORT_WIDTH, _UNLIMITED = 110, 80, 10_000
_STEP_WIDTH = 39
_FEW_REFUSALS = 12


class Explanation:
    """The plans of one call, to be printed.

    Attributes:
        plans: one for each group of ops between plain modules.
        measured: times of their steps, where they were asked for.
        unseen: what it takes to know the plans that come after these; empty where these are all.
        borders: what runs between them by itself, and why: (the number of plans before it, text).
        passes: what each pass of planning changed, for each plan, where that was asked for.
        details: whether the text has all of each step, what is kept and what was refused, or a line a step and totals.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        source: bool = False,
        measured: Sequence[Measured] = (),
        unseen: str = "",
        borders: Sequence[tuple[int, str]] = (),
        passes: Sequence[Sequence[PassRecord]] = (),
        details: bool = True,
    ) -> None:
        self.plans = list(plans)
        self.source = source
        self.measured = list(measured)
        self.unseen = unseen
        self.borders = list(borders)
        self.passes = [last_attempt(records) for records in passes]
        self.details = details

    def __str__(self) -> str:
        """Plain text, as wide as the terminal, else 110 columns, 80 without details."""
        page = io.StringIO()
        width = shutil.get_terminal_size((_WIDTH if self.details else _SHORT_WIDTH, 0)).columns
        console = Console(file=page, width=_UNLIMITED, color_system=None, force_terminal=False, legacy_windows=False)
        least = measure_renderables(console, console.options, list(self._pages())).minimum
        console.print(self, width=max(width, least), crop=False)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(self, f"step-{secrets.token_hex(4)}")  # a notebook shows several in one document

    def to_html(self, path: str | Path) -> Path:
        """Write one page that needs nothing else: steps as bars as wide as their time, memory kept, refusals.

        Returns:
            The path.
        """
        Path(path).write_text(page(self), encoding="utf-8")
        return Path(path)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._pages()
        if self.source:
            for title, text in self.sources().items():
                yield Text(f"\n{title}", style="bold")
                # Code is code: a broken line would not compile.
                yield Text(text.rstrip(), no_wrap=True, overflow="ignore")

    def _pages(self) -> Iterable[Any]:
        for k, plan in enumerate([*self.plans, None]):
            between = [Text(text) for before, text in self.borders if before == k]
            yield from [*([Text("")] if between and k else []), *between]
            if plan is None:
                break
            of = f" of {len(self.plans)}" if not self.unseen else ""
            number = f"Plan {k + 1}{of}: " if len(self.plans) > 1 or self.unseen else "Plan: "
            if k or between:
                yield Text("")
            show = _plan_page if self.details else _short_page
            yield from show(plan, self.measured[k] if self.measured else None, number)
            yield from pass_page(self.passes[k]) if self.passes else ()
        if self.unseen:
            yield Text(f"\n{self.beyond}")

    @property
    def beyond(self) -> str:
        """Sentence behind the last plan that is known; empty where all are."""
        return f"No plan is known from here on: {self.unseen}." if self.unseen else ""

    @property
    def makers(self) -> list[list[tuple[str, str]]]:
        """List of (step as text, the pass that made it) for each plan; of `explain(passes=True)`."""
        return [makers_of_steps(records) for records in self.passes]

    def sources(self) -> dict[str, str]:
        """Heading -> generated code, of each distinct kernel of the plans; equal kernels come once."""
        return sources(self.plans)


# What row kernels run as -> what it is called.
_TARGETS = {"cpp": "generated C++", "cuda": "generated CUDA C++", "torch": "PyTorch operations"}


# --------------------------------------------------------------------------------------------------- one plan


def _plan_page(plan: Plan, measured: Measured | None, number: str) -> Iterable[Any]:
    yield from _heading(plan, number)
    for direction, rows in rows_of(plan, measured).items():
        if rows:
            yield _table(direction, rows)
    if not plan.backward:
        yield Text(f"\n{_NO_BACKWARD}")
    yield from _kept_page(plan)
    yield from _refused_page(plan)
    yield from _gains_page(plan)
    yield from _totals_page(plan, measured)
    for note in plan.notes:
        yield Text(f"Note: {note}")


_NO_BACKWARD = "No backward: nothing in this call needs a gradient."


def _heading(plan: Plan, number: str) -> Iterable[Text]:
    x = plan.graph.values[0].spec
    dtype = text_of(x.dtype)
    device = f"{plan.device.name} (estimated)" if plan.device.estimate else plan.device.name
    yield Text(
        f"{number}{count(len(plan.graph.nodes), 'op')}, input {list(x.shape)} {dtype}, on {device}, "
        f"row kernels by {_TARGETS[plan.target]}, memory {plan.memory}",
        style="bold",
    )
    yield from map(Text, layouts(plan))


# Kind of a step -> its colour in a terminal.
_STYLES = {"kernel": "green", "fusion": "cyan", "formula": "yellow", "op": "yellow"}


@dataclass(frozen=True)
class _Fitting:
    """The first of several tables that fits, each with every column as wide as its longest line."""

    tables: tuple[Table, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [sum((c.width or 0) + 1 for c in table.columns) for table in self.tables]
        fits = (table for table, width in zip(self.tables, widths, strict=True) if width <= options.max_width + 1)
        yield next(fits, self.tables[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return measure_renderables(console, options, self.tables[-1:])


def _short_page(plan: Plan, measured: Measured | None, number: str) -> Iterable[Any]:
    """A line a step, and totals."""
    yield from _heading(plan, number)
    found = rows_of(plan, measured)
    if any(found.values()):
        yield _Fitting((_short_table(found, True), _short_table(found, False)))
    kept = f"Kept for backward: {size_text(plan.kept_bytes())} of activations"
    yield Text(kept if plan.backward else _NO_BACKWARD)
    yield from (Text(f"{name:8} {total}") for name, total in totals(plan, found, measured is not None).items())
    saved = gains(plan)
    if saved:
        yield Text(f"8 bits save {_gained(saved)[2]} ms of products, predicted")
    refused = len({r.name for r in plan.refusals})
    if refused:
        yield Text(
            f"{count(refused, 'fusion')} considered and not taken: explain(x, details=True) says why", style="dim"
        )
    for note in plan.notes:
        yield Text(f"Note: {note}")


def _short_table(found: Mapping[str, list[StepRow]], with_ops: bool) -> Table:
    """One table of both directions, with or without the ops that steps cover by name."""
    headings, times = _times([row for rows in found.values() for row in rows])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("ops", *(["what they are"] if with_ops else []), "step"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit, share", no_wrap=True)
    for direction, rows in found.items():
        if rows:
            table.add_row("", Text(direction.capitalize(), style="bold"))
        for block in _folded(rows):
            if isinstance(block, _Again):
                table.add_row(span(block.ops), block.text)
                continue
            name = Text(f"{block.what} {block.name}", style=_STYLES.get(block.what, "dim"))
            covers = [", ".join(block.covers)] if with_ops else []
            table.add_row(span(block.ops), *covers, name, *times(block), block.bound)
    return _whole(table)


def _times(rows: Sequence[StepRow]) -> tuple[list[str], Callable[[StepRow], list[str]]]:
    """Headings of the columns of times, in a unit for all of these rows, and the cells of one of them."""
    measured = any(row.measured is not None for row in rows)
    longest = max((max(row.seconds, row.measured or 0.0) for row in rows), default=0.0)
    unit, tick = ("ms", 1e-3) if longest >= 0.1 else ("us", 1e-6)

    def cells(row: StepRow) -> list[str]:
        return [f"{seconds / tick:.1f}" for seconds in (row.seconds, *([row.measured or 0.0] if measured else []))]

    return [f"{heading}\n{unit}" for heading in ("predicted", *(["measured"] if measured else []))], cells


def _table(direction: str, rows: list[StepRow]) -> Group:
    size_unit, size = ("MiB", 2.0**20) if max(r.read + r.written for r in rows) >= 2**20 else ("KiB", 2.0**10)
    headings, times = _times(rows)
    table = _StepTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ops", no_wrap=True)
    table.add_column("what they are", overflow="fold")
    table.add_column("step", overflow="fold")
    for heading in (f"read\n{size_unit}", f"written\n{size_unit}", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit, share", no_wrap=True)
    for block in _folded(rows):
        if isinstance(block, _Again):
            table.add_row(span(block.ops), "", block.text)
            continue
        cells = [f"{block.read / size:.2f}", f"{block.written / size:.2f}", *times(block), block.bound]
        more = (Padding(Text(text), (0, 0, 0, 2)) for text in block.more())
        step = Group(Text(f"{block.what} {block.name}", overflow="fold"), *more)
        table.add_row(span(block.ops), ", ".join(block.covers), step, *cells)
    return Group(Text(f"\n{direction.capitalize()}", style="bold"), _whole(table))


class _StepTable(Table):
    """Table whose two columns of words share what its numbers leave."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_UNLIMITED)
        what, step = (measure_renderables(console, wide, [c.header, *c.cells]) for c in self.columns[1:3])
        room = options.max_width - sum((c.width or 0) + 1 for c in self.columns) + 1
        if room >= what.minimum + step.minimum:
            first = room - max(step.minimum, min(step.maximum, _STEP_WIDTH))
            self.columns[1].width = max(what.minimum, min(what.maximum, first))
            self.columns[2].width = min(step.maximum, room - self.columns[1].width)
        return super().__rich_console__(console, options)


def _whole(table: Table) -> Table:
    """The table, with every column of numbers as wide as its longest line: only words wrap."""
    for column in table.columns:
        if column.no_wrap:
            column.width = max(map(len, "\n".join(map(str, (column.header, *column.cells))).splitlines()))
    return table


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
            yield _Again(ops, f"... the same {count(period, 'step')} {more}")
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


def _kept_page(plan: Plan) -> Iterable[Any]:
    if not plan.kept:
        return
    yield Text("\nKept for backward", style="bold")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")

    def order(kept: SavedTensor) -> tuple[int, int]:
        number = kept.ref.index
        return -kept.bytes, (plan.graph.makers[number] or 0) if kept.ref.kind is VALUE else number

    activations = sorted([k for k in plan.kept if k.owner == "activation"], key=order)
    for (_, size), entries in grouped(activations, lambda k: (_kept_name(plan, k)[0], k.bytes)).items():
        name, maker = _kept_name(plan, entries[0])
        where = f" of {maker}" if maker else ""
        grid.add_row(f"{multiple(len(entries))}{size_text(size)}", f"{name}{where}{and_others(len(entries))}")
    grid.add_row(size_text(plan.kept_bytes()), "activations together", style="bold")
    for owner, words in _OTHERS.items():
        entries = [k for k in plan.kept if k.owner == owner]
        if entries:
            text = words.format(count(sum(k.ref != SEED for k in entries), owner))
            seed = " and the seed of random draws" if any(k.ref == SEED for k in entries) else ""
            grid.add_row(size_text(plan.kept_bytes(owner)), text + seed)
    yield Padding(_whole(grid), (0, 0, 0, 2))
    if plan.choices:
        yield Text("\nKept, or computed again in backward (predicted)", style="bold")
        choices = grouped(plan.choices, str)
        yield Padding(Text("\n".join(multiple(len(c)) + text for text, c in choices.items())), (0, 0, 0, 2))


# Owner -> whose memory it is; none of it is counted as activations.
_OTHERS = {
    "statistic": "{} of rows",
    "input": "{} of the call, the caller's memory",
    "parameter": "{}, the model's memory",
    "tensor": "{} that each call makes of parameters",
}


def _kept_name(plan: Plan, kept: SavedTensor) -> tuple[str, str]:
    """Label of a kept tensor, and the op that makes it."""
    makers = {"values": plan.graph.makers.__getitem__, "nodes": lambda number: number}
    made_by = makers.get(kept.ref.kind.counts)
    maker = None if made_by is None else made_by(kept.ref.index)
    return kept.ref.label(plan.graph), "" if maker is None else f"op {maker} ({place(plan.graph.nodes[maker])})"


# ------------------------------------------------------------------------------------- what was not taken, totals


def _refused_page(plan: Plan) -> Iterable[Any]:
    if not plan.refusals:
        return
    yield Text("\nConsidered and not taken", style="bold")
    lines = []  # one for each reason; where that is of several fusions, their names stand for the places
    for entries in grouped(plan.refusals, lambda r: r.reason).values():
        what = ", ".join(dict.fromkeys(r.name for r in entries))
        if what == entries[0].name:
            ranges = list(dict.fromkeys(range_of(r.start, r.stop - 1) for r in entries))
            direction = {"joint": "both ways"}.get(entries[0].direction, entries[0].direction)
            what += f" ({direction}; {'; '.join(few(ranges, 3))})"
        lines.append(f"{what}: {entries[0].reason}")
    left = len(lines) - _FEW_REFUSALS
    if left > 1:
        lines = [*lines[:_FEW_REFUSALS], f"... and {left} more; all are in plan.refusals"]
    yield Padding(Text("\n".join(lines)), (0, 0, 0, 2))


def _gains_page(plan: Plan) -> Iterable[Any]:
    found = gains(plan)
    if not found:
        return
    yield Text(
        "\nProducts in 8 bits, beside these alone in their own precision, forward and backward (predicted)",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for k, heading in enumerate(("products of", "their own", "8 bits ms", "own ms", "gain ms")):
        table.add_column(heading, justify="right" if k > 1 else "left", no_wrap=k > 0, overflow="fold")
    for entries in grouped(found, lambda g: (g.dtype, g.seconds, g.own_seconds)).values():
        table.add_row(f"{entries[0].path}{and_others(len(entries))}", entries[0].dtype, *_gained(entries[:1]))
    table.add_row("together", "", *_gained(found), style="bold")
    yield Padding(_whole(table), (0, 0, 0, 2))


def _gained(entries: Sequence[Gain]) -> list[str]:
    """The milliseconds of some products in 8 bits, in their own precision, and the difference."""
    taken, own = math.fsum(g.seconds for g in entries), math.fsum(g.own_seconds for g in entries)
    return [f"{seconds * 1e3:.3f}" for seconds in (taken, own, own - taken)]


def _totals_page(plan: Plan, measured: Measured | None) -> Iterable[Any]:
    yield Text("\nTotals", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    predicted = ["predicted ms", "device ms", "host ms"]
    headings = ["", *predicted, *(["measured ms"] if measured else []), "predicted bytes", "steps", "launches"]
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k else "left", no_wrap=True)
    for name, of in totals(plan, rows_of(plan, measured), measured is not None).items():
        times = (of.seconds, of.device, of.host, *(() if of.measured is None else (of.measured,)))
        cells = [f"{seconds * 1e3:.3f}" for seconds in times]
        table.add_row(name, *cells, size_text(of.moved), str(of.steps), str(of.launches))
    yield Padding(_whole(table), (0, 0, 0, 2))
    recorded = sum(s.recorded for s in plan.segments)
    own = f"autograd: {count(len(plan.segments) - recorded, 'node')} of its own, else PyTorch's"
    nodes = own if recorded else "autograd nodes"
    text = f"{count(len(plan.segments), 'segment')} ({nodes}), {size_text(plan.kept_bytes())} of activations kept"
    # Kernels of many rows add up what their blocks have summed by a launch of its own; one written by hand says none.
    sums = len([d for s in plan.steps if (d := s.task.description) is not None and d.sums and plan.target == "cuda"])
    text += f"; generated kernels add up column sums by at most {count(sums, 'launch', 'es')} more" if sums else ""
    yield Padding(Text(text), (0, 0, 0, 2))
