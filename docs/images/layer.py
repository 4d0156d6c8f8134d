"""Draws docs/images/layer.svg from the real plan of a GPT layer: python docs/images/layer.py."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step

UNIT, LEFT, HEIGHT = 56, 92, 30
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


def box(start: int, stop: int, y: float, text: str, fill: str, ink: str = "#fff", height: float = HEIGHT) -> str:
    """One rounded box over the columns start..stop-1."""
    x, width = LEFT + start * UNIT, (stop - start) * UNIT - 4
    size = min(12.0, 1.75 * width / max(len(text), 1))
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}"/>'
        f'<text x="{x + width / 2}" y="{y + height / 2 + size / 3:.1f}" font-size="{size:.1f}" fill="{ink}" '
        f'text-anchor="middle">{escape(text)}</text>'
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
    parts += [box(k, k + 1, y, name, "#e5e7eb", "#111827") for k, name in enumerate(names)]
    parts.append(f'<text x="8" y="{y + 19}" font-size="13" fill="#374151">the list</text>')
    for title, steps in (("forward", plan.forward), ("backward", plan.backward)):
        y += HEIGHT + 18
        shown = [s for s in steps if s.name != "alias"]
        parts.append(f'<text x="8" y="{y + 14}" font-size="13" fill="#374151">{title}</text>')
        parts.append(f'<text x="8" y="{y + 29}" font-size="11" fill="#6b7280">{len(shown)} steps</text>')
        for row in lanes(shown):
            parts += [box(s.start, s.stop, y, s.name.replace("mat_mul.", "d "), colour(s)) for s in row]
            y += HEIGHT + 4
        y -= HEIGHT + 4
    width, height = LEFT + UNIT * len(names) + 8, y + HEIGHT + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    x = torch.empty(2048, 4, 4096, dtype=torch.bfloat16, requires_grad=True)
    with torch.device("meta"):
        model = layer(4096, 16384, 32).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    Path(__file__).with_suffix(".svg").write_text(draw(model.plan(x, device="h200")))
