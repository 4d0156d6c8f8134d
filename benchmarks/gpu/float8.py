"""Layers in FP8 beside the same in bfloat16, forward and backward, on the GPU.

python -m benchmarks.gpu.float8                    # about a minute; prints a table, and what runs beside the products
python -m benchmarks.gpu.float8 --only layer       # cases whose names have this in them
python -m benchmarks.gpu.float8 --quick            # shorter rounds
python -m benchmarks.gpu.float8 --recipes current,blocks  # other recipes than delayed scaling
python -m benchmarks.gpu.float8 --record results   # also writes results/gpu-float8-<gpu>.json
python -m benchmarks.gpu --take-in FILE --only-docs  # that one into benchmarks/results/, and the tables of the guides

All ways take turns in long blocks, Transformer Engine's module by its own delayed scaling too, where it is installed.
"over its products": from the first kernel's begin to the last one's end, over what the products and attention of that
run take; "over fp8's": over what these take by delayed scaling; "as copies": over its products if everything beside
them were plain copies of the bytes that the plan says, one after the other without a gap, at the rate of a copy in that
run. Memory kept for backward counts neither parameters nor kept weights; "host" is how long a call keeps the host busy.
`--toy` tries the command on a CPU, in tiny sizes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_fuser as te
from benchmarks import models
from benchmarks.common import command_parser
from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.entries import why
from benchmarks.gpu.contest.goals import Goal, judged, sentence
from benchmarks.gpu.contest.measure import (
    QUICK,
    SHORT,
    TRIAL,
    Card,
    Effort,
    Trace,
    contest,
    kept_bytes,
    kind_of,
    peak_bytes,
    traced,
)
from benchmarks.gpu.heads import copied
from benchmarks.gpu.record.float8 import COLUMNS, KIND, table_of
from benchmarks.gpu.record.records import circumstances, part_record, record_path, write
from te_fuser.quantization import microbatch
from te_fuser.quantization.products import products_of
from te_fuser.quantization.state import state_of
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

CASES: dict[str, models.Builder] = {
    "layer, dropout 0.1": models.gpt(0.1),
    "layer": models.gpt(0.0),
    "mlp, LayerNorm, GELU": models.mlp,
    "mlp, RMSNorm, SwiGLU": models.gated_mlp,
}
# What another library calls a case, and its dropout.
RIVALS = {
    "layer, dropout 0.1": ("seed layer", 0.1),
    "layer": ("seed layer", 0.0),
    "mlp, LayerNorm, GELU": ("LayerNorm-GELU MLP", 0.0),
    "mlp, RMSNorm, SwiGLU": ("RMSNorm-SwiGLU MLP", 0.0),
}
PLAIN, FP8, KEPT, LEAN = "bfloat16", "fp8", "fp8, kept weights", "fp8, kept weights, lean"
_SHOWN = 12  # kernels beside the products
_HOST_CALLS, _HOST_ROUNDS = 3, 9  # few calls, so that the GPU's queue is never full
_MIB = 2**20
_COPIED = 128 * _MIB  # read, and as many written


@dataclass(frozen=True)
class Way:
    """Way to run a model: by a recipe or in its own precision; with weights kept in 8 bits; what backward keeps."""

    recipe: Recipe | None = None
    keeps: bool = False
    memory: str = "balanced"


DELAYED = DelayedScaling(amax_history_len=16)
RECIPES: dict[str, dict[str, Way]] = {
    "fp8": {FP8: Way(DELAYED), KEPT: Way(DELAYED, keeps=True), LEAN: Way(DELAYED, keeps=True, memory="lean")},
    "current": {"current": Way(Float8CurrentScaling())},
    "blocks": {"blocks": Way(Float8BlockScaling())},
}


def goals_of(case: str) -> tuple[Goal, ...]:
    """Goals on an H200."""
    if not case.startswith("layer"):
        beside = Goal("over_own_products", 1.13, FP8), Goal("over_own_products", 1.10, KEPT)
        return *beside, *(Goal("over_transformer_engine", 0.96, way) for way in (FP8, KEPT))
    return (
        Goal("over_own_products", 1.12, FP8),
        Goal("over_own_products", 1.095, KEPT),
        Goal("over_own_products", 1.17, "current"),
        Goal("over_own_products", 1.12, "blocks"),
        Goal("over_tensor_products", 1.32, "blocks"),
        Goal("over_bfloat16", 1 / 1.5 if "dropout" in case else 1 / 1.55, FP8),
        Goal("kernels", 34, FP8),
        Goal("kept_mib", 740, KEPT),  # copies of weights apart
        Goal("kept_mib", 680, LEAN),
        Goal("peak_mib", 1600, FP8),
        Goal("host_over_bfloat16", 1.2, FP8),
    )


class Step:
    """A forward and a backward of a model by one way."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, way: Way) -> None:
        self.model, self.x, self.way = model, x, way
        self.dy = torch.ones_like(x)
        if way.keeps:
            self._forward(True)

    def forward(self) -> torch.Tensor:
        """The output; weights that are kept were quantized before."""
        return self._forward(False if self.way.keeps else None)

    def _forward(self, first: bool | None) -> torch.Tensor:
        with self._region(first):
            return self.model(self.x)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _region(self, first: bool | None) -> Iterator[None]:
        with te.fp8_autocast(enabled=self.way.recipe is not None, fp8_recipe=self.way.recipe), microbatch(first):
            yield

    def __call__(self) -> None:
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None
        self.forward().backward(self.dy)

    def bytes_beside(self) -> float | None:
        """Bytes that the plan moves beside products and attention; None where no plan says it."""
        with self._region(False if self.way.keeps else None):
            plans = self.model.explain(self.x).plans  # type: ignore[operator]
        costs = [step.cost for plan in plans for step in (*plan.forward, *plan.backward)]
        return sum(cost.apart if cost.flops else cost.read + cost.written for cost in costs)

    def apart(self) -> list[torch.Tensor]:
        """Tensors that do not count as kept for backward."""
        kept = [t for w in products_of(self.model).values() for t in state_of(w).kept.values()]
        return [*self.model.parameters(), *kept]


