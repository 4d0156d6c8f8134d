"""Norms and rotations of heads beside a copy of the same bytes, on the GPU.

python -m benchmarks.gpu.heads               # about a minute; prints a table
python -m benchmarks.gpu.heads --only Llama  # cases whose names have this in them
python -m benchmarks.gpu.heads --json FILE   # also writes a record

Each call is captured many times in one CUDA graph over inputs that take turns, so that no call finds its own in the
cache; times are medians of replays. "copy" moves as many bytes by torch.Tensor.copy_; "ops" are the same ops as plans
run them without the kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_fuser
from benchmarks.common import command_parser, write_record
from te_fuser import ops
from te_fuser.kernels.qk_norm_rope import WEIGHTS, Groups, Norming, PassInputs, Turned, TurnedPass, Turning

BF16, F32 = torch.bfloat16, torch.float32
SETS, CALLS, ROUNDS = 4, 20, 15
FUSIONS = (
    "turned_heads_forward",
    "turned_heads_backward",
    "turned_heads_norm_backward",
    "turned_heads_bias_norm_backward",
)


@dataclass(frozen=True)
class Case:
    """Heads of a model, [positions, batch, features].

    Attributes:
        tables: "angles" in float32, or "cos_sin" in bfloat16; None: nothing turns.
        columns: whether backward adds up columns for a bias.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    tables: str | None = "cos_sin"
    norm: str | None = None
    columns: bool = False
    batch: int = 4
    positions: int = 2048

    @property
    def features(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def size(self) -> int:
        """Bytes of the heads."""
        return self.positions * self.batch * self.features * BF16.itemsize

    def passes(self) -> tuple[TurnedPass, TurnedPass]:
        groups = Groups.of(self.heads, self.kv_heads, self.head_dim, "blocked")
        dtype = F32 if self.tables == "angles" else BF16
        turning = Turning(self.head_dim, "half", self.tables, True, True, dtype) if self.tables else None
        norming = Norming(self.norm, dtype=BF16) if self.norm else None
        names = tuple(n for n in WEIGHTS if self.norm == "LayerNorm" or (self.norm and n.endswith("weight")))
        columns = BF16 if self.columns else None
        return TurnedPass(groups, BF16, turning, norming), TurnedPass(
            groups, BF16, turning, norming, True, columns, names
        )

    def model(self) -> te_fuser.Sequential:
        are: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "packing": "blocked"}
        listed: list[torch.nn.Module] = [ops.Bias(self.features)] if self.columns else []
        listed += [ops.HeadNorm(self.head_dim, norm=self.norm, **are)] if self.norm else []
        if self.tables:
            named: Any = {"angles": "a"} if self.tables == "angles" else {"cos_sin": ("a", "b")}
            listed.append(ops.RotaryByAngles(self.head_dim, **are, **named))
        return te_fuser.Sequential(*listed).to("cuda", BF16)


CASES = (
    Case("Llama 8B", 32, 8, 128),
    Case("Llama 8B, angles", 32, 8, 128, "angles"),
    Case("GPT 4096, angles, bias", 32, 32, 128, "angles", columns=True),
    Case("GPT 2048, heads of 64, angles", 32, 32, 64, "angles"),
    Case("Qwen3 8B, RMSNorm", 32, 8, 128, norm="RMSNorm"),
    Case("GPT 4096, angles, LayerNorm, bias", 32, 32, 128, "angles", "LayerNorm", True),
    Case("GPT 2048, heads of 64, RMSNorm", 32, 32, 64, norm="RMSNorm"),
    Case("Gemma 3 12B, RMSNorm", 16, 8, 256, norm="RMSNorm"),
    Case("RMSNorm alone", 32, 8, 128, None, "RMSNorm"),
    Case("one token of 8 samples, RMSNorm", 32, 8, 128, norm="RMSNorm", batch=8, positions=1),
)


@dataclass(frozen=True)
class Line:
    """Microseconds, and the share of a copy's bandwidth that the kernel reaches."""

    case: str
    direction: str
    kernel: float
    copy: float
    share: float
    ops: float


def seconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, by the device's clock."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(CALLS):
            calls[k % len(calls)]()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / CALLS)
    return statistics.median(found[2:])


def copied(size: int) -> float:
    """Seconds of reading and writing so many bytes each."""
    pairs = [[torch.empty(size // 2, dtype=BF16, device="cuda").normal_() for _ in range(2)] for _ in range(SETS)]
    return seconds([lambda a=a, b=b: a.copy_(b) for a, b in pairs])  # type: ignore[misc]


def measured(case: Case) -> Iterator[Line]:
    """Forward and backward of a case."""
    shape = (case.positions, case.batch, case.features)
    sets = [[torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(SETS)]
    turning = {"angles": 1, "cos_sin": 2, None: 0}[case.tables]
    dtype = F32 if case.tables == "angles" else BF16
    tables = [torch.randn(case.positions, 1, 1, case.head_dim, device="cuda", dtype=dtype) for _ in range(turning)]
    weights = {name: torch.ones(case.head_dim, device="cuda", dtype=BF16) for name in WEIGHTS}
    given = PassInputs(tables, weights=weights)
    ahead, back = (Turned(p, "sequence_first", 1e-6) for p in case.passes())
    forward = [lambda x=x: ahead(x, given) for x, _ in sets]  # type: ignore[misc]
    read = [x if case.norm else None for x, _ in sets]
    backward = [
        lambda dy=dy, x=x: back(dy, given, read=x)  # type: ignore[misc]
        for (_, dy), x in zip(sets, read, strict=True)
    ]
    usual = _by_ops(case, [x for x, _ in sets], dict(zip("ab", tables, strict=False)))
    for direction, calls, units, other in (
        ("forward", forward, 2, usual[0]),
        ("backward", backward, 3 if case.norm else 2, usual[1]),
    ):
        ours, theirs = seconds(calls), copied(int(case.size * units / 2))
        yield Line(case.name, direction, ours * 1e6, theirs * 1e6, theirs / ours, other * 1e6)


def _by_ops(case: Case, xs: list[torch.Tensor], named: dict[str, torch.Tensor]) -> tuple[float, float]:
    model = case.model()
    with te_fuser.fusions.disabled(*FUSIONS), torch.no_grad():
        forward = seconds([lambda x=x: model(x, **named) for x in xs])  # type: ignore[misc]
    leaves = [x.detach().requires_grad_() for x in xs]

    def both(x: torch.Tensor) -> object:
        y = model(x, **named)
        return torch.autograd.grad(y, [x, *model.parameters()], y.detach())

    with te_fuser.fusions.disabled(*FUSIONS):
        return forward, seconds([lambda x=x: both(x) for x in leaves]) - forward  # type: ignore[misc]


def main() -> None:
    """Print the table."""
    parser = command_parser("benchmarks.gpu.heads", __doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--json", type=Path, help="write a record, too")
    arguments = parser.parse_args()
    table = Table("case", "direction", "kernel us", "copy us", "share of a copy", "ops us")
    lines = []
    for case in (c for c in CASES if arguments.only in c.name):
        for line in measured(case):
            lines.append(line)
            numbers = f"{line.kernel:.1f}", f"{line.copy:.1f}", f"{line.share:.2f}", f"{line.ops:.1f}"
            table.add_row(line.case, line.direction, *numbers)
    Console().print(table)
    if arguments.json:
        write_record(arguments.json, [asdict(line) for line in lines], {"only": arguments.only})


if __name__ == "__main__":
    main()
