"""A plan as text: what runs, on which tensors by their names, at what price, and what was not taken and why."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from te_fuser.dtypes import text_of as text_of_dtype
from te_fuser.fuser.graph.refs import EMITTED, GRADIENT, RECOMPUTED, SAVED, SEED, STATISTIC, Ref
from te_fuser.fuser.plan.device import Device, device_named
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.explain import Explanation
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step
from tests.plans.models import Case
from tests.plans.passes import Made
from tests.recorded import recorded

RATES = {"float32": 0.26e12, "bfloat16": 0.65e12, "float16": 0.09e12, "float64": 0.05e12}
# A CPU of no machine in particular, and two GPUs by name.
DEVICES: tuple[Device, ...] = (Device("cpu", 20e9, RATES, 0.06e12, 0.0), device_named("h200"), device_named("b200"))
MEMORY = ("fast", "balanced", "lean")


def plans_of(case: Case, device: Device, memory: str) -> list[Plan]:
    """The plans of a case."""
    x, inputs = case.call()
    with recorded(), case.within(device.kind):
        return case.model(memory).plans(x, device=device, outputs=case.outputs, **inputs)


def text_of_passes(made: Made | Sequence[Made]) -> str:
    """Plans that passes change, for one device and one choice of memory."""
    found = [make() for make in (made if isinstance(made, Sequence) else [made])]
    texts = [one.splitlines() if isinstance(one, str) else plan_lines(one) for one in found]
    return "\n====\n".join("\n".join(line.rstrip() for line in lines) for lines in texts) + "\n"


def text_of(case: Case) -> str:
    """A case on all devices, for all choices of memory; a short one on one GPU, its steps and kernels by name."""
    return "\n".join(line.rstrip() for line in (_short if case.is_short else _lines)(case)) + "\n"


def _lines(case: Case) -> Iterator[str]:
    sources: dict[str, str] = {}
    for device in DEVICES:
        seen: set[str] = set()
        for memory in MEMORY:
            plans = plans_of(case, device, memory)
            yield f"==== {device.name}, {memory}"
            whole = [str(Explanation(plans)), *(line for plan in plans for line in plan_lines(plan))]
            yield from whole if memory == "balanced" else (_digest("\n".join(whole)), *map(_brief, plans))
            if not seen.issuperset(keys := [key for plan in plans for key in plan.generated]):
                sources |= {f"{device.name}: {name}": text for name, text in Explanation(plans, True).sources().items()}
                seen.update(keys)
    yield "==== sources"
    for name, text in sources.items():
        yield f"{_digest(text)} {name}"


def _short(case: Case) -> Iterator[str]:
    device = device_named("h200")
    for plan in plans_of(case, device, "balanced"):
        for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
            for step in steps:
                yield f"{direction} {step.start}-{step.stop - 1} {step.name}"
                if isinstance(step.task, KernelTask):
                    yield f"  kernel {step.task.description.key[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _brief(plan: Plan) -> str:
    steps = (f"{s.name} {s.start}-{s.stop - 1} {s.seconds * 1e6:.1f} us" for s in (*plan.forward, *plan.backward))
    return f"{'; '.join(steps)}; {plan.kept_bytes()} B kept"


def plan_lines(plan: Plan) -> Iterator[str]:
    """One plan."""
    for direction, steps in (("before", plan.before), ("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            yield f"{direction} {step.start}-{step.stop - 1} {step.name}{'' if step.chain else ' (hanging)'}"
            yield f"  takes {_tensors(plan, step.inputs)}"
            yield f"  gives {_tensors(plan, step.outputs)}"
            c = step.cost
            yield (
                f"  {c.read:.17g} B read, {c.written:.17g} B written, {c.flops:.17g} flops, {c.launches} launches, "
                f"{step.seconds:.17g} s"
            )
            if c.sent:
                yield f"  {c.sent:.17g} B sent to {c.ranks} ranks, {c.beside:g} of it beside, {c.hidden:g} hidden"
            if step.task.written:
                yield f"  launches {', '.join(map(str, step.task.written))}"
            yield from _kernel(step)
    yield f"segments {' '.join(f'{a}-{b - 1}' for a, b in ((s.start, s.stop) for s in plan.segments))}"
    for k in plan.kept:
        yield f"kept {name_of(plan, k.ref)}: {k.name}, {k.bytes} B, {k.owner}"
    for choice in plan.choices:
        yield f"choice {choice}"
    for r in plan.refusals:
        yield f"not taken {r.direction} {r.start}-{r.stop - 1} {r.name}: {r.reason}"
    for note in plan.notes:
        yield f"note {note}"


def _tensors(plan: Plan, named: tuple[tuple[str, Ref], ...]) -> str:
    return ", ".join(name if name.startswith("= ") else f"{name} = {name_of(plan, ref)}" for name, ref in named)


def _kernel(step: Step) -> Iterator[str]:
    task = step.task
    if not isinstance(task, KernelTask):
        return
    d = task.description
    yield f"  kernel {d.key[:16]}, streams {list(task.streams)}, samples along {task.batch_dim}"
    if d.overwrites:
        yield f"  may store {', '.join(f'{store} over {load}' for store, load in d.overwrites)}"
    for new, old in task.aliases:
        yield f"  alias {new != old}"


def name_of(plan: Plan, ref: Ref) -> str:
    """A tensor of a plan, for people."""
    term = f"term {ref.term - 1} of " if ref.term else ""
    form = "" if ref.form.dtype is None else f" in {text_of_dtype(ref.form.dtype)}"
    layout = "" if ref.form.layout == "rows" else f" {ref.form.layout}"
    return f"{term}{_whole(plan, ref)}{form}{layout}"


def _whole(plan: Plan, ref: Ref) -> str:
    if ref.is_of_a_value:
        name = f"value {ref.index} {plan.graph.values[ref.index].name}"
        return {GRADIENT: f"gradient of {name}", RECOMPUTED: f"{name} again"}.get(ref.kind, name)
    if ref.kind is STATISTIC:
        return f"statistic {ref.name[:8]} of {ref.index}"
    if ref.kind is EMITTED:
        return f"{ref.name} of op {ref.index}"
    if ref.kind is SAVED:
        fusion, _, name = ref.name.partition(": ")
        return f"{name} of {fusion} at {ref.index}"
    return "seed" if ref == SEED else f"{ref.kind.name} {ref.index}"
