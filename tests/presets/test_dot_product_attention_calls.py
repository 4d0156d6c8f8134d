"""te_fuser.DotProductAttention: masks, windows, biases and dropout where keys are fewer than queries, or more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fuser.presets.attention_call import MASK_TYPES
from tests.presets.layers import around
from tests.presets.plain import Call, causal, causal_from_last_shown
from tests.presets.test_dot_product_attention import B, D, E, G, H, S, assert_as_meant, attention, parts
from tests.twins import tensor


def given_for(kind: str, keys: int) -> tuple[torch.Tensor | None, Any]:
    """What is hidden, and the mask that says it beside the type."""
    corner = "bottom_right" if kind.endswith("bottom_right") else "top_left"
    hidden = causal(S, keys, corner) if "causal" in kind else torch.zeros(1, 1, S, keys, dtype=torch.bool)
    if kind == "arbitrary":
        mask = torch.rand(B, 1, S, keys, generator=torch.Generator().manual_seed(1)) > 0.6
        return mask, mask
    if "padding" in kind:
        pads = tuple(torch.rand(B, 1, 1, n, generator=torch.Generator().manual_seed(n)) > 0.7 for n in (S, keys))
        hidden = causal_from_last_shown(*pads) if corner == "bottom_right" else hidden
        return hidden | around(*pads), pads
    return hidden, None


@pytest.mark.parametrize("keys", [5, S, 9])
@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("kind", MASK_TYPES)
def test_types_of_masks(kind: str, by_call: bool, keys: int) -> None:
    said = {"attn_mask_type": kind}
    made, given = attention(**({} if by_call else said)), (said if by_call else {})
    hidden, mask = given_for(kind, keys)
    assert_as_meant(made, Call(hidden), parts(keys=keys), attention_mask=mask, **given)


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("corner", [None, False, True])
@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
def test_corners_of_windows(kind: str, corner: bool | None, by_call: bool) -> None:
    """None: the last query and key, where the type is none that counts from the first ones."""
    bottom_right = kind != "causal" if corner is None else corner
    at = "bottom_right" if bottom_right else "top_left"
    hidden = causal(S, 5, at, (2, 1))
    if "causal" in kind:
        hidden = hidden | causal(S, 5, at)
    said = {"attn_mask_type": kind, "window_size": (2, 1), "bottom_right_diagonal": corner}
    made, given = attention(**({} if by_call else said)), (said if by_call else {})
    assert_as_meant(made, Call(hidden), parts(), **given)


@pytest.mark.parametrize("window", [None, (-1, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_masks_of_padding_hide_what_lengths_hide(kind: str, window: Any) -> None:
    """The last query that is shown stands at the last key that is shown, however the padding is said."""
    keys, lengths = 9, (torch.tensor([3, 0, S][:B]), torch.tensor([5, 4, 9][:B]))
    pads = tuple(torch.arange(n) >= found[:, None, None, None] for n, found in zip((S, keys), lengths, strict=True))
    counts = [torch.nn.functional.pad(found.cumsum(0), (1, 0)) for found in lengths]
    made, said = attention(attention_type="cross"), {"attn_mask_type": kind, "window_size": window}
    sides = tuple(None if side == -1 else side for side in window or (-1, -1))
    sides = (sides[0], 0) if "causal" in kind else sides
    hidden = around(*pads)
    if kind == "padding_causal":
        hidden = hidden | causal(S, keys, window=sides)
    elif sides != (None, None):
        hidden = hidden | causal_from_last_shown(*pads, sides)
    assert_as_meant(made, Call(hidden), parts(keys=keys), attention_mask=pads, **said)
    assert_as_meant(made, Call(hidden), parts(keys=keys), cu_seqlens_q=counts[0], cu_seqlens_kv=counts[1], **said)
    alone = (torch.zeros_like(pads[0]), pads[1])
    if kind == "padding_causal_bottom_right":
        hidden = causal_from_last_shown(*alone, sides) | around(*alone)
        assert_as_meant(made, Call(hidden), parts(keys=keys), attention_mask=(None, pads[1]), **said)


@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
def test_biases_of_scores(kind: str) -> None:
    made, bias = attention(attn_mask_type=kind, softmax_scale=0.4), tensor(1, H, S, 5, seed=4)
    hidden = given_for(kind, 5)[0]
    bias.requires_grad_(False)
    given = {"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias"}
    assert_as_meant(made, Call(hidden, bias=bias), parts(), **given)
    given["core_attention_bias_type"] = "pre_scale_bias"
    assert_as_meant(made, Call(hidden, bias=0.4 * bias), parts(), **given)
    shift = 0 if kind == "causal" else 5 - S
    distance = (torch.arange(S)[:, None] + shift - torch.arange(5)).abs()
    for slopes in (None, tensor(H, grad=False), tensor(B, H, grad=False)):
        by = torch.tensor([2.0 ** (-8 * (k + 1) / H) for k in range(H)]) if slopes is None else slopes
        call = Call(hidden, bias=-by.double().view(-1, H, 1, 1) * distance)
        assert_as_meant(made, call, parts(), core_attention_bias_type="alibi", alibi_slopes=slopes)


@pytest.mark.parametrize("how", [{"fast_zero_fill": False}, {"pad_between_seqs": False}, {"max_seqlen_q": 3}])
def test_what_changes_nothing(how: dict[str, Any]) -> None:
    made, qkv = attention(layer_number=3), parts()
    assert torch.equal(made(*qkv, **how), made(*qkv))
    assert torch.equal(made(*qkv, checkpoint_core_attention=True), made(*qkv))


def test_dropout_drops_weights_and_scales_the_others() -> None:
    """All weights are 1/S, and a value tells whose it is: each is dropped, or has its share over the kept ones'."""
    made = attention(2, (4, S), attention_dropout=0.25, attn_mask_type="no_mask")
    query, key = (torch.zeros(S, 64, 2, 4, dtype=torch.float64) for _ in range(2))
    value = torch.eye(S, dtype=torch.float64)[:, None, None].expand(S, 64, 2, S)
    weights = made(query, key, value) * S * 0.75
    kept = weights.round()
    torch.testing.assert_close(weights, kept)
    assert set(kept.unique().tolist()) == {0.0, 1.0} and abs(kept.mean() - 0.75) < 0.03
    torch.testing.assert_close(made.eval()(query, key, value), torch.full_like(weights, 1 / S))
    assert attention(H, (D, E), G).attention_dropout == 0.0
