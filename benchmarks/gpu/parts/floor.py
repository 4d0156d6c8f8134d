"""The floor of a layer: its matrix products and its attention back to back, and nothing else.

Each product runs by the faster of torch.mm and te_fuser's own call of cuBLASLt, found out within the running sequence,
since a product that is timed alone has another clock. Attention is cuDNN's where that can compute it.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.contest.measure import Card, Step
from benchmarks.models import CausalAttention, Rival
from te_fuser.kernels.cublaslt import products

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Way = Mapping[str, Multiply]  # by the kind of product

_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_TRIALS = 12


@dataclass(frozen=True)
class Product:
    """y = x @ weight.T with x [rows, inputs], and both its gradients."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Heads:
    """A layer's attention; `heads`: of queries, of keys and values, and features of each."""

    batch: int
    positions: int
    heads: tuple[int, int, int]
    dropout: float


def work_of(model: nn.Module, shape: Sequence[int]) -> list[Product | Heads]:
    """Products and attention of a model of torch.nn, in its order, for an input of this shape."""
    found: list[Product | Heads] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.append(Product(math.prod(shape[:-1]), module.in_features, module.out_features))
        elif isinstance(module, CausalAttention):
            heads = module.heads, module.kv_heads, module.head_dim
            found.append(Heads(shape[0], shape[1], heads, module.dropout))
    return found


# --------------------------------------------------------------------------------------------- the products


class Multiplication:
    """One product of the sequence: what it is, its operands, and how it is computed."""

    def __init__(self, kind: str, left: torch.Tensor, right: torch.Tensor) -> None:
        self.kind, self.left, self.right = kind, left, right
        self.by: Multiply = _TORCH[kind]

    def __call__(self) -> torch.Tensor:
        return self.by(self.left, self.right)


_KINDS = {"linear": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
_TORCH: dict[str, Multiply] = {
    "linear": lambda x, weight: torch.mm(x, weight.t()),
    "input_gradient": torch.mm,
    "weight_gradient": lambda dy, x: torch.mm(dy.t(), x),
}


def multiplications(product: Product, dtype: torch.dtype, device: torch.device) -> tuple[Multiplication, ...]:
    """(forward, input's gradient, weight's gradient) on random data in the layouts of a layer."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    x, dy = (torch.randn(product.rows, n, **options) for n in (product.inputs, product.outputs))
    weight = torch.randn(product.outputs, product.inputs, **options) * product.inputs**-0.5
    operands = {"linear": (x, weight), "input_gradient": (dy, weight), "weight_gradient": (dy, x)}
    return tuple(Multiplication(kind, *pair) for kind, pair in operands.items())


def ways_to_multiply(card: Card) -> dict[str, Way]:
    """By name; PyTorch's first."""
    ways: dict[str, Way] = {"torch.mm": _TORCH}
    if card.is_gpu and products.obstacle() is None:
        ways["te_fuser cuBLASLt"] = {name: functools.partial(products.multiply, kind) for name, kind in _KINDS.items()}
    return ways


def choose(steps: Sequence[Multiplication], run: Step, ways: dict[str, Way], card: Card) -> dict[str, int]:
    """Give each product the way that is faster in its place; how many took which."""
    if len(ways) == 1:
        return {name: len(steps) for name in ways}
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(_TRIALS):
        for name, way in ways.items():
            clocked = [_Clocked(way[step.kind]) for step in steps]
            for step, by in zip(steps, clocked, strict=True):
                step.by = by
            run()
            card.synchronize()
            times[name].append([c.milliseconds() for c in clocked])
    taken = dict.fromkeys(ways, 0)
    for k, step in enumerate(steps):
        fastest = min(ways, key=lambda name: statistics.median(t[k] for t in times[name]))
        step.by = ways[fastest][step.kind]
        taken[fastest] += 1
    return taken


class _Clocked:
    """A product with events around it."""

    def __init__(self, way: Multiply) -> None:
        self.way = way
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self.start.record()
        result = self.way(left, right)
        self.stop.record()
        return result

    def milliseconds(self) -> float:
        return self.start.elapsed_time(self.stop)


# ------------------------------------------------------------------------------------------------ attention


class _Attending:
    """Attention forward and backward on packed queries, keys and values; gradients come out apart."""

    products: tuple[Multiplication, ...] = ()

    def __init__(self, work: Heads, dtype: torch.dtype, device: torch.device) -> None:
        batch, positions, (count, kv_count, head_dim) = work.batch, work.positions, work.heads
        sizes = [n * head_dim for n in (count, kv_count, kv_count)]
        packed = torch.randn(batch, positions, sum(sizes), dtype=dtype, device=device)
        self.parts = [
            part.view(batch, positions, -1, head_dim).transpose(1, 2).requires_grad_()
            for part in packed.split(sizes, -1)
        ]
        self.dy = torch.randn(batch, positions, count, head_dim, dtype=dtype, device=device).transpose(1, 2)
        self.options = {"is_causal": True, "dropout_p": work.dropout, "enable_gqa": count != kv_count}

    def forward(self) -> torch.Tensor:
        with torch.enable_grad(), sdpa_kernel(_BACKENDS, set_priority=True):
            return functional.scaled_dot_product_attention(*self.parts, **self.options)

    def backward(self, y: torch.Tensor) -> object:
        return torch.autograd.grad(y, self.parts, self.dy)


# ---------------------------------------------------------------------------------------------------- whole


@dataclass(frozen=True)
class Floor:
    """Ready to be called; `taken`: how many products run by which way."""

    run: Step
    taken: dict[str, int]


def make_floor(eager: Rival, card: Card) -> Floor:
    """Of a model of torch.nn, for its input."""
    return floor_of(work_of(eager.model, eager.x.shape), eager.x.dtype, card)


def floor_of(works: Sequence[Product | Heads], dtype: torch.dtype, card: Card) -> Floor:
    """Of products and attentions in this order."""
    kinds = {Product: _Multiplying, Heads: _Attending}
    pieces = [kinds[type(work)](work, dtype, card.device) for work in works]

    def run() -> None:
        outputs = [piece.forward() for piece in pieces]
        for piece, y in zip(reversed(pieces), reversed(outputs), strict=True):
            piece.backward(y)

    run()
    steps = [m for piece in pieces for m in piece.products]
    return Floor(run, choose(steps, run, ways_to_multiply(card), card))


class _Multiplying:
    def __init__(self, work: Product, dtype: torch.dtype, device: torch.device) -> None:
        self.products = multiplications(work, dtype, device)

    def forward(self) -> None:
        self.products[0]()

    def backward(self, y: None) -> None:
        _, by_input, by_weight = self.products
        by_input()
        by_weight()
