"""te_fuser.TransformerLayer: every mask, window, packing and bias against explicit PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from tests.presets.layers import BY_LENGTH, HEADS, LENGTHS, PAD, B, F, K, S, around, assert_as_meant, layer
from tests.presets.plain import Call, causal
from tests.presets.plain import layer as plain
from tests.twins import tensor


@pytest.mark.parametrize(("keywords", "by_call"), [({}, True), ({"fuse_qkv_params": True, "num_gqa_groups": 2}, False)])
@pytest.mark.parametrize("kind", te_fuser.presets.attention_call.MASK_TYPES)
def test_masks(kind: str, keywords: dict[str, Any], by_call: bool) -> None:
    said = {"self_attn_mask_type": kind}
    made, given = layer(**keywords, **({} if by_call else said)), (said if by_call else {})
    hidden = causal(S) if "causal" in kind else torch.zeros(1, 1, S, S, dtype=torch.bool)
    if kind == "arbitrary":
        for shape in ((B, HEADS, S, S), (1, 1, S, S)):
            mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.6
            assert_as_meant(made, Call(mask), attention_mask=mask, **given)
    elif "padding" in kind:
        assert_as_meant(made, Call(hidden | around(PAD)), attention_mask=PAD, **given)
        assert_as_meant(made, Call(hidden | around(BY_LENGTH)), cu_seqlens_q=LENGTHS, **given)
        with pytest.raises(ValueError, match="reads what is padding: give attention_mask"):
            made(tensor(S, B, F), **given)
    else:
        assert_as_meant(made, Call(hidden), **given)


@pytest.mark.parametrize("window", [(2, 0), (1, 2), (-1, 1), (0, -1)])
def test_windows(window: tuple[int, int]) -> None:
    sides = tuple(None if side == -1 else side for side in window)
    hidden = causal(S, window=sides)
    assert_as_meant(layer(self_attn_mask_type="no_mask", window_size=window), Call(hidden))
    made = layer()
    assert_as_meant(made, Call(hidden | causal(S)), window_size=window)
    assert_as_meant(made, Call(hidden), window_size=window, self_attn_mask_type="no_mask")
    assert_as_meant(layer(window_size=(1, 1)), Call(causal(S)), window_size=(-1, -1), bottom_right_diagonal=True)


def test_masks_of_cross_attention() -> None:
    made, memory = layer(layer_type="decoder"), tensor(K, B, F, seed=5)
    keys = torch.rand(B, 1, 1, K, generator=torch.Generator().manual_seed(1)) > 0.7
    both = {"encoder_output": memory}
    nothing = torch.zeros_like(PAD)
    for pads, mask in (((PAD, keys), around(PAD, keys)), ((None, keys), around(nothing, keys))):
        assert_as_meant(made, Call(causal(S), memory=memory, crossing=mask), enc_dec_attn_mask=pads, **both)
    mask = torch.rand(B, HEADS, S, K, generator=torch.Generator().manual_seed(2)) > 0.7
    assert_as_meant(made, Call(causal(S), memory=memory, crossing=mask), enc_dec_attn_mask=mask, **both)
    for corner, kind in (("top_left", "causal"), ("bottom_right", "causal_bottom_right")):
        call = Call(causal(S), memory=memory, crossing=causal(S, K, corner))
        assert_as_meant(made, call, enc_dec_attn_mask_type=kind, **both)
        call.crossing = causal(S, K, corner, (2, 0))
        assert_as_meant(made, call, enc_dec_attn_mask_type=kind, enc_dec_window_size=(2, 0), **both)
        assert_as_meant(
            layer(layer_type="decoder", enc_dec_attn_mask_type=kind, enc_dec_window_size=(2, 0)), call, **both
        )
    call.crossing = causal(S, K, "bottom_right")
    given = {"enc_dec_attn_mask_type": "causal", "enc_dec_bottom_right_diagonal": True}
    assert_as_meant(made, call, **given, **both)
    assert_as_meant(layer(layer_type="decoder", **given), call, **both)
    counts = torch.tensor([0, 2, 5, 6])
    by_length = torch.arange(K) >= counts.diff()[:, None, None, None]
    call = Call(causal(S) | around(BY_LENGTH), memory=memory, crossing=around(BY_LENGTH, by_length))
    given = {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}
    assert_as_meant(made, call, cu_seqlens_q=LENGTHS, cu_seqlens_kv=counts, **given, **both)
    with pytest.raises(TypeError, match=r"a pair of masks, of queries \(or None\) and of keys, got one tensor"):
        made(tensor(S, B, F), enc_dec_attn_mask=keys, enc_dec_attn_mask_type="padding", **both)


@pytest.mark.parametrize("keywords", [{}, {"fuse_qkv_params": True, "num_gqa_groups": 2}])
def test_sequences_one_behind_the_other(keywords: dict[str, Any]) -> None:
    """Each as if it was alone; also where padding lies between them."""
    ends, lengths = torch.tensor([0, 3, 3, 10]), (3, 0, 7)
    made, x = layer(attn_input_format="thd", **keywords), tensor(11, F)
    for kind in ("causal", "padding_causal", "no_mask", "padding"):
        y = made(x, cu_seqlens_q=ends, self_attn_mask_type=kind)
        for n, length in enumerate(lengths):
            alone = x[None, ends[n] : ends[n + 1]]
            hidden = causal(length) if "causal" in kind else None
            torch.testing.assert_close(y[ends[n] : ends[n + 1]], plain(made, alone, Call(hidden))[0])
    bounded = made(x, cu_seqlens_q=ends, max_seqlen_q=7)
    torch.testing.assert_close(bounded[:10], made(x, cu_seqlens_q=ends)[:10])
    angles = tensor(7, 1, 1, 6, grad=False)
    y = made(x, cu_seqlens_q=ends, rotary_pos_emb=angles)
    assert not any("rotary" in step.name for step in made.plan(x, cu_seqlens_q=ends).steps)
    call = Call(causal(7), angles=angles.transpose(0, 2))
    torch.testing.assert_close(y[3:10], plain(made, x[None, 3:10], call)[0])
    begins = torch.tensor([0, 4, 4, 11])
    y = made(x, cu_seqlens_q=ends, cu_seqlens_q_padded=begins)
    for begin, length in ((0, 3), (4, 7)):
        alone = x[None, begin : begin + length]
        torch.testing.assert_close(y[begin : begin + length], plain(made, alone, Call(causal(length)))[0])


BIAS, SLOPES = tensor(1, HEADS, S, S, seed=4), tensor(B, HEADS, grad=False)
DISTANCE = (torch.arange(S)[None] - torch.arange(S)[:, None]).abs()
BIASES: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "post_scale_bias": ({"core_attention_bias": BIAS}, BIAS),
    "pre_scale_bias": ({"core_attention_bias": BIAS.detach()}, BIAS.detach() / 6**0.5),
    "alibi": ({"alibi_slopes": SLOPES}, -SLOPES[:, :, None, None] * DISTANCE),
}


@pytest.mark.parametrize("kind", BIASES)
def test_layer_given_a_bias_adds_it_to_scores(kind: str) -> None:
    given, bias = BIASES[kind]
    assert_as_meant(layer(), Call(causal(S), bias=bias), core_attention_bias_type=kind, **given)


def test_rows_that_see_nothing_give_zeros_to_the_projection() -> None:
    made, everything = layer().self_attention, torch.ones(B, 1, 1, S, dtype=torch.bool)
    x = tensor(S, B, F)
    y = made(x, everything, attn_mask_type="padding")
    torch.testing.assert_close(y, made.proj.bias.expand_as(y))
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_a_mask_that_is_not_read_is_said_once() -> None:
    """By each attention."""
    with pytest.warns(UserWarning, match="attn_mask_type='causal' reads no mask") as said:
        for made in (layer(), layer()):
            for _ in range(3):
                made(tensor(S, B, F), PAD)
    assert [Path(warning.filename) for warning in said] == [Path(__file__)] * 2
