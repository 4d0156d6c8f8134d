"""te_fuser.TransformerLayer against explicit PyTorch: parts, masks, packings, biases, dropout; parts by themselves."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.presets import plain
from tests.presets.layers import BY_LENGTH, FFN, HEADS, LENGTHS, PAD, B, F, K, S, around, assert_as_meant, layer
from tests.presets.plain import Call, causal
from tests.refused import raises
from tests.twins import assert_same, tensor

KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "fused": {"fuse_qkv_params": True},
    "fused_blocked": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "gqa": {"num_gqa_groups": 2},
    "gqa_fused": {"num_gqa_groups": 2, "fuse_qkv_params": True},
    "mqa": {"num_gqa_groups": 1},
    "channels": {"kv_channels": 5},
    "rms": {"normalization": "RMSNorm", "zero_centered_gamma": True, "layernorm_epsilon": 1e-2},
    "no_bias": {"bias": False, "activation": "swiglu"},
    "added_to_norm": {"apply_residual_connection_post_layernorm": True},
    "bert": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "output_norm": {"output_layernorm": True, "normalization": "RMSNorm"},
    "parallel": {"parallel_attention_mlp": True},
    "learnable": {"softmax_type": "learnable"},
    "off_by_one": {"softmax_type": "off-by-one"},
    "nothing_changes": {"apply_query_key_layer_scaling": False, "attention_softmax_in_fp32": True, "layer_number": 3},
    "cut": {"set_parallel_mode": True, "sequence_parallel": True},
    "clamped": {"activation": "clamped_swiglu", "activation_params": {"limit": 0.5, "alpha": 1.1}},
}


NAMES = ("query", "key", "value")


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str) -> None:
    assert_as_meant(layer(**KINDS[kind]), Call(causal(S)))


@pytest.mark.parametrize("kind", ["gpt", "fused", "fused_blocked", "gqa_fused", "added_to_norm", "bert", "no_bias"])
def test_decoders(kind: str) -> None:
    made, memory = layer(layer_type="decoder", **KINDS[kind]), tensor(K, B, F, seed=5)
    assert_as_meant(made, Call(causal(S), memory=memory), encoder_output=memory)


@pytest.mark.parametrize("norm", ["L2Normalization", "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("keywords", [{"qk_norm_before_rope": True}, {"fuse_qkv_params": True, "num_gqa_groups": 2}])
def test_norms_of_heads(norm: str, keywords: dict[str, Any]) -> None:
    angles = tensor(S + 2, 1, 1, 6, grad=False)
    call = Call(causal(S), angles=angles[:S].transpose(0, 2))
    assert_as_meant(layer(qk_norm_type=norm, qk_norm_eps=0.1, **keywords), call, rotary_pos_emb=angles)
    made, memory = layer(qk_norm_type=norm, layer_type="decoder", **keywords), tensor(K, B, F, seed=5)
    assert_as_meant(made, Call(causal(S), memory=memory), encoder_output=memory)


@pytest.mark.parametrize(
    "keywords", [{}, {"fuse_qkv_params": True, "num_gqa_groups": 2}, {"attn_input_format": "bshd"}]
)
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotary_embedding(keywords: dict[str, Any], neighbours: bool) -> None:
    made = layer(rotary_pos_interleaved=neighbours, **keywords)
    pair = tensor(S, 1, 1, 6, grad=False), tensor(S + 1, 1, 1, 6, grad=False, seed=1)
    ours, theirs = (t[:S].transpose(0, 2) for t in pair)
    same = {"x": tensor(B, S, F), "order": lambda t: t} if "attn_input_format" in keywords else {}
    assert_as_meant(made, Call(causal(S), angles=ours), rotary_pos_emb=pair[0], **same)
    assert_as_meant(made, Call(causal(S), angles=(ours, theirs)), rotary_pos_emb=pair, **same)


# ------------------------------------------------------------------------------------------------ as a list


def test_lists_take_its_inputs_by_name() -> None:
    layers = [layer(self_attn_mask_type="padding"), layer(layer_type="decoder")]
    stack, x, memory = te_fuser.Sequential(*layers, ops.GELU()), tensor(S, B, F), tensor(K, B, F)
    angles = tensor(S, 1, 1, 6, grad=False)
    y = stack(x, attention_mask=PAD, rotary_pos_emb=angles, encoder_output=memory)
    h = layers[0](x, PAD, rotary_pos_emb=angles)
    want = torch.nn.functional.gelu(layers[1](h, None, memory, rotary_pos_emb=angles), approximate="tanh")
    torch.testing.assert_close(y, want)
    stack[1].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(
        stack(x, attention_mask=PAD, rotary_pos_emb=angles, encoder_output=memory), want, rtol=1e-12, atol=1e-12
    )


def test_each_call_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_fuser.fuser import pipeline

    made, x, planned = layer(), tensor(S, B, F), []
    make_plan = pipeline.make_plan
    monkeypatch.setattr(pipeline, "make_plan", lambda *args: planned.append(1) or make_plan(*args))
    for k in range(3):
        made(x)
        made(x, PAD.roll(k, -1), self_attn_mask_type="padding")
        made(x, window_size=(k % 2, 0))
    assert len(planned) == 4


# ------------------------------------------------------------------------------------------- other arguments


def shapes(weight: tuple[int, ...], *paths: str) -> dict[str, tuple[int, ...]]:
    """Shapes of projections or norms under these paths: weights, and biases of their first size."""
    return {f"{path}{what}": size for path in paths for what, size in (("weight", weight), ("bias", weight[:1]))}


def test_names_and_shapes() -> None:
    def made(**keywords: Any) -> dict[str, tuple[int, ...]]:
        layer = te_fuser.TransformerLayer(F, FFN, HEADS, device="meta", **keywords)
        return {name: tuple(t.shape) for name, t in layer.state_dict().items()}

    qkv = "self_attention.layernorm_qkv."
    norm, apart = shapes((F,), f"{qkv}layer_norm_"), shapes((F, F), *(f"{qkv}{part}_" for part in NAMES))
    common = {
        **shapes((F, F), "self_attention.proj."),
        **shapes((F,), "layernorm_mlp.layer_norm_"),
        **shapes((FFN, F), "layernorm_mlp.fc1_"),
        **shapes((F, FFN), "layernorm_mlp.fc2_"),
    }
    assert made() == {**common, **norm, **apart}
    assert made(fuse_qkv_params=True) == {**common, **norm, **shapes((3 * F, F), qkv)}
    without = shapes((F, F), *(f"self_attention.qkv.{part}_" for part in NAMES))
    assert made(output_layernorm=True) == {**common, **without, **shapes((F,), "layernorm.")}
    query, key_value = "inter_attention.layernorm_query.", "inter_attention.key_value."
    crossing = shapes((F, F), f"{query}query_", f"{key_value}key_", f"{key_value}value_", "inter_attention.proj.")
    assert made(layer_type="decoder") == {**common, **norm, **apart, **crossing, **shapes((F,), f"{query}layer_norm_")}


def test_checkpoints_copies_and_pickles() -> None:
    made, x = layer(hidden_dropout=0.3), tensor(S, B, F)

    def grads(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]

    want = grads(made)
    for got in (
        grads(lambda x: checkpoint(made, x, use_reentrant=False)),
        grads(lambda x: te_fuser.checkpoint(made, x)),
        grads(lambda x: made(x, checkpoint_core_attention=True)),
    ):
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    made.eval()
    made(x, PAD, self_attn_mask_type="padding")
    calls: tuple[dict[str, Any], ...] = ({}, {"attention_mask": PAD, "self_attn_mask_type": "padding"})
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        for how in calls:
            torch.testing.assert_close(twin(x, **how), made(x, **how))
        with torch.no_grad():
            twin.self_attention.proj.weight.add_(1.0)
        for how in calls:
            assert not torch.allclose(twin(x, **how), made(x, **how))
            want = twin(x, **how).float()
            torch.testing.assert_close(twin.float()(x.float(), **how), want, rtol=1e-4, atol=1e-4)
            twin.double()


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_weight_assigned_to_a_split_layer(interleaved: bool) -> None:
    """The weight is read as that of a layer with fuse_qkv_params, in every kind of call."""
    made, x = layer(qkv_weight_interleaved=interleaved), tensor(S, B, F)
    made(x), made(x, window_size=(1, 0))
    fused = layer(fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    state = {name: t for name, t in made.state_dict().items() if "query" not in name}
    fused.load_state_dict(state, strict=False)
    qkv, theirs = made.self_attention.layernorm_qkv, fused.self_attention.layernorm_qkv
    qkv.weight, qkv.bias = theirs.weight, theirs.bias
    assert made.state_dict().keys() == fused.state_dict().keys()
    for how in ({}, {"window_size": (1, 0)}):
        torch.testing.assert_close(made(x, **how), fused(x, **how))
    made(x, window_size=(1, 0)).sum().backward()
    assert theirs.weight.grad is not None


@pytest.mark.parametrize(
    "keywords",
    [{"qk_norm_type": "RMSNorm"}, {"window_size": (2, 0)}, {"softmax_type": "learnable"}, {"output_layernorm": True}],
    ids=str,
)
def test_what_to_torch_does_not_know(keywords: dict[str, Any]) -> None:
    raises(NotImplementedError, r"to_torch\(\) knows", lambda: layer(**keywords).to_torch())


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
            torch.testing.assert_close(y[ends[n] : ends[n + 1]], plain.layer(made, alone, Call(hidden))[0])
    bounded = made(x, cu_seqlens_q=ends, max_seqlen_q=7)
    torch.testing.assert_close(bounded[:10], made(x, cu_seqlens_q=ends)[:10])
    angles = tensor(7, 1, 1, 6, grad=False)
    y = made(x, cu_seqlens_q=ends, rotary_pos_emb=angles)
    assert not any("rotary" in step.name for step in made.plan(x, cu_seqlens_q=ends).steps)
    call = Call(causal(7), angles=angles.transpose(0, 2))
    torch.testing.assert_close(y[3:10], plain.layer(made, x[None, 3:10], call)[0])
    begins = torch.tensor([0, 4, 4, 11])
    y = made(x, cu_seqlens_q=ends, cu_seqlens_q_padded=begins)
    for begin, length in ((0, 3), (4, 7)):
        alone = x[None, begin : begin + length]
        torch.testing.assert_close(y[begin : begin + length], plain.layer(made, alone, Call(causal(length)))[0])


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
