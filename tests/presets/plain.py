"""Meaning of presets in explicit PyTorch, read from their parameters by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

# Activations, and below the functions of the gate in gated ones; the gate is the first half.
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATES = {
    "geglu": PLAIN["gelu"],
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "qgeglu": PLAIN["qgelu"],
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "swiglu": PLAIN["silu"],
}
ACTIVATIONS = [*PLAIN, *GATES, "clamped_swiglu"]


def activated(
    name: str, x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Any:
    """The activation of that name, as published."""
    if name in PLAIN:
        return PLAIN[name](x)
    half = x.shape[-1] // 2
    gate, linear = x[..., :half], x[..., half:]
    if name in GATES:
        return GATES[name](gate) * linear
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (linear + glu_linear_offset)


def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm where there is a bias, else RMSNorm, by their formulas."""
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, not by F.linear."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


@dataclass
class Call:
    """Inputs of a call beside x: `hidden` and `bias` broadcast to [B, H, S, K], angles are [B or 1, 1, S, D]."""

    hidden: torch.Tensor | None = None
    angles: Any = None
    bias: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    crossing: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    soft_cap: float = 0.0


def causal(queries: int, keys: int | None = None, corner: str = "top_left", window: Any = (None, 0)) -> torch.Tensor:
    """True = hidden, [1, 1, S, K]."""
    keys = queries if keys is None else keys
    shift = keys - queries if corner == "bottom_right" else 0
    d = torch.arange(keys)[None] - torch.arange(queries)[:, None] - shift
    left, right = window
    hidden = torch.zeros_like(d, dtype=torch.bool)
    hidden |= d > right if right is not None else False
    hidden |= d < -left if left is not None else False
    return hidden[None, None]


def causal_from_last_shown(queries: torch.Tensor, keys: torch.Tensor, window: Any = (None, 0)) -> torch.Tensor:
    """True = hidden, [B, 1, S, K]: the last query that is no padding, [B, 1, 1, S], stands at the last such key."""
    found = []
    for pads in zip(queries, keys, strict=True):
        shown = [max((n + 1 for n, pad in enumerate(side.flatten().tolist()) if not pad), default=0) for side in pads]
        whole = torch.ones(1, 1, queries.shape[-1], keys.shape[-1], dtype=torch.bool)
        whole[..., : shown[0], : shown[1]] = causal(*shown, "bottom_right", window)
        found.append(whole)
    return torch.cat(found)


def attend(q: Any, k: Any, v: Any, call: Call, scale: float | None = None, kept: Any = None) -> torch.Tensor:
    """[B, H, S, E] of q [B, H, S, D], k [B, G, K, D], v [B, G, K, E]; zeros for a row that sees nothing.

    Probabilities are multiplied by `kept`, if there is one: what dropout makes of them.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if call.soft_cap:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    if call.bias is not None:
        scores = scores + call.bias
    weights = scores.exp()
    if call.hidden is not None:
        weights = weights.masked_fill(call.hidden, 0.0)
    total = weights.sum(-1, keepdim=True)
    if call.sink is not None:
        total = total + call.sink.view(1, -1, 1, 1).exp()
    seen = (weights > 0).any(-1, keepdim=True)
    probabilities = weights / torch.where(seen, total, torch.ones_like(total))
    return (probabilities if kept is None else probabilities * kept) @ v


def turned(x: torch.Tensor, angles: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """The first features of heads [B, H, S, D], as many as there are angles [.., S, T], turned."""
    size = angles.shape[-1]
    x, rest = x[..., :size], x[..., size:]
    if neighbours:
        other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
    return torch.cat((x * angles.cos() + other * angles.sin(), rest), -1)


def joined(part: Any, what: str) -> torch.Tensor | None:
    """A projection's weight or bias; those of its parts one behind the other."""
    parts = [p for name, p in part.named_parameters() if name.endswith(what) and not name.startswith("layer_norm")]
    return torch.cat(parts) if parts else None


