"""Attention that hides by structure beside the same without it, on the GPU, by each provider and as it is planned.

python -m benchmarks.gpu.attention                 # some three minutes; prints a table, goes on where one fails
python -m benchmarks.gpu.attention --only window   # cases whose names have this in them
python -m benchmarks.gpu.attention --toy           # tiny sizes, one call each, on the CPU: does it run at all
python -m benchmarks.gpu.attention --json FILE     # also writes a record

Times are by the device's clock, of many calls one behind the other: medians of rounds. Each case is a list with one
attention in it, bfloat16, heads of 128 features. "of" is the time over that of the case it stands beside, both as they
are planned; a provider's own is in brackets.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_fuser
from benchmarks.common import command_parser, write_record
from te_fuser import fusions, ops
from te_fuser.kernels.attention import PROVIDERS

PLANNED, DIRECTIONS = "as planned", ("forward", "forward+backward")
BLOCK = 0.03  # seconds of calls between two looks at the clock
Mask = ops.AttentionMask
Step = Callable[[], object]
Times = Mapping[tuple[str, str, str], float]


class Refused(Exception):
    """A provider says no."""


@dataclass(frozen=True)
class Sizes:
    """batch x positions with heads x head_dim, and one sample of `long` positions with a window."""

    batch: int = 4
    positions: int = 2048
    long: int = 16384
    window: int = 1024
    heads: int = 32
    head_dim: int = 128


TOY = Sizes(2, 32, 64, 8, 2, 16)


@dataclass(frozen=True)
class Case:
    """An attention, the shape of what it reads before features, what else it reads, and its bound.

    Attributes:
        counts: whole numbers by name.
        hidden: positions of each sample that are tokens, of a mask of padding `pad`; `first`: those begin there.
    """

    name: str
    mask: Mask
    rows: tuple[int, ...]
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    beside: str = ""
    goal: float = 0.0
    layout: str = "batch_first"
    packing: str = "interleaved"
    hidden: tuple[int, ...] = ()
    first: int = 0


@dataclass(frozen=True)
class Line:
    """Seconds of one direction; or why there are none."""

    case: str
    provider: str
    direction: str
    seconds: float = 0.0
    problem: str = ""
    by: str = ""  # the steps that a plan has for it, forward and backward


def cases(s: Sizes) -> Iterator[Case]:
    """Cases that are compared, references first."""
    whole, first = (s.batch, s.positions), (s.positions, s.batch)
    tokens = (s.batch * s.positions,)
    full = [s.positions] * s.batch
    mixed = [s.positions * (s.batch + n) // (2 * s.batch) for n in range(1, s.batch + 1)]
    some = {"lengths": "lengths"}
    for kind, causal in (("causal", True), ("none", False)):
        reference = f"{kind}, whole"
        yield Case(reference, Mask(causal=causal), whole)
        yield Case(f"{reference}, sequence first", Mask(causal=causal), first, layout="sequence_first")
        mask = Mask(causal=causal, **some)
        for name, lengths in (("all", full), ("half and more", mixed)):
            said = f"{kind}, lengths, {name}"
            yield Case(said, mask, whole, {"lengths": lengths}, reference, 1.05)
            other = f"{reference}, sequence first"
            yield Case(f"{said}, sequence first", mask, first, {"lengths": lengths}, other, 1.05, "sequence_first")
        padded = Mask(causal=causal, padding="pad")
        for name, lengths, begin in (("all", full, 0), ("half and more", mixed, 0), ("behind a gap", mixed, 1)):
            hidden = tuple(length - begin for length in lengths)
            said = f"{kind}, boolean mask, {name}"
            yield Case(said, padded, whole, {}, reference, 1.05, hidden=hidden, first=begin)
        for bound in (None, s.positions):
            mask = Mask(causal=causal, offsets="cu", longest=bound)
            cu = {"cu": [n * s.positions for n in range(s.batch + 1)]}
            said = f"{kind}, packed, equal" + ("" if bound is None else ", longest given")
            yield Case(said, mask, tokens, cu, reference, 1.1, "tokens")
    ends = [0, 1, 3, 6, 10, 15, 16]
    cu = {"cu": [n * tokens[0] // 16 for n in ends]}
    yield Case("causal, packed, unequal", Mask(causal=True, offsets="cu"), tokens, cu, "causal, whole", 1.1, "tokens")
    yield Case("causal, long", Mask(causal=True), (1, s.long))
    window = (s.window - 1, 0)
    yield Case("window", Mask(causal=True, window=window), (1, s.long), {}, "causal, long", 0.3)
    both = (s.window // 2, s.window // 2)
    yield Case("window on both sides", Mask(window=both), (1, s.long), {}, "causal, long", 0.3)


def model_of(case: Case, s: Sizes, device: torch.device) -> tuple[te_fuser.Sequential, torch.Tensor, dict[str, Any]]:
    """The list, its input and what else it reads."""
    options: dict[str, Any] = {"layout": case.layout, "packing": case.packing}
    op = ops.DotProductAttention(s.heads, s.head_dim, mask=case.mask, **options)
    x = torch.randn(*case.rows, op.packed.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    counts = {name: torch.tensor(c, dtype=torch.int32, device=device) for name, c in case.counts.items()}
    if case.hidden:
        at, ends = torch.arange(case.rows[1], device=device), torch.tensor(case.hidden, device=device) + case.first
        counts["pad"] = ((at < case.first) | (at >= ends[:, None]))[:, None, None]
    return te_fuser.Sequential(op).to(device), x, counts


def steps_of(case: Case, s: Sizes, device: torch.device, provider: str) -> Iterator[tuple[str, str, Step]]:
    """Steps that are timed, by direction, and the plan's steps.

    Raises:
        Refused: with a provider's reason where it says no.
    """
    model, x, counts = model_of(case, s, device)
    plan = model.plan(x, **counts)
    names = [step.name for step in (*plan.forward, *plan.backward)]
    if provider != PLANNED and names.count(provider) != 2:
        raise Refused(next((r.reason for r in plan.refusals if r.name == provider), f"planned are {names}"))
    with torch.no_grad():
        dy = torch.randn_like(model(x, **counts))

    def forward() -> object:
        with torch.no_grad():
            return model(x, **counts)

    def both() -> object:
        return torch.autograd.grad(model(x, **counts), x, dy)

    by = " ".join(dict.fromkeys(name.removeprefix("attention_") for name in names))
    yield DIRECTIONS[0], by, forward
    yield DIRECTIONS[1], by, both


def seconds_of(step: Step, device: torch.device, rounds: int) -> float:
    """Of one call: the median over the rounds."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    for _ in range(3):
        step()
    once = _timed(step, 3)
    calls = max(3, int(BLOCK / max(once, 1e-6)))
    return statistics.median(_timed(step, calls) for _ in range(rounds))


