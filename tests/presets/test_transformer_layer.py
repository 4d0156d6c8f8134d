"""te_fuser.TransformerLayer: every order of parts and every mask against explicit PyTorch, and each argument."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.presets.layers import FFN, HEADS, PAD, B, F, K, S, assert_as_meant, layer
from tests.presets.plain import Call, causal
from tests.twins import tensor

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


def test_names_and_shapes() -> None:
    def shapes(**keywords: Any) -> dict[str, tuple[int, ...]]:
        made = te_fuser.TransformerLayer(F, FFN, HEADS, device="meta", **keywords)
        return {name: tuple(t.shape) for name, t in made.state_dict().items()}

    mlp = {
        "layernorm_mlp.layer_norm_weight": (F,),
        "layernorm_mlp.layer_norm_bias": (F,),
        "layernorm_mlp.fc1_weight": (FFN, F),
        "layernorm_mlp.fc1_bias": (FFN,),
        "layernorm_mlp.fc2_weight": (F, FFN),
        "layernorm_mlp.fc2_bias": (F,),
    }
    proj = {"self_attention.proj.weight": (F, F), "self_attention.proj.bias": (F,)}
    norm = {f"self_attention.layernorm_qkv.layer_norm_{n}": (F,) for n in ("weight", "bias")}
    apart = {
        f"self_attention.layernorm_qkv.{part}_{what}": shape
        for part in ("query", "key", "value")
        for what, shape in (("weight", (F, F)), ("bias", (F,)))
    }
    assert shapes() == {**norm, **apart, **proj, **mlp}
    fused = {"self_attention.layernorm_qkv.weight": (3 * F, F), "self_attention.layernorm_qkv.bias": (3 * F,)}
    assert shapes(fuse_qkv_params=True) == {**norm, **fused, **proj, **mlp}
    without = {name.replace("layernorm_qkv", "qkv"): shape for name, shape in apart.items()}
    last = {"layernorm.weight": (F,), "layernorm.bias": (F,)}
    assert shapes(output_layernorm=True) == {**without, **proj, **mlp, **last}
    decoder = shapes(layer_type="decoder")
    crossing = {name.removeprefix("inter_attention."): s for name, s in decoder.items() if name.startswith("inter")}
    assert crossing == {
        "layernorm_query.layer_norm_weight": (F,),
        "layernorm_query.layer_norm_bias": (F,),
        "layernorm_query.query_weight": (F, F),
        "layernorm_query.query_bias": (F,),
        "key_value.key_weight": (F, F),
        "key_value.value_weight": (F, F),
        "key_value.key_bias": (F,),
        "key_value.value_bias": (F,),
        "proj.weight": (F, F),
        "proj.bias": (F,),
    }


def test_checkpoints_copies_and_pickles() -> None:
    made, x = layer(hidden_dropout=0.3), tensor(S, B, F)

    def grads(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])]

    want = grads(made)
    for got in (
        grads(lambda x: checkpoint(made, x, use_reentrant=False)),
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
    """It is read as that of a layer with fuse_qkv_params, in every kind of call."""
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
    [
        {},
        {"fuse_qkv_params": True, "num_gqa_groups": 2, "self_attn_mask_type": "no_mask"},
        {"attn_input_format": "bshd", "num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu"},
    ],
    ids=str,
)
def test_to_torch_and_back(keywords: dict[str, Any]) -> None:
    made, x = layer(bias=False, **keywords), tensor(S, B, F)
    plain = made.to_torch()
    assert not any(isinstance(m, (te_fuser.FusableOperation, te_fuser.Sequential)) for m in plain.modules())
    torch.testing.assert_close(plain(x), made(x))
    back = te_fuser.from_torch(plain, x.detach())
    torch.testing.assert_close(back(x), made(x))
    assert len(back.plans(x)) == 1


@pytest.mark.parametrize(
    "keywords",
    [{"qk_norm_type": "RMSNorm"}, {"window_size": (2, 0)}, {"softmax_type": "learnable"}, {"output_layernorm": True}],
    ids=str,
)
def test_what_to_torch_does_not_know(keywords: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"to_torch\(\) knows"):
        layer(**keywords).to_torch()
