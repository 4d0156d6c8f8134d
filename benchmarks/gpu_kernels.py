"""Times generated kernels on a GPU: GB/s on the fewest bytes they must move, against a copy in the same run.

python benchmarks/gpu_kernels.py                 every case with the schedule that is picked
python benchmarks/gpu_kernels.py --variants      and the best of all schedules that could be
python benchmarks/gpu_kernels.py --case norm     only cases with "norm" in their name
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from te_fuser.codegen import cuda
from te_fuser.codegen import schedule as plan
from te_fuser.codegen import schedule_model as model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription, describe
from te_fuser.codegen.nvrtc import Resources
from te_fuser.codegen.schedule import Kind, Schedule
from te_fuser.formula import expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Axes
from tests.codegen import corpus
from tests.codegen.corpus import Kit
from tests.codegen.cuda_calls import arguments
from tests.gpu.cuda_driver import GpuKernel, arch, compile_all, multiprocessors

SETS = 3  # inputs that take turns, so that no call finds its own in L2
CALLS = 4  # in one measurement, so that the pauses between launches overlap
SAMPLES = 15


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
        (e,) = expr.substitute([adjoint], lambda n: kept.get(id(n)))
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
    goal: str


CASES = (
    Case("LayerNorm", corpus.layer_norm, 16384, 4096, ">= 3800 GB/s both"),
    Case("RMSNorm", corpus.rms_norm, 16384, 4096, ">= 3900 GB/s both"),
    Case("bias + GELU", corpus.bias_gelu, 8192, 16384, ">= 3800 GB/s both, backward <= 0.215 ms"),
    Case("SwiGLU", corpus.swiglu, 8192, 14336, ">= 4100 GB/s both"),
    Case("bias + dropout + add", bias_dropout_add, 16384, 4096, ">= 3800 GB/s both"),
    Case("bias + dropout + add + LayerNorm", stretch, 8192, 4096, "<= 0.075 ms forward, <= 0.19 ms both"),
)


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
        """One call for each set."""
        return [
            kernel.call(
                arguments(kernel.kernel, self.description, tensors, made, self.rows, (1, 1), multiprocessors(), "cuda"),
                self.rows,
                1,
            )
            for tensors, made in self.sets
        ]

    def results(self) -> list[torch.Tensor]:
        """What the first set's outputs hold."""
        return [t.float() for t in self.sets[0][1]]


def milliseconds(calls: Sequence[Callable[[], None]], samples: int = SAMPLES) -> float:
    """The median time of one call."""
    for call in calls:
        call()
    times = []
    at = 0
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            calls[at % len(calls)]()
            at += 1
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def copy_speed() -> float:
    """GB/s of a copy, bytes read and written."""
    pairs = [(torch.randn(2**27, device="cuda"), torch.empty(2**27, device="cuda")) for _ in range(2)]
    time = milliseconds([lambda p=p: p[1].copy_(p[0]) for p in pairs])
    return 2 * 4 * 2**27 / time / 1e6


def variants(d: KernelDescription) -> list[Schedule]:
    """Schedules worth a try, whatever the estimates say of them; the picked one first."""
    device, d = plan.device_of(arch()), rewrite(d)
    picked = model.candidates(d, device)[0]
    make = _column_variants if picked.kind == Kind.COLUMNS else _row_variants
    most = 1024 if d.sums else 2048
    fitting = [
        s for s in make(d, picked)
        if s.threads * s.blocks_per_multiprocessor <= most
        and s.blocks_per_multiprocessor * (plan.shared_bytes(d, s) + plan.static_bytes(d, s) + 1024)
        <= device.shared_bytes + 1024
    ]  # fmt: skip
    return list(dict.fromkeys([picked, *fitting]))