def _timed(step: Step, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls


def measure(case: Case, s: Sizes, device: torch.device, provider: str, rounds: int) -> Iterator[Line]:
    """Both directions of a case by a provider; what fails is a line too."""
    allowed = nullcontext() if provider == PLANNED else fusions.only("stretch", provider)
    try:
        with allowed:
            for direction, by, step in steps_of(case, s, device, provider):
                yield Line(case.name, provider, direction, seconds_of(step, device, rounds), by=by)
    except Exception as error:
        if not isinstance(error, Refused):
            print("".join(traceback.format_exception(error)[-4:])[:1500], flush=True)
        yield Line(case.name, provider, "", problem=f"{type(error).__name__}: {error}".split("\n")[0][:140])


def show(lines: list[Line], listed: list[Case]) -> None:
    """Print the table of what was measured, then why the rest was not."""
    table = Table("case", "provider", "forward", "both ms", "of: forward", "both", "goal", box=None)
    known = {(line.case, line.provider, line.direction): line.seconds for line in lines if line.seconds}
    for case in listed:
        for provider, by in {line.provider: line.by for line in lines if line.case == case.name and line.by}.items():
            name = f"{PLANNED}: {by}" if provider == PLANNED else provider.removeprefix("attention_")
            pairs = [_compared(known, case, provider, direction) for direction in DIRECTIONS]
            goal = f"{case.goal:.2f}" if case.goal else ""
            table.add_row(case.name, name, *(times for times, _ in pairs), *(of for _, of in pairs), goal)
    Console(width=150).print(table)
    problems: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.problem:
            problems.setdefault((line.provider, line.problem), []).append(line.case)
    for (provider, problem), names in problems.items():
        print(f"{provider}: {problem} [{len(names)}: {'; '.join(names[:3])}{', ...' if len(names) > 3 else ''}]")


def _compared(
    known: Mapping[tuple[str, str, str], float], case: Case, provider: str, direction: str
) -> tuple[str, str]:
    """Milliseconds, and how that is to the time of the case beside it."""
    seconds = known.get((case.name, provider, direction))
    if seconds is None:
        return "", ""
    beside, own = (known.get((case.beside, name, direction)) for name in (PLANNED, provider))
    words = f" ({seconds / own:.2f})" if own and provider != PLANNED else ""
    return f"{1e3 * seconds:.3f}", f"{seconds / beside:.3f}{words}" if beside else ""


def main() -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.gpu.attention", __doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them, and what they stand beside")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each (usual: 7)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, one call each, on the CPU")
    parser.add_argument("--json", type=Path, help="where to write a record")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure: PyTorch sees none here")
    device, s = torch.device("cpu" if options.toy else "cuda"), TOY if options.toy else Sizes()
    every = list(cases(s))
    asked = [case for case in every if options.only in case.name]
    wanted = {case.name for case in asked} | {case.beside for case in asked}
    listed = [case for case in every if case.name in wanted]
    providers = [PLANNED, *(f"attention_{p.name}" for p in PROVIDERS if p.on_cuda == (device.type == "cuda"))]
    lines: list[Line] = []
    for case in listed:
        for provider in providers:
            lines += measure(case, s, device, provider, options.rounds)
        print(f"measured: {case.name}", flush=True)
    show(lines, listed)
    if options.json is not None:
        write_record(options.json, [asdict(line) for line in lines], {"rounds": options.rounds})


if __name__ == "__main__":
    main()
