"""te_fuser.TransformerLayer: every order of parts and every mask against explicit PyTorch, and each argument."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.presets.layers import FFN, HEADS, PAD, B, F, K, S, around, assert_as_meant, layer
from tests.presets.plain import Call, causal
from tests.presets.plain import layer as plain
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


def bare(made: Any) -> te_fuser.Sequential:
    """The ops of a GPT layer, each with the parameters of a preset."""
    attention, mlp = made.self_attention, made.layernorm_mlp
    qkv, dtype = attention.layernorm_qkv, attention.proj.weight.dtype
    listed = te_fuser.Sequential(
        te_fuser.Residual(
            ops.LayerNorm(F, dtype=dtype),
            ops.Linear(F, 3 * F, dtype=dtype),
            ops.DotProductAttention(HEADS, F // HEADS, mask="causal", layout="sequence_first"),
            ops.Linear(F, F, dtype=dtype),
            ops.Dropout(0.0),
        ),
        te_fuser.Residual(
            ops.LayerNorm(F, dtype=dtype),
            ops.Linear(F, FFN, dtype=dtype),
            ops.GELU(),
            ops.Linear(FFN, F, dtype=dtype),
            ops.Dropout(0.0),
        ),
    )
    first, second = listed
    owners = [
        *[(first[0], n, qkv, f"layer_norm_{n}") for n in ("weight", "bias")],
        *[(first[1], n, qkv, n) for n in ("weight", "bias")],
        *[(first[3], n, attention.proj, n) for n in ("weight", "bias")],
        *[(second[0], n, mlp, f"layer_norm_{n}") for n in ("weight", "bias")],
        *[(second[1], n, mlp, f"fc1_{n}") for n in ("weight", "bias")],
        *[(second[3], n, mlp, f"fc2_{n}") for n in ("weight", "bias")],
    ]
    for op, name, owner, theirs in owners:
        setattr(op, name, owner.get_parameter(theirs))
    return listed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_its_list_bit_for_bit(dtype: torch.dtype) -> None:
    made = layer(fuse_qkv_params=True, params_dtype=dtype)
    x, listed = tensor(S, B, F, dtype=dtype), bare(made)
    y, want = made(x), listed(x)
    assert torch.equal(y, want)
    leaves = [x, *made.parameters()]
    for ours, theirs in zip(*[torch.autograd.grad(t, leaves, torch.ones_like(t)) for t in (y, want)], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["h200", None])
def test_stacks_plan_as_one_list(device: str | None) -> None:
    """As the bare lists do, those behind one another fused across their ends; queries, keys and values apart too."""
    layers = [layer(fuse_qkv_params=True, params_dtype=torch.bfloat16) for _ in range(2)]
    x = torch.empty(64, 2, F, dtype=torch.bfloat16, requires_grad=True)
    want = te_fuser.Sequential(*map(bare, layers)).plan(x, device=device)
    got = te_fuser.Sequential(*layers).plan(x, device=device)
    assert [s.name for s in got.steps] == [s.name for s in want.steps]
    apart = te_fuser.Sequential(*[layer(params_dtype=torch.bfloat16) for _ in range(2)]).plan(x, device=device)
    assert [s.name for s in apart.steps] == [s.name for s in want.steps]


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


def test_parts_with_hooks_and_calls_that_change_something() -> None:
    seen: list[str] = []
    made = layer()
    made.self_attention.proj.register_forward_hook(lambda *_: seen.append("proj"))
    made.layernorm_mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    assert_as_meant(made, Call(causal(S)))
    assert seen == ["proj", "mlp"]
    assert_as_meant(made, Call(around(PAD)), attention_mask=PAD, self_attn_mask_type="padding")
    assert seen == ["proj", "mlp"] * 2


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_attentions_run_in_every_call(late: bool) -> None:
    seen: list[str] = []
    made, memory = layer(layer_type="decoder"), tensor(K, B, F, seed=5)
    given = {"attention_mask": PAD, "self_attn_mask_type": "padding", "encoder_output": memory}
    call = Call(around(PAD), memory=memory, crossing=causal(S, K, window=(1, 0)))
    windows = {"enc_dec_window_size": (1, 0), "enc_dec_attn_mask_type": "causal"}
    if late:
        assert_as_meant(made, call, **given, **windows)
    for name in ("self_attention", "inter_attention"):
        getattr(made, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    assert_as_meant(made, call, **given, **windows)
    assert seen == ["self_attention", "inter_attention"]
    angles = tensor(S, 1, 1, 6, grad=False)
    call.angles = angles.transpose(0, 2)
    assert_as_meant(made, call, rotary_pos_emb=angles, **given, **windows)
    assert_as_meant(made, Call(causal(S), memory=memory), encoder_output=memory)
    assert seen == ["self_attention", "inter_attention"] * 3


def test_each_call_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_fuser.fuser.run import fuser

    made, x, planned = layer(), tensor(S, B, F), []
    make_plan = fuser.make_plan
    monkeypatch.setattr(fuser, "make_plan", lambda *args: planned.append(1) or make_plan(*args))
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


def test_initialisation() -> None:
    def ones(t: torch.Tensor) -> None:
        t.fill_(1.0)

    made = te_fuser.TransformerLayer(
        F,
        FFN,
        HEADS,
        init_method=ones,
        output_layer_init_method=torch.nn.init.zeros_,
        device="cpu",
        layer_type="decoder",
    )
    last = ("proj.weight", "fc2_weight")
    for name, p in made.named_parameters():
        first = name.endswith("weight") and not name.endswith(last)
        assert (p == float(first)).all(), name
    torch.manual_seed(0)
    std = te_fuser.TransformerLayer(256, 256, 4, device="cpu").self_attention.proj.weight.std()
    assert 0.022 < std < 0.024


def test_dropout_and_drop_path() -> None:
    x = tensor(S, B, F)
    for keywords in ({"hidden_dropout": 0.5}, {"attention_dropout": 0.5}, {"drop_path_rate": 0.5}):
        made = layer(**keywords)
        torch.manual_seed(1)
        first, second = made(x), made(x)
        torch.manual_seed(1)
        assert torch.equal(made(x), first) and not torch.equal(first, second)
        want = made.eval()(x)
        torch.testing.assert_close(want, plain(made, x.transpose(0, 1), Call(causal(S))).transpose(0, 1))
        made(x, window_size=(2, 0)), made.train()
        assert not torch.equal(made(x, window_size=(2, 0)), made(x, window_size=(2, 0)))
    whole = torch.ones(1, 64, F, dtype=torch.float64)
    for layout, sample in (("sbhd", 1), ("bshd", 0)):
        made = layer(drop_path_rate=0.5, attn_input_format=layout)
        h = whole if sample else whole.transpose(0, 1)
        kept = (made(h) != h).any(-1).flatten()
        assert 0 < kept.sum() < 64
    with pytest.raises(ValueError, match="drop_path_rate drops samples"):
        layer(drop_path_rate=0.5, attn_input_format="thd")


def test_main_grad() -> None:
    made = layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True, params_dtype=torch.float32, layer_type="decoder")
    x, memory = tensor(S, B, F, dtype=torch.float32, grad=False), tensor(K, B, F, dtype=torch.float32, grad=False)
    twin = layer(fuse_qkv_params=True, params_dtype=torch.float32, layer_type="decoder")
    twin(x, encoder_output=memory).sum().backward()
    weights = {n: p for n, p in made.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.ones_like(p)
    for first, count, base in ((None, 1, 1), (True, 1, 0), (False, 2, 0)):
        for p in made.parameters():
            p.grad = None
        made(x, encoder_output=memory, is_first_microbatch=first).sum().backward()
        for name, p in made.named_parameters():
            want = twin.get_parameter(name).grad
            if name in weights:
                assert p.grad is None
                torch.testing.assert_close(p.main_grad, base + count * want, rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="takes fuse_qkv_params=True"):
        layer(fuse_wgrad_accumulation=True)


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


def test_hooks_of_parts_run_in_every_kind_of_call() -> None:
    made, x, seen = layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True), tensor(S, B, F), list[str]()
    for p in made.parameters():
        p.main_grad = torch.zeros_like(p)
    calls: list[Any] = [{}, {"window_size": (1, 0)}, {"is_first_microbatch": True}]
    want = [made(x, **how) for how in calls]
    for name in ("self_attention", "layernorm_mlp"):
        made.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.append(name))
    for how, y in zip(calls, want, strict=True):
        torch.testing.assert_close(made(x, **how), y)
        assert seen == ["self_attention", "layernorm_mlp"]
        seen.clear()


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


def test_sizes_ahead() -> None:
    made = layer(seq_length=S, micro_batch_size=B, params_dtype=torch.float32)
    kept = made.plans_kept()
    assert len(kept) == 1
    made(tensor(S, B, F, dtype=torch.float32))
    assert len(made.plans_kept()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_no_grad(dtype: torch.dtype) -> None:
    made, x = layer(params_dtype=torch.float32), tensor(S, B, F, dtype=torch.float32)
    want = plain(made.double(), x.double().transpose(0, 1), Call(causal(S))).transpose(0, 1)
    made = made.float()
    with torch.autocast("cpu", dtype), torch.no_grad():
        torch.testing.assert_close(made(x).double(), want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("shape", [(0, B), (S, 0), (1, 1)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    made = layer()
    if min(shape) > 0:
        assert_as_meant(made, Call(causal(shape[0])), tensor(*shape, F))
    x = tensor(*shape, F)
    made(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    wide = tensor(S, B, 2 * F)[..., ::2]
    torch.testing.assert_close(made(wide), made(wide.contiguous()))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hiden_dropout": 0.1}, TypeError, "did you mean 'hidden_dropout'"),
    ({"self_attn_mask_type": "casual"}, ValueError, "attn_mask_type='casual' is unknown"),
    ({"layer_type": "both"}, ValueError, "layer_type='both' is unknown"),
    ({"attn_input_format": "bhsd"}, ValueError, "attn_input_format='bhsd' is unknown"),
    ({"num_gqa_groups": 3}, ValueError, "does not divide num_attention_heads=4"),
    ({"qk_norm_type": "Norm"}, ValueError, "qk_norm_type='Norm' is unknown"),
    ({"softmax_type": "soft"}, ValueError, "softmax_type='soft' is unknown"),
    ({"window_size": 3}, ValueError, r"window_size is \(left, right\)"),
    ({"parallel_attention_mlp": True, "layer_type": "decoder"}, ValueError, "parallel_attention_mlp=True stands alone"),
    ({"hidden_dropout": 1.5}, ValueError, "1.5"),
    ({"layer_number": 0}, ValueError, "layer_number is a whole number from 1 on"),
]


@pytest.mark.parametrize(("keywords", "error", "words"), BAD)
def test_bad_arguments(keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        layer(**keywords)


def test_bad_calls() -> None:
    made, x = layer(), tensor(S, B, F)
    with pytest.raises(TypeError, match="give the type of a mask by its keyword, self_attn_mask_type='causal'"):
        made(x, None, "causal")
    with pytest.raises(
        TypeError, match=r"attention_mask is torch.float64, and masks are boolean.*give attention_mask < 0"
    ):
        made(x, PAD.double(), self_attn_mask_type="padding")
    with pytest.raises(TypeError, match="give attention_mask < 0"):
        made(x, torch.zeros(1, 1, S, S), self_attn_mask_type="arbitrary")
    with pytest.raises(TypeError, match="takes no argument 'windowsize' in a call; did you mean 'window_size'"):
        made(x, windowsize=(1, 0))
    with pytest.raises(ValueError, match="encoder_output is for cross attention"):
        made(x, None, x)
    with pytest.raises(ValueError, match="enc_dec_attn_mask is for layer_type='decoder'"):
        made(x, enc_dec_attn_mask=PAD)
    with pytest.raises(TypeError, match="cross attention takes encoder_output"):
        layer(layer_type="decoder")(x)
    with pytest.raises(ValueError, match="no multiple of num_attention_heads"):
        layer(F, FFN, 5)
    with pytest.raises(RuntimeError, match="call set_tensor_parallel_group"):
        layer(tp_size=2)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match="ub_tp_comm_overlap does nothing here"):
            layer(ub_tp_comm_overlap=False)


@pytest.mark.parametrize("last", [True, False])
def test_hooks_of_parts_whose_norm_is_the_residual(last: bool) -> None:
    """A part that runs by itself still gives the list around what its norm gave."""
    made = layer(apply_residual_connection_post_layernorm=True, output_layernorm=last)
    x = tensor(S, B, F)
    leaves = [x, *made.parameters()]
    want = made(x)
    dy = tensor(*want.shape, grad=False)
    gradients = torch.autograd.grad(want, leaves, dy)
    first = f"self_attention.{'qkv' if last else 'layernorm_qkv'}"
    for names in (["layernorm_mlp"], ["self_attention"], ["self_attention", first]):
        seen: list[str] = []
        hooks = [made.get_submodule(n).register_forward_hook(lambda *_, n=n, seen=seen: seen.append(n)) for n in names]
        y = made(x)
        assert sorted(seen) == sorted(names)
        torch.testing.assert_close(y, want)
        for mine, other in zip(torch.autograd.grad(y, leaves, dy), gradients, strict=True):
            torch.testing.assert_close(mine, other)
        for hook in hooks:
            hook.remove()
