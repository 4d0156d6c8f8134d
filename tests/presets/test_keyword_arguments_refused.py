"""Arguments and calls that presets refuse: the error calls an argument by the name that it was given under."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser.presets.rotary_position_embedding import apply_rotary_pos_emb
from tests.presets.layers import LENGTHS, PAD, PRESETS, B, F, S, layer, sample
from tests.refused import raises

NAN, INF = float("nan"), float("inf")


def linear(out_features: int = 12, **keywords: Any) -> Any:
    return te_fuser.Linear(7, out_features, device="cpu", **keywords)


def norm_linear(eps: Any = 1e-5, **keywords: Any) -> Any:
    return te_fuser.LayerNormLinear(7, 12, eps, device="cpu", **keywords)


def mlp(eps: Any = 1e-5, **keywords: Any) -> Any:
    return te_fuser.LayerNormMLP(7, 11, eps, device="cpu", **keywords)


def core(channels: Any = 4, groups: int = 2, **keywords: Any) -> Any:
    return te_fuser.DotProductAttention(4, channels, groups, device="cpu", **keywords)


def attention(**keywords: Any) -> Any:
    return te_fuser.MultiheadAttention(F, 4, device="cpu", **{"params_dtype": torch.float64, **keywords})


rotary, norms = te_fuser.RotaryPositionEmbedding, (te_fuser.LayerNorm, te_fuser.RMSNorm)
# Preset, its arguments, and the error with its words.
Refused = tuple[Any, dict[str, Any], type[Exception], str]
MADE: list[Refused] = [
    (core, {"softmax_scale": NAN}, ValueError, "takes a finite number as softmax_scale, got"),
    (core, {"softmax_scale": -INF}, ValueError, "takes a finite number as softmax_scale, got"),
    (core, {"softmax_scale": "a"}, TypeError, "takes a number as softmax_scale, got 'a'"),
    (core, {"softcap": INF}, ValueError, "takes a finite number as softcap, got"),
    *((core, {"softcap": given}, TypeError, "takes a number as softcap, got") for given in (None, True, (1.0,))),
    *((core, {"channels": n}, TypeError, "kv_channels is a whole number") for n in (None, 4.0, torch.tensor(4))),
    (core, {"groups": 3}, ValueError, "num_gqa_groups=3 does not divide"),
    (core, {"qkv_formt": "thd"}, TypeError, "did you mean 'qkv_format'"),
    (core, {"cp_group": object()}, TypeError, "cp_group takes a group of ranks, got <object"),
    (core, {"cp_comm_type": "ring"}, ValueError,
     "cp_comm_type='ring' is unknown; use one of 'p2p', 'all_gather', 'a2a'"),
    (rotary, {"dim": "8"}, TypeError, "dim is a whole number, got '8'"),
    (rotary, {"dim": 5}, ValueError, "features turn in pairs: dim=5"),
    (rotary, {"dim": 8, "rotary_percent": 2.0}, ValueError, "rotary_percent is a share of the features"),
    (linear, {"parameters_split": "query"}, TypeError, "takes names, or names with sizes, got 'query'"),
    (linear, {"parameters_split": 5}, TypeError, "takes names, or names with sizes, got 5"),
    (linear, {"parameters_split": ("a", "a_")}, ValueError, "takes different names"),
    (linear, {"parameters_split": ()}, ValueError, "takes different names"),
    (linear, {"parameters_split": tuple("abcde")}, ValueError, "makes 5 equal parts of out_features=12"),
    (linear, {"parameters_split": {"a": 3, "b": 4}}, ValueError, "has 7 rows, got out_features=12"),
    (linear, {"parameters_split": {"a": 12.0}}, TypeError, r"parameters_split\['a'\] is a whole number, got 12.0"),
    (linear, {"parallel_mode": "diagonal"}, ValueError,
     "parallel_mode='diagonal' is unknown; use one of 'column', 'row'"),
    (linear, {"parallel_mode": "column", "tp_size": 5}, ValueError, "out_features=12 cannot be cut into 5 equal parts"),
    (linear, {"tp_group": "tp"}, TypeError, "tp_group is a group of torch.distributed's, got 'tp'"),
    (norm_linear, {"return_layer_norm_output": True}, TypeError, "did you mean 'return_layernorm_output'"),
    (norm_linear, {"eps": None}, ValueError, "^eps is a number from 0 on"),
    (mlp, {"eps": -1.0}, ValueError, "^eps is a number from 0 on"),
    (mlp, {"tp_size": 0}, ValueError, "tp_size is a whole number from 1 on, got 0"),
    (mlp, {"tp_size": 1.0}, TypeError, "tp_size is a whole number, got 1.0"),
    (mlp, {"set_parallel_mode": True, "tp_size": 2}, ValueError, "ffn_hidden_size=11 cannot be cut into 2"),
    (mlp, {"sequence_parallel": "yes"}, TypeError, "sequence_parallel is True or False, got 'yes'"),
    (mlp, {"init_method": "normal"}, TypeError, "init_method is a function, got 'normal'"),
    (mlp, {"get_rng_state_tracker": 5}, TypeError, "get_rng_state_tracker is a function, got 5"),
    (mlp, {"fuse_wgrad_accumulation": 1}, TypeError, "fuse_wgrad_accumulation is True or False, got 1"),
    (mlp, {"return_bias": "yes"}, TypeError, "return_bias is True or False, got 'yes'"),
    (mlp, {"normalization": "BatchNorm"}, ValueError,
     "normalization='BatchNorm' is unknown; use one of 'LayerNorm', 'RMSNorm'"),
    (mlp, {"activation": "swish"}, ValueError, "activation='swish' is unknown; use one of 'gelu'"),
    (mlp, {"activation_param": {}}, TypeError, "did you mean 'activation_params'"),
    (mlp, {"activation_params": {"limit": 1.0}}, ValueError, "'gelu' takes none, got limit"),
    (mlp, {"seq_length": 0, "micro_batch_size": 2}, ValueError, "seq_length is a whole number from 1 on, got 0"),
    *(
        (mlp, {"activation": "clamped_swiglu", "activation_params": params}, error, words)
        for params, error, words in (
            ({"offset": 1.0}, ValueError, "takes limit, alpha, glu_linear_offset, got offset"),
            ({"limit": "a"}, TypeError, "ClampedSwiGLU takes a number as limit, got 'a'"),
            (7.0, TypeError, "activation_params is a mapping"),
        )
    ),
    (te_fuser.LayerNormMLP, {"hidden_size": 7.0, "ffn_hidden_size": 8}, TypeError,
     "hidden_size is a whole number, got 7.0"),
    (te_fuser.LayerNorm, {"normalized_shape": b"q"}, TypeError, "^normalized_shape is a whole number, got b'q'"),
    (te_fuser.RMSNorm, {"normalized_shape": torch.tensor(2.0)}, TypeError,
     "^normalized_shape is a whole number, got tensor"),
    (te_fuser.RMSNorm, {"hidden_size": "8"}, TypeError, "^hidden_size is a whole number, got '8'"),
    *((kind, {}, TypeError, "a norm takes its size once") for kind in norms),
    *((kind, {"normalized_shape": 3, "hidden_size": 3}, TypeError, "a norm takes its size once") for kind in norms),
    *((kind, {"normalized_shape": 3.5}, TypeError, "normalized_shape is a whole number, got 3.5") for kind in norms),
    *((kind, {"normalized_shape": ()}, ValueError, "normalized_shape has at least one size") for kind in norms),
    *((kind, {"normalized_shape": 3, "epss": 1.0}, TypeError,
     "no argument 'epss'; did you mean 'eps'") for kind in norms),
    *((kind, {"normalized_shape": 3, "eps": "small"}, ValueError, "eps is a number from 0 on") for kind in norms),
    (attention, {"attention_dropout": 1.5}, ValueError, "^attention_dropout, a drop probability, lies in"),
    (attention, {"layernorm_epsilon": [1]}, ValueError, "^layernorm_epsilon is a number from 0 on"),
    (attention, {"qk_norm_eps": INF}, ValueError, "^qk_norm_eps is a number from 0 on"),
    (attention, {"attn_mask_type": 0}, ValueError, "^attn_mask_type=0 is unknown"),
    (attention, {"attention_type": "both"}, ValueError, "attention_type='both' is unknown"),
    (layer, {"attention_dropout": "x"}, TypeError, "^attention_dropout, a drop probability, is a number in"),
    (layer, {"hidden_dropout": -1}, ValueError, "^hidden_dropout, a drop probability, lies in"),
    (layer, {"hiden_dropout": 0.1}, TypeError, "did you mean 'hidden_dropout'"),
    (layer, {"drop_path_rate": NAN}, ValueError, "^drop_path_rate, a drop probability, lies in"),
    (layer, {"drop_path_rate": 0.5, "attn_input_format": "thd"}, ValueError, "drop_path_rate drops samples"),
    (layer, {"layernorm_epsilon": -1.0}, ValueError, "^layernorm_epsilon is a number from 0 on"),
    (layer, {"self_attn_mask_type": "casual"}, ValueError,
     r"^self_attn_mask_type='casual' is unknown; use one of .*; did you mean 'causal'\?"),
    (layer, {"params_dtype": "float16"}, TypeError,
     "^params_dtype is a floating-point dtype of .*'float16': use torch.float16$"),
    (layer, {"window_size": 1}, ValueError, "^window_size is .left, right"),
    (layer, {"enc_dec_attn_mask_type": "x"}, ValueError, "^enc_dec_attn_mask_type='x' is unknown"),
    (layer, {"enc_dec_window_size": [1]}, ValueError, "^enc_dec_window_size is .left, right"),
    (layer, {"enc_dec_bottom_right_diagonal": 1.5}, TypeError, "^enc_dec_bottom_right_diagonal is True or False"),
    (layer, {"verify": "x"}, TypeError, "^verify is True or False, got 'x'"),
    (layer, {"memory": [1]}, ValueError, r"^memory is one of .* or a budget in bytes, .* got \[1\]"),
    (layer, {"layer_type": "both"}, ValueError, "layer_type='both' is unknown"),
    (layer, {"attn_input_format": "bhsd"}, ValueError, "attn_input_format='bhsd' is unknown"),
    (layer, {"num_gqa_groups": 3}, ValueError, "does not divide num_attention_heads=4"),
    (lambda: layer(F, 20, 5), {}, ValueError, "no multiple of num_attention_heads"),
    (layer, {"qk_norm_type": "Norm"}, ValueError, "qk_norm_type='Norm' is unknown"),
    (layer, {"softmax_type": "soft"}, ValueError, "softmax_type='soft' is unknown"),
    (layer, {"parallel_attention_mlp": True, "layer_type": "decoder"}, ValueError,
     "parallel_attention_mlp=True stands alone"),
    (layer, {"layer_number": 0}, ValueError, "layer_number is a whole number from 1 on"),
    (layer, {"fuse_wgrad_accumulation": True}, ValueError, "takes fuse_qkv_params=True"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "keywords", "error", "words"), MADE)
def test_argument_that_is_wrong_is_refused(
    make: Any, keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    for kind in ("encoder", "decoder") if make is layer and "layer_type" not in keywords else (None,):
        more = {} if kind is None else {"layer_type": kind}
        raises(error, words, make, **keywords, **more)


X, ANGLES = torch.zeros(S, B, F, dtype=torch.float64), torch.zeros(S, 1, 1, 6)
TOKENS, ENDS = torch.zeros(11, F, dtype=torch.float64), torch.tensor([0, 4, 11])
HEADS = tuple(torch.zeros(S, B, 4, 4) for _ in range(3))
FLAT = tuple(t.flatten(0, 1) for t in HEADS)
DECODER: dict[str, Any] = {"layer_type": "decoder"}
PARAMS = te_fuser.InferenceParams(B, S)
STEP: dict[str, Any] = {"inference_params": PARAMS, "self_attn_mask_type": "padding_causal"}
ASKED = ANGLES.clone().requires_grad_()
BOTH: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_kv": torch.tensor([0, 6, 9])}
# Preset and its arguments, arguments of the call, and the error with its words.
Called = tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any], type[Exception], str]
CALLED: list[Called] = [
    (linear, {"skip_weight_param_allocation": True}, (torch.zeros(3, 7),), {}, TypeError,
     "give weight and bias in the call"),
    (linear, {"skip_weight_param_allocation": True}, (torch.zeros(3, 7), torch.zeros(12, 7)), {}, TypeError,
     "give bias in the call"),
    (linear, {}, (torch.zeros(3, 7), True), {}, TypeError,
     "weight takes a tensor in place of the preset's own, got True"),
    (linear, {"bias": False}, (torch.zeros(3, 7),), {"bias": torch.zeros(12)}, ValueError,
     "made with bias=False, got a bias"),
    (linear, {"tp_size": 2}, (torch.zeros(3, 7),), {}, RuntimeError,
     r"tp_size=2 takes a group: call set_tensor_parallel_group\(group\)"),
    *(
        (make, {}, (torch.zeros(3, 7),), {name: True}, NotImplementedError, f"{name} asks for a result in 8 bits")
        for make in (linear, norm_linear)
        for name in ("fp8_output", "fp8_grad")
    ),
    (mlp, {}, (torch.zeros(3, 7), "padding"), {}, TypeError, "is_first_microbatch is True or False, got 'padding'"),
    (core, {}, HEADS, {"alibi_slopes": torch.ones(4)}, ValueError,
     "alibi_slopes are for core_attention_bias_type='alibi'"),
    (core, {}, HEADS, {"inference_params": object()}, NotImplementedError, "give inference_params there"),
    (core, {}, (torch.zeros(S, B, 8, 2), *HEADS[1:]), {}, ValueError, "query_layer has 8 heads of 2 channels"),
    (core, {"groups": 4}, HEADS[:2], {}, TypeError, "value_layer takes a tensor, got NoneType"),
    (core, {"qkv_format": "thd"}, FLAT, {}, ValueError, "takes cu_seqlens_q"),
    (core, {"qkv_format": "thd"}, FLAT, {"cu_seqlens_q": ENDS, "max_seqlen_kv": 4.0}, TypeError,
     "max_seqlen_kv are whole numbers, got .None, 4.0."),
    (core, {"qkv_format": "thd"}, (*FLAT, PAD), {"cu_seqlens_q": ENDS, "attn_mask_type": "arbitrary"}, ValueError,
     "takes no attn_mask_type='arbitrary'"),
    (core, {"qkv_format": "thd"}, FLAT, {"cu_seqlens_q": LENGTHS, "pad_between_seqs": True}, ValueError,
     r"pad_between_seqs=True, and nothing says .*: give cu_seqlens_q_padded"),
    (core, {"qkv_format": "thd"}, FLAT, {"cu_seqlens_q": LENGTHS, "cu_seqlens_q_padded": [0, 4]}, TypeError,
     "cu_seqlens_q_padded is a tensor of .* got list"),
    (attention, {}, (X, None, X), {}, ValueError, "encoder_output is for cross attention"),
    (attention, {"attention_type": "cross"}, (X,), {"encoder_output": X, "inference_params": PARAMS}, ValueError,
     "are for attention_type='self', got 'cross'"),
    (attention, {"attention_type": "cross"}, (X,), {"encoder_output": X, "rotary_pos_emb": ANGLES}, ValueError,
     "rotary_pos_emb is for attention_type='self'"),
    (layer, {}, (X,), {"attention_mask": "causal"}, TypeError,
     "attention_mask takes a tensor, got 'causal': give its type by self_attn_mask_type="),
    (layer, {}, (X, None, "causal"), {}, TypeError,
     "give the type of a mask by its keyword, self_attn_mask_type='causal'"),
    (layer, {}, (X, PAD.double()), {"self_attn_mask_type": "padding"}, TypeError,
     "attention_mask is torch.float64, and masks are boolean.*give attention_mask < 0"),
    (layer, {}, (X, torch.zeros(1, 1, S, S)), {"self_attn_mask_type": "arbitrary"}, TypeError,
     "give attention_mask < 0"),
    (layer, {}, (X,), {"cu_seqlens_q": [0, 3, 6], "self_attn_mask_type": "padding"}, TypeError,
     "cu_seqlens_q is a tensor .* got list"),
    (layer, {}, (X,), {"rotary_pos_emb": (ANGLES,)}, ValueError,
     "rotary_pos_emb is angles, or a pair, .* got 1 of them"),
    (layer, {}, (X,), {"core_attention_bias": X}, ValueError,
     "core_attention_bias_type='no_bias' with a core_attention_bias"),
    (layer, {}, (X, None, X), {}, ValueError, "encoder_output is for cross attention"),
    (layer, {}, (X,), {"enc_dec_attn_mask": PAD}, ValueError, "enc_dec_attn_mask is for layer_type='decoder'"),
    (layer, {}, (X,), {"enc_dec_attn_mask_type": "causal"}, ValueError,
     "enc_dec_attn_mask_type is for layer_type='decoder': leave it out"),
    (layer, {}, (X,), {"enc_dec_window_size": (1, 0)}, ValueError,
     "enc_dec_window_size is for layer_type='decoder': leave it out"),
    (layer, DECODER, (X,), {}, TypeError, "cross attention takes encoder_output"),
    (layer, DECODER, (X,), {"encoder_output": X, "enc_dec_attn_mask": PAD, "enc_dec_attn_mask_type": "padding"},
     TypeError, r"a pair of masks, of queries \(or None\) and of keys, got one tensor"),
    (layer, {"tp_size": 2}, (X,), {}, RuntimeError, "call set_tensor_parallel_group"),
    (layer, {"attn_input_format": "thd"}, (TOKENS,), {**BOTH, "rotary_pos_emb": ANGLES}, ValueError,
     "rotary_pos_emb turns by cu_seqlens_q, and cu_seqlens_kv puts keys into"),
    *(
        (layer, {"layer_number": 1}, (X,), {**STEP, name: t}, ValueError,
         f"with inference_params reads no {name}: pre_step says")
        for name, t in (("attention_mask", PAD), ("cu_seqlens_q", LENGTHS), ("cu_seqlens_kv", LENGTHS))
    ),
    (layer, {"layer_number": 1}, (X,), {"inference_params": PARAMS, "bottom_right_diagonal": False}, ValueError,
     "bottom_right_diagonal=False with inference_params"),
    *(
        (layer, kind, (X,), {**({"encoder_output": X} if kind else {}), **call}, error, f"(?s){words}")
        for kind in ({}, DECODER)
        for call, error, words in (
            ({"self_attn_mask_type": "x"}, ValueError, "^self_attn_mask_type='x' is unknown"),
            ({"self_attn_mask_type": "padding"}, ValueError,
             "self_attn_mask_type='padding' reads what is padding: give attention_mask"),
            ({"enc_dec_attn_mask_type": 1}, ValueError, "^enc_dec_attn_mask_type=1 is unknown"),
            ({"enc_dec_window_size": 0}, ValueError, "^enc_dec_window_size is .left, right"),
            ({"enc_dec_bottom_right_diagonal": "x"}, TypeError, "^enc_dec_bottom_right_diagonal is True or False"),
            ({"core_attention_bias_type": torch.zeros(4, 4)}, ValueError,
             "^core_attention_bias_type=tensor.* is unknown"),
            ({"checkpoint_core_attention": X}, TypeError,
             "^checkpoint_core_attention is True or False, got a Tensor of"),
            ({"checkpoint_core_attention": 0}, TypeError, "^checkpoint_core_attention is True or False, got 0"),
        )
    ),
]  # fmt: skip
# Refused by plans alone: plain PyTorch gives a gradient there, or has words of its own.
PLANNED: list[Called] = [
    (linear, {"skip_weight_param_allocation": True}, (torch.zeros(3, 7), torch.zeros(5, 7), torch.zeros(12)), {},
     ValueError, "weight"),
    (norm_linear, {}, (torch.zeros(3, 8),), {}, ValueError, "LayerNorm was made for 7 features, got 8"),
    (mlp, {}, (torch.zeros(3, 5),), {}, ValueError, "LayerNorm was made for 7 features, got 5"),
    *((kind, {"hidden_size": 7}, (torch.zeros(2, 3),), {}, ValueError,
     "was made for 7 features, got 3") for kind in norms),
    *((kind, {"normalized_shape": (3, 4)}, (torch.zeros(5, 6, 2),), {}, ValueError,
     r"for \[..., 3, 4\], got \[5, 6, 2\]") for kind in norms),
    (layer, {}, (X,), {"rotary_pos_emb": ASKED}, TypeError, r"requires a gradient, .* give rotary_pos_emb\.detach\(\)"),
    (layer, {}, (X,), {"rotary_pos_emb": (ANGLES, ASKED)}, TypeError,
     r"requires a gradient, .* give rotary_pos_emb_k\.detach\(\)"),
    (layer, {"attn_input_format": "thd"}, (TOKENS,), {**BOTH,
     "cu_seqlens_kv": torch.tensor([0, 3, 6, 9])}, ValueError, r"'cu_seqlens_q' and 'cu_seqlens_kv' say \[3, 4\]"),
]  # fmt: skip
WAYS = ("forward", "reference", "plan", "explain")


@pytest.mark.parametrize(
    ("make", "keywords", "args", "call", "error", "words", "ways"),
    [*((*row, WAYS) for row in CALLED), *((*row, ("forward", "plan", "explain")) for row in PLANNED)],
)
def test_call_that_is_wrong_is_refused_in_every_way(
    make: Any, keywords: Any, args: Any, call: Any, error: type[Exception], words: str, ways: tuple[str, ...]
) -> None:
    made = make(**keywords)
    for way in ways:
        raises(error, words, getattr(made, way), *args, **call)


MISSPELLED: dict[str, tuple[str, str]] = {
    "Linear": ("is_first_microbach", "is_first_microbatch"),
    "LayerNormLinear": ("is_first_micro_batch", "is_first_microbatch"),
    "LayerNormMLP": ("is_first_microbach", "is_first_microbatch"),
    "LayerNorm": ("output", "outputs"),
    "RMSNorm": ("output", "outputs"),
    "DotProductAttention": ("window", "window_size"),
    "MultiheadAttention": ("rotary_pos", "rotary_pos_emb"),
    "TransformerLayer": ("attn_mask_type", "self_attn_mask_type"),  # attention's own
}


@pytest.mark.parametrize("value", [None, True, torch.zeros(3, 2, 8)])
@pytest.mark.parametrize("name", PRESETS)
def test_call_with_a_keyword_that_nobody_knows_names_the_nearest(name: str, value: Any) -> None:
    wrong, nearest = MISSPELLED[name]
    words = rf"^{name} takes no argument '{wrong}' in a call; did you mean '{nearest}'\?"
    for way in WAYS:
        raises(TypeError, words, getattr(PRESETS[name](), way), *sample(name), **{wrong: value})


def test_call_takes_the_names_that_appended_ops_read() -> None:
    preset = te_fuser.Linear(8, 8, device="cpu")
    preset.append(te_fuser.ops.Add("skip"))
    x, skip = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(preset(x, skip=skip), preset[0:2](x) + skip)
    raises(TypeError, "takes no argument 'skp' in a call; did you mean 'skip'", preset, x, skip=skip, skp=None)


T, TABLE = torch.zeros(S, B, 4, 8), torch.zeros(S, 1, 1, 8)
HALF = T[: S // 2]
TURNED: list[tuple[Any, type[Exception], str]] = [
    (lambda: apply_rotary_pos_emb(HALF, TABLE, cp_size=2, cp_rank=2), ValueError,
     "cp_size=2, cp_rank=. with .* positions of t and .* of freqs"),
    (lambda: apply_rotary_pos_emb(HALF, TABLE[:-2], cp_size=2), ValueError,
     "cp_size=2, cp_rank=. with .* positions of t and .* of freqs"),
    (lambda: apply_rotary_pos_emb(T, TABLE, start_positions=LENGTHS, cp_size=2), ValueError,
     "start_positions with cp_size=2: ranks cut sequences that begin together"),
    (lambda: apply_rotary_pos_emb(T[:, 0], TABLE, "thd"), ValueError, "takes cu_seqlens"),
    (lambda: apply_rotary_pos_emb(T, TABLE, "thd"), ValueError, "t is 3-dimensional for tensor_format='thd'"),
    (lambda: rotary(6)("a"), TypeError, "RotaryPositionEmbedding takes a whole number as max_seq_len, got 'a'"),
    (lambda: rotary(6)(2.5), TypeError, "a whole number as max_seq_len, got 2.5"),
    (lambda: rotary(6)(-1), ValueError, "a whole number from 0 on as max_seq_len, got -1"),
    (
        lambda: te_fuser.ops.RotaryByAngles(6, heads=4, cos_sin=("cos", "sin"))(X, cos=ANGLES.cos(), sin=ASKED.sin()),
        TypeError,
        "'sin' requires a gradient, and RotaryByAngles gives it none: give sin.det",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), TURNED)
def test_angles_that_are_wrong_are_refused(call: Any, error: type[Exception], words: str) -> None:
    raises(error, words, call)
