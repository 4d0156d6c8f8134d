"""Times generated kernels on a GPU: GB/s on the fewest bytes they must move, beside a copy in the same run.

python -m benchmarks.gpu.kernels                     every case with the schedule that is picked
python -m benchmarks.gpu.kernels --layer             and every kernel that a GPT layer runs
python -m benchmarks.gpu.kernels --variants 40       and the best of so many schedules that fit
python -m benchmarks.gpu.kernels --sizes             hidden sizes and rows around those of the cases
python -m benchmarks.gpu.kernels --case norm         only cases with "norm" in their name
python -m benchmarks.gpu.kernels --record results    write every measurement to results/gpu-kernels-<gpu>.json
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.common import command_parser
from benchmarks.gpu.contest.measure import Card
from benchmarks.gpu.record.records import circumstances, record_path
from te_fuser.codegen import cuda_loader, schedule_model
from te_fuser.codegen.cuda import CudaKernel
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.description import KernelDescription, describe
from te_fuser.codegen.nvrtc import Compiled, Resources
from te_fuser.codegen.schedule import Schedule, limits_of
from te_fuser.formula import expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Axes
from te_fuser.formula.reductions import substitute
from tests.codegen import corpus
from tests.codegen.corpus import Kit
from tests.codegen.cuda_calls import arguments, sizes_of
from tests.gpu.cuda_driver import GpuKernel, arch, checked, multiprocessors

SETS = 3  # inputs that take turns, so that no call finds its own in L2
CALLS = 6  # in one measurement, as a graph, so that the host does not matter
SAMPLES = 15
THREADS = 16  # that compile


def bias_dropout_add(kit: Kit, width: int) -> corpus.Pair:
    """skip + dropout(x + bias)."""
    x, bias, skip = kit.full("x", width), kit.feature("bias", width), kit.full("skip", width)
    keep = expr.keep_leaf("dropout", 6554, Axes.FULL, width) * expr.const(1 / 0.9)
    out = {"y": (skip + (x + bias) * keep, width)}
    return kit.forward("bias_dropout_add_fwd", out), kit.backward("bias_dropout_add_bwd", out, [x, bias])


def stretch(kit: Kit, width: int) -> corpus.Pair:
    """Bias, dropout, residual add, fork, LayerNorm; the backward reads the stored sum instead of its parts."""
    forward, _ = corpus.dropout_add_layer_norm(kit, width)
    x, bias, skip = (expr.leaf(n, a, width) for n, a in (("x", Axes.FULL), ("bias", Axes.FEATURE), ("skip", Axes.FULL)))
    weight, shift = (expr.leaf(f"layer_norm.{n}", Axes.FEATURE, width) for n in ("weight", "bias"))
    keep = expr.keep_leaf("dropout", 6554, Axes.FULL, width) * expr.const(1 / 0.9)
    total = expr.value("total", skip + (x + bias) * keep)
    y, statistics_ = corpus._layer_norm(total, weight, shift)
    seeds = {y: kit.full("dy", width), total: kit.full("dtotal", width)}
    kept = {id(n): kit.leaf(n.attrs[0], Axes.ROWS) for s in statistics_ for n in (s,)}
    kept |= {id(s.args[0]): kept[id(s)] for s in statistics_} | {id(total): kit.full("total", width)}
    adjoints = differentiate(seeds, [x, bias, skip, weight, shift])
    targets = []
    for leaf, adjoint in adjoints.items():
        (e,) = substitute([adjoint], lambda n: kept.get(id(n)))
        targets.append(kit.target(f"d{leaf.attrs[0]}", e, leaf.axes, width))
    stores = [t for t in targets if t.axes & Axes.OUTER]
    sums = [t for t in targets if not t.axes & Axes.OUTER]
    return forward, describe("dropout_add_layer_norm_saved_bwd", stores, sums, kit.tensors)


@dataclass(frozen=True)
class Case:
    """A pair of kernels, and what is to be reached: GB/s, or ms for each direction."""

    name: str
    family: corpus.Family
    rows: int
    width: int
    goal: str = ""


CASES = (
    Case("LayerNorm", corpus.layer_norm, 16384, 4096, ">= 3800 GB/s both"),
    Case("RMSNorm", corpus.rms_norm, 16384, 4096, ">= 3900 GB/s both"),
    Case("bias + GELU", corpus.bias_gelu, 8192, 16384, ">= 3800 GB/s both, backward <= 0.215 ms"),
    Case("SwiGLU", corpus.swiglu, 8192, 14336, ">= 4100 GB/s both"),
    Case("bias + dropout + add", bias_dropout_add, 16384, 4096, ">= 3800 GB/s both"),
    Case("bias + dropout + add + LayerNorm", stretch, 8192, 4096, "<= 0.075 ms forward, <= 0.19 ms both"),
)
WIDTHS = (512, 1024, 2048, 5120, 8192, 16384)
ROWS = (16, 256, 2048, 32768)


def cases_by_size() -> Iterator[Case]:
    """The cases in other sizes: all widths at the same number of elements, and few and many rows."""
    for case in CASES:
        for width in WIDTHS:
            yield dataclasses.replace(case, width=width, rows=case.rows * case.width // width, goal="")
        for rows in ROWS:
            yield dataclasses.replace(case, rows=rows, width=min(case.width, 4096), goal="")


def layer_kernels() -> list[KernelDescription]:
    """Every generated kernel of a GPT layer, forward and backward."""
    tokens, hidden = 8192, 4096
    fused = models.gpt(0.1)(tokens, hidden).fused.to("cuda", torch.bfloat16)
    x = torch.randn(tokens // models.POSITIONS, models.POSITIONS, hidden, device="cuda", dtype=torch.bfloat16)
    y = fused(x.requires_grad_())
    y.backward(torch.randn_like(y))
    return [k.description for k in cuda_loader.loaded()]


# ------------------------------------------------------------------------------------------------ measuring


def inputs(d: KernelDescription, rows: int) -> dict[str, torch.Tensor]:
    """Random tensors on the GPU."""
    found = {}
    for load in d.loads:
        tensor = torch.randn(corpus.shape(load.axes, load.width, rows, 1), device="cuda")
        found[load.name] = (tensor.abs() + 0.1 if load.name.endswith("rstd") else tensor).to(getattr(torch, load.dtype))
    return found


class Rotation:
    """A kernel's tensors, several times."""

    def __init__(self, d: KernelDescription, rows: int) -> None:
        self.description, self.rows = d, rows
        self.sets = [(inputs(d, rows), corpus.outputs(d, rows, device="cuda")) for _ in range(SETS)]

    def calls(self, kernel: GpuKernel) -> list[Callable[[], None]]:
        """One call for each set, on the stream that is current now."""
        return [
            kernel.call(
                arguments(kernel.kernel, self.description, tensors, made, self.rows, (1, 1), multiprocessors(), "cuda"),
                self.rows,
                1,
            )
            for tensors, made in self.sets
        ]

    def results(self) -> list[torch.Tensor]:
        """Outputs of the first set."""
        return [t.float() for t in self.sets[0][1]]

    def poison(self) -> None:
        """Make every output NaN."""
        for _, outputs in self.sets:
            for out in outputs:
                out.fill_(float("nan"))


