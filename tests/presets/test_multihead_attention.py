"""te_fuser.MultiheadAttention against explicit PyTorch; calls of attention that say lengths and sequences of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import te_fuser
from tests.presets import plain
from tests.presets.layers import HEADS, LENGTHS, PAD, B, F, K, S, attention, layer, leaves_of
from tests.presets.layers import assert_as_meant as assert_layer_as_meant
from tests.presets.plain import Call, causal
from tests.twins import assert_same, tensor

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


def test_its_parts_run_alone_and_its_norm_is_given_in_every_call() -> None:
    made = attention(input_layernorm=True, return_layernorm_output=True)
    assert_as_meant(made, Call(causal(S)))
    assert_as_meant(made, Call(causal(S, window=(1, 0))), window_size=(1, 0))
    # Under Transformer Engine's names: the projections, and attention of heads that are apart.
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


def test_attributes_and_names_that_scripts_ask_for() -> None:
    """Names are those of Transformer Engine's modules, whatever their values are."""
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
    made = attention(qk_norm_type="RMSNorm", softmax_type="learnable"), attention(attention_type="cross")
    own, crossing = ({name.rpartition(".")[0] for name in m.state_dict()} for m in made)
    assert own == {"q_norm", "k_norm", "qkv", "core_attention", "proj"}
    assert crossing == {"query_layer", "key_value", "proj"}


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


KEYS = torch.tensor([0, 7, 9, 12])  # 7, 2 and 3 of the samples' positions
CAUSAL = causal(S)
HIDDEN = (torch.arange(S) >= LENGTHS.diff()[:, None])[:, None, :, None] | (torch.arange(S) >= KEYS.diff()[:, None])[
    :, None, None
]


@pytest.mark.parametrize(
    "keywords", [{}, {"fuse_qkv_params": True, "num_gqa_groups": 2}, {"softmax_type": "learnable"}]
)
@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_samples(kind: str, keywords: dict[str, Any]) -> None:
    """Keys behind their own length are hidden, whatever queries there are."""
    made = layer(**keywords)
    given = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": KEYS, "self_attn_mask_type": kind}
    assert_layer_as_meant(made, Call(HIDDEN | CAUSAL if "causal" in kind else HIDDEN), **given)
    made = layer(rotary_pos_interleaved=True, qk_norm_type="RMSNorm", **keywords)
    angles = tensor(S, 1, 1, 6, grad=False)
    assert_layer_as_meant(
        made,
        Call(HIDDEN | CAUSAL if "causal" in kind else HIDDEN, angles=angles.transpose(0, 2)),
        rotary_pos_emb=angles,
        **given,
    )


def sequences_of(offsets: torch.Tensor, lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sequence that each token is of; -1: of none."""
    found = torch.full((tokens,), -1)
    for n, (begin, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=False)):
        found[begin : begin + length] = n
    return found


@pytest.mark.parametrize("packed", [{"fuse_qkv_params": True, "num_gqa_groups": 2}, {}])
def test_sequences_one_behind_the_other(packed: dict[str, Any]) -> None:
    made, ours, theirs = layer(attn_input_format="thd", **packed), torch.tensor([0, 4, 9]), torch.tensor([0, 6, 9])
    begins = torch.tensor([0, 5, 11]), torch.tensor([0, 7, 11])
    given = {"cu_seqlens_q": ours, "cu_seqlens_kv": theirs, "self_attn_mask_type": "padding"}

    def one_sample(t: torch.Tensor) -> torch.Tensor:
        return t[None] if t.dim() == 2 else t[0]

    for said in ({}, {"cu_seqlens_q_padded": begins[0], "cu_seqlens_kv_padded": begins[1]}, {"max_seqlen_q": 6}):
        starts = begins if "cu_seqlens_q_padded" in said else (ours, theirs)
        a, b = (sequences_of(s, t.diff(), 11) for s, t in zip(starts, (ours, theirs), strict=True))
        hidden = (a[:, None] != b) | (a < 0)[:, None]
        said |= {"max_seqlen_kv": 6} if "max_seqlen_q" in said else {}
        assert_layer_as_meant(made, Call(hidden), tensor(11, F), one_sample, **given, **said)
    same = {"cu_seqlens_q": ours, "cu_seqlens_kv": ours.clone(), "self_attn_mask_type": "padding_causal"}
    x = tensor(11, F)
    torch.testing.assert_close(made(x, **same), made(x, **{**same, "cu_seqlens_kv": ours}))


def test_decoder_given_lengths_reads_those_of_its_memory() -> None:
    made, x = layer().self_attention, tensor(S, B, F)
    given = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": KEYS, "attn_mask_type": "padding"}
    torch.testing.assert_close(made.reference(x, **given), made(x, **given))
    memory, counts = tensor(K, B, F, seed=5), torch.tensor([0, 2, 5, 6])
    crossing = torch.arange(K) >= counts.diff()[:, None, None, None]
    given = {"encoder_output": memory, "enc_dec_attn_mask_type": "padding", "cu_seqlens_kv": counts}
    lengths = torch.arange(0, (B + 1) * S, S)
    with pytest.warns(UserWarning, match="reads no lengths"):  # of self attention
        call = Call(CAUSAL, memory=memory, crossing=crossing)
        assert_layer_as_meant(layer(layer_type="decoder"), call, cu_seqlens_q=lengths, **given)


HEADS = [torch.zeros(S, B, 2, 4)] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"attn_mask_type": "padding", "attention_mask": PAD, "cu_seqlens_kv": KEYS}, "the cu_seqlens_kv that calls"),
        ({"attn_mask_type": "padding", "cu_seqlens_q": KEYS, "cu_seqlens_q_padded": KEYS},
         "qkv_format='sbhd' has no padding between sequences, and the cu_seqlens_q_padded"),
        ({"cu_seqlens_kv_padded": KEYS}, "attn_mask_type='causal' reads no lengths"),
        ({"attn_mask_type": "arbitrary", "attention_mask": PAD, "cu_seqlens_q": KEYS},
         "attn_mask_type='arbitrary' reads no lengths"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_said(call: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        te_fuser.DotProductAttention(2, 4)(*HEADS, **call)


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_a_bias_of_sequences_goes_by_positions_in_each(kind: str) -> None:
    """[1, heads, max_seqlen_q, max_seqlen_kv], as Transformer Engine has it; so does its gradient."""
    made, x, ends = layer(attn_input_format="thd"), tensor(11, F), torch.tensor([0, 4, 11])
    bias = tensor(1, 4, 8, 8, seed=4)
    given = {"core_attention_bias": bias, "core_attention_bias_type": kind, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    scaled = bias / 6**0.5 if kind == "pre_scale_bias" else bias
    parts = [
        plain.layer(made, x[None, a:b], Call(causal(b - a), bias=scaled[..., : b - a, : b - a]))[0]
        for a, b in ((0, 4), (4, 11))
    ]
    for run in (made, made.reference):
        assert_same(run(x, cu_seqlens_q=ends, **given), torch.cat(parts), [x, bias, *made.parameters()])
