"""te_fuser.DotProductAttention against explicit PyTorch: each argument, masks, windows, biases, dropout; angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.presets.attention_call import MASK_TYPES
from te_fuser.presets.rotary_position_embedding import RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.presets.layers import around
from tests.presets.plain import Call, attend, causal, causal_from_last_shown, turned
from tests.twins import assert_same, tensor

POSITIONS, SAMPLES, COUNT, SIZE = 7, 3, 4, 8


def angles(turning: int, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    k = torch.arange(turning // 2, dtype=torch.float64)
    return positions.double()[:, None] * base ** (-2 * k / turning)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles(interleaved: bool) -> None:
    def made(*args: float, at: tuple[int, ...] = (2,), **keywords: float) -> torch.Tensor:
        keywords |= {"interleaved": True} if interleaved else {}
        found = RotaryPositionEmbedding(SIZE, *args, device="cpu", **keywords)(POSITIONS, *at)  # type: ignore[arg-type]
        assert found.shape[1:3] == (1, 1) and found.dtype == torch.float32
        return (found[..., 0::2] if interleaved else found[..., : found.shape[-1] // 2])[:, 0, 0].double()

    at = torch.arange(2, POSITIONS + 2)
    torch.testing.assert_close(made(), angles(SIZE, at), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(at=()), angles(SIZE, torch.arange(POSITIONS)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(0.5), angles(4, at), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(rotary_base=100.0), angles(SIZE, at, 100.0), rtol=1e-6, atol=1e-6)
    for alone in ("seq_len_interpolation_factor", "pretrained_max_position_embeddings"):
        torch.testing.assert_close(made(**{alone: 2}), angles(SIZE, at), rtol=1e-6, atol=1e-6)
    squeezed = made(seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    torch.testing.assert_close(squeezed, angles(SIZE, at / 2), rtol=1e-6, atol=1e-6)
    squeezed = made(seq_len_interpolation_factor=2, pretrained_max_position_embeddings=3)
    torch.testing.assert_close(squeezed, angles(SIZE, at * 3 / POSITIONS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("size", [SIZE, 4])
def test_heads_are_turned(order: str, interleaved: bool, size: int) -> None:
    table = RotaryPositionEmbedding(size, interleaved=interleaved, device="cpu")(POSITIONS + 3)
    given = {"tensor_format": order, **({"interleaved": True} if interleaved else {})}
    for starts in (None, torch.tensor([0, 3, 1])):
        first = [0] * SAMPLES if starts is None else starts.tolist()
        if order == "thd":
            t, ends = tensor(10, COUNT, SIZE), torch.tensor([0, 2, 2, 10])
            y = apply_rotary_pos_emb(t, table, start_positions=starts, cu_seqlens=ends, **given)
            pieces = [
                turned(t[None, a:b].transpose(1, 2), table[at : at + b - a, 0].transpose(0, 1).double(), interleaved)
                for a, b, at in zip(ends[:-1].tolist(), ends[1:].tolist(), first, strict=True)
                if b > a
            ]
            want = torch.cat(pieces, 2)[0].transpose(0, 1)
        else:
            t = tensor(*((POSITIONS, SAMPLES) if order == "sbhd" else (SAMPLES, POSITIONS)), COUNT, SIZE)
            y = apply_rotary_pos_emb(t, table, start_positions=starts, **given)
            heads = t.permute((1, 2, 0, 3) if order == "sbhd" else (0, 2, 1, 3))
            by = torch.stack([table[at : at + POSITIONS, 0, 0] for at in first])[:, None].double()
            want = turned(heads, by, interleaved).permute((2, 0, 1, 3) if order == "sbhd" else (0, 2, 1, 3))
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
        dy = tensor(*y.shape, grad=False, seed=3)
        ours, theirs = (torch.autograd.grad(out, t, dy)[0] for out in (y, want))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_ranks_that_cut_the_sequence(order: str) -> None:
    """Each turns its two blocks by where they stand in the whole."""
    whole, ranks, dim = tensor(12, SAMPLES, COUNT, SIZE), 3, {"sbhd": 0, "bshd": 1}[order]
    whole = whole.transpose(0, dim)
    table = RotaryPositionEmbedding(SIZE, device="cpu")(13).double()
    want = apply_rotary_pos_emb(whole, table, order).chunk(2 * ranks, dim)
    for rank in range(ranks):
        blocks = whole.chunk(2 * ranks, dim)
        mine = torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]], dim)
        got = apply_rotary_pos_emb(mine, table, order, cp_size=ranks, cp_rank=rank)
        torch.testing.assert_close(got, torch.cat([want[rank], want[2 * ranks - 1 - rank]], dim))


S, K, B, H, G, D, E = 7, 5, 3, 4, 2, 6, 3
ORDERS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # to [B, H, S, D]


def parts(order: str = "sbhd", keys: int = K) -> list[torch.Tensor]:
    """q, k and v in that order."""
    sizes = ((S, H, D), (keys, G, D), (keys, G, E))
    made = [tensor(B, s, h, d, seed=k) for k, (s, h, d) in enumerate(sizes)]
    return made if order == "bshd" else [t.transpose(0, 1).detach().requires_grad_() for t in made]


def assert_as_meant(made: Any, call: Call, qkv: list[torch.Tensor], order: str = "sbhd", **given: Any) -> None:
    want = attend(*[t.permute(ORDERS[order]) for t in qkv], call, made.softmax_scale)
    want = want.permute(2, 0, 1, 3) if order == "sbhd" else want.permute(0, 2, 1, 3)
    assert_same(made(*qkv, **given), want.flatten(2), [*qkv, *made.parameters()], 1e-9)


def attention(*args: Any, **keywords: Any) -> Any:
    return te_fuser.DotProductAttention(*(args or (H, (D, E), G)), device="cpu", **keywords).double()


@pytest.mark.parametrize("order", ORDERS)
def test_values_and_gradients(order: str) -> None:
    made = attention(qkv_format=order)
    assert_as_meant(made, Call(causal(S, K)), parts(order), order)
    assert_as_meant(attention(), Call(causal(S, K)), parts(order), order, qkv_format=order)
    assert_as_meant(attention(H, D), Call(causal(S)), [tensor(S, B, H, D, seed=k) for k in range(3)])


def test_scores() -> None:
    no_mask = {"attn_mask_type": "no_mask"}
    assert_as_meant(attention(softmax_scale=0.5, **no_mask), Call(), parts())
    assert_as_meant(attention(softcap=0.7, **no_mask), Call(soft_cap=0.7), parts())
    zero = torch.zeros(H, dtype=torch.float64)
    assert_as_meant(attention(softmax_type="off-by-one", **no_mask), Call(sink=zero), parts())
    made = attention(softmax_type="learnable", **no_mask)
    assert list(made.state_dict()) == ["softmax_offset"] and made.softmax_offset.shape == (H,)
    torch.nn.init.normal_(made.softmax_offset)
    assert_as_meant(made, Call(sink=made.softmax_offset), parts())


@pytest.mark.parametrize("kind", ["padding,causal", "causal,padding"])
def test_mask_of_two_words_is_both(kind: str) -> None:
    made, pads = attention(attention_type="cross"), tuple(tensor(B, 1, 1, n) > 0.5 for n in (S, K))
    want = made(*parts(), pads, attn_mask_type="padding_causal")
    torch.testing.assert_close(made(*parts(), pads, attn_mask_type=kind), want)


def test_sequences_one_behind_the_other() -> None:
    made = attention(qkv_format="thd")
    ends, others = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 1, 4, 9])
    q, k, v = (tensor(n, h, d, seed=m) for m, (n, h, d) in enumerate(((7, H, D), (9, G, D), (9, G, E))))
    y = made(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=others, max_seqlen_q=4, max_seqlen_kv=5)
    for n in range(3):
        mine, theirs = slice(ends[n], ends[n + 1]), slice(others[n], others[n + 1])
        one = [t[None, where].transpose(1, 2) for t, where in ((q, mine), (k, theirs), (v, theirs))]
        want = attend(*one, Call(causal(one[0].shape[2], one[1].shape[2])), made.softmax_scale)
        torch.testing.assert_close(y[mine], want[0].transpose(0, 1).flatten(1))
    same = made(q, k[:7], v[:7], cu_seqlens_q=ends, cu_seqlens_kv=ends)
    torch.testing.assert_close(same, made(q, k[:7], v[:7], cu_seqlens_q=ends))
    begins = {"cu_seqlens_q_padded": torch.tensor([0, 4, 4, 7]), "cu_seqlens_q": torch.tensor([0, 3, 3, 6])}
    y = made(q, k[:7], v[:7], **begins)
    want = made(q[:3], k[:3], v[:3], cu_seqlens_q=torch.tensor([0, 3]))
    torch.testing.assert_close(y[:3], want)
    bounded = made(q, k[:7], v[:7], cu_seqlens_q=ends, max_seqlen_q=torch.tensor(4))
    torch.testing.assert_close(bounded, same)


ENDS, QUERIES, KEYS = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10]), torch.tensor([0, 4, 10])


@pytest.mark.parametrize("ends", [{}, {"cu_seqlens_kv": ENDS}, {"cu_seqlens_kv": ENDS.clone()}])
@pytest.mark.parametrize(
    "begins",
    [
        {"cu_seqlens_q_padded": QUERIES, "cu_seqlens_kv_padded": KEYS},
        {"cu_seqlens_q_padded": QUERIES, "cu_seqlens_kv_padded": QUERIES},
        {"cu_seqlens_kv_padded": KEYS},
    ],
)
def test_padding_between_sequences_of_keys(ends: dict[str, torch.Tensor], begins: dict[str, torch.Tensor]) -> None:
    made = attention(qkv_format="thd")
    q, k, v = (tensor(10, h, d, seed=n) for n, (h, d) in enumerate(((H, D), (G, D), (G, E))))
    y = made(q, k, v, cu_seqlens_q=ENDS, max_seqlen_q=3, **ends, **begins)
    for n in range(2):
        rows, seen = (begins.get(f"cu_seqlens_{side}_padded", ENDS)[n] for side in ("q", "kv"))
        one = [t[None, at : at + 3].transpose(1, 2) for t, at in ((q, rows), (k, seen), (v, seen))]
        want = attend(*one, Call(causal(3, 3)), made.softmax_scale)
        torch.testing.assert_close(y[rows : rows + 3], want[0].transpose(0, 1).flatten(1))


def test_a_bound_of_sequences_holds_for_both_sides() -> None:
    """Keys of other sequences than the queries' are not bounded by the queries' longest alone."""
    made = attention(qkv_format="thd")
    ends, others = torch.tensor([0, 3]), torch.tensor([0, 40])

    def longest(**given: Any) -> int | None:
        return made.asking.understood({"cu_seqlens_q": ends, **given})[0].longest

    assert longest(max_seqlen_q=3) == longest(max_seqlen_kv=torch.tensor(3)) == 4
    assert longest(max_seqlen_q=3, cu_seqlens_kv=ends) == 4
    assert longest(max_seqlen_q=3, cu_seqlens_kv=others) is longest(max_seqlen_kv=40, cu_seqlens_kv=others) is None
    assert longest(max_seqlen_q=3, max_seqlen_kv=40, cu_seqlens_kv=others) == 64
    assert longest() is longest(max_seqlen_q=3, cu_seqlens_q_padded=torch.tensor([0, 9])) is None


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_one_mask_of_padding_for_both_sides(kind: str) -> None:
    """Of self attention; it has one name, so that a kernel may be told of it though later positions are hidden."""
    mask = torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[1] = torch.arange(S) >= 3
    qkv = [tensor(S, B, H, D, seed=k) for k in range(3)]
    made = attention(H, D, attn_mask_type=kind)
    hidden = around(mask, mask) | (causal(S) if "causal" in kind else False)
    for given in (mask, (mask, mask)):
        assert_as_meant(made, Call(hidden), qkv, attention_mask=given)
    how, tensors = made.asking.understood({"attention_mask": mask})
    assert list(tensors) == ["attention_mask_q"] and how.hides(True).key_padding == "attention_mask_q"
    pair = (mask, mask.clone())
    assert_as_meant(made, Call(hidden), qkv, attention_mask=pair)


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_masks_of_padding_go_by_structure_on_a_gpu(kind: str) -> None:
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(
            1024, 4096, 16, self_attn_mask_type=kind, params_dtype=torch.bfloat16, device="meta", hidden_dropout=0.0
        )
        x = torch.empty(2048, 4, 1024, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(4, 1, 1, 2048, dtype=torch.bool)
    plan = layer.plan(x, attention_mask=mask, device="h200")
    names = [step.name for step in (*plan.forward, *plan.backward) if "attention" in step.name]
    assert names == ["attention_cuda_flash"] * 2


def given_for(kind: str, keys: int) -> tuple[torch.Tensor | None, Any]:
    """Hidden positions, and the mask that says them beside the type."""
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


def test_dropout_drops_weights_and_scales_the_others_and_lists_take_names() -> None:
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
    made, (q, k, v) = attention(H, D, attention_dropout=0.5), [tensor(S, B, H, D, seed=n) for n in range(3)]
    assert not torch.equal(made(q, k, v), made(q, k, v))
    made.eval()
    model = te_fuser.Sequential(ops.Scale(value=2.0), made, ops.GELU())
    key, value = k.flatten(2), v.flatten(2)
    want = torch.nn.functional.gelu(made(2.0 * q, k, v), approximate="tanh")
    torch.testing.assert_close(model(q.flatten(2), key_layer=key, value_layer=value), want)
