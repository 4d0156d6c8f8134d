"""Kernels that store 8 bits by rows and transposed beside a copy of as many bytes, on the GPU.

python -m benchmarks.gpu.tile                # half a minute; prints a table
python -m benchmarks.gpu.tile --only dGELU   # cases whose names have this in them
python -m benchmarks.gpu.tile --variants 12  # and every other schedule that fits, so many at most
python -m benchmarks.gpu.tile --json FILE    # also writes a record

Calls are captured and timed as `benchmarks.gpu.heads` does it. GB/s are of the fewest bytes that a kernel must move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import command_parser, write_record
from benchmarks.gpu.heads import SETS, copied, seconds
from te_fuser.codegen import cuda_loader
from te_fuser.codegen.cuda_loader import GpuKernel
from te_fuser.codegen.description import KernelDescription
from tests.codegen import tile_cases
from tests.codegen.corpus import Kit, outputs, shape

GPU = torch.device("cuda", 0)
ROWS, WIDTHS = 8192, (4096, 16384)
CASES = {
    "quantize": (tile_cases.plain, "float8_e4m3fn"),
    "GELU, quantize": (tile_cases.gelu, "float8_e4m3fn"),
    "dGELU, quantize, dbias": (tile_cases.gelu_slope, "float8_e5m2"),
}


@dataclass(frozen=True)
class Line:
    """Microseconds, GB/s, and the share of a copy's bandwidth that a kernel reaches; all with the largest magnitude."""

    case: str
    width: int
    us: float
    gbps: float
    share: float
    schedule: str
    picked: bool


def described(name: str, width: int) -> KernelDescription:
    """A case in bfloat16."""
    family, dtype = CASES[name]
    return family(Kit("bfloat16", "bfloat16"), width, dtype)


def calls(kernel: GpuKernel) -> list[Callable[[], None]]:
    """One call for each set of tensors."""
    d, found = kernel.description, []
    for _ in range(SETS):
        loads = [torch.randn(shape(t.axes, t.width, ROWS, 1), device=GPU).to(getattr(torch, t.dtype)) for t in d.loads]
        given = (*loads, *(torch.zeros(1, device=GPU) for _ in d.maxima), *outputs(d, ROWS, device="cuda"))
        found.append(lambda given=given: kernel.run(given, ROWS, 1, 1, ()))  # type: ignore[misc]
    return found


def measured(name: str, width: int, variants: int) -> Iterator[Line]:
    """The picked schedule of a case, then others."""
    d = described(name, width)
    kernels = cuda_loader.load([d], GPU)
    kernels += [cuda_loader.load_variant(d, GPU, s) for s in cuda_loader.variants(d, GPU, variants)[:variants]]
    moved = sum(d.bytes_moved(ROWS))
    copy = copied(moved // 2)
    for k, kernel in enumerate(kernels):
        time = seconds(calls(kernel))
        yield Line(name, width, time * 1e6, moved / time / 1e9, copy / time, str(kernel.text.schedules[0]), k == 0)


def main() -> None:
    """Print the table."""
    parser = command_parser("benchmarks.gpu.tile", __doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--variants", type=int, default=0, help="try so many other schedules")
    parser.add_argument("--json", type=Path, help="write a record, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure: PyTorch sees none here")
    table = Table("case", "features", "us", "GB/s", "share of a copy", "schedule")
    lines = []
    for name in (n for n in CASES if arguments.only in n):
        for line in (m for width in WIDTHS for m in measured(name, width, arguments.variants)):
            lines.append(line)
            numbers = str(line.width), f"{line.us:.1f}", f"{line.gbps:.0f}", f"{line.share:.2f}"
            table.add_row(line.case if line.picked else "", *numbers, line.schedule)
    Console(width=200).print(table)
    if arguments.json:
        write_record(arguments.json, [asdict(line) for line in lines], {"only": arguments.only})


if __name__ == "__main__":
    main()