def norm(x: torch.Tensor, said: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, as a preset says it."""
    return normalized(x, weight + 1 if said.zero_centered_gamma else weight, bias, eps)


def head_norm(x: torch.Tensor, mha: Any, which: str) -> torch.Tensor:
    said = mha.common
    if said.qk_norm_type is None:
        return x
    if said.qk_norm_type == "L2Normalization":
        return x * (x.square().sum(-1, keepdim=True) + said.qk_norm_eps).rsqrt()
    part = getattr(mha, f"{which}_norm")
    return normalized(x, part.weight, getattr(part, "bias", None), said.qk_norm_eps)


def split(packed: torch.Tensor, counts: list[int], groups: int, size: int, interleaved: bool) -> list[torch.Tensor]:
    """[B, S, F] as heads [B, n, S, size] of each part: group by group, or one part behind the other."""
    batch, length = packed.shape[:2]
    if not interleaved:
        return [p.unflatten(-1, (-1, size)).transpose(1, 2) for p in packed.split([n * size for n in counts], -1)]
    x = packed.view(batch, length, groups, sum(counts) // groups, size)
    parts = x.split([n // groups for n in counts], 3)
    return [p.flatten(2, 3).transpose(1, 2) for p in parts]


def attention(mha: Any, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a MultiheadAttention for x [B, S, F], and that of its norm, or x."""
    first, said = mha.first, mha.common
    size, heads, groups = mha.channels, mha.num_attention_heads, mha.num_gqa_groups
    h = x
    if mha.input_layernorm:
        bias = getattr(first, "layer_norm_bias", None)
        h = norm(x, said, first.layer_norm_weight, bias, said.layernorm_epsilon)
    projected = linear(h, joined(first, "weight"), joined(first, "bias"))
    if mha.crosses:
        q = projected.unflatten(-1, (heads, size)).transpose(1, 2)
        both = linear(call.memory, joined(mha.key_value, "weight"), joined(mha.key_value, "bias"))
        k, v = split(both, [groups, groups], groups, size, mha.qkv_weight_interleaved)
    else:
        q, k, v = split(projected, [heads, groups, groups], groups, size, mha.qkv_weight_interleaved)
    if said.qk_norm_before_rope:
        q, k = head_norm(q, mha, "q"), head_norm(k, mha, "k")
    if call.angles is not None and not mha.crosses:
        ours, theirs = call.angles if isinstance(call.angles, tuple) else (call.angles, call.angles)
        q, k = (turned(t, a, said.rotary_pos_interleaved) for t, a in ((q, ours), (k, theirs)))
    if not said.qk_norm_before_rope:
        q, k = head_norm(q, mha, "q"), head_norm(k, mha, "k")
    sink = {"learnable": lambda: mha.core_attention.softmax_offset, "off-by-one": lambda: torch.zeros(heads)}
    call = replace(call, sink=sink[said.softmax_type]() if said.softmax_type in sink else None)
    out = attend(q, k, v, call).transpose(1, 2).flatten(2)
    return linear(out, mha.proj.weight, getattr(mha.proj, "bias", None)), h


def mlp(part: Any, x: torch.Tensor, said: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a LayerNormMLP for x, and that of its norm."""
    h = norm(x, said, part.layer_norm_weight, getattr(part, "layer_norm_bias", None), said.layernorm_epsilon)
    projected = linear(h, part.fc1_weight, getattr(part, "fc1_bias", None))
    between = activated(said.activation, projected, **(part.activation_params or {}))
    return linear(between, part.fc2_weight, getattr(part, "fc2_bias", None)), h


def layer(preset: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Output of a TransformerLayer without dropout for x [B, S, F]."""
    said = preset.common
    to_norm = said.apply_residual_connection_post_layernorm
    out, h = attention(preset.self_attention, x, call)
    if said.parallel_attention_mlp:
        return x + out + mlp(preset.layernorm_mlp, x, said)[0]
    x = out + (h if to_norm else x)
    if preset.decodes:
        crossing = replace(call, hidden=call.crossing, angles=None, bias=None)
        out, h = attention(preset.inter_attention, x, crossing)
        x = out + (h if to_norm else x)
    out, h = mlp(preset.layernorm_mlp, x, said)
    y = out + (h if to_norm else x)
    if said.output_layernorm:
        last = preset.layernorm
        y = norm(y, said, last.weight, getattr(last, "bias", None), said.layernorm_epsilon)
    return y
