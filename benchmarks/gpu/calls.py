"""Cost for the host of one call of attention, and of quack's products: until it returns; the GPU goes on by itself.

python -m benchmarks.gpu.calls               # some three minutes, most of it packages that compile; prints a table
python -m benchmarks.gpu.calls --profile     # also where in Python the time of each call goes
python -m benchmarks.gpu.calls --only quack  # calls whose names have this in them
python -m benchmarks.gpu.calls --json FILE   # also writes a record
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import command_parser, write_record
from te_fuser import Fuser, fusions
from te_fuser.kernels.attention import PROVIDERS, AttentionProblem, Provider
from te_fuser.kernels.packages import quack
from te_fuser.kernels.packed_heads import Packing
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.base import Spec

GPU = torch.device("cuda", 0)
BATCH = 20  # calls between two waits: their launches fit into the driver's queue, so that none waits for the GPU
SHOWN = 25  # lines of a profile


@dataclass(frozen=True)
class Sizes:
    """Attention of batch x positions with heads x head_dim; products of rows x narrow and wide."""

    name: str
    batch: int
    positions: int
    heads: int
    head_dim: int
    narrow: int
    wide: int

    @property
    def rows(self) -> int:
        """Of a product."""
        return self.batch * self.positions


SIZES = (Sizes("seed layer", 4, 2048, 32, 128, 4096, 16384), Sizes("small", 1, 256, 4, 128, 512, 2048))
Call = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """One call: the median over the rounds, and the fastest round, in microseconds; or why it could not be made."""

    call: str
    us: float = 0.0
    fastest: float = 0.0
    problem: str = ""


# ------------------------------------------------------------------------------------------------ the calls


def calls() -> Iterator[tuple[str, Callable[[], Call] | str]]:
    """By name: what makes a call ready, or why there is none."""
    for sizes in SIZES:
        for dropout in (0.0, 0.1):
            for provider in (p for p in PROVIDERS if p.on_cuda):
                yield from attention(sizes, dropout, provider)
        yield from products(sizes)


def attention(sizes: Sizes, dropout: float, provider: Provider) -> Iterator[tuple[str, Callable[[], Call] | str]]:
    """Forward and backward of one provider, and forward as a plan runs it."""
    op = DotProductAttention(sizes.heads, sizes.head_dim, mask="causal", dropout=dropout, layout="sequence_first")
    name = f"{provider.name}, {sizes.name}, dropout {dropout}"
    spec = Spec((sizes.positions, sizes.batch, op.packed.features), torch.bfloat16, GPU)
    why = provider.reason_not(AttentionProblem.of(op.settings(), spec, needs_grad=True))
    if why is not None:
        yield name, why
        return

    def forward() -> Call:
        x, settings = torch.randn(spec.shape, dtype=spec.dtype, device=GPU), op.settings()
        return lambda: provider.forward(settings, {"input": x})

    def backward() -> Call:
        x, settings = torch.randn(spec.shape, dtype=spec.dtype, device=GPU), op.settings()
        y, saved = provider.forward(settings, {"input": x})
        dy, tensors = torch.randn_like(y), {"input": x, "output": y, **saved}
        if provider.packs:
            return lambda: provider.backward(settings, tensors, dy)["input"]
        packing = Packing(op.packed)
        return lambda: packing(*provider.gradients_apart(settings, tensors, dy), sums=spec.dtype)

    def step() -> Call:
        x = torch.randn(spec.shape, dtype=spec.dtype, device=GPU, requires_grad=True)
        with fusions.only(f"attention_{provider.name}"):
            segment = Fuser([op]).prepare(x, {})[0].segments[0]
        entering = (x.detach(),)
        return lambda: segment.run_forward(entering)

    yield f"{name}, forward", forward
    yield f"{name}, backward" + ("" if provider.packs else " and packing with sums"), backward
    if not dropout:
        yield f"{name}, forward as a step", step


def products(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Call] | str]]:
    """Quack's, and one of PyTorch's beside them."""
    yield f"torch.mm, {sizes.name}", lambda: _plain(sizes)
    why = quack.PACKAGE.missing() or quack.unusable() or quack.unusable_by_gates()
    if why is not None:
        yield f"quack, {sizes.name}", why
        return
    for function in (quack.linear_bias_gelu, quack.linear_bias_gelu_aux):
        yield f"quack {function.__name__}, {sizes.name}", lambda function=function: _up(sizes, function)
    for function, times in ((quack.input_gradient_dgelu_sum, 1), (quack.input_gradient_dswiglu, 2)):
        make = lambda function=function, times=times: _down(sizes, function, times)  # noqa: E731
        yield f"quack {function.__name__}, {sizes.name}", make


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=GPU)


def _plain(sizes: Sizes) -> Call:
    x, weight = _random(sizes.rows, sizes.narrow), _random(sizes.wide, sizes.narrow)
    return lambda: torch.mm(x, weight.t())


def _up(sizes: Sizes, function: Callable[..., object]) -> Call:
    x, weight, bias = _random(sizes.rows, sizes.narrow), _random(sizes.wide, sizes.narrow), _random(sizes.wide)
    return lambda: function(x, weight, bias)


def _down(sizes: Sizes, function: Callable[..., object], times: int) -> Call:
    dy, weight = _random(sizes.rows, sizes.narrow), _random(sizes.narrow, sizes.wide)
    before = _random(sizes.rows, times * sizes.wide)
    return lambda: function(dy, weight, before)


# ------------------------------------------------------------------------------------------------- measuring


def measure(name: str, call: Call, rounds: int) -> Line:
    """Microseconds that the host is busy with one call; the GPU's queue is empty at the beginning of each round."""
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
    torch.cuda.synchronize()
    return Line(name, statistics.median(times[3:]), min(times[3:]))


def profile(name: str, call: Call) -> None:
    """Print which functions of Python the calls spend their time in; cumulative, and by themselves."""
    profiler = cProfile.Profile()
    for _ in range(10):
        torch.cuda.synchronize()
        profiler.enable()
        for _ in range(BATCH):
            call()
        profiler.disable()
    torch.cuda.synchronize()
    print(f"=== {10 * BATCH} calls of {name}", flush=True)
    pstats.Stats(profiler).strip_dirs().sort_stats("cumulative").print_stats(SHOWN)


def main() -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.gpu.calls", __doc__)
    parser.add_argument("--profile", action="store_true", help="print where the time of each call goes")
    parser.add_argument("--only", default="", help="calls whose names have this in them")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each call (usual: 25)")
    parser.add_argument("--json", type=Path, help="where to write a record")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure: PyTorch sees none here")
    lines, ready = [], []
    with torch.no_grad():
        for name, make in calls():
            if options.only not in name:
                continue
            if isinstance(make, str):
                lines.append(Line(name, problem=make))
                continue
            call = make()
            call()
            lines.append(measure(name, call, options.rounds))
            if options.profile:
                ready.append((name, make))
            del call
        show(lines)
        for name, make in ready:  # after all is measured: a profiler that ran leaves calls slower
            profile(name, make())
    if options.json is not None:
        write_record(options.json, [asdict(line) for line in lines], {"rounds": options.rounds})


def show(lines: list[Line]) -> None:
    """Print the table."""
    table = Table("call", "us", "fastest", title=f"host, {torch.cuda.get_device_name(GPU)}", box=None)
    for line in lines:
        table.add_row(line.call, line.problem or f"{line.us:.1f}", "" if line.problem else f"{line.fastest:.1f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
