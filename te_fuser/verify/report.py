"""Report of a verification: rows, in one line, as a table and as an error."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from te_fuser.compare import Row

_FEW = 5  # failures that are named


TELL: ContextVar[Callable[[str], object]] = ContextVar("TELL", default=str)  # takes the name of a case that begins


@contextmanager
def progress(title: str, told: bool = True) -> Iterator[None]:
    """Context in which stderr, if a terminal, shows the case that TELL took last, of how many."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = TimeElapsedColumn(), TextColumn("verify {task.description}", markup=False)
    quiet = not (told and sys.stderr.isatty())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, disable=quiet
    ) as shown:
        task, number = shown.add_task(title), itertools.count(1)
        before = TELL.set(lambda c: shown.update(task, description=f"{title}, case {next(number)}: {c}", refresh=True))
        try:
            yield
        finally:
            TELL.reset(before)


class VerificationError(AssertionError):
    """A fused result differs from the unfused ops; the message names the case, the tensor and the error."""


@dataclass(frozen=True)
class VerifyReport:
    """The rows of one verification.

    Attributes:
        title: the fusion or model.
        rows: one for each tensor of each case.
        skipped: (case, why it was not run).
    """

    title: str
    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        """True where every row passed."""
        return all(row.passed for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that did not pass."""
        return tuple(row for row in self.rows if not row.passed)

    def error(self) -> VerificationError:
        """The failure in the simplest case, which is run first, and how many more there are."""
        failures = self.failures
        more = f" (and {len(failures) - 1} more of {len(self.rows)} checks)" if len(failures) > 1 else ""
        return VerificationError(f"{self.title}: {failures[0]}{more}")

    def __str__(self) -> str:
        """A line where all passed; else the first failures, the simplest cases first."""
        ran, left = (len(dict.fromkeys(cases)) for cases in ((r.case for r in self.rows), (c for c, _ in self.skipped)))
        failed = [str(row) for row in self.failures]
        passed = f"{len(failed)} of {len(self.rows)} checks failed" if failed else f"{len(self.rows)} checks passed"
        reasons = [*dict.fromkeys(why for _, why in self.skipped)]
        others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        not_run = f", {left} not run ({reasons[0]}{others})" if left else ""
        more = [f"... and {len(failed) - _FEW} more"] if len(failed) > _FEW else []
        head = f"{self.title}: {passed}, in {ran} cases{not_run}; report.table() shows them"
        return "\n  ".join([head, *failed[:_FEW], *more])

    __repr__ = __str__

    def table(self) -> str:
        """Every case with the tensor closest to its limit, and reasons of those not run."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for heading, side in (("case", "left"), ("worst tensor", "left"), ("error", "right"), ("allowed", "right")):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]
        table.add_column("", justify="left")
        for case in dict.fromkeys(row.case for row in self.rows):
            worst = max((row for row in self.rows if row.case == case), key=lambda row: row.share)
            verdict = "ok" if worst.passed else worst.note or "failed"
            table.add_row(case, worst.tensor, f"{worst.error:.1e}", f"{worst.allowed:.1e}", verdict)
        for why in dict.fromkeys(why for _, why in self.skipped):
            cases = [case for case, reason in self.skipped if reason == why]
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            table.add_row(f"{cases[0]}{more}", "", "", "", f"not run: {why}")
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return capture.get()