def _column_variants(d: KernelDescription, picked: Schedule) -> Iterator[Schedule]:
    for lanes, ahead, blocks in itertools.product((64, 128, 256, 512), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8)):
        slots = max(1, 256 // lanes)
        yield dataclasses.replace(picked, lanes=lanes, slots=slots, ahead=ahead, blocks_per_multiprocessor=blocks)


def _row_variants(d: KernelDescription, picked: Schedule) -> Iterator[Schedule]:
    kinds = ((Kind.REGISTERS, 1), (Kind.SHARED, 1), (Kind.SHARED, 2))
    for lanes, blocks, (kind, ahead) in itertools.product((64, 128, 256, 512), (1, 2, 3, 4, 6, 8, 10, 12, 16), kinds):
        chunks = -(-d.width // (picked.vector * lanes))
        if chunks <= 8 and lanes * blocks >= 256:
            yield dataclasses.replace(
                picked, kind=kind, lanes=lanes, slots=1, chunks=chunks, ahead=ahead, blocks_per_multiprocessor=blocks
            )


@dataclass(frozen=True)
class Timed:
    """One schedule's result."""

    kernel: str
    rows: int
    width: int
    schedule: str
    ms: float
    gbps: float
    registers: int
    spilled: int
    agrees: bool


def timed(d: KernelDescription, rows: int, schedules: Sequence[Schedule]) -> list[Timed]:
    """Each schedule's time, in the given order."""
    made = [cuda.generate(d, arch(), schedules=(s,)) for s in schedules] if schedules else [cuda.generate(d, arch())]
    rotation, found, first = Rotation(d, rows), [], None
    bytes_moved = sum(d.bytes_moved(rows))
    for kernel, compiled in zip(made, compile_all(made, threads=14), strict=True):
        for _, outputs in rotation.sets:
            for out in outputs:
                out.fill_(float("nan"))
        try:
            ms = milliseconds(rotation.calls(GpuKernel(kernel, compiled)))
        except RuntimeError as error:
            print(f"    {kernel.schedules[0]}: {error}")
            continue
        results = rotation.results()
        first = first or results
        agrees = all(
            torch.allclose(a, b, rtol=2e-2, atol=1e-2 * float(a.abs().max()))
            for a, b in zip(first, results, strict=True)
        )
        # An older NVRTC gives no report.
        main = next((r for r in compiled.resources if r.symbol == kernel.launches[0].symbol), Resources("", 0, 0, 0, 0))
        text = "; ".join(map(str, kernel.schedules))
        gbps = bytes_moved / ms / 1e6
        found.append(Timed(d.name, rows, d.width, text, ms, gbps, main.registers, main.spilled_bytes, agrees))
    return found


def report(label: str, t: Timed, copy: float) -> None:
    """One line of the table."""
    flags = ("" if t.agrees else "  DIFFERS") + (f"  spills {t.spilled}" if t.spilled else "")
    print(
        f"  {label:8} {t.ms:8.4f} ms {t.gbps:7.0f} GB/s {t.gbps / copy:6.1%} of copy  {t.registers:3} regs  "
        f"{t.schedule}{flags}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="try every schedule that fits")
    parser.add_argument("--best", type=int, default=6, help="how many variants to show")
    parser.add_argument("--case", default="", help="part of a case's name")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    options = parser.parse_args()
    copy = copy_speed()
    print(f"{torch.cuda.get_device_name()}, copy {copy:.0f} GB/s")
    everything: list[Timed] = []
    for case in CASES:
        if options.case.lower() not in case.name.lower():
            continue
        print(f"\n{case.name}, {case.rows} x {case.width}, bf16; goal {case.goal}")
        picked = []
        for d in case.family(Kit("bfloat16", "bfloat16"), case.width):
            found = timed(d, case.rows, variants(d) if options.variants else ())
            everything += found
            picked.append(found[0])
            report(d.name.rsplit("_", 1)[1], found[0], copy)
            if options.variants:
                for t in sorted(found, key=lambda t: t.ms)[: options.best]:
                    report("  best", t, copy)
        moved = sum(t.gbps * t.ms for t in picked)
        total = sum(t.ms for t in picked)
        print(f"  {'both':8} {total:8.4f} ms {moved / total:7.0f} GB/s {moved / total / copy:6.1%} of copy")
    print(f"\ncopy again {copy_speed():.0f} GB/s")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(t) for t in everything], indent=1))


if __name__ == "__main__":
    main()
