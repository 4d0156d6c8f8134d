"""Draws docs/images/layer.svg from the real plan of a GPT layer: python docs/images/layer.py."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from xml.sax.saxutils import escape

import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step

LEFT, HEIGHT, GAP, MARGIN = 82, 34, 4, 2
SIZE, LEAST, LETTER = 12.0, 11.0, 0.6  # of a font; how wide its letters are
COLOURS = {"generated": "#3b7dd8", "product": "#6b7280", "other": "#9a6bb5"}


def layer(hidden: int, ffn: int, heads: int) -> te_fuser.Sequential:
    """The layer drawn: pre-norm attention and MLP with residuals and dropout."""
    return te_fuser.Sequential(
        te_fuser.Residual(
            ops.LayerNorm(hidden),
            ops.Linear(hidden, 3 * hidden),
            ops.DotProductAttention(heads, hidden // heads, mask="causal", layout="sequence_first"),
            ops.Linear(hidden, hidden),
            ops.Dropout(0.1),
        ),
        te_fuser.Residual(
            ops.LayerNorm(hidden), ops.Linear(hidden, ffn), ops.GELU(), ops.Linear(ffn, hidden), ops.Dropout(0.1)
        ),
    )


def colour(step: Step) -> str:
    """Generated kernels blue, products grey, the rest violet."""
    if isinstance(step.task, KernelTask):
        return COLOURS["generated"]
    return COLOURS["product"] if step.name.startswith("mat") else COLOURS["other"]


def words(name: str) -> list[str]:
    """The parts of a name that stay on one line, each but the last with its underscore."""
    return re.findall("[^_]*_|[^_]+", name)


def edges(names: list[str], steps: list[Step]) -> list[float]:
    """Where columns begin, and the last one ends: each is as wide as the words that stand in it alone."""
    alone = [[name] for name in names]
    for step in steps:
        if step.stop - step.start == 1:
            alone[step.start] += words(step.name)
    widths = [max(map(len, column)) * LETTER * SIZE + 4 * MARGIN + GAP for column in alone]
    return [round(edge, 1) for edge in accumulate(widths, initial=LEFT)]


def box(x: float, end: float, y: float, name: str, fill: str, ink: str = "#fff") -> str:
    """One rounded box from x to a gap before `end`, and in it a name, in as many lines as it needs."""
    width = end - GAP - x
    lines, letters = [""], int((width - 2 * MARGIN) / LETTER / LEAST)
    for word in words(name):
        if lines[-1] and len(lines[-1] + word) > letters:
            lines.append("")
        lines[-1] += word
    size = min(SIZE, (width - 2 * MARGIN) / LETTER / max(map(len, lines)))
    first = y + HEIGHT / 2 + size / 3 - 1.15 * size * (len(lines) - 1) / 2
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="5" fill="{fill}"/>' + "".join(
        f'<text x="{x + width / 2:.1f}" y="{first + 1.15 * size * k:.1f}" font-size="{size:.1f}" fill="{ink}" '
        f'text-anchor="middle">{escape(line)}</text>'
        for k, line in enumerate(lines)
    )


def lanes(steps: list[Step]) -> list[list[Step]]:
    """Steps in as few rows as do not overlap."""
    rows: list[list[Step]] = []
    for step in steps:
        row = next((r for r in rows if all(s.stop <= step.start or step.stop <= s.start for s in r)), None)
        if row is None:
            rows.append(row := [])
        row.append(step)
    return rows


def draw(plan: Plan) -> str:
    """The picture as SVG text."""
    parts, y = [], 12.0
    names = [n.op.kind.__name__.replace("DotProduct", "") for n in plan.graph.nodes]
    at = edges(names, [s for s in (*plan.forward, *plan.backward) if s.name != "alias"])
    parts += [box(at[k], at[k + 1], y, name, "#e5e7eb", "#111827") for k, name in enumerate(names)]
    parts.append(f'<text x="8" y="{y + 19}" font-size="13" fill="#374151">the list</text>')
    for title, steps in (("forward", plan.forward), ("backward", plan.backward)):
        y += HEIGHT + 18
        shown = [s for s in steps if s.name != "alias"]
        parts.append(f'<text x="8" y="{y + 14}" font-size="13" fill="#374151">{title}</text>')
        parts.append(f'<text x="8" y="{y + 29}" font-size="11" fill="#6b7280">{len(shown)} steps</text>')
        for row in lanes(shown):
            parts += [box(at[s.start], at[s.stop], y, s.name, colour(s)) for s in row]
            y += HEIGHT + 4
        y -= HEIGHT + 4
    width, height = round(at[-1] + 8), y + HEIGHT + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def picture() -> str:
    """The file's text."""
    with torch.device("meta"):
        x = torch.empty(2048, 4, 4096, dtype=torch.bfloat16, requires_grad=True)
        return draw(layer(4096, 16384, 32).bfloat16().plan(x, device="h200"))


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
