"""te_fuser.MultiheadAttention: what its layer does not show, against explicit PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import te_fuser
from tests.presets import plain
from tests.presets.layers import HEADS, B, F, K, S, assert_same, attention, leaves_of
from tests.presets.plain import Call, causal
from tests.twins import tensor

H = HEADS


def assert_as_meant(made: Any, call: Call, **given: Any) -> None:
    x = tensor(S, B, F)
    y = made(x, **given)
    memory = None if call.memory is None else call.memory.transpose(0, 1)
    want, h = (t.transpose(0, 1) for t in plain.attention(made, x.transpose(0, 1), replace(call, memory=memory)))
    ours, theirs = ((y[0], y[-1]), (want, h)) if isinstance(y, tuple) else (y, want)
    more = {} if call.memory is None else {"memory": call.memory}
    assert_same(ours, theirs, leaves_of(made, x, **more), 1e-9)


@pytest.mark.parametrize("keywords", [{}, {"fuse_qkv_params": True}, {"num_gqa_groups": 1, "kv_channels": 5}])
def test_self_and_cross_attention(keywords: dict[str, Any]) -> None:
    memory = tensor(K, B, F, seed=3)
    for norm in (False, True):
        assert_as_meant(attention(input_layernorm=norm, **keywords), Call(causal(S)))
        made = attention(input_layernorm=norm, attention_type="cross", attn_mask_type="no_mask", **keywords)
        assert_as_meant(made, Call(memory=memory), encoder_output=memory)


@pytest.mark.parametrize("keywords", [{"bias": False}, {"normalization": "RMSNorm"}, {"softmax_type": "off-by-one"}])
def test_other_arguments(keywords: dict[str, Any]) -> None:
    made = attention(input_layernorm=True, layer_number=2, **keywords)
    assert_as_meant(made, Call(causal(S)))
    x = tensor(S, B, F)
    for how in ({"fast_zero_fill": False}, {"pad_between_seqs": False}, {"checkpoint_core_attention": True}):
        assert torch.equal(made(x, **how), made(x))
    other = attention(input_layernorm=True, qkv_format="bshd", **keywords)
    torch.testing.assert_close(other(x.transpose(0, 1)).transpose(0, 1), made(x))


def test_attention_that_gives_its_norm_too_does_so_in_every_call() -> None:
    made = attention(input_layernorm=True, return_layernorm_output=True)
    assert_as_meant(made, Call(causal(S)))
    assert_as_meant(made, Call(causal(S, window=(1, 0))), window_size=(1, 0))


def test_its_parts_run_alone() -> None:
    """Under Transformer Engine's names: the projections, and attention of heads that are apart."""
    made, x = attention(fuse_qkv_params=True), tensor(S, B, F)
    heads = made.qkv(x).view(S, B, H, 3, F // H)
    out = made.core_attention(*heads.unbind(3))
    torch.testing.assert_close(made.proj(out), made(x))


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_norms_of_heads(norm: str) -> None:
    """Their weights are factors, whatever zero_centered_gamma says; called by themselves they normalize."""
    made = attention(qk_norm_type=norm, qk_norm_eps=0.1, zero_centered_gamma=True, input_layernorm=True)
    assert_as_meant(made, Call(causal(S)))
    fresh = te_fuser.MultiheadAttention(F, H, qk_norm_type=norm, zero_centered_gamma=True, device="cpu")
    assert (fresh.q_norm.weight == 1).all() and (fresh.k_norm.weight == 1).all()
    heads = tensor(S, B, H, F // H)
    for which in ("q", "k"):
        part = made.get_submodule(f"{which}_norm")
        torch.testing.assert_close(part(heads), plain.head_norm(heads, made, which))
    x = tensor(S, B, F)
    want = made(x)
    made.q_norm.register_forward_hook(lambda *_: None)
    assert torch.equal(made(x), want) and len(made.plans(x)) == 1


def test_attributes_that_scripts_ask_for() -> None:
    """Those of Transformer Engine's modules, whatever their values are."""
    plain_one = attention()
    assert plain_one.q_norm is plain_one.k_norm is plain_one.core_attention.softmax_offset is None
    assert plain_one.qk_norm_before_rope is False and te_fuser.InferenceParams(2, 8).is_paged is False
    made = attention(
        qk_norm_type="L2Normalization", qk_norm_before_rope=True, qk_norm_eps=0.1, softmax_type="off-by-one"
    )
    heads = tensor(S, B, H, F // H)
    for norm in (made.q_norm, made.k_norm):
        torch.testing.assert_close(norm(heads), plain.head_norm(heads, made, "q"))
    assert made.qk_norm_before_rope is True and made.core_attention.softmax_offset.tolist() == [0.0] * H
    assert made.state_dict().keys() == plain_one.state_dict().keys()
    assert len(made.plans(tensor(S, B, F))) == 1
    assert_as_meant(made, Call(causal(S)))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_main_grad_of_weights_that_are_apart(kind: str) -> None:
    made = attention(fuse_wgrad_accumulation=True, attention_type=kind, attn_mask_type="no_mask")
    x, given = tensor(S, B, F), {} if kind == "self" else {"encoder_output": tensor(K, B, F, seed=3)}
    twin = attention(attention_type=kind, attn_mask_type="no_mask")
    twin(x, **given).sum().backward()
    weights = {name: p for name, p in made.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.ones_like(p)
    for first, times, base in ((None, 1, 1), (True, 1, 0), (False, 2, 0)):
        made(x, is_first_microbatch=first, **given).sum().backward()
        for name, p in weights.items():
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, base + times * twin.get_parameter(name).grad)


def test_attention_names_its_parts_as_transformer_engine_does() -> None:
    made = attention(qk_norm_type="RMSNorm", softmax_type="learnable"), attention(attention_type="cross")
    own, crossing = ({name.rpartition(".")[0] for name in m.state_dict()} for m in made)
    assert own == {"q_norm", "k_norm", "qkv", "core_attention", "proj"}
    assert crossing == {"query_layer", "key_value", "proj"}
