"""The parts of a layer, called by themselves and in other lists: each is a preset, in whatever order of parts it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets import plain
from tests.presets.layers import PAD, B, F, K, S, around, assert_same, layer
from tests.presets.plain import Call, causal
from tests.twins import tensor

ORDERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "post_norm": {"apply_residual_connection_post_layernorm": True},
    "bert": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
}
each = pytest.mark.parametrize("order", ORDERS)


def attended(part: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return plain.attention(part, x.transpose(0, 1), call)[0].transpose(0, 1)


@each
@pytest.mark.parametrize("called", [False, True])
def test_parts(order: str, called: bool) -> None:
    made, x = layer(**ORDERS[order]), tensor(S, B, F)
    whole = made(x) if called else None
    attention, mlp = made.self_attention, made.layernorm_mlp
    assert_same(mlp(x), plain.mlp(mlp, x, made.common)[0], [x, *mlp.parameters()])
    assert_same(attention(x), attended(attention, x, Call(causal(S))), [x, *attention.parameters()])
    masked = attention(x, PAD, attn_mask_type="padding")
    assert_same(masked, attended(attention, x, Call(around(PAD))), [x, *attention.parameters()])
    again = made(x)
    assert whole is None or torch.equal(again, whole)


@each
def test_projections(order: str) -> None:
    made, x = layer(**ORDERS[order]), tensor(S, B, F)
    first = made.self_attention.first
    h = x
    if made.self_attention.input_layernorm:
        h = plain.norm(x, made.common, first.layer_norm_weight, first.layer_norm_bias, 1e-5)
    want = torch.nn.functional.linear(h, plain.joined(first, "weight"), plain.joined(first, "bias"))
    assert_same(first(x), want, [x, *first.parameters()])


def test_cross_attention() -> None:
    made, x, memory = layer(layer_type="decoder", **ORDERS["post_norm"]), tensor(S, B, F), tensor(K, B, F, seed=5)
    part = made.inter_attention
    want = attended(part, x, Call(memory=memory.transpose(0, 1)))
    assert_same(part(x, encoder_output=memory), want, [x, memory, *part.parameters()])


@each
def test_in_other_lists(order: str) -> None:
    """A list of a user's own, of parts of several layers: each name is that of the part before."""
    layers, x = [layer(**ORDERS[order]) for _ in range(2)], tensor(S, B, F)
    stack = te_fuser.Sequential(*(part for made in layers for part in (made.self_attention, made.layernorm_mlp)))
    want = x
    for made in layers:
        want = plain.mlp(made.layernorm_mlp, attended(made.self_attention, want, Call(causal(S))), made.common)[0]
    used = [p for name, p in stack.named_parameters()]
    assert_same(stack(x), want, [x, *used])
    assert len(stack.plans(x)) == 1
    residual = te_fuser.Residual(layers[0].layernorm_mlp, ops.Dropout(0.0))
    torch.testing.assert_close(residual(x), x + plain.mlp(layers[0].layernorm_mlp, x, layers[0].common)[0])


def test_what_a_norm_gives_beside() -> None:
    """The projection of an attention that returns its norm's output, called by itself, gives what it projects."""
    made = te_fuser.MultiheadAttention(
        F, 4, input_layernorm=True, return_layernorm_output=True, device="cpu", params_dtype=torch.float64
    )
    x, first = tensor(S, B, F), made.layernorm_qkv
    h = torch.nn.functional.layer_norm(x, (F,), first.layer_norm_weight, first.layer_norm_bias)
    want = torch.nn.functional.linear(h, plain.joined(first, "weight"), plain.joined(first, "bias"))
    torch.testing.assert_close(first(x), want)