def milliseconds(make: Callable[[], Sequence[Callable[[], None]]]) -> float:
    """The median time of one call; `make` gives calls for the stream that is current."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls = make()
        for call in calls:
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for k in range(CALLS):
                calls[k % len(calls)]()
    times = []
    for _ in range(SAMPLES + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def copy_speed() -> float:
    """GB/s of a large copy, bytes read and written."""
    pairs = [(torch.randn(2**27, device="cuda"), torch.empty(2**27, device="cuda")) for _ in range(2)]
    time = milliseconds(lambda: [lambda p=p: torch.neg(p[0], out=p[1]) for p in pairs])  # type: ignore[misc]
    return 2 * 4 * 2**27 / time / 1e6


@dataclass(frozen=True)
class Timed:
    """One schedule's result; `resident` blocks fit a multiprocessor, `groups` of rows have partial sums."""

    kernel: str
    rows: int
    width: int
    schedule: str
    ms: float
    gbps: float
    registers: int
    spilled: int
    resident: int
    groups: int
    agrees: bool


def timed(d: KernelDescription, rows: int, schedules: Sequence[tuple[Schedule, ...]]) -> list[Timed]:
    """Each schedule's time, in the given order; an empty one is what is picked."""
    with ThreadPoolExecutor(THREADS) as pool:
        made = list(pool.map(lambda s: compile_kernel(d, arch(), schedules=s), schedules))
    rotation, found, first = Rotation(d, rows), [], None
    for kernel, compiled in dict.fromkeys(made):
        loaded = GpuKernel(kernel, compiled)
        rotation.poison()
        ms = milliseconds(lambda loaded=loaded: rotation.calls(loaded))  # type: ignore[misc]
        results = rotation.results()
        first = first or results
        agrees = all(
            torch.allclose(a, b, rtol=2e-2, atol=1e-2 * float(a.abs().max()))
            for a, b in zip(first, results, strict=True)
        )
        found.append(_timed(d, rows, ms, kernel, compiled, loaded, agrees))
    return found