class RivalStep(Step):
    """Step of Transformer Engine's module, in a region of its own."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor) -> None:
        super().__init__(model, x, Way())

    @contextlib.contextmanager
    def _region(self, first: bool | None) -> Iterator[None]:
        with libraries.fp8_region():
            yield

    def bytes_beside(self) -> None:
        """None: the module has no plan."""


def rivals(case: str, hidden: int, x: torch.Tensor, card: Card) -> tuple[dict[str, RivalStep], dict[str, str]]:
    """Transformer Engine's, where it is installed; and why it is left out, where it does not run."""
    known, dropout = RIVALS[case]
    make = libraries.installed(known, hidden, dropout).get(libraries.TE)
    if make is None:
        return {}, {}
    try:
        step = RivalStep(make().to(x.device, x.dtype), x)
        step()
        card.synchronize()
    except Exception as error:
        return {}, {libraries.TE: why(error)}
    return {libraries.TE: step}, {}


def entry(
    name: str, build: models.Builder, sizes: tuple[int, int], card: Card, effort: Effort, recipes: Sequence[str]
) -> dict[str, Any]:
    """All ways of a case, for the record."""
    tokens, hidden = sizes
    ways = {PLAIN: Way()} | {way: how for recipe in recipes for way, how in RECIPES[recipe].items()}
    pairs = {memory: build(tokens, hidden, memory=memory) for memory in dict.fromkeys(w.memory for w in ways.values())}
    made = {memory: pair.fused.to(card.device, torch.bfloat16) for memory, pair in pairs.items()}
    shape = pairs[Way.memory].shape
    x = torch.randn(shape, device=card.device, dtype=torch.bfloat16).requires_grad_()
    others, left_out = rivals(name, hidden, x, card)
    steps = {way: Step(made[how.memory], x, how) for way, how in ways.items()} | others
    results = contest(steps, effort, card)
    found: dict[str, dict[str, Any]] = {}
    for way, result in results.items():
        found[way] = {**result.as_data(), "over_bfloat16": result.over(results[PLAIN]), **_beyond(steps[way], card)}
        for rival in others.keys() - {way}:
            found[way]["over_transformer_engine"] = result.over(results[rival])
    busy = host_ms(steps, card)
    for way, data in found.items():
        data["host_ms"] = busy[way]
        data["host_over_bfloat16"] = data["host_ms"] / found[PLAIN]["host_ms"]
        data |= over_tensor_products(data, found.get(FP8, {}))
    about = {"case": name, "tokens": tokens, "hidden": hidden, "contenders": found}
    return {**about, **({"left_out": left_out} if left_out else {}), "goals": judged(goals_of(name), about)}


