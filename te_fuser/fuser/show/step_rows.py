"""Plans as rows of text: steps and what bounds them, gains of 8 bits, passes and what they changed, generated code."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from te_fuser.dtypes import name_of
from te_fuser.fuser.graph.refs import RECOMPUTED, Ref
from te_fuser.fuser.plan.overlap import awaited, said_of
from te_fuser.fuser.plan.plan import Plan, SavedTensor, size_text
from te_fuser.ops import op_table

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.graph.passes import PassRecord
    from te_fuser.fuser.show.measure import Measured
    from te_fuser.fuser.steps.step import Step


def grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """The entries by what `key` says of each, in the order of the first of each."""
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def count(number: int, noun: str, ending: str = "s") -> str:
    """Number with its noun ("1 op", "2 ops"); of several words the first has the ending."""
    if number == 1:
        return f"1 {noun}"
    first, _, rest = noun.partition(" ")
    return f"{number} {first}{ending}{' ' + rest if rest else ''}"


def multiple(number: int) -> str:
    """Prefix of that which is there so often: "2 x ", empty for one."""
    return f"{number} x " if number > 1 else ""


def and_others(number: int) -> str:
    """Suffix to the first of several: " and 2 others like it"; empty for one."""
    return f" and {count(number - 1, 'other')} like it" if number > 1 else ""


def span(ops: tuple[int, int]) -> str:
    """The first and the last op: "3-5", or "3"."""
    return str(ops[0]) if ops[0] == ops[1] else f"{ops[0]}-{ops[1]}"


def range_of(first: int, last: int) -> str:
    """The ops from the first to the last: "ops 3-5", or "op 3"."""
    return f"op {first}" if first == last else f"ops {first}-{last}"


def few(texts: Sequence[str], most: int) -> list[str]:
    """The first `most`, and how many more there are."""
    return list(texts) if len(texts) <= most else [*texts[:most], f"{len(texts) - most} more places"]


@dataclass(frozen=True)
class StepCost:
    """Cost of a step.

    Attributes:
        read, written: predicted bytes.
        seconds: predicted time; `measured` is None where nothing was measured.
        limit: the resource that bounds it: "memory", "products", "arithmetic", "launch", on a CPU also the "host", for
            what ranks send the "link"; "stated" by a fusion.
        share: least time for that resource over the time it takes (measured, else predicted); None if stated.
    """

    read: float
    written: float
    launches: int
    seconds: float
    measured: float | None
    limit: str
    share: float | None


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step beside the plain ones.

    Attributes:
        keeps: what it makes that is kept for backward.
        again: what it computes again in backward.
        transposed: what else it stores transposed.
        over: which outputs may be stored over which inputs, in the names of the kernel.
    """

    keeps: tuple[str, ...]
    again: tuple[str, ...]
    transposed: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(frozen=True)
class StepRow(StepCost, StepOutputs):
    """One step as it is shown.

    Attributes:
        ops: the first and the last op it covers.
        covers: those ops by kind and place in the model.
        what: "kernel" (generated), "formula" (by PyTorch operations), "op" (its own code), "fusion", "torch" (a cast or
            a sum of gradients), "no kernel:" (an alias).
        algorithm: what the body of a fusion says that it runs by; empty where that is not known.
        sends: what it sends to other ranks, or what of the wait for that is hidden.
    """

    ops: tuple[int, int]
    covers: tuple[str, ...]
    what: str
    name: str
    algorithm: str
    sends: str

    @property
    def bound(self) -> str:
        return self.limit if self.share is None else f"{self.limit} {self.share:.0%}"

    def more(self) -> Iterator[str]:
        """Further facts, in words."""
        verbs = {"computes again": self.again, "stores": self.transposed, "keeps": self.keeps, "may store": self.over}
        yield from (f"{verb} {', '.join(names)}" for verb, names in verbs.items() if names)
        yield from filter(None, (self.algorithm and f"algorithm: {self.algorithm}", self.sends))


