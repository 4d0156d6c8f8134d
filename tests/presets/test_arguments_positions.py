"""Positions of arguments, of constructors and of calls of presets, and the defaults of their keywords."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import te_fuser

# Of Transformer Engine 2.20, beside what this project says: the device and the type of cross attention's mask.
SHARED = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "init_method": None,
    "output_layer_init_method": None,
    "params_dtype": None,
    "device": None,
}
NORMED = {"normalization": "LayerNorm", "zero_centered_gamma": False, "return_layernorm_output": False}
AHEAD = {"seq_length": None, "micro_batch_size": None}
LINEAR = {
    "parallel_mode": None,
    "return_bias": False,
    "parameters_split": None,
    "skip_weight_param_allocation": False,
}
HEADS = {
    "num_gqa_groups": None,
    "layer_number": None,
    "window_size": None,
    "bottom_right_diagonal": None,
    "softmax_type": "vanilla",
    "qk_norm_type": None,
    "qk_norm_eps": 1e-6,
    "qk_norm_before_rope": False,
    "set_parallel_mode": False,
    "fuse_qkv_params": False,
    "qkv_weight_interleaved": True,
    "rotary_pos_interleaved": False,
    "bias": True,
    **AHEAD,
}
PLACED = {name: SHARED[name] for name in ("sequence_parallel", "tp_group", "tp_size", "params_dtype", "device")}
DEFAULTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Linear": (["in_features", "out_features", "bias"], {**SHARED, **LINEAR, "bias": True}),
    "LayerNormLinear": (
        ["in_features", "out_features", "eps", "bias"],
        {
            **SHARED,
            **LINEAR,
            **NORMED,
            "eps": 1e-5,
            "bias": True,
            "return_layernorm_output_gathered": False,
        },
    ),
    "LayerNormMLP": (
        ["hidden_size", "ffn_hidden_size", "eps", "bias"],
        {
            **SHARED,
            **NORMED,
            **AHEAD,
            "eps": 1e-5,
            "bias": True,
            "fc1_bias": None,
            "return_bias": False,
            "return_layernorm_output_gathered": False,
            "activation": "gelu",
            "activation_params": None,
            "set_parallel_mode": False,
            "checkpoint": False,
        },
    ),
    "LayerNorm": (["normalized_shape", "eps"], {**PLACED, "eps": 1e-5, "zero_centered_gamma": False}),
    "RMSNorm": (["normalized_shape", "eps"], {**PLACED, "eps": 1e-5, "zero_centered_gamma": False}),
    "DotProductAttention": (
        ["num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type"],
        {
            **PLACED,
            "num_gqa_groups": None,
            "attention_dropout": 0.0,
            "qkv_format": "sbhd",
            "attn_mask_type": "causal",
            "window_size": None,
            "bottom_right_diagonal": None,
            "softmax_scale": None,
            "softmax_type": "vanilla",
            "softcap": 0.0,
            "layer_number": None,
            "attention_type": "self",
            "get_rng_state_tracker": None,
        },
    ),
    "MultiheadAttention": (
        [
            "hidden_size",
            "num_attention_heads",
            "kv_channels",
            "attention_dropout",
            "layernorm_epsilon",
            "init_method",
            "output_layer_init_method",
            "layer_number",
            "attn_mask_type",
        ],
        {
            **SHARED,
            **NORMED,
            **HEADS,
            "kv_channels": None,
            "attention_dropout": 0.1,
            "layernorm_epsilon": 1e-5,
            "attn_mask_type": "causal",
            "return_bias": False,
            "input_layernorm": False,
            "attention_type": "self",
            "qkv_format": "sbhd",
        },
    ),
    "TransformerLayer": (
        [
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_gqa_groups",
            "layernorm_epsilon",
            "hidden_dropout",
            "attention_dropout",
            "init_method",
            "output_layer_init_method",
            "layer_number",
            "kv_channels",
            "self_attn_mask_type",
        ],
        {
            **SHARED,
            **HEADS,
            "normalization": "LayerNorm",
            "zero_centered_gamma": False,
            "kv_channels": None,
            "layernorm_epsilon": 1e-5,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "self_attn_mask_type": "causal",
            "enc_dec_attn_mask_type": None,
            "enc_dec_window_size": None,
            "enc_dec_bottom_right_diagonal": None,
            "apply_query_key_layer_scaling": True,
            "attention_softmax_in_fp32": False,
            "apply_residual_connection_post_layernorm": False,
            "output_layernorm": False,
            "parallel_attention_mlp": False,
            "layer_type": "encoder",
            "drop_path_rate": 0.0,
            "activation": "gelu",
            "activation_params": None,
            "attn_input_format": "sbhd",
        },
    ),
}

each = pytest.mark.parametrize("name", DEFAULTS)


@each
def test_positions_and_defaults(name: str) -> None:
    positions, defaults = DEFAULTS[name]
    found = inspect.signature(getattr(te_fuser, name)).parameters
    by_position = [n for n, p in found.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == positions
    assert {n: found[n].default for n in defaults} == defaults


# Values of the first arguments that go by position, none the default.
GIVEN: dict[str, list[Any]] = {
    "Linear": [8, 6, False],
    "LayerNormLinear": [8, 6, 1e-3, False],
    "LayerNormMLP": [8, 6, 1e-3, False],
    "LayerNorm": [8, 1e-3],
    "RMSNorm": [8, 1e-3],
    "DotProductAttention": [4, 2, 2, 0.5, "bshd", "no_mask"],
    "MultiheadAttention": [8, 4, 4, 0.5, 1e-3, torch.nn.init.ones_, torch.nn.init.zeros_, 3, "no_mask"],
    "TransformerLayer": [8, 6, 4, 2, 1e-3, 0.3, 0.4, torch.nn.init.ones_, torch.nn.init.zeros_, 3, 4, "no_mask"],
}


@each
def test_what_goes_by_position_is_what_its_name_says(name: str) -> None:
    kind, (positions, _) = getattr(te_fuser, name), DEFAULTS[name]
    made, want = kind(*GIVEN[name], device="cpu"), kind(**dict(zip(positions, GIVEN[name], strict=True)), device="cpu")
    if "init_method" not in positions:
        want.load_state_dict(made.state_dict())
    assert str(made) == str(want)
    ours, theirs = made.state_dict(), want.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(t, theirs[key]) for key, t in ours.items())
    numbers = [getattr(m, "layer_number", None) for m in made.modules()]
    assert numbers == [getattr(m, "layer_number", None) for m in want.modules()]


@each
def test_more_by_position_is_told_what_goes_so(name: str) -> None:
    last = DEFAULTS[name][0][-1]
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) takes .*{last} by position, got \(1, 0\) behind them: give it by"
    ):
        getattr(te_fuser, name)(*GIVEN[name], (1, 0))

    class Own(getattr(te_fuser, name)):  # type: ignore[misc]
        def __init__(self, *sizes: int) -> None:
            super().__init__(*GIVEN[name], device="cpu")

    assert Own(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14).training


CALLS: dict[str, list[str]] = {
    "Linear": ["inp", "weight", "bias", "is_first_microbatch"],
    "LayerNormLinear": ["inp", "weight", "bias", "is_first_microbatch"],
    "LayerNormMLP": ["inp", "is_first_microbatch"],
    "LayerNorm": ["inp"],
    "RMSNorm": ["inp"],
    "DotProductAttention": ["query_layer", "key_layer", "value_layer", "attention_mask"],
    "MultiheadAttention": ["hidden_states", "attention_mask", "encoder_output"],
    "TransformerLayer": [
        "hidden_states",
        "attention_mask",
        "encoder_output",
        "enc_dec_attn_mask",
        "is_first_microbatch",
        "checkpoint_core_attention",
        "inference_params",
        "rotary_pos_emb",
    ],
}


@each
def test_positions_of_calls(name: str) -> None:
    found = inspect.signature(getattr(te_fuser, name).forward).parameters
    by_position = [n for n, p in found.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position[1 : 1 + len(CALLS[name])] == CALLS[name]
