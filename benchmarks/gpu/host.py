"""Cost of a call for the host on a GPU machine, and of one generated kernel in its place between two products.

python -m benchmarks.gpu.host             # some two minutes; prints a table
python -m benchmarks.gpu.host --quick     # fewer rounds
python -m benchmarks.gpu.host --json FILE # also writes a record
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from benchmarks import models
from benchmarks.common import SHORT_NAMES, Effort, command_parser, compete, write_record
from te_fuser import Fuser, fusions, ops
from te_fuser.codegen import cuda_loader
from te_fuser.codegen.description import KernelDescription, elements
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.measure import measured_run
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step

GPU = torch.device("cuda")
TOKENS, HIDDEN = 16, 256  # so few that only the host counts
ROWS, NARROW, WIDE = 8192, 4096, 16384  # of the stretch between two products
QUEUE = 200  # launches that the driver takes without waiting for the GPU


@dataclass(frozen=True)
class Line:
    """One line of the table; `ratio` is over the line's own yardstick."""

    what: str
    value: float
    unit: str
    note: str = ""
    ratio: float | None = None


# ------------------------------------------------------------------------------------------ single calls


def host_us(call: Callable[[], object], rounds: int, per_call: int = 1) -> float:
    """Microseconds that the host is busy with one call; the GPU's queue is empty at the beginning of each round."""
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(QUEUE // per_call):
            call()
        times.append((time.perf_counter() - start) / (QUEUE // per_call * per_call))
    return statistics.median(times[3:]) * 1e6


def kernel_steps(plan: Plan) -> Iterator[tuple[str, Step, KernelDescription]]:
    """The generated kernels of a plan: (direction, step, description)."""
    for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            if isinstance(step.task, KernelTask):
                yield direction, step, step.task.description


def tensors_of(d: KernelDescription, rows: int) -> tuple[torch.Tensor, ...]:
    """Memory for every tensor of a kernel; kernels do not look at shapes."""
    return tuple(
        torch.ones(elements(t.axes, t.width, rows, 1), dtype=getattr(torch, t.dtype), device=GPU)
        for t in (*d.loads, *d.stores, *d.sums)
    )


def native_call(d: KernelDescription, direction: str, rounds: int) -> Iterator[Line]:
    """One kernel: a whole call, and its launches without the rest of it."""
    (kernel,) = cuda_loader.load([d], GPU)
    tensors = tensors_of(d, TOKENS)
    scratch = " and scratch from the allocator" if d.sums else ""
    us = host_us(lambda: kernel.run(tensors, TOKENS, 1, 1, ()), rounds)
    yield Line(f"native call, LayerNorm {direction}", us, "us", f"{len(kernel.text.launches)} launches{scratch}")
    us = host_us(lambda: kernel.run.repeat(10, tensors, TOKENS, 1, 1, ()), rounds, 10)
    yield Line("  its launches alone", us, "us", "tensors read once, launched 10 times")


def single_calls(rounds: int) -> Iterator[Line]:
    """Native calls, beside PyTorch's own."""
    norm = ops.LayerNorm(HIDDEN).to(GPU, torch.bfloat16)
    fuser = Fuser([norm], kernels="generated")
    x = torch.randn(TOKENS, HIDDEN, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    prepared, _ = fuser.prepare(x, {})
    for direction, _, d in kernel_steps(prepared.plan):
        yield from native_call(d, direction, rounds)
    segment = prepared.segments[0]
    parameters = prepared.plan.graph.parameters
    entering = (x.detach(), *(parameters[p].get().detach() for p in segment.plan.parameters))
    yield Line(
        "the same as a plan's step", host_us(lambda: segment.run_forward(entering), rounds), "us", "with its outputs"
    )
    plain, weight, bias = entering
    with torch.no_grad():
        yield Line(
            "functional.layer_norm",
            host_us(lambda: functional.layer_norm(plain, (HIDDEN,), weight, bias), rounds),
            "us",
        )
        yield Line("a + b", host_us(lambda: plain + plain, rounds), "us")
        yield Line(
            "torch.empty", host_us(lambda: torch.empty(plain.shape, dtype=plain.dtype, device=GPU), rounds), "us"
        )


# ----------------------------------------------------------------------------------- four ops, against eager


def four_ops(effort: Effort) -> Iterator[Line]:
    """LayerNorm, Linear, GELU, Linear: eager and te_fuser in turns."""
    for dtype in (torch.bfloat16, torch.float32):
        pair = models.rivals(models.four_ops(TOKENS, HIDDEN, kernels="generated"), dtype, GPU)
        for direction in ("forward", "forward+backward"):
            taking_part = {name: rival.runner(direction) for name, rival in pair.items()}
            found = compete(taking_part, effort, torch.cuda.synchronize)
            name = f"four ops {TOKENS}x{HIDDEN} {SHORT_NAMES[dtype]}, {direction}"
            timings = found.timings
            yield Line(f"{name}: eager", timings["eager"].seconds * 1e6, "us", f"spread {timings['eager'].spread:.0%}")
            ours = timings["te_fuser"]
            yield Line(f"{name}: te_fuser", ours.seconds * 1e6, "us", f"spread {ours.spread:.0%}", found.ratio)


# ------------------------------------------------------------------------------- a stretch between products


def stretch_in_place(effort: Effort, repeats: int) -> Iterator[Line]:
    """Bias + GELU between two products, forward and backward: by events around each step, and by leaving it out."""
    up, down = (ops.MatMul(i, o).to(GPU, torch.bfloat16) for i, o in ((NARROW, WIDE), (WIDE, NARROW)))
    bias = ops.Bias(WIDE).to(GPU, torch.bfloat16)
    x = torch.randn(ROWS, NARROW, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    with fusions.only(fusions.STRETCH):  # no epilogue takes a part of it
        fuser = Fuser([up, bias, ops.GELU("tanh"), down], kernels="generated")
        plan, measured, _ = measured_run(fuser, x, {}, repeats=repeats)
        seconds = {
            id(s): t for d in ("forward", "backward") for s, t in zip(getattr(plan, d), measured.of(d), strict=True)
        }
        for direction, step, _ in kernel_steps(plan):
            moved, took = step.cost.read + step.cost.written, seconds[id(step)]
            name = f"{step.name} {ROWS}x{WIDE} bf16, {direction}, by events"
            yield Line(name, took * 1e3, "ms", f"{moved / took / 1e9:.0f} GB/s")
        yield from without_it(fuser, [x, up.weight, bias.bias, down.weight], effort)


def without_it(fuser: Fuser, wanted: list[torch.Tensor], effort: Effort) -> Iterator[Line]:
    """The whole against its products alone, in turns, so that the clock is the same for both."""
    x, up, down = wanted[0], wanted[1].detach(), wanted[3].detach()
    hidden = torch.randn(ROWS, WIDE, device=GPU, dtype=torch.bfloat16)
    dy, plain = torch.randn_like(x).detach(), x.detach()

    def products() -> None:
        plain @ up.t()
        hidden @ down.t()

    def all_products() -> None:
        products()
        for product in (lambda: dy @ down, lambda: dy.t() @ hidden, lambda: hidden @ up, lambda: hidden.t() @ plain):
            product()

    def forward() -> None:
        with torch.no_grad():
            fuser(x)

    def both() -> None:
        torch.autograd.grad(fuser(x), wanted, dy)

    for name, alone, whole in (("forward", products, forward), ("forward+backward", all_products, both)):
        found = compete({"alone": alone, "whole": whole}, effort, torch.cuda.synchronize).timings
        cost = found["whole"].seconds - found["alone"].seconds
        note = f"{found['whole'].seconds * 1e3:.3f} ms with it, {found['alone'].seconds * 1e3:.3f} ms without"
        yield Line(f"the same stretch, {name}, by difference", cost * 1e3, "ms", note)


# ----------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.gpu.host", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="where to write a record")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure: PyTorch sees none here")
    rounds, effort = (10, Effort(3, 0.1, 5)) if options.quick else (40, Effort(9, 0.5, 20))
    table = Table("what", "value", "unit", "ratio", "note", title=torch.cuda.get_device_name(GPU), box=None)
    lines = []
    for part in (single_calls(rounds), four_ops(effort), stretch_in_place(effort, 10 if options.quick else 50)):
        for line in part:
            lines.append(line)
            ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
            table.add_row(
                line.what, f"{line.value:.3g}" if line.value < 100 else f"{line.value:.0f}", line.unit, ratio, line.note
            )
    Console(width=160).print(table)
    if options.json is not None:
        write_record(options.json, [asdict(line) for line in lines], {"quick": options.quick})


if __name__ == "__main__":
    main()
