"""Layers in FP8 beside the same in bfloat16, forward and backward, on the GPU.

python -m benchmarks.gpu.float8               # about a minute; prints a table, and what runs beside the products
python -m benchmarks.gpu.float8 --only layer  # cases whose names have this in them
python -m benchmarks.gpu.float8 --quick       # shorter rounds
python -m benchmarks.gpu.float8 --recipes current,blocks  # other recipes than delayed scaling
python -m benchmarks.gpu.float8 --json FILE   # also writes a record

Both take turns in long blocks. "over its products": from the first kernel's begin to the last one's end, over what the
products and attention of that run take. `--toy` tries the command on a CPU, in tiny sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import te_fuser as te
from benchmarks import models
from benchmarks.common import command_parser, write_record
from benchmarks.gpu.contest.measure import QUICK, SHORT, TRIAL, Card, Effort, Trace, contest, kind_of, traced
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

CASES: dict[str, models.Builder] = {
    "layer, dropout 0.1": models.gpt(0.1),
    "layer": models.gpt(0.0),
    "mlp, LayerNorm, GELU": models.mlp,
    "mlp, RMSNorm, SwiGLU": models.gated_mlp,
}
RECIPES: dict[str, Recipe] = {
    "fp8": DelayedScaling(amax_history_len=16),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
_SHOWN = 12  # kernels beside the products


@dataclass(frozen=True)
class Line:
    """One way to run a case; of a CPU nothing is known of kernels."""

    case: str
    way: str
    ms: float
    over_bfloat16: float
    kernels: float = 0.0
    products_ms: float = 0.0
    attention_ms: float = 0.0
    rest_ms: float = 0.0
    over_own_products: float = 0.0
    beside: list[tuple[str, float, float]] = field(default_factory=list)


def steps_of(
    build: models.Builder, tokens: int, hidden: int, device: torch.device, recipes: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """A forward and a backward, by each way, of one model."""
    pair = build(tokens, hidden)
    model = pair.fused.to(device, torch.bfloat16)
    x = torch.randn(pair.shape, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(model(x))

    def step(recipe: Recipe | None) -> None:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = model(x)
        y.backward(dy)

    ways = {name: functools.partial(step, RECIPES[name]) for name in recipes}
    return {"bfloat16": lambda: step(None), **ways}


def measured(
    name: str, build: models.Builder, tokens: int, hidden: int, card: Card, effort: Effort, recipes: Sequence[str]
) -> Iterator[Line]:
    """All ways of a case."""
    steps = steps_of(build, tokens, hidden, card.device, recipes)
    results = contest(steps, effort, card)
    for way, result in results.items():
        trace = traced(steps[way], card)
        over = result.over(results["bfloat16"])
        yield Line(name, way, 1e3 * result.seconds, over, **({} if trace is None else _of_trace(trace)))


def _of_trace(trace: Trace) -> dict[str, object]:
    data = trace.as_data()
    beside = [row for row in data["by_name"] if kind_of(row["kernel"].lower()) == "rest"]
    beside.sort(key=lambda row: -row["ms"])
    rows = [(row["kernel"], row["count"], row["ms"]) for row in beside[:_SHOWN]]
    names = ("kernels", "products_ms", "attention_ms", "rest_ms", "over_own_products")
    return {name: data.get(name, 0.0) for name in names} | {"beside": rows}


def main() -> None:
    """Print the table."""
    parser = command_parser("benchmarks.gpu.float8", __doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--recipes", default="fp8", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: does it run at all")
    parser.add_argument("--json", type=Path, help="write a record, too")
    chosen = parser.parse_args()
    device, (tokens, hidden) = ("cpu", (64, 64)) if chosen.toy else ("cuda", (8192, 4096))
    effort = TRIAL if chosen.toy else QUICK if chosen.quick else SHORT
    card, console, lines = Card(torch.device(device)), Console(width=160), []
    for name, build in CASES.items():
        if chosen.only in name:
            lines += measured(name, build, tokens, hidden, card, effort, chosen.recipes.split(","))
    table = Table(
        "case", "way", "ms", "of bfloat16", "kernels", "products ms", "attention ms", "rest ms", "over its products"
    )
    for n in lines:
        numbers = [f"{n.ms:.3f}", f"{n.over_bfloat16:.3f}", f"{n.kernels:.0f}"]
        numbers += [f"{v:.3f}" for v in (n.products_ms, n.attention_ms, n.rest_ms, n.over_own_products)]
        table.add_row(n.case, n.way, *numbers)
    console.print(table)
    for n in lines:
        for kernel, count, ms in n.beside:
            console.print(
                f"{n.case}, {n.way}: {1e3 * ms:8.1f} us in {count:4.1f} {kernel}", soft_wrap=True, markup=False
            )
    if chosen.json:
        write_record(chosen.json, [asdict(line) for line in lines], {"only": chosen.only, "quick": chosen.quick})


if __name__ == "__main__":
    main()
