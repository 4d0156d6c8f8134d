"""The seed layer in torch.nn, whole or shared by ranks in the ways that PyTorch has: tensor and sequence parallel.

Tensors are [sequence, batch, features], cut along the sequence between the products. Biases stand apart from products,
since torch.compile's pass for async TP knows products without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.several.ranks import Ranks, Sizes

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# The parameters of a layer, in te_fuser's order -> the dimension along which ranks cut it.
CUTS: dict[str, int | None] = {
    "norm1.weight": None, "norm1.bias": None, "qkv.weight": 0, "qkv_bias": 0, "out.weight": 1, "out_bias": None,
    "norm2.weight": None, "norm2.bias": None, "up.weight": 0, "up_bias": 0, "down.weight": 1, "down_bias": None,
}  # fmt: skip
SUMMED = tuple(name for name, dim in CUTS.items() if dim is None)  # each rank's rows give it a term


# ------------------------------------------------------------------------------------------ products of ranks


def gathered(x: torch.Tensor, wait: bool = True) -> Any:
    """The rows of all ranks; without waiting with what is to be waited for."""
    y = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    work = dist.all_gather_into_tensor(y, x.contiguous(), async_op=not wait)
    return y if wait else (y, work)


def scattered(x: torch.Tensor, wait: bool = True) -> Any:
    """Rows of the sum over ranks that this rank has."""
    y = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    work = dist.reduce_scatter_tensor(y, x.contiguous(), async_op=not wait)
    return y if wait else (y, work)


def _weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


class _Column(torch.autograd.Function):
    """As Megatron does: backward gathers x again beside dx's product, and scatters dx beside the weight gradient's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(gathered(x), weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        whole, gathering = gathered(x, wait=False)
        d_whole = dy @ weight
        gathering.wait()
        dx, scattering = scattered(d_whole, wait=False)
        dw = _weight_gradient(dy, whole)
        scattering.wait()
        return dx, dw


class _Row(torch.autograd.Function):
    """A product whose terms are scattered; backward gathers dy once for both gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return scattered(functional.linear(x, weight))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        dy = gathered(dy)
        return dy @ weight, _weight_gradient(dy, x)


def _column_of_functions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = functional_collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    return functional.linear(x, weight)


def _row_of_functions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = functional.linear(x, weight)
    return functional_collectives.reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)


@dataclass(frozen=True)
class Style:
    """Functions of products by column and by row, and whether a layer is made of this rank's part."""

    column: Product | None = None
    row: Product | None = None
    parts: bool = True


WHOLE = Style(parts=False)
MEGATRON = Style(_Column.apply, _Row.apply)
FUNCTIONS = Style(_column_of_functions, _row_of_functions)
DTENSOR = Style()  # parallelize_module cuts the products


# ------------------------------------------------------------------------------------------------- the layer


class Layer(nn.Module):
    """x + attention of a norm, then x + MLP of a norm; causal, GELU by tanh, biases."""

    def __init__(self, sizes: Sizes, style: Style = WHOLE, ranks: int = 1, device: torch.device | None = None) -> None:
        super().__init__()
        self.style, self.heads = style, sizes.heads // ranks
        new: dict[str, Any] = {"device": device, "dtype": sizes.dtype}
        h, cut = sizes.hidden, (1 if style is DTENSOR else ranks)
        self.norm1, self.norm2 = nn.LayerNorm(h, **new), nn.LayerNorm(h, **new)
        self.qkv, self.out = nn.Linear(h, 3 * h // cut, False, **new), nn.Linear(h // cut, h, False, **new)
        inner = sizes.inner // cut
        self.up, self.down = nn.Linear(h, inner, False, **new), nn.Linear(inner, h, False, **new)
        biases = {"qkv_bias": 3 * h // ranks, "out_bias": h, "up_bias": sizes.inner // ranks, "down_bias": h}
        for name, size in biases.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, **new)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self._column(self.norm1(x), self.qkv) + self.qkv_bias
        q, k, v = (t.permute(1, 2, 0, 3) for t in heads.unflatten(-1, (self.heads, 3, -1)).unbind(3))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + (self._row(y, self.out) + self.out_bias)
        y = functional.gelu(self._column(self.norm2(x), self.up) + self.up_bias, approximate="tanh")
        return x + (self._row(y, self.down) + self.down_bias)

    def _column(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self.style.column(x, linear.weight) if self.style.column else linear(x)

    def _row(self, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        return self.style.row(x, linear.weight) if self.style.row else linear(x)


def numbers(ranks: Ranks, name: str) -> torch.Tensor:
    """A parameter of the whole layer, the same on every rank."""
    sizes, (owner, _, what) = ranks.sizes, name.partition(".")
    features = {"qkv": 3 * sizes.hidden, "up": sizes.inner}.get(owner.removesuffix("_bias"), sizes.hidden)
    if what == "weight" and not owner.startswith("norm"):
        inputs = sizes.inner if owner == "down" else sizes.hidden
        return ranks.random(name, features, inputs, scale=inputs**-0.5)
    return ranks.random(name, features, scale=0.1) + float(what == "weight")


def own(ranks: Ranks, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Part that this rank has of a parameter, or of its gradient."""
    dim = CUTS[name]
    return whole if dim is None else ranks.own(whole, dim)


def layer(ranks: Ranks, style: Style = WHOLE) -> Layer:
    """One with its numbers."""
    made = Layer(ranks.sizes, style, ranks.size if style.parts else 1, ranks.device)
    with torch.no_grad():
        for name, p in made.named_parameters():
            whole = numbers(ranks, name)
            p.copy_(whole if whole.shape == p.shape else own(ranks, name, whole))
    return made


def by_parallelize_module(ranks: Ranks) -> Layer:
    """Products and norms are DTensors; biases stay this rank's part."""
    column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    norm = SequenceParallel(sequence_dim=0)
    plan = {"norm1": norm, "norm2": norm, "qkv": column, "up": column, "out": row, "down": row}
    made: Layer = parallelize_module(layer(ranks, DTENSOR), ranks.mesh(), plan)  # type: ignore[arg-type]
    return made


def asynchronous(ranks: Ranks, model: nn.Module) -> nn.Module:
    """By torch.compile with products and collectives fused in pipelines over symmetric memory.

    Raises:
        RuntimeError: where no GPU has that.
    """
    if not ranks.card.is_gpu:
        raise RuntimeError("async TP needs symmetric memory, which GPUs have")
    groups = {dist.group.WORLD, ranks.mesh().get_group()}
    for name in {group.group_name for group in groups if group is not None}:
        symmetric.enable_symm_mem_for_group(name)
    return compiled(model, {"_micro_pipeline_tp": True})


def compiled(model: nn.Module, options: dict[str, Any] | None = None) -> nn.Module:
    """By torch.compile."""
    return torch.compile(model, options=options or {})  # type: ignore[return-value]


def attending() -> Any:
    """The context in which rivals run: attention by cuDNN where that can compute it."""
    return sdpa_kernel(BACKENDS, set_priority=True)
