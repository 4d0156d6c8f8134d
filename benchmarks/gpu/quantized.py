"""Kernels of 8 bits beside a copy of the same bytes, and products of 8 bits beside those in bfloat16, on the GPU.

python -m benchmarks.gpu.quantized                # under a minute; prints two tables
python -m benchmarks.gpu.quantized --only weights # lines whose names have this in them
python -m benchmarks.gpu.quantized --json FILE    # also writes a record

Each call is captured many times in one CUDA graph over inputs that take turns, so that no call finds its own in the
cache; times are medians of replays. "copy" moves as many bytes by torch.Tensor.copy_.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import command_parser, write_record
from benchmarks.gpu.heads import SETS, copied, seconds
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.quantizers import Weight8, quantizer_on

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MATRICES = ((8192, 4096), (8192, 16384), (8191, 4096), (1024, 4096), (16, 4096))
LAYER = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))  # the weights of a GPT layer
SIZES = ((8192, 4096, 4096), (8192, 16384, 4096))  # tokens, out, in


@dataclass(frozen=True)
class Moved:
    """Microseconds, and the share of a copy's bandwidth."""

    name: str
    kernel: float
    copy: float
    share: float


@dataclass(frozen=True)
class Multiplied:
    """Microseconds and 10**12 operations per second; gain: how many times faster than in bfloat16."""

    name: str
    product: float
    rate: float
    gain: float


def _bytes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Random finite numbers, as a model's are: constant ones cost less energy, and run faster."""
    return torch.randn(rows, columns, device="cuda").to(dtype)


# --------------------------------------------------------------------------------------------- bytes moved


def turned() -> Iterator[tuple[str, int, list[Callable[[], object]]]]:
    """Matrices turned: (name, bytes read and written, calls)."""
    for tokens, features in MATRICES:
        sets = [_bytes(tokens, features) for _ in range(SETS)]
        calls: list[Callable[[], object]] = [lambda x=x: quantizers.transpose_by_kernel(x) for x in sets]  # type: ignore[misc]
        yield f"turned {tokens} x {features}", 2 * tokens * features, calls


def weights() -> Iterator[tuple[str, int, list[Callable[[], object]]]]:
    """The weights of layers in one launch, in the layouts of forward, of backward, and both."""
    cases = [(BF16, 1, "both"), (F32, 1, "both"), (BF16, 4, "both"), (BF16, 1, "rows"), (BF16, 1, "turned")]
    for dtype, layers, wanted in cases:
        rows, turned = wanted != "turned", wanted != "rows"
        count, size = layers * len(LAYER), layers * sum(m * n for m, n in LAYER)
        scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        run = quantizer_on(scale.device, [Weight8(dtype, rows, turned, rows)] * count)
        calls: list[Callable[[], object]] = []
        for _ in range(2 if layers > 1 else SETS):
            ws = [torch.randn(*shape, device="cuda").to(dtype) for _ in range(layers) for shape in LAYER]
            given = [t for w in ws for t in (w, scale, *([amax] if rows else []))]
            calls.append(functools.partial(run, *given))
        name = str(dtype).removeprefix("torch.")
        moved = (dtype.itemsize + rows + turned) * size
        yield f"weights of {layers} layer{'s'[: layers > 1]}, {name}, {wanted}", moved, calls


