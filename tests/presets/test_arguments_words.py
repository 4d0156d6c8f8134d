"""Values that presets refuse: the error calls the argument by the name that it was given under."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"takes a finite number as {name}, got"):
        te_fuser.DotProductAttention(2, 4, **{name: number})


def attention(**keywords: Any) -> Any:
    return te_fuser.MultiheadAttention(8, 2, device="cpu", **keywords)


def made(**keywords: Any) -> Any:
    return te_fuser.TransformerLayer(8, 6, 2, device="cpu", **keywords)


@pytest.mark.parametrize(
    ("make", "keywords", "words"),
    [
        (attention, {"attention_dropout": 1.5}, "^attention_dropout, a drop probability, lies in"),
        (made, {"attention_dropout": "x"}, "^attention_dropout, a drop probability, is a number in"),
        (made, {"hidden_dropout": -1}, "^hidden_dropout, a drop probability, lies in"),
        (made, {"drop_path_rate": float("nan")}, "^drop_path_rate, a drop probability, lies in"),
        (made, {"layernorm_epsilon": -1.0}, "^layernorm_epsilon is a number from 0 on"),
        (attention, {"layernorm_epsilon": [1]}, "^layernorm_epsilon is a number from 0 on"),
        (attention, {"qk_norm_eps": float("inf")}, "^qk_norm_eps is a number from 0 on"),
        (attention, {"attn_mask_type": 0}, "^attn_mask_type=0 is unknown"),
        (made, {"self_attn_mask_type": "x"}, "^self_attn_mask_type='x' is unknown"),
        (made, {"self_attn_mask_type": "casual"}, r"='casual' is unknown; use one of .*; did you mean 'causal'\?"),
        (
            made,
            {"params_dtype": "float16"},
            "^params_dtype is a floating-point dtype of .*'float16': use torch.float16$",
        ),
        (made, {"window_size": 1}, "^window_size is .left, right"),
        (made, {"enc_dec_attn_mask_type": "x"}, "^enc_dec_attn_mask_type='x' is unknown"),
        (made, {"enc_dec_window_size": [1]}, "^enc_dec_window_size is .left, right"),
        (made, {"enc_dec_bottom_right_diagonal": 1.5}, "^enc_dec_bottom_right_diagonal is True or False"),
        (made, {"verify": "x"}, "^verify is True or False, got 'x'"),
        (made, {"memory": [1]}, r"^memory is one of .* or a budget in bytes, .* got \[1\]"),
        (te_fuser.LayerNorm, {"normalized_shape": b"q"}, "^normalized_shape is a whole number, got b'q'"),
        (te_fuser.RMSNorm, {"normalized_shape": torch.tensor(2.0)}, "^normalized_shape is a whole number, got tensor"),
        (te_fuser.RMSNorm, {"hidden_size": "8"}, "^hidden_size is a whole number, got '8'"),
        (te_fuser.LayerNormLinear, {"in_features": 4, "out_features": 4, "eps": None}, "^eps is a number from 0 on"),
    ],
)
def test_errors_call_an_argument_by_its_own_name(make: Any, keywords: dict[str, Any], words: str) -> None:
    kinds = {"layer_type": ["encoder", "decoder"]} if make is made else {"": [""]}
    for name, values in kinds.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=words):
                make(**keywords, **({name: value} if name else {}))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"self_attn_mask_type": "x"}, "^self_attn_mask_type='x' is unknown"),
        ({"self_attn_mask_type": "padding"}, "self_attn_mask_type='padding' reads what is padding"),
        ({"enc_dec_attn_mask_type": 1}, "^enc_dec_attn_mask_type=1 is unknown"),
        ({"enc_dec_window_size": 0}, "^enc_dec_window_size is .left, right"),
        ({"enc_dec_bottom_right_diagonal": "x"}, "^enc_dec_bottom_right_diagonal is True or False"),
        ({"core_attention_bias_type": torch.zeros(4, 4)}, "^core_attention_bias_type=tensor.* is unknown"),
        (
            {"checkpoint_core_attention": torch.zeros(4, 4)},
            "^checkpoint_core_attention is True or False, got a Tensor of",
        ),
        ({"checkpoint_core_attention": 0}, "^checkpoint_core_attention is True or False, got 0"),
    ],
)
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_errors_of_calls_do_so_too(layer_type: str, call: dict[str, Any], words: str) -> None:
    x = torch.randn(4, 2, 8)
    given = {"encoder_output": x} if layer_type == "decoder" else {}
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}"):
        made(layer_type=layer_type)(x, **given, **call)


CALLED: list[tuple[Any, str, str]] = [
    (lambda: te_fuser.Linear(8, 4), "is_first_microbach", "is_first_microbatch"),
    (lambda: te_fuser.Linear(8, 4, return_bias=True), "fp8_outputs", "fp8_output"),
    (lambda: te_fuser.LayerNormLinear(8, 4), "is_first_micro_batch", "is_first_microbatch"),
    (lambda: te_fuser.LayerNormMLP(8, 6), "is_first_microbach", "is_first_microbatch"),
    (lambda: te_fuser.LayerNorm(8), "output", "outputs"),
    (lambda: te_fuser.RMSNorm(8), "output", "outputs"),
    (lambda: te_fuser.DotProductAttention(2, 4), "window", "window_size"),
    (lambda: attention(), "rotary_pos", "rotary_pos_emb"),
    (lambda: made(), "inference_param", "inference_params"),
    (lambda: made(), "attn_mask_type", "self_attn_mask_type"),  # attention's own
]


@pytest.mark.parametrize(("make", "name", "nearest"), CALLED)
@pytest.mark.parametrize("value", [None, True, torch.zeros(3, 2, 8)])
@pytest.mark.parametrize("way", ["forward", "reference", "plan", "explain"])
def test_calls_refuse_keywords_that_nobody_knows(make: Any, name: str, nearest: str, value: Any, way: str) -> None:
    preset = make()
    words = rf"^{type(preset).__name__} takes no argument '{name}' in a call; did you mean '{nearest}'\?"
    with pytest.raises(TypeError, match=words):
        getattr(preset, way)(torch.zeros(3, 2, 8), **{name: value})


def test_calls_take_the_names_that_appended_ops_read() -> None:
    preset = te_fuser.Linear(8, 8, device="cpu")
    preset.append(te_fuser.ops.Add("skip"))
    x, skip = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(preset(x, skip=skip), preset[0:2](x) + skip)
    with pytest.raises(TypeError, match="takes no argument 'skp' in a call; did you mean 'skip'"):
        preset(x, skip=skip, skp=None)
