"""Helpers for scripts of the quickstart: a clock, plain attention, a plain MLP, shared parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from te_fuser.recipe import fp8_autocast

__all__ = [
    "BasicMLP",
    "DotProductAttention",
    "share_parameters_with_basic_te_model",
    "share_parameters_with_fused_te_model",
    "share_parameters_with_transformerlayer_te_model",
    "speedometer",
]
__dir__ = __all__.copy


def speedometer(
    module: torch.nn.Module,
    input: torch.Tensor,
    output_grad: torch.Tensor,
    forward_kwargs: Mapping[str, Any] | None = None,
    fp8_autocast_kwargs: Mapping[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
) -> None:
    """Print the mean time of a training step: module(input) and its backward.

    Args:
        output_grad: the gradient of what the module gives.
        forward_kwargs: further arguments of the module.
        fp8_autocast_kwargs: of `fp8_autocast` around its forward; by default it is off.
        timing_iters, warmup_iters: steps that count, and steps before them.

    Raises:
        ValueError: without a step that counts.
    """
    if timing_iters < 1:
        raise ValueError(f"timing_iters counts steps, got {timing_iters}: use 1 or more")

    def steps(count: int) -> None:
        for _ in range(count):
            with fp8_autocast(**(fp8_autocast_kwargs or {})):
                output = module(input, **(forward_kwargs or {}))
            output.backward(output_grad)
        if input.is_cuda:
            torch.cuda.synchronize(input.device)

    steps(warmup_iters)
    start = time.perf_counter()
    steps(timing_iters)
    print(f"Mean time: {1e3 * (time.perf_counter() - start) / timing_iters} ms")


class DotProductAttention(torch.nn.Module):
    """Attention in plain PyTorch: softmax(q k^T / sqrt(kv_channels)) v, of [S, B, heads, kv_channels] each.

    Args:
        num_attention_heads: heads.
        kv_channels: features of one.
        attention_dropout: probability with which a weight is dropped.
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float) -> None:
        super().__init__()
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[S, B, heads * kv_channels]; what `attention_mask`, [B or 1, heads or 1, S, S], has True is hidden."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.kv_channels)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        attended = self.dropout(scores.softmax(-1)) @ v
        return attended.permute(2, 0, 1, 3).flatten(2)


class BasicMLP(torch.nn.Module):
    """linear2(gelu(linear1(x))) in plain PyTorch, by tanh.

    Args:
        hidden_size: features of x.
        ffn_hidden_size: features between the two.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = torch.nn.Linear(hidden_size, ffn_hidden_size, bias=True)
        self.linear2 = torch.nn.Linear(ffn_hidden_size, hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of x."""
        return self.linear2(F.gelu(self.linear1(x), approximate="tanh"))  # type: ignore[no-any-return]


def share_parameters_with_basic_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a layer of `Linear` and `LayerNorm` the parameters of the plain layer; the plain one keeps them, too."""
    for name in ("ln1", "qkv_projection", "projection", "ln2", "mlp.linear1", "mlp.linear2"):
        _share(te_model, name, "", basic_model, name)


def share_parameters_with_fused_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a layer of `LayerNormLinear`, `Linear` and `LayerNormMLP` the parameters of the plain layer."""
    _share(te_model, "projection", "", basic_model, "projection")
    _share_fused(te_model, "ln_qkv", "ln_mlp", basic_model)


def share_parameters_with_transformerlayer_te_model(te_model: torch.nn.Module, basic_model: torch.nn.Module) -> None:
    """Give a `TransformerLayer` the parameters of the plain layer.

    Queries, keys and values are one parameter there, and then here, too: packed head by head as [q | k | v].
    """
    _share(te_model, "self_attention.proj", "", basic_model, "projection")
    _share_fused(te_model, "self_attention.layernorm_qkv", "layernorm_mlp", basic_model)


def _share_fused(te_model: torch.nn.Module, qkv: str, mlp: str, basic_model: torch.nn.Module) -> None:
    _share(te_model, qkv, "layer_norm_", basic_model, "ln1")
    _share(te_model, qkv, "", basic_model, "qkv_projection")
    _share(te_model, mlp, "layer_norm_", basic_model, "ln2")
    _share(te_model, mlp, "fc1_", basic_model, "mlp.linear1")
    _share(te_model, mlp, "fc2_", basic_model, "mlp.linear2")


def _share(to: torch.nn.Module, path: str, prefix: str, source: torch.nn.Module, source_path: str) -> None:
    """Weight and bias of a module in one model become those, by their prefix, of one in another."""
    module, given = to.get_submodule(path), source.get_submodule(source_path)
    for name in ("weight", "bias"):
        setattr(module, prefix + name, given.get_parameter(name))
