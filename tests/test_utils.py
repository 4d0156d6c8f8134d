"""te_fuser.utils: the quickstart's helpers, and its layers, which share the plain one's parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_fuser as te
import te_fuser.utils as utils
from tests.twins import randomize, tensor

HIDDEN, FFN, HEADS = 12, 20, 3


class Attending(torch.nn.Module):
    """Base of the quickstart's layers: attention between a projection of x and its sum with x."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = utils.DotProductAttention(HEADS, HIDDEN // HEADS, 0.0)

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(*qkv.shape[:2], HEADS, 3 * HIDDEN // HEADS).chunk(3, -1)
        return self.projection(self.attention(q, k, v, None))


class Basic(Attending):
    def __init__(self, linear: Any = torch.nn.Linear, norm: Any = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.ln1, self.ln2 = norm(HIDDEN), norm(HIDDEN)
        self.qkv_projection, self.projection = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.mlp = utils.BasicMLP(HIDDEN, FFN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.qkv_projection(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class Fused(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.ln_qkv, self.projection = te.LayerNormLinear(HIDDEN, 3 * HIDDEN), te.Linear(HIDDEN, HIDDEN)
        self.ln_mlp = te.LayerNormMLP(HIDDEN, FFN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.ln_qkv(x))
        return x + self.ln_mlp(x)


def with_te_linears() -> Basic:
    model = Basic(te.Linear, te.LayerNorm)
    model.mlp.linear1, model.mlp.linear2 = te.Linear(HIDDEN, FFN), te.Linear(FFN, HIDDEN)
    return model


@pytest.mark.parametrize("which", ["basic", "fused"])
def test_all_parameters_are_shared(which: str) -> None:
    basic = randomize(Basic().double())
    model: Any = (with_te_linears() if which == "basic" else Fused()).to(torch.float64).cpu()
    x = tensor(5, 2, HIDDEN)
    model(x)
    share = (
        utils.share_parameters_with_basic_te_model if which == "basic" else utils.share_parameters_with_fused_te_model
    )
    share(model, basic)
    assert {id(p) for p in model.parameters()} == {id(p) for p in basic.parameters()}
    torch.testing.assert_close(model(x), basic(x))
    for m in (basic, model):
        m(x).square().sum().backward()
    grads = [p.grad.clone() for p in basic.parameters()]
    basic.zero_grad()
    basic(x).square().sum().backward()
    for both, p in zip(grads, basic.parameters(), strict=True):
        torch.testing.assert_close(both, 2 * p.grad)
    torch.optim.SGD(basic.parameters(), lr=0.01).step()
    torch.testing.assert_close(model(x), basic(x))


class Causal(Basic):
    """The plain layer with the mask that a TransformerLayer has."""

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(*qkv.shape[:2], HEADS, 3 * HIDDEN // HEADS).chunk(3, -1)
        mask = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)[None, None]
        return self.projection(self.attention(q, k, v, mask))


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_transformer_layers_parameters(fused: bool, called_before: bool) -> None:
    """A weight for queries, keys and values takes the place of three, with heads as they lie in it."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=fused, **options).double()
    basic, x = randomize(Causal().double()), tensor(5, 2, HIDDEN)
    around = te.Sequential(layer, te.LayerNorm(HIDDEN, device="cpu", params_dtype=torch.float64))
    padding = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    padded = {"attention_mask": padding, "self_attn_mask_type": "padding_causal"}
    if called_before:
        layer(x), around(x), layer(x, **padded)
    utils.share_parameters_with_transformerlayer_te_model(layer, basic)
    assert {id(p) for p in layer.parameters()} == {id(p) for p in basic.parameters()}
    want = basic(x)
    for got in (layer(x), layer(x, **padded), copy.deepcopy(layer)(x)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(around(x), torch.nn.functional.layer_norm(want, (HIDDEN,)))
    grads = [torch.autograd.grad(y.square().sum(), list(basic.parameters())) for y in (layer(x), basic(x))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked: bool) -> None:
    q, k, v = (tensor(5, 2, HEADS, 4, seed=seed) for seed in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None] if masked else None
    got = utils.DotProductAttention(HEADS, 4, 0.0)(q, k, v, mask)
    heads = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=masked)
    torch.testing.assert_close(got, want.permute(2, 0, 1, 3).reshape(5, 2, -1))
    assert (utils.DotProductAttention(HEADS, 4, 1.0)(q, k, v) == 0).all()


def test_speedometer(capsys: pytest.CaptureFixture[str]) -> None:
    layer, x = te.LayerNormMLP(HIDDEN, FFN, device="cpu"), torch.randn(4, HIDDEN, requires_grad=True)
    calls: list[Any] = []
    layer.register_forward_hook(lambda *args: calls.append(1))
    utils.speedometer(
        layer,
        x,
        torch.ones_like(x),
        forward_kwargs={"is_first_microbatch": False},
        fp8_autocast_kwargs={"enabled": False, "fp8_recipe": te.recipe.DelayedScaling()},
        timing_iters=2,
        warmup_iters=1,
    )
    assert len(calls) == 3 and x.grad is not None
    assert capsys.readouterr().out.startswith("Mean time: ")
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    fp8 = {"enabled": True, "fp8_recipe": recipe}
    utils.speedometer(layer, x, x.detach(), fp8_autocast_kwargs=fp8, timing_iters=1, warmup_iters=1)
    assert len(calls) == 5 and all(len(history) == 3 for _, history in te.quantization.states(layer).values())
    with pytest.raises(ValueError, match="timing_iters counts steps, got 0"):
        utils.speedometer(layer, x, x.detach(), timing_iters=0)