def over_tensor_products(data: Mapping[str, Any], tensorwise: Mapping[str, Any]) -> dict[str, float]:
    """A way's time over what products and attention take by one scale for each tensor, in the run of that way."""
    floor, own = (d.get("products_ms", 0.0) + d.get("attention_ms", 0.0) for d in (tensorwise, data))
    return {"over_tensor_products": data["over_own_products"] * own / floor} if floor and own else {}


def _beyond(step: Step, card: Card) -> dict[str, Any]:
    """Memory and kernels; of a CPU nothing is known of kernels."""
    found: dict[str, Any] = {"kept_mib": kept_bytes(step.forward, step.apart()) / _MIB}
    trace, peak = traced(step, card), peak_bytes(step, card)
    if peak is not None:
        found["peak_mib"] = peak / _MIB
    return found if trace is None else {**found, **trace.as_data(), **_as_copies(step, trace)}


def _as_copies(step: Step, trace: Trace) -> dict[str, float]:
    """Time of plain copies of all bytes that the plan moves beside its products, and the step's time with them."""
    moved = step.bytes_beside()
    if moved is None:
        return {}
    seconds = copied(_COPIED) * moved / (2 * _COPIED)
    return {"copies_ms": 1e3 * seconds, "as_copies": 1 + seconds / (trace.products + trace.attention)}


def host_ms(steps: Mapping[str, Step], card: Card) -> dict[str, float]:
    """Milliseconds that the host is busy with one call of each way, whatever the GPU has still to do; in turns."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(_HOST_ROUNDS):
        for way, step in steps.items():
            step()
            card.synchronize()
            start = time.perf_counter()
            for _ in range(_HOST_CALLS):
                step()
            times[way].append((time.perf_counter() - start) / _HOST_CALLS)
            card.synchronize()
    return {way: 1e3 * statistics.median(found) for way, found in times.items()}


def beside(data: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """(name, how often, ms) of the kernels that are no products, the longest first."""
    rows = [row for row in data.get("by_name", ()) if kind_of(row["kernel"].lower()) == "rest"]
    for row in sorted(rows, key=lambda row: -row["ms"])[:_SHOWN]:
        yield row["kernel"], row["count"], row["ms"]


def shown(entries: list[dict[str, Any]], console: Console) -> None:
    """Print a table, what runs beside the products, and the goals."""
    header, rows = table_of(entries, COLUMNS)
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for e in entries:
        for way, data in e["contenders"].items():
            for kernel, count, ms in beside(data):
                line = f"{e['case']}, {way}: {1e3 * ms:8.1f} us in {count:4.1f} {kernel}"
                console.print(line, soft_wrap=True, markup=False)
        for name, reason in e.get("left_out", {}).items():
            console.print(f"{e['case']}: {name} is left out: {reason}", markup=False)
        for verdict in e["goals"]:
            console.print(f"{e['case']}: {sentence(verdict)}", markup=False)


def main() -> None:
    """Print the table."""
    parser = command_parser("benchmarks.gpu.float8", __doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--recipes", default="fp8", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: does it run at all")
    parser.add_argument("--record", type=Path, help="write every measurement into this folder")
    parser.add_argument("--commit", default="", help="what is measured, where the tree is no git repository")
    chosen = parser.parse_args()
    device, (tokens, hidden) = ("cpu", (64, 64)) if chosen.toy else ("cuda", (8192, 4096))
    effort = TRIAL if chosen.toy else QUICK if chosen.quick else SHORT
    card, start, recipes = Card(torch.device(device)), time.perf_counter(), chosen.recipes.split(",")
    asked = {name: build for name, build in CASES.items() if chosen.only in name}
    entries = [entry(name, build, (tokens, hidden), card, effort, recipes) for name, build in asked.items()]
    shown(entries, Console(width=200))
    if chosen.record:
        options = {"only": chosen.only, "quick": chosen.quick or chosen.toy, "recipes": recipes}
        about = {"kind": KIND, **circumstances(card, chosen.commit)}
        record = part_record(about, effort, options, time.perf_counter() - start, entries)
        write(chosen.record / record_path(card.name, KIND).name, record)


if __name__ == "__main__":
    main()
