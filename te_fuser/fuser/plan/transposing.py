"""Who makes what is read transposed: the kernel that makes the rows, where it can store both, else a step that turns.

Products of 8 bits take what lies along what is summed (`kernels/cublaslt/products.py`): dW = dy^T x sums over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import NotOneKernel
from te_fuser.codegen.schedule import limits_of
from te_fuser.codegen.schedule_model import tile_refusal
from te_fuser.fuser.graph.refs import RECOMPUTED, Ref, gradient_ref
from te_fuser.fuser.plan.candidates import NOTHING, kernel_step
from te_fuser.fuser.steps.step import Price, Step
from te_fuser.fuser.steps.transpose_task import TransposeTask

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.plan.derivation import DerivedStretch
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Options, Problem
    from te_fuser.fuser.steps.fusion_task import FusionTask
    from te_fuser.fuser.steps.kernel_task import KernelTask

Place = tuple[int, int]  # the ops that a step covers


def row_steps(
    problem: Problem,
    prices: Prices,
    covers: Place,
    wanted: Sequence[Ref],
    derive: Callable[[bool], KernelTask | None],
) -> tuple[Step, ...]:
    """The kernel of a range, and where it cannot store what is wanted transposed, steps that turn its rows.

    Args:
        derive: f(transposed) -> the kernel that gives what is wanted, so or by rows; None where there is nothing to do.
    """
    kernel = derive(bool(wanted))
    turning: Sequence[Ref] = ()
    if kernel is not None and why_not_transposed(problem.options, kernel.description):
        kernel, turning = derive(False), wanted
    steps = () if kernel is None else (kernel_step(problem, prices, kernel, *covers),)
    return *steps, *[turning_step(problem, prices, ref, covers) for ref in turning]


def why_not_transposed(options: Options, description: KernelDescription) -> str:
    """Why a kernel cannot store transposed what it shall; empty where it can, and where that is nothing."""
    if options.target != "cuda" or not description.transposed:
        return ""
    if description.reductions:
        return "rows that wait for their sums and what is turned are in each other's way: two launches are faster"
    return tile_refusal(rewrite(description), limits_of(options.device.arch))


def turning_step(problem: Problem, prices: Prices, ref: Ref, covers: Place) -> Step:
    """The step that makes a tensor transposed from its rows."""
    inputs, outputs = (("rows", ref.by_rows),), (("transposed", ref),)
    spec = ref.spec(problem.graph)
    assert spec is not None
    task = TransposeTask(spec.dtype, problem.options.target == "cuda")
    price = Price("of_launch", (inputs, outputs, 0.0))
    return prices.step("transposed8", covers, inputs, outputs, task, price)


def wanted_of(problem: Problem, start: int, stop: int, again: Iterable[Ref]) -> list[Ref]:
    """What the backward kernel of a range has to give transposed: gradients, and values that it computes again."""
    if not problem.transposed:
        return []
    nodes = problem.nodes[start:stop]
    made = {v for n in nodes for v in (n.output, *n.named_out)}
    entering = dict.fromkeys(v for n in nodes for v in (n.input, *n.named_in.values()) if v not in made)
    gradients = [r for v in entering if (r := gradient_ref(v).transposed) in problem.transposed]
    return gradients + [r._replace(kind=RECOMPUTED) for r in again if r.form.layout == "transposed"]


def given_transposed(problem: Problem, task: FusionTask, outputs: Iterable[tuple[str, Ref]]) -> list[tuple[str, Ref]]:
    """What a backward that is one step gives transposed, too: of what is read so, what its body says that it can."""
    names = () if task.body is None else task.body.transposed
    return [(f"{name}.transposed", r.transposed) for name, r in outputs if name in names and _is_read(problem, r)]


def with_turned(problem: Problem, prices: Prices, steps: Sequence[Step], covers: Place) -> tuple[Step, ...]:
    """A fusion's steps, with those that turn what it gives by rows alone and is read transposed."""
    made = [r for s in steps for r in s.writes()] if problem.transposed else []
    missing = [r.transposed for r in made if _is_read(problem, r) and r.transposed not in made]
    return *steps, *[turning_step(problem, prices, r, covers) for r in missing]


def _is_read(problem: Problem, ref: Ref) -> bool:
    return ref.form.layout == "rows" and ref.transposed in problem.transposed


def in_forward(
    problem: Problem, prices: Prices, stretch: DerivedStretch, covers: Place, kept: Iterable[Ref]
) -> tuple[float, float]:
    """Seconds, and those of the host, that forward takes more to make what is kept of a range transposed, too."""
    turned = [r for r in kept if r.form.layout == "transposed"]
    if not turned:
        return NOTHING
    values = list(map(problem.graph.value_of, turned))
    try:
        kernel = stretch.forward(*covers, values, (), values)
    except NotOneKernel:
        return NOTHING  # who makes them, forward's cover says
    if kernel is not None and not why_not_transposed(problem.options, kernel.description):
        return sum(map(prices.size, turned)) / problem.options.device.bandwidth, 0.0
    steps = [turning_step(problem, prices, r, covers) for r in turned]
    return sum([s.seconds for s in steps]), sum([s.host for s in steps])
