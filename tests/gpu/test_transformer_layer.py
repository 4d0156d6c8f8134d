"""Layers on a GPU: masks, packing and dtypes against explicit PyTorch in float64, and decoding, captured and not."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch

import te_fuser
from tests.presets.plain import Call, causal
from tests.presets.plain import layer as plain

GPU = torch.device("cuda")
S, B, F, FFN, HEADS = 130, 3, 256, 512, 4


def layer(**keywords: Any) -> Any:
    torch.manual_seed(0)
    own = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16, "device": GPU}
    return te_fuser.TransformerLayer(F, FFN, HEADS, **{**own, **keywords})


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(GPU, torch.bfloat16)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=0.02, atol=0.02 * want.abs().max().item())


def padding() -> torch.Tensor:
    pad = torch.zeros(B, 1, 1, S, dtype=torch.bool, device=GPU)
    pad[1, ..., 100:] = pad[2, ..., :7] = True
    return pad


@pytest.mark.parametrize("keywords", [{}, {"fuse_qkv_params": True, "num_gqa_groups": 2}, {"output_layernorm": True}])
@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding", "padding_causal", "arbitrary"])
def test_values_and_gradients(kind: str, keywords: dict[str, Any]) -> None:
    made = layer(self_attn_mask_type=kind, **keywords)
    exact, x = copy.deepcopy(made).double(), values(S, B, F).requires_grad_()
    hidden = causal(S).to(GPU) if "causal" in kind else None
    mask = None
    if "padding" in kind or kind == "arbitrary":
        mask = padding() if "padding" in kind else causal(S, window=(9, 3)).to(GPU)
        pad = mask.transpose(-1, -2) | mask if "padding" in kind else mask
        hidden = pad if hidden is None else pad | hidden
    wide = x.detach().double().requires_grad_()
    y = made(x, mask)
    want = plain(exact, wide.transpose(0, 1), Call(hidden)).transpose(0, 1)
    assert_close(y, want)
    dy = values(*y.shape, seed=1)
    ours = torch.autograd.grad(y, [x, *made.parameters()], dy)
    theirs = torch.autograd.grad(want, [wide, *exact.parameters()], dy.double())
    for name, got, gradient in zip(["x", *dict(made.named_parameters())], ours, theirs, strict=True):
        if not name.endswith("key_bias"):  # softmax does not see it: its gradient is what is left of rounding
            assert_close(got, gradient)


def test_sequences_one_behind_the_other() -> None:
    made, x = layer(attn_input_format="thd"), values(200, F)
    ends = torch.tensor([0, 70, 70, 199], dtype=torch.int32, device=GPU)
    y = made(x, cu_seqlens_q=ends, max_seqlen_q=129)
    exact = copy.deepcopy(made).double()
    for first, last in ((0, 70), (70, 199)):
        want = plain(exact, x[None, first:last].double(), Call(causal(last - first).to(GPU)))
        assert_close(y[first:last], want[0])


@pytest.mark.parametrize("captured", [False, True])
@torch.no_grad()
def test_decoding(captured: bool) -> None:
    layers = [layer(layer_number=n, num_gqa_groups=2) for n in (1, 2)]
    text, angles = values(40, B, F), te_fuser.RotaryPositionEmbedding(F // HEADS, device=GPU)(64)

    def whole(x: torch.Tensor, **call: Any) -> torch.Tensor:
        for made in layers:
            x = made(x, rotary_pos_emb=angles, **call)
        return x

    want, params = whole(text), te_fuser.InferenceParams(B, 64)

    def advance(count: int) -> None:
        params.pre_step(OrderedDict.fromkeys(range(B), count))

    advance(30)
    assert_close(whole(text[:30], inference_params=params), want[:30])
    x = text[30:31].clone()
    advance(1)
    y = whole(x, inference_params=params)
    assert_close(y, want[30:31])
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = whole(x, inference_params=params)
    for at in range(31, 40):
        x.copy_(text[at : at + 1])
        advance(1)
        if captured:
            graph.replay()
        else:
            y = whole(x, inference_params=params)
        assert_close(y, want[at : at + 1])