def moved(only: str) -> Iterator[Moved]:
    """The kernels beside copies."""
    for cases in (turned(), weights()):
        for name, size, calls in cases:
            if only not in name:
                continue
            ours, copy = seconds(calls), copied(size // 2)
            yield Moved(name, ours * 1e6, copy * 1e6, copy / ours)


# ------------------------------------------------------------------------------------------------ products


@dataclass(frozen=True)
class Product:
    """One of the three products of a layer: y = x W^T, dx = dy W, dW = dy^T x.

    Attributes:
        kind: what cuBLASLt's product in bfloat16 is called; "wgrad_onto" adds to float32.
        rows, columns: of the result; summed: how many are added up for each of it.
    """

    kind: str
    rows: int
    columns: int
    summed: int

    def in_bfloat16(self) -> list[Callable[[], object]]:
        """As layers run it, with operands that lie as they are."""
        a, b = (self.rows, self.summed), (self.columns, self.summed)
        a = a[::-1] if self.kind.startswith("wgrad") else a
        b = b if self.kind == "forward" else b[::-1]
        pairs = [[torch.randn(*shape, device="cuda").to(BF16) for shape in (a, b)] for _ in range(SETS)]
        if self.kind != "wgrad_onto":
            return [lambda x=x, w=w: products.multiply(self.kind, x, w) for x, w in pairs]  # type: ignore[misc]
        onto = torch.zeros(self.rows, self.columns, device="cuda")
        native = products.configured(self.kind, BF16, F32)
        return [lambda x=x, w=w: native((x, w, onto)) for x, w in pairs]  # type: ignore[misc]

    def in_8_bits(self, fast: bool) -> list[Callable[[], object]]:
        """With operands that lie along what is summed."""
        one, gradients = torch.ones((), device="cuda"), E4M3 if self.kind == "forward" else E5M2
        shapes = ((self.rows, self.summed, gradients), (self.columns, self.summed, E4M3))
        pairs = [[_bytes(*shape) for shape in shapes] for _ in range(SETS)]
        kind, out = ("onto", F32) if self.kind == "wgrad_onto" else ("plain", BF16)
        native = products.product_of(products.form_of_8(kind, gradients, E4M3, out, fast))
        if kind == "plain":
            return [lambda x=x, w=w: native.make(x, w, one, one) for x, w in pairs]  # type: ignore[misc]
        onto = torch.zeros(self.rows, self.columns, device="cuda")
        return [lambda x=x, w=w: native((x, w, one, one, onto)) for x, w in pairs]  # type: ignore[misc]


def multiplied(only: str) -> Iterator[Multiplied]:
    """The three products of a layer, by fast sums and by split ones, beside those in bfloat16."""
    for tokens, out, inner in SIZES:
        for name, p in (
            ("y", Product("forward", tokens, out, inner)),
            ("dx", Product("dgrad", tokens, inner, out)),
            ("dW", Product("wgrad", out, inner, tokens)),
            ("dW onto float32", Product("wgrad_onto", out, inner, tokens)),
        ):
            title = f"{name} of {tokens} x {out} x {inner}"
            if only not in title:
                continue
            operations, plain = 2e-12 * tokens * out * inner, seconds(p.in_bfloat16())
            yield Multiplied(f"{title}, bfloat16", plain * 1e6, operations / plain, 1.0)
            for fast in (True, False):
                took = seconds(p.in_8_bits(fast))
                line = f"{title}, 8 bits, sums {'fast' if fast else 'split'}"
                yield Multiplied(line, took * 1e6, operations / took, plain / took)


def main() -> None:
    """Print the tables."""
    parser = command_parser("benchmarks.gpu.quantized", __doc__)
    parser.add_argument("--only", default="", help="lines whose names have this in them")
    parser.add_argument("--json", type=Path, help="write a record, too")
    arguments = parser.parse_args()
    bytes_moved, lines = list(moved(arguments.only)), []
    table = Table("bytes", "kernel us", "copy us", "share of a copy")
    for line in bytes_moved:
        table.add_row(line.name, f"{line.kernel:.1f}", f"{line.copy:.1f}", f"{line.share:.2f}")
    Console().print(table)
    table = Table("products", "us", "10^12 operations/s", "of bfloat16's")
    for product in multiplied(arguments.only):
        lines.append(product)
        table.add_row(product.name, f"{product.product:.1f}", f"{product.rate:.0f}", f"{product.gain:.2f}")
    Console().print(table)
    if arguments.json:
        write_record(arguments.json, [asdict(line) for line in (*bytes_moved, *lines)], {"only": arguments.only})


if __name__ == "__main__":
    main()