def _timed(
    d: KernelDescription, rows: int, ms: float, kernel: CudaKernel, compiled: Compiled, loaded: GpuKernel, agrees: bool
) -> Timed:
    from cuda.bindings import driver

    launch = kernel.launches[0]
    # Not every NVRTC gives a report.
    main = next((r for r in compiled.resources if r.symbol == launch.symbol), Resources("", 0, 0, 0, 0))
    resident = checked(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            loaded.functions[launch.symbol], launch.threads, launch.shared_bytes
        )
    )
    groups = sizes_of(kernel, rows, 1, multiprocessors()).groups if d.sums else 0
    text, gbps = "; ".join(map(str, kernel.schedules)), sum(d.bytes_moved(rows)) / ms / 1e6
    return Timed(d.name, rows, d.width, text, ms, gbps, main.registers, main.spilled_bytes, resident, groups, agrees)


# ------------------------------------------------------------------------------------------------ what is shown


def report(label: str, t: Timed, copy: float) -> None:
    """One line of the table."""
    flags = ("" if t.agrees else "  DIFFERS") + (f"  spills {t.spilled}" if t.spilled else "")
    print(
        f"  {label:8} {t.ms:8.4f} ms {t.gbps:7.0f} GB/s {t.gbps / copy:6.1%} of copy  {t.registers:3} regs  "
        f"{t.resident:2} resident  {t.schedule}{flags}",
        flush=True,
    )


class Bench:
    """Measures, prints and remembers."""

    def __init__(self, variants: int, best: int) -> None:
        self.variants, self.best, self.copy = variants, best, copy_speed()
        self.everything: list[dict[str, object]] = []
        print(f"{torch.cuda.get_device_name()}, copy {self.copy:.0f} GB/s")

    def kernel(self, case: str, label: str, d: KernelDescription, rows: int) -> Timed:
        """The picked schedule, and the best of others if asked for."""
        others = schedule_model.variants(rewrite(d), limits_of(arch()), self.variants) if self.variants else []
        found = timed(d, rows, [(), *others])
        report(label, found[0], self.copy)
        for t in sorted(found, key=lambda t: t.ms)[: self.best if others else 0]:
            report("  best", t, self.copy)
        self.everything += [{"case": case, "picked": t is found[0], **dataclasses.asdict(t)} for t in found]
        return found[0]

    def case(self, case: Case) -> None:
        """Both directions of a case."""
        print(f"\n{case.name}, {case.rows} x {case.width}, bf16{'; goal ' if case.goal else ''}{case.goal}")
        pair = case.family(Kit("bfloat16", "bfloat16"), case.width)
        picked = [self.kernel(case.name, d.name.rsplit("_", 1)[1], d, case.rows) for d in pair]
        total = sum(t.ms for t in picked)
        moved = sum(t.gbps * t.ms for t in picked)
        print(f"  {'both':8} {total:8.4f} ms {moved / total:7.0f} GB/s {moved / total / self.copy:6.1%} of copy")

    def layer(self) -> None:
        """Every kernel of a GPT layer."""
        print("\nGPT layer, 8192 x 4096, bf16")
        for d in layer_kernels():
            print(f"  {d.name}: {d.counts()}")
            self.kernel("GPT layer", "", d, 8192)

    def record(self, folder: Path, commit: str) -> None:
        """Write everything measured, on what and how."""
        card = Card(torch.device("cuda"))
        found = {**circumstances(card, commit), "copy_gbps": self.copy, "kernels": self.everything}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / record_path(card.name, "gpu-kernels").name).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Print the table."""
    parser = command_parser("benchmarks.gpu.kernels", __doc__)
    parser.add_argument("--variants", type=int, default=0, help="try so many other schedules")
    parser.add_argument("--best", type=int, default=4, help="how many of them to show")
    parser.add_argument("--case", default="", help="part of a case's name")
    parser.add_argument("--sizes", action="store_true", help="other widths and numbers of rows as well")
    parser.add_argument("--layer", action="store_true", help="the kernels of a GPT layer as well")
    parser.add_argument("--record", type=Path, help="write every measurement into this folder")
    parser.add_argument("--commit", default="", help="what is measured, where the tree is no git repository")
    options = parser.parse_args()
    bench = Bench(options.variants, options.best)
    for case in (*CASES, *(cases_by_size() if options.sizes else ())):
        if options.case.lower() in case.name.lower():
            bench.case(case)
    if options.layer:
        bench.layer()
    print(f"\ncopy again {copy_speed():.0f} GB/s")
    if options.record:
        bench.record(options.record, options.commit)


if __name__ == "__main__":
    main()
