"""Attentions whose calls say lengths and sequences of keys, and what else of a call may not stay unread in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from tests.presets import plain
from tests.presets.layers import LENGTHS, PAD, B, F, K, S, assert_as_meant, layer
from tests.presets.plain import Call, causal
from tests.twins import tensor

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
    assert_as_meant(made, Call(HIDDEN | CAUSAL if "causal" in kind else HIDDEN), **given)
    made = layer(rotary_pos_interleaved=True, qk_norm_type="RMSNorm", **keywords)
    angles = tensor(S, 1, 1, 6, grad=False)
    assert_as_meant(
        made,
        Call(HIDDEN | CAUSAL if "causal" in kind else HIDDEN, angles=angles.transpose(0, 2)),
        rotary_pos_emb=angles,
        **given,
    )


def sequences_of(offsets: torch.Tensor, lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which sequence a token is of; -1: of none."""
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
        assert_as_meant(made, Call(hidden), tensor(11, F), one_sample, **given, **said)
    with pytest.raises(ValueError, match=r"'cu_seqlens_q' and 'cu_seqlens_kv' say \[3, 4\]"):
        made(tensor(11, F), **{**given, "cu_seqlens_kv": torch.tensor([0, 3, 6, 9])})
    with pytest.raises(ValueError, match="rotary_pos_emb turns by cu_seqlens_q, and cu_seqlens_kv puts keys into"):
        made(tensor(11, F), rotary_pos_emb=tensor(11, 1, 1, 6, grad=False), **given)
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
        assert_as_meant(layer(layer_type="decoder"), call, cu_seqlens_q=lengths, **given)


def core(**keywords: Any) -> Any:
    return te_fuser.DotProductAttention(2, 4, **keywords)


HEADS = [torch.zeros(S, B, 2, 4)] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"attn_mask_type": "padding", "attention_mask": PAD, "cu_seqlens_kv": KEYS}, "the cu_seqlens_kv that calls"),
        (
            {"attn_mask_type": "padding", "cu_seqlens_q": KEYS, "cu_seqlens_q_padded": KEYS},
            "qkv_format='sbhd' has no padding between sequences, and the cu_seqlens_q_padded",
        ),
        ({"cu_seqlens_kv_padded": KEYS}, "attn_mask_type='causal' reads no lengths"),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": PAD, "cu_seqlens_q": KEYS},
            "attn_mask_type='arbitrary' reads no lengths",
        ),
    ],
)
def test_what_changes_nothing_is_said(call: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        core()(*HEADS, **call)


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
    want, dy, leaves = torch.cat(parts), tensor(11, F, grad=False, seed=3), [x, bias, *made.parameters()]
    grads = torch.autograd.grad(want, leaves, dy)
    for run in (made, made.reference):
        y = run(x, cu_seqlens_q=ends, **given)
        torch.testing.assert_close(y, want)
        for ours, theirs in zip(torch.autograd.grad(y, leaves, dy), grads, strict=True):
            torch.testing.assert_close(ours, theirs)
