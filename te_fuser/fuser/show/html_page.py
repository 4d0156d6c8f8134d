"""An explanation as one HTML page without scripts: it needs no network, and keyboards reach all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from te_fuser.dtypes import text_of
from te_fuser.fuser.plan.plan import Plan, size_text
from te_fuser.fuser.show.step_rows import StepRow, Total, count, layouts, place, range_of, rows_of, span, totals

if TYPE_CHECKING:
    from te_fuser.fuser.show.explain import Explanation
    from te_fuser.fuser.show.measure import Measured

_DIRECTIONS = ("forward", "backward")
_KINDS = {
    "fusion": "fusion",
    "kernel": "generated kernel",
    "op": "the op's own code",
    "torch": "PyTorch",
    "link": "exchange between ranks",
}
_STYLE = """
.te-fuser{--ink:#1c2733;--soft:#5b6b7b;--line:#d8dee5;--page:#fff;--fusion:#3f6fa3;--kernel:#c2414f;--op:#7a6ba8;
--torch:#8a8f98;--link:#c98a1b;color:var(--ink);background:var(--page);font:14px/1.45 system-ui,sans-serif;
max-width:1100px;margin:0 auto;padding:12px}
@media(prefers-color-scheme:dark){.te-fuser{--ink:#e6ebf0;--soft:#9fb0c0;--line:#3a4653;--page:#12181f;--fusion:#6c9bd0;
--kernel:#e0707c;--op:#a394d4;--torch:#a0a6b0;--link:#e0ab4c}}
.te-fuser h2{font-size:17px;margin:20px 0 4px}.te-fuser h3{font-size:14px;margin:16px 0 4px}
.te-fuser p{margin:4px 0}.te-fuser .soft{color:var(--soft)}
.te-fuser .lane{position:relative;display:flex;height:40px;margin:2px 0 6px;padding:0;list-style:none}
.te-fuser .lane li{display:flex;min-width:0;flex-basis:0;overflow:hidden;list-style:none}
.te-fuser .lane a{flex:1;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;color:#fff;font-size:11px;
padding:3px 0;text-indent:3px;text-decoration:none;margin-right:min(1px,20%)}
.te-fuser a:focus{outline:3px solid var(--ink);outline-offset:-3px}
.te-fuser .tip{display:none;position:absolute;left:0;right:0;top:42px;z-index:2;background:var(--page);padding:8px;
border:1px solid var(--line);box-shadow:0 3px 10px #0004;white-space:pre-line}
.te-fuser li:hover .tip,.te-fuser li:focus-within .tip{display:block}
.te-fuser .scroll{overflow-x:auto}.te-fuser table{border-collapse:collapse;width:100%;font-size:13px}
.te-fuser th,.te-fuser td{text-align:left;vertical-align:top;padding:3px 8px 3px 0;border-bottom:1px solid var(--line)}
.te-fuser td.n,.te-fuser th.n{text-align:right;white-space:nowrap}.te-fuser tr:target{background:#ffd54a44}
.te-fuser .key{display:inline-block;width:10px;height:10px;margin:0 4px 0 12px}
.te-fuser summary{cursor:pointer;font-weight:600;margin-top:14px}.te-fuser svg{width:100%;height:90px;display:block}
.te-fuser code{font-family:ui-monospace,monospace;font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere}
""" + "".join(f".te-fuser .{kind}{{background:var(--{kind})}}" for kind in _KINDS)


def page(explanation: Explanation) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    body = fragment(explanation)
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>te_fuser: plan</title><style>body{{margin:0}}'
        f"@media(prefers-color-scheme:dark){{body{{background:#12181f}}}}</style></head><body>{body}</body></html>\n"
    )


def fragment(explanation: Explanation, name: str = "step") -> str:
    """Content of the page with its own style; `name` begins ids of elements."""
    e, parts = explanation, [f"<style>{_STYLE}</style>"]
    keys = "".join(f'<span class="key {kind}"></span>{words}' for kind, words in _KINDS.items())
    parts.append(f'<p class="soft">A bar is a step, as wide as its time.{keys}</p>')
    for k, plan in enumerate(e.plans):
        parts += [f"<p>{escape(text)}</p>" for before, text in e.borders if before == k]
        title = f"Plan {k + 1} of {len(e.plans)}" if len(e.plans) > 1 else "Plan"
        parts += _plan(plan, e.measured[k] if e.measured else None, title, f"{name}-{k}")
    parts += [f"<p>{escape(text)}</p>" for before, text in e.borders if before == len(e.plans)]
    if e.unseen:
        parts.append(f"<p>{escape(e.beyond)}</p>")
    return f'<div class="te-fuser">{"".join(parts)}</div>'


def _plan(plan: Plan, measured: Measured | None, title: str, name: str) -> Iterator[str]:
    x, rows = plan.graph.values[0].spec, rows_of(plan, measured)
    sums = totals(plan, rows, measured is not None)
    what = f"{count(len(plan.graph.nodes), 'op')}, input {list(x.shape)} {text_of(x.dtype)}, on {plan.device.name}"
    yield f'<h2>{title}</h2><p class="soft">{escape(what)}, memory {plan.memory}</p>'
    yield from (f"<p>{escape(text)}</p>" for text in layouts(plan))
    for direction, steps in rows.items():
        if steps:
            yield from _direction(direction, steps, sums[direction], f"{name}-{direction}")
    if plan.backward:
        yield f"<p>Both together: {sums['both']}</p>"
    else:
        yield "<p>No backward: nothing in this call needs a gradient.</p>"
    yield from _memory(plan, rows)
    yield from _refusals(plan)
    yield "<details><summary>The list</summary>"
    table = []
    for node in plan.graph.nodes:
        spec = plan.graph.values[node.output].spec
        table.append([str(node.index), place(node), repr(node.op), f"{list(spec.shape)} {text_of(spec.dtype)}"])
    yield from _table(("op", "place", "as written", "output"), table)
    yield "</details>"
    yield from (f"<p>Note: {escape(note)}</p>" for note in plan.notes)


def _time(row: StepRow) -> float:
    return row.seconds if row.measured is None else row.measured


def _direction(direction: str, rows: Sequence[StepRow], sums: Total, name: str) -> Iterator[str]:
    total = sum(map(_time, rows))
    how = "predicted" if sums.measured is None else "measured"
    yield f"<h3>{direction.capitalize()}: {sums}, {count(sums.steps, 'step')}</h3>"
    yield f'<ol class="lane" aria-label="{direction}">'
    for k, row in enumerate(rows):
        share = f" ({_time(row) / total:.0%})" if total else ""
        tip = "\n".join([
            f"{row.name}: {_time(row) * 1e6:.1f} us{share}, limit: {row.bound}",
            f"ops {span(row.ops)}: {', '.join(row.covers)}",
            f"reads {size_text(row.read)}, writes {size_text(row.written)}",
            *row.more(),
        ])  # fmt: skip
        sends = row.limit == "link" or row.sends
        kind = "link" if sends else row.what if row.what in _KINDS else "torch"
        yield (
            f'<li style="flex-grow:{max(_time(row) / total if total else 1.0, 1e-4):.5f}"><a class="{kind}" '
            f'href="#{name}-{k}">{escape(row.name)}</a><span class="tip">{escape(tip)}</span></li>'
        )
    yield "</ol><details><summary>Steps</summary>"
    table = [
        [span(row.ops), f"{row.what} {row.name}", ", ".join(row.covers), f"{_time(row) * 1e6:.1f}",
         size_text(row.read), size_text(row.written), row.bound, "; ".join(row.more())]
        for row in rows
    ]  # fmt: skip
    ids = [f"{name}-{k}" for k in range(len(rows))]
    heads = ("ops", "step", "of", f"us {how}", "read", "written", "limit, share of it", "more")
    yield from _table(heads, table, (3, 4, 5), ids)
    yield "</details>"


def _memory(plan: Plan, rows: dict[str, list[StepRow]]) -> Iterator[str]:
    """Activations kept for backward: a curve over both directions, and a table."""
    kept = [k for k in plan.kept if k.owner == "activation" and k.bytes]
    if not kept:
        return
    forward, backward = (list(map(_time, rows[d])) for d in _DIRECTIONS)
    spans = {}  # the step of forward that makes it, and the last one of backward that reads it
    for ref in [k.ref for k in kept]:
        made = next((k for k, step in enumerate(plan.forward) if ref in step.writes()), 0)
        reads = [k for k, step in enumerate(plan.backward) if ref in step.reads()]
        spans[ref] = made, max(reads, default=len(plan.backward) - 1)
    changes = [0] * (len(forward) + len(backward) + 1)
    for k in kept:
        made, last = spans[k.ref]
        changes[made] += k.bytes
        changes[len(forward) + last + 1] -= k.bytes
    whole, at, held, peak = sum(forward) + sum(backward) or 1.0, 0.0, 0, 0
    points = [(0.0, 0)]
    for seconds, change in zip([*forward, *backward, 0.0], changes, strict=True):
        held += change
        peak = max(peak, held)
        points += [(at, held), (at + seconds, held)]
        at += seconds
    scaled = " ".join(f"{1000 * x / whole:.1f},{88 - 84 * y / peak:.1f}" for x, y in points)
    turn = 1000 * sum(forward) / whole
    yield (
        f"<h3>Kept for backward: {size_text(plan.kept_bytes())} of activations, {size_text(peak)} at most at once</h3>"
        f'<svg viewBox="0 0 1000 90" preserveAspectRatio="none" role="img" aria-label="bytes kept over a step: forward '
        f'up to the line, then backward"><polygon points="0,88 {scaled} 1000,88" fill="var(--fusion)" opacity=".5"/>'
        f'<line x1="{turn:.1f}" x2="{turn:.1f}" y1="0" y2="90" stroke="var(--soft)" stroke-dasharray="4"/></svg>'
        "<details><summary>Tensors kept</summary>"
    )
    names = {d: [row.name for row in rows[d]] for d in _DIRECTIONS}
    table = [
        [k.ref.label(plan.graph), size_text(k.bytes), names["forward"][made], names["backward"][last]]
        for k in sorted(kept, key=lambda k: -k.bytes)
        for made, last in (spans[k.ref],)
    ]
    yield from _table(("tensor", "bytes", "made by", "last read by"), table, (1,))
    yield "</details>"


def _refusals(plan: Plan) -> Iterator[str]:
    if not plan.refusals:
        return
    number = count(len({r.name for r in plan.refusals}), "fusion")
    places = count(len(plan.refusals), "place")
    yield f"<details><summary>Considered and not taken: {number}, at {places}</summary>"
    both = {"joint": "both ways"}
    table = [
        [r.name, both.get(r.direction, r.direction), range_of(r.start, r.stop - 1), r.reason] for r in plan.refusals
    ]
    yield from _table(("fusion", "direction", "where", "reason"), table)
    yield "</details>"


def _table(
    heads: Iterable[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), ids: Sequence[str] = ()
) -> Iterator[str]:
    kinds = dict.fromkeys(numbers, ' class="n"')
    yield '<div class="scroll"><table><thead><tr>'
    yield from (f'<th scope="col"{kinds.get(k, "")}>{head}</th>' for k, head in enumerate(heads))
    yield "</tr></thead><tbody>"
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kinds.get(k, '')}><code>{escape(text)}</code></td>" for k, text in enumerate(row))
        yield f'<tr id="{ids[number]}">{cells}</tr>' if ids else f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
