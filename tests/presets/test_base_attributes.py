"""Attributes by which scripts ask presets what they were made with, under the names of Transformer Engine's modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser

OWN = {"device": "cpu"}
LAYER = {
    "num_gqa_groups": 2,
    "self_attn_mask_type": "padding_causal",
    "window_size": (3, 0),
    "layer_type": "decoder",
    "enc_dec_attn_mask_type": "no_mask",
    "enc_dec_window_size": (4, 4),
    "hidden_dropout": 0.2,
    "drop_path_rate": 0.3,
    "apply_residual_connection_post_layernorm": True,
    "output_layernorm": True,
    "attn_input_format": "bshd",
    "softmax_type": "off-by-one",
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "zero_centered_gamma": True,
    "layer_number": 5,
    "rotary_pos_interleaved": True,
}
LINEAR = {"parallel_mode": None, "use_bias": True, "return_bias": True, "tp_size": 1, "sequence_parallel": False}
HEADS = {"num_attention_heads": 4, "num_gqa_groups": 2, "num_gqa_groups_per_partition": 2, "layer_number": 5}
ASKED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Linear": (
        lambda: te_fuser.Linear(8, 6, return_bias=True, **OWN),
        {**LINEAR, "in_features": 8, "out_features": 6, "fuse_wgrad_accumulation": False},
    ),
    "LayerNormLinear": (
        lambda: te_fuser.LayerNormLinear(
            8, 6, 1e-3, return_bias=True, return_layernorm_output=True, normalization="RMSNorm", **OWN
        ),
        {
            **LINEAR,
            "eps": 1e-3,
            "normalization": "RMSNorm",
            "zero_centered_gamma": False,
            "return_layernorm_output": True,
            "return_layernorm_output_gathered": False,
        },
    ),
    "LayerNormMLP": (
        lambda: te_fuser.LayerNormMLP(8, 6, activation="clamped_swiglu", activation_params={"limit": 3.0}, **OWN),
        {
            "activation": "clamped_swiglu",
            "activation_params": {"limit": 3.0},
            "normalization": "LayerNorm",
            "set_parallel_mode": False,
            "use_bias": True,
            "return_bias": False,
            "checkpoint": False,
            "eps": 1e-5,
        },
    ),
    "LayerNorm": (
        lambda: te_fuser.LayerNorm(8, 1e-3, zero_centered_gamma=True, **OWN),
        {"eps": 1e-3, "zero_centered_gamma": True, "normalized_shape": (8,), "normalization": "LayerNorm"},
    ),
    "DotProductAttention": (
        lambda: te_fuser.DotProductAttention(
            4, (8, 6), 2, qkv_format="bshd", layer_number=5, window_size=(2, 0), **OWN
        ),
        {
            **HEADS,
            "qkv_format": "bshd",
            "attn_mask_type": "causal",
            "window_size": (2, 0),
            "bottom_right_diagonal": None,
            "softmax_type": "vanilla",
            "softmax_scale": 8**-0.5,
            "attention_type": "self",
            "attention_dropout": 0.0,
            "hidden_size_per_attention_head_k": 8,
            "hidden_size_per_attention_head_v": 6,
            "tp_group": None,
        },
    ),
    "MultiheadAttention": (
        lambda: te_fuser.TransformerLayer(16, 8, 4, **LAYER, **OWN).self_attention,
        {
            **HEADS,
            "hidden_size": 16,
            "hidden_size_per_attention_head": 4,
            "num_attention_heads_per_partition": 4,
            "attention_type": "self",
            "attn_mask_type": "padding_causal",
            "window_size": (3, 0),
            "qkv_format": "bshd",
            "softmax_type": "off-by-one",
            "rotary_pos_interleaved": True,
            "qkv_weight_interleaved": False,
            "input_layernorm": False,
            "return_layernorm_output": False,
            "return_bias": False,
        },
    ),
    "TransformerLayer": (
        lambda: te_fuser.TransformerLayer(16, 8, 4, **LAYER, **OWN),
        {**{name: value for name, value in LAYER.items() if name != "num_gqa_groups"}, "kv_channels": 4},
    ),
}
each = pytest.mark.parametrize("name", ASKED)


@each
def test_what_a_preset_was_made_with(name: str) -> None:
    make, asked = ASKED[name]
    made = make()
    for found in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert {attribute: getattr(found, attribute) for attribute in asked} == asked
    assert not set(asked) & set(made.state_dict())


def test_of_ranks_it_says_the_parts() -> None:
    made = te_fuser.MultiheadAttention(16, 4, num_gqa_groups=2, tp_size=2, set_parallel_mode=True, **OWN)
    assert (made.num_attention_heads, made.num_gqa_groups) == (4, 2)
    assert (made.num_attention_heads_per_partition, made.num_gqa_groups_per_partition) == (2, 1)
    assert made.core_attention.num_gqa_groups_per_partition == 1


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: te_fuser.Linear(4, 4, bias=False, **OWN), ["bias"]),
        (lambda: te_fuser.Linear(4, 4, bias=False, parameters_split=("q", "k"), **OWN), ["q_bias", "k_bias"]),
        (lambda: te_fuser.LayerNormLinear(4, 4, normalization="RMSNorm", **OWN), ["layer_norm_bias"]),
        (lambda: te_fuser.LayerNormMLP(4, 4, bias=False, **OWN), ["fc1_bias", "fc2_bias"]),
        (lambda: te_fuser.RMSNorm(4, **OWN), ["bias"]),
    ],
)
def test_of_a_parameter_that_there_is_not_it_says_none(make: Callable[[], Any], names: list[str]) -> None:
    made = make()
    for found in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert all(getattr(found, name) is None for name in names)
        assert not set(names) & {*found.state_dict(), *dict(found.named_parameters())}
        found.reset_parameters()
        assert all(getattr(found.to(torch.float64), name) is None for name in names)


def test_what_is_no_argument_is_told_as_ever() -> None:
    made = te_fuser.Linear(4, 4, **OWN)
    assert not hasattr(made, "activation")
    made.activation = torch.nn.GELU()
    assert isinstance(made.activation, torch.nn.GELU)