@dataclass(frozen=True)
class Total:
    """Sums over the steps of one direction or of both: seconds, bytes, numbers; `measured` as that of a row.

    Attributes:
        seconds: predicted for the whole: of device and host the longer one, on a CPU both.
    """

    seconds: float
    device: float
    host: float
    measured: float | None
    moved: float
    steps: int
    launches: int

    def __str__(self) -> str:
        measured = "" if self.measured is None else f", {self.measured * 1e3:.3f} ms measured"
        numbers = f"{size_text(self.moved)}, {count(self.launches, 'launch', 'es')}"
        return f"{self.seconds * 1e3:.3f} ms predicted{measured}, {numbers}"


def totals(plan: Plan, found: Mapping[str, Sequence[StepRow]], is_measured: bool) -> dict[str, Total]:
    """Totals of the directions whose rows are given, and of "both"."""
    sums = {}
    for name, rows in {**found, "both": list(itertools.chain(*found.values()))}.items():
        of = () if name == "both" else (name,)
        sums[name] = Total(
            *(plan.seconds(*of), plan.device_seconds(*of), plan.host_seconds(*of)),
            measured=sum(row.measured or 0.0 for row in rows) if is_measured else None,
            moved=sum(row.read + row.written for row in rows),
            steps=len(rows),
            launches=sum(row.launches for row in rows),
        )
    return sums


def rows_of(plan: Plan, measured: Measured | None = None) -> dict[str, list[StepRow]]:
    return {direction: step_rows(plan, direction, measured) for direction in ("forward", "backward")}


def step_rows(plan: Plan, direction: str, measured: Measured | None = None) -> list[StepRow]:
    """The steps of one direction ("forward", "backward") in running order."""
    steps = plan.forward if direction == "forward" else plan.backward
    times: Sequence[float | None] = measured.of(direction) if measured else [None] * len(steps)
    kept = {k.ref: k for k in plan.kept} if direction == "forward" else {}
    return [_row(plan, step, seconds, kept) for step, seconds in zip(steps, times, strict=True)]


def _row(plan: Plan, step: Step, measured: float | None, kept: dict[Ref, SavedTensor]) -> StepRow:
    nodes = [plan.graph.nodes[k] for k in step.task.ops or range(step.start, step.stop)]
    limit, least = _limit(plan, step, nodes[0])
    taken = step.seconds if measured is None else measured
    description, what = step.task.description, step.task.what
    one = getattr(step.task, "gradient", None) if what == "fusion" else None  # whose gradients run apart
    if description is not None and step.cost.launches == 0:
        what = "no kernel:"
    elif description is not None and plan.target == "torch":
        what = "formula"
    # Their layouts are named by nothing else.
    turned = [r for r in step.writes() if r.form.layout != "rows" and r.kind is not RECOMPUTED and r not in kept]
    held = [kept[r] for r in step.writes() if r in kept]
    keeps = [f"{k.name.rpartition(': ')[2]} ({size_text(k.bytes)})" for k in held if k.owner != "statistic"]
    if len(keeps) < len(held):
        keeps.append(f"{count(len(held) - len(keeps), 'statistic')} of each row")
    return StepRow(
        ops=(step.start, step.stop - 1),
        covers=tuple(place(n) for n in nodes),
        what=what,
        name=step.name if one is None else f"{step.name}.{one.method}",
        read=step.cost.read,
        written=step.cost.written,
        launches=step.cost.launches,
        seconds=step.seconds,
        measured=measured,
        limit=limit,
        share=least / taken if limit != "stated" and taken > 0 and not awaited(step) else None,
        keeps=tuple(keeps),
        again=tuple(r.label(plan.graph) for r in step.writes() if r.kind is RECOMPUTED),
        transposed=tuple(r.label(plan.graph) for r in turned),
        algorithm=step.task.runs_by(),
        over=tuple(f"{store} over {load}" for store, load in description.overwrites) if description else (),
        sends=said_of(plan, step),
    )


def place(node: Node) -> str:
    """An op by kind and path; "1.0.matmul" is the MatMul of the Linear at 1.0: the kind says as much."""
    kind = node.op.kind.__name__
    path = node.path.removesuffix("." + kind.lower())
    return f"{kind} {path}" if path else kind


