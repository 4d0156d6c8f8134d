"""A whole model against its floor and its rivals: time, kernels, memory, and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import te_fuser
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entrants import Entrants
from benchmarks.gpu.contest.entries import MIB, OURS, Entry, add_details, attempt, compared
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import Effort, Result, Step, contest
from benchmarks.gpu.parts.floor import make_floor
from benchmarks.models import Builder, Rival, copy_parameters
from te_fuser.fuser.show.step_rows import step_rows

# Fusions that take part where a package is installed that te_fuser does not ask for.
OPTIONAL = (
    "attention_cuda_cudnn_frontend",
    "attention_cuda_flash_attn_4",
    "bias_gelu_matmul_quack",
    "float8_matmul_add_bias_quack",
    "float8_matmul_add_bias_quack_dropout",
    "float8_matmul_bias_quack",
    "float8_matmul_gelu_quack",
    "float8_matmul_gelu_quack_aux",
    "matmul_bias_gelu_quack",
    "matmul_bias_gelu_quack_aux",
    "swiglu_matmul_quack",
)
WITHOUT = f"{OURS} without optional packages"


@dataclass(frozen=True)
class Case:
    """A model against its floor and its rivals.

    Attributes:
        goals: what is to be reached.
        memories: which memory= beside "balanced".
        library: under which name `contest.libraries` knows it.
    """

    name: str
    builder: Builder
    tokens: int
    hidden: int
    dtype: torch.dtype
    goals: tuple[Goal, ...] = ()
    memories: tuple[str, ...] = ()
    library: str = ""
    dropout: float = 0.0
    with_plan: bool = False


def measure_case(bench: Bench, case: Case) -> Entry:
    """Everything about one model."""
    torch.manual_seed(0)
    entrants = _model_rivals(bench, case)
    entry, _ = against_floor(bench, case.name, entrants.found, bench.effort, entrants.remarks())
    if case.with_plan:
        attempt(entry, "the plan's times", lambda: entry.update(plan=plan_rows(entrants.ours)))
    entry["goals"] = judged(case.goals, entry)
    return entry


def against_floor(
    bench: Bench, case: str, found: Mapping[str, Rival], effort: Effort, remarks: Entry | None = None
) -> tuple[Entry, dict[str, Result]]:
    """Models, which are tuned by now, and the floor of eager's: its products too run as tuned."""
    floor = make_floor(found["eager"], bench.card)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    results = contest(steps, effort, bench.card)
    entry = {**compared(case, results), "floor_products": floor.taken, **(remarks or {})}
    add_details(entry, steps, found, bench.card)
    return entry, results


def _model_rivals(bench: Bench, case: Case) -> Entrants:
    pair = bench.build(case.builder, case.tokens, case.hidden)
    entrants = Entrants.of(bench, pair, case.dtype)
    for rival in list(entrants.found.values()):
        rival.forward_and_backward()  # plans are made before anything is tuned
    entrants.add_compiled()
    for memory in case.memories:
        entrants.add(f"{OURS} {memory}", lambda memory=memory: _ours(bench, case, entrants.eager, memory=memory))  # type: ignore[misc]
    ours = entrants.ours
    if optional_fusions(ours.model, ours.x, **ours.named):
        entrants.add(WITHOUT, lambda: ours.like(_Without(ours.model)))
    entrants.add_libraries(case.library, case.hidden, case.dropout)
    if bench.tune:
        tuned = _ours(bench, case, entrants.eager)
        entrants.tuning = str(tuned.model.tune(tuned.x, rounds=3, seconds=0.1, **tuned.named))
        entrants.add(f"{OURS} tuned", lambda: tuned)
    return entrants


def optional_fusions(model: Any, x: torch.Tensor, **named: torch.Tensor) -> set[str]:
    """Steps of a model's plan that optional packages bring."""
    plan = model.plan(x, **named)
    return {step.name for step in (*plan.forward, *plan.backward)}.intersection(OPTIONAL)


class _Without(torch.nn.Module):
    """A model that is planned without what optional packages bring."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        with te_fuser.fusions.disabled(*OPTIONAL):
            return self.model(x, **named)


def _ours(bench: Bench, case: Case, eager: Rival, **options: object) -> Rival:
    """Another model of te_fuser with eager's parameters."""
    other = bench.build(case.builder, case.tokens, case.hidden, **options).fused
    copy_parameters(eager.model, other)
    return eager.like(other.to(bench.device, case.dtype))


def plan_rows(rival: Rival) -> list[dict[str, Any]]:
    """The steps of the plan with predicted and measured times: where the time goes."""
    explanation = rival.model.explain(rival.x, measure=True, **rival.named)
    rows = []
    for plan, measured in zip(explanation.plans, explanation.measured, strict=True):
        for direction in ("forward", "backward"):
            for row in step_rows(plan, direction, measured):
                rows.append(
                    {
                        "direction": direction,
                        "step": row.name,
                        "ops": ", ".join(dict.fromkeys(c.split()[0] for c in row.covers)),
                        "moved_mib": (row.read + row.written) / MIB,
                        "predicted_ms": 1e3 * row.seconds,
                        "measured_ms": 1e3 * (row.measured or 0.0),
                        "limit": row.limit,
                        "share": row.share,
                    }
                )
    return rows
