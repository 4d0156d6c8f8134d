"""Passes of a call as text: what each changed of the list of ops and of the plan, and which pass made each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from te_fuser.fuser.show.words import count

if TYPE_CHECKING:
    from te_fuser.fuser.graph.passes import PassRecord

_MOST = 12  # entries of one pass


def last_attempt(records: Sequence[PassRecord]) -> list[PassRecord]:
    """The records of one plan: those from the last beginnings on, where planning began anew."""
    starts = {r.name: k for k, r in enumerate(records) if not r.before and r.name in ("list", "cover")}
    first, second = starts.get("list", 0), starts.get("cover", len(records))
    return [r for r in records[first:second] if r.over == "ops"] + [*records[second:]]


def pass_page(records: Sequence[PassRecord]) -> Iterable[Text | Padding]:
    """A line for each pass, and below it the entries that it added (+), took away (-) and changed (~)."""
    yield Text("\nPasses", style="bold")
    width = max([len(r.name) for r in records], default=0)
    for record in records:
        if not record.before:
            yield Text(f"{record.name:<{width}}  {count(len(record.after), record.over.removesuffix('s'))}")
            continue
        marked = [("-", record.removed), ("+", record.added), ("~", record.changed)]
        counts = [f"{mark}{len(texts)}" for mark, texts in marked if texts] + ["another order"] * record.moved
        yield Text(f"{record.name:<{width}}  {', '.join(counts) or 'no change'}")
        listed = marked if record.over == "steps" else marked[:2]
        lines = [f"{mark} {text}" for mark, texts in listed for text in texts]
        more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
        yield from (Padding(Text(line), (0, 0, 0, 4)) for line in [*lines[:_MOST], *more])
    made = Counter(maker for _, maker in makers_of_steps(records))
    yield Text(f"Steps made by: {', '.join(f'{name} {number}' for name, number in made.items()) or 'none'}")


def makers_of_steps(records: Sequence[PassRecord]) -> list[tuple[str, str]]:
    """(step as text, the pass that made it) of each step of the plan; "cover": the covers of the graph have it."""
    found: dict[str, str] = {}
    steps = [r for r in records if r.over == "steps"]
    for record in steps:
        for text in record.added:
            found.setdefault(text, record.name)
    return [(text, found[text]) for text, _ in steps[-1].after] if steps else []