def layouts(plan: Plan) -> Iterator[str]:
    """Sentences that say in which layout ops read x, where it could be misread."""
    nodes = [(n, op_table.reading.of(type(n.op))(n.op, plan.graph.values[n.input].spec)) for n in plan.graph.nodes]
    for text, entries in grouped([e for e in nodes if e[1]], lambda e: e[1]).items():
        more = and_others(len(entries))
        yield f"Layout: {place(entries[0][0])}{more} {'read' if more else 'reads'} {text}"


def _limit(plan: Plan, step: Step, first: Node) -> tuple[str, float]:
    if awaited(step):
        return "link", 0.0
    if step.cost.seconds is not None:
        return "stated", step.cost.seconds
    limits = plan.device.limits(step.cost, name_of(plan.graph.arithmetic(first)))
    calls = {"launch": limits.pop("launch")}
    if plan.device.kind == "cpu":
        calls = {"host": step.host}
    together = limits | calls
    # A launch or a call is a cost, not a limit to come near to: the share is that of the work.
    return max(together, key=lambda name: together[name]), max(limits.values())


@dataclass(frozen=True)
class Gain:
    """Matrix products that a plan runs in 8 bits, forward and backward together.

    Attributes:
        path: their op's place in the model.
        dtype: the name of their own precision.
        seconds: the predicted time of the steps that multiply them, with what these do beside.
        own_seconds: that of as many products alone, of factors in `dtype`.
    """

    path: str
    dtype: str
    seconds: float
    own_seconds: float


def gains(plan: Plan) -> list[Gain]:
    """Gains by op whose products are of 8 bits; what a step has of several counts for the first."""
    found: dict[int, Gain] = {}
    for step in plan.steps:
        nodes = [plan.graph.nodes[k] for k in step.task.ops or range(step.start, step.stop)]
        node = next((node for node in nodes if getattr(node.op, "multiplies_8_bits", False)), None)
        if node is None or not step.cost.flops:
            continue
        before = found.get(node.index)
        x, y = plan.graph.values[node.input].spec, plan.graph.values[node.output].spec
        taken = step.seconds + (before.seconds if before else 0.0)
        # The time of its products in y's dtype, with nothing beside them.
        one = node.op.flops(x, {})
        read = (step.cost.flops / one) * (x.rows * (x.features + y.features) + one / (2 * x.rows)) * y.dtype.itemsize
        cost = type(step.cost)(read=read, flops=step.cost.flops, launches=round(step.cost.flops / one))
        own = plan.device.seconds(cost, name_of(y.dtype)) + (before.own_seconds if before else 0.0)
        found[node.index] = Gain(node.path, name_of(y.dtype), taken, own)
    return [found[index] for index in sorted(found)]


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
    """(step as text, the pass that made it) of each step; "cover": the covers have it."""
    found: dict[str, str] = {}
    steps = [r for r in records if r.over == "steps"]
    for record in steps:
        for text in record.added:
            found.setdefault(text, record.name)
    return [(text, found[text]) for text, _ in steps[-1].after] if steps else []


def sources(plans: Sequence[Plan]) -> dict[str, str]:
    """Heading -> generated code, of each distinct kernel of the plans; equal kernels come once."""
    found: dict[str, tuple[Plan, KernelDescription, list[str]]] = {}
    for plan in plans:
        for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
            for step in steps:
                d = step.task.description
                if d is None or d.key not in plan.generated:
                    continue
                _, _, users = found.setdefault(d.key, (plan, d, []))
                users.append(f"{direction}, {range_of(step.start, step.stop - 1)}")
    return {f"{d.name}: {'; '.join(few(users, 4))}": _text(plan, d) for plan, d, users in found.values()}


def _text(plan: Plan, description: KernelDescription) -> str:
    """A row kernel as it runs: C++, CUDA, or its formula."""
    from te_fuser.codegen import compiler, cuda

    if plan.target == "cpp":
        return compiler.source_of(description)
    return cuda.generate(description, plan.device.arch).source if plan.target == "cuda" else str(description)
