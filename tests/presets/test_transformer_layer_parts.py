"""te_fuser.TransformerLayer: what dropout drops, and what the others become; its parts, by themselves and in lists."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets import plain
from tests.presets.layers import PAD, B, F, K, S, around, layer
from tests.presets.plain import Call, causal
from tests.twins import assert_same, tensor

P = 0.4
ORDERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "post_norm": {"apply_residual_connection_post_layernorm": True},
    "bert": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "decoder": {"layer_type": "decoder"},
}


def branched(made: Any, x: torch.Tensor, memory: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
    """A layer [B, S, F] each of whose branches is multiplied by a number before it is added."""
    said, call = made.common, Call(causal(S), memory=memory)
    to_norm = said.apply_residual_connection_post_layernorm
    out, h = plain.attention(made.self_attention, x, call)
    if said.parallel_attention_mlp:
        return x + factors[0] * (out + plain.mlp(made.layernorm_mlp, x, said)[0])
    x = factors[0] * out + (h if to_norm else x)
    if made.decodes:
        out, h = plain.attention(made.inter_attention, x, Call(memory=memory))
        x = factors[1] * out + (h if to_norm else x)
    out, h = plain.mlp(made.layernorm_mlp, x, said)
    y = factors[-1] * out + (h if to_norm else x)
    if said.output_layernorm:
        last = made.layernorm
        y = plain.norm(y, said, last.weight, last.bias, said.layernorm_epsilon)
    return y


@pytest.mark.parametrize(("order", "format"), [*((order, "sbhd") for order in ORDERS), ("decoder", "bshd")])
def test_drop_path(order: str, format: str) -> None:
    """Each sample's branches are there or not, by themselves; those that are count 1 / (1 - p)."""
    made = layer(drop_path_rate=P, attn_input_format=format, **ORDERS[order])
    count = {"parallel": 1, "decoder": 3}.get(order, 2)
    x, memory = tensor(B, S, F, grad=False), tensor(B, K, F, grad=False, seed=5)
    ways = list(itertools.product((0.0, 1 / (1 - P)), repeat=count))
    want = {way: branched(made, x, memory, way) for way in ways}
    turn = (lambda t: t.transpose(0, 1)) if format == "sbhd" else lambda t: t
    given = {"encoder_output": turn(memory)} if order == "decoder" else {}
    seen: list[tuple[float, ...]] = []
    torch.manual_seed(0)
    for _ in range(40):
        y = turn(made(turn(x), **given))
        for sample in range(B):
            seen += [way for way in ways if torch.allclose(y[sample], want[way][sample], rtol=1e-9, atol=1e-9)]
    assert len(seen) == 40 * B and set(seen) == set(ways)
    shares = torch.tensor(seen, dtype=torch.float64).bool().double().mean(0)
    assert ((shares - (1 - P)).abs() < 0.15).all()
    torch.testing.assert_close(made.eval()(turn(x), **given), turn(branched(made, x, memory, (1.0,) * count)))


@pytest.mark.parametrize("order", ["gpt", "parallel"])
def test_hidden_dropout(order: str) -> None:
    """Elements of a branch are dropped, and the others count 1 / (1 - p); the sum is not."""
    made, x = layer(hidden_dropout=P, **ORDERS[order]), tensor(S, B, F, grad=False)
    with torch.no_grad():
        made.self_attention.proj.weight.zero_(), made.self_attention.proj.bias.zero_()
    branch = branched(made, x.transpose(0, 1), x, (1.0, 1.0)).transpose(0, 1) - x
    kept = (made(x) - x) / branch * (1 - P)
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-6)
    assert set(kept.round().abs().unique().tolist()) == {0.0, 1.0} and abs(kept.mean() - (1 - P)) < 0.08


def test_attention_dropout() -> None:
    """With one key to be seen, a head's output is there, times 1 / (1 - p), or it is not."""
    made = layer(attention_dropout=P, window_size=(0, 0)).self_attention
    x = tensor(S, B, F, grad=False)
    with torch.no_grad():
        made.proj.weight.copy_(torch.eye(F)), made.proj.bias.zero_()
    want = plain.attention(made, x.transpose(0, 1), Call(causal(S, window=(0, 0))))[0].transpose(0, 1)
    kept = (made(x) / want * (1 - P)).unflatten(-1, (4, F // 4))
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-6)
    torch.testing.assert_close(kept, kept[..., :1].expand_as(kept))
    assert abs(kept.mean() - (1 - P)) < 0.15


def test_both_directions_drop_the_same() -> None:
    made = layer(hidden_dropout=P, attention_dropout=P, drop_path_rate=P, layer_type="decoder")
    x, memory = tensor(S, B, F), tensor(S, B, F, seed=5)
    torch.manual_seed(3)
    y = made(x, encoder_output=memory)
    assert not torch.equal(made(x, encoder_output=memory), y)
    (dx,) = torch.autograd.grad(y.sum(), x)
    step = 1e-6 * tensor(S, B, F, grad=False, seed=9)
    sums = []
    for sign in (1, -1):
        torch.manual_seed(3)
        sums.append(made(x + sign * step, encoder_output=memory).sum())
    torch.testing.assert_close((sums[0] - sums[1]) / 2e-6, (dx * step / 1e-6).sum(), rtol=1e-4, atol=1e-6)


each = pytest.mark.parametrize("order", [order for order in ORDERS if order != "decoder"])


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
