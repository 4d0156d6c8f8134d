"""Preset: checkpoints, files, parameters that move, lists around, and attributes by which scripts ask what it is."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.refused import raises
from tests.twins import randomize, tensor

WIDTH = 6


def model(**keywords: Any) -> Any:
    given = {"device": "cpu", "params_dtype": torch.float64, **keywords}
    return randomize(
        te_fuser.Sequential(
            te_fuser.LayerNormLinear(WIDTH, WIDTH, parameters_split=("a", "b"), **given),
            te_fuser.RMSNorm(WIDTH, **given),
            te_fuser.Residual(te_fuser.LayerNormMLP(WIDTH, 10, activation="swiglu", **given)),
            te_fuser.Linear(WIDTH, 3, **given),
        )
    )


def test_checkpoints_with_extra_state() -> None:
    """Transformer Engine's have one in each module: skipped, and said once for the whole model."""
    saved, x = model(), tensor(3, WIDTH)
    state = saved.state_dict()
    extra = {f"{path}_extra_state": torch.zeros(0) for path in ("0.", "1.", "2.0.", "3.")}
    for given in ({**state, **extra}, {**state, **dict.fromkeys(extra)}):
        fresh = model()
        with pytest.warns(UserWarning, match="_extra_state is skipped") as seen:
            keys = fresh.load_state_dict(given)
        assert len(seen) == 1 and not keys.missing_keys and not keys.unexpected_keys
        assert len(given) == len(state) + 4
        assert torch.equal(fresh(x), saved(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*1\._extra"):
        model().load_state_dict({**state, "1._extra": torch.zeros(0)})


def test_checkpoints_of_layers_with_extra_state() -> None:
    """In each of its modules, as Transformer Engine saves them: none is a part that this layer does not have."""
    given: dict[str, Any] = {"device": "cpu", "output_layernorm": True, "qk_norm_type": "RMSNorm"}
    saved, fresh = (randomize(te_fuser.TransformerLayer(8, 12, 2, **given), seed=k).eval() for k in range(2))
    paths = [
        *(f"self_attention.{name}" for name in ("qkv", "q_norm", "k_norm", "core_attention", "proj")),
        *("layernorm_mlp", "layernorm"),
    ]
    state = {**saved.state_dict(), **{f"{path}._extra_state": torch.zeros(3) for path in paths}}
    with pytest.warns(UserWarning, match="_extra_state is skipped") as seen:
        fresh.load_state_dict(state)
    x = torch.randn(3, 2, 8)
    assert len(seen) == 1 and torch.equal(fresh(x), saved(x))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*inter_attention\.proj\._extra_state"):
        fresh.load_state_dict({**state, "inter_attention.proj._extra_state": None})


def test_a_named_output_of_a_preset_in_a_list() -> None:
    """Named outputs that ops put into a preset are asked of it as of any list."""
    preset = te_fuser.Linear(WIDTH, WIDTH, device="cpu")
    preset.insert(1, ops.Output("product"))
    x = torch.randn(3, WIDTH)
    y, product = preset(x, outputs=("product",))
    torch.testing.assert_close(product, x @ preset.weight.T)
    outer = te_fuser.Sequential(preset, ops.GELU())
    torch.testing.assert_close(outer(x, outputs=("product",))[1], product)
    preset.register_forward_hook(lambda *args: None)
    torch.testing.assert_close(outer(x, outputs=("product",))[1], product)
    assert torch.equal(preset(x), y)


def test_a_subclass_with_modules_of_its_own() -> None:
    class Adapted(te_fuser.LayerNormMLP):
        def __init__(self) -> None:
            super().__init__(WIDTH, 10, device="cpu", params_dtype=torch.float64)
            self.adapter = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, inp: torch.Tensor, *given: Any, **call: Any) -> Any:
            return super().forward(self.adapter(inp), *given, **call)

    adapted, x = Adapted(), tensor(4, WIDTH)
    plain = te_fuser.LayerNormMLP(WIDTH, 10, device="cpu", params_dtype=torch.float64)
    plain.load_state_dict(adapted.state_dict(), strict=False)

    def both(run: Any, mlp: Any) -> tuple[torch.Tensor, ...]:
        y = run(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, mlp.fc1_weight, *adapted.adapter.parameters()])

    want = both(lambda x: plain(adapted.adapter(x)), plain)
    for run in (adapted, te_fuser.Sequential(adapted)):
        torch.testing.assert_close(both(run, adapted), want, rtol=1e-12, atol=1e-12)


CORE = "softmax_scale attention_dropout qkv_format attention_type bottom_right_diagonal"
LAYER = """hidden_dropout attention_dropout drop_path_rate self_attn_mask_type enc_dec_attn_mask_type window_size
    softmax_type"""


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: te_fuser.DotProductAttention(2, 4), CORE),
        (lambda: te_fuser.MultiheadAttention(8, 2, device="cpu"), "qkv_format attention_type bottom_right_diagonal"),
        *((lambda k=kind: k(8, device="cpu"), "eps") for kind in (te_fuser.LayerNorm, te_fuser.RMSNorm)),
        *((lambda k=k: k(8, 4, device="cpu"), "eps") for k in (te_fuser.LayerNormLinear, te_fuser.LayerNormMLP)),
        (lambda: te_fuser.TransformerLayer(8, 4, 2, device="cpu"), LAYER),
    ],
)
def test_what_its_ops_have_or_calls_may_say_is_settled(make: Any, names: str) -> None:
    """A later one would hold for those variants alone that are made after it; the same one is taken."""
    preset = make()
    for name in names.split():
        before = getattr(preset, name, getattr(preset.common, name, None))
        setattr(preset, name, before)
        raises(AttributeError, f"{name} is settled when it is made", setattr, preset, name, 0.25)
        assert getattr(preset, name) == before


def test_ops_that_are_listed_anew_are_in_the_mode_of_those_before() -> None:
    layer = te_fuser.TransformerLayer(16, 32, 2, hidden_dropout=0.5, attention_dropout=0.5).eval()
    x = torch.randn(5, 2, 16)
    expected = layer(x)
    before = {name: m.training for name, m in layer.named_modules()}
    layer.relist()
    layer.self_attention.relist()
    assert {name: m.training for name, m in layer.named_modules()} == before and not any(before.values())
    assert torch.equal(layer(x), expected)
    layer.self_attention.train()
    layer.relist()
    assert not layer.training and layer.self_attention.training


OWN = {"device": "cpu"}
SAID = {
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
    "Linear": (lambda: te_fuser.Linear(8, 6, return_bias=True, **OWN),
     {**LINEAR, "in_features": 8, "out_features": 6, "fuse_wgrad_accumulation": False}),
    "LayerNormLinear": (lambda: te_fuser.LayerNormLinear(8, 6, 1e-3, return_bias=True, return_layernorm_output=True,
     normalization="RMSNorm", **OWN),
     {**LINEAR, "eps": 1e-3, "normalization": "RMSNorm", "zero_centered_gamma": False, "return_layernorm_output": True,
     "return_layernorm_output_gathered": False}),
    "LayerNormMLP": (lambda: te_fuser.LayerNormMLP(8, 6, activation="clamped_swiglu", activation_params={"limit": 3.0},
     **OWN),
     {"activation": "clamped_swiglu", "activation_params": {"limit": 3.0}, "normalization": "LayerNorm",
     "set_parallel_mode": False, "use_bias": True, "return_bias": False, "checkpoint": False, "eps": 1e-5}),
    "LayerNorm": (lambda: te_fuser.LayerNorm(8, 1e-3, zero_centered_gamma=True, **OWN),
     {"eps": 1e-3, "zero_centered_gamma": True, "normalized_shape": (8,), "normalization": "LayerNorm"}),
    "DotProductAttention": (lambda: te_fuser.DotProductAttention(4, (8, 6), 2, qkv_format="bshd", layer_number=5,
     window_size=(2, 0), **OWN),
     {**HEADS, "qkv_format": "bshd", "attn_mask_type": "causal", "window_size": (2, 0), "bottom_right_diagonal": None,
     "softmax_type": "vanilla", "softmax_scale": 8**-0.5, "attention_type": "self", "attention_dropout": 0.0,
     "hidden_size_per_attention_head_k": 8, "hidden_size_per_attention_head_v": 6, "tp_group": None}),
    "MultiheadAttention": (lambda: te_fuser.TransformerLayer(16, 8, 4, **SAID, **OWN).self_attention,
     {**HEADS, "hidden_size": 16, "hidden_size_per_attention_head": 4, "num_attention_heads_per_partition": 4,
     "attention_type": "self", "attn_mask_type": "padding_causal", "window_size": (3, 0), "qkv_format": "bshd",
     "softmax_type": "off-by-one", "rotary_pos_interleaved": True, "qkv_weight_interleaved": False,
     "input_layernorm": False, "return_layernorm_output": False, "return_bias": False}),
    "TransformerLayer": (lambda: te_fuser.TransformerLayer(16, 8, 4, **SAID, **OWN),
     {**{name: value for name, value in SAID.items() if name != "num_gqa_groups"}, "kv_channels": 4}),
}  # fmt: skip
each = pytest.mark.parametrize("name", ASKED)


@each
def test_what_a_preset_was_made_with(name: str) -> None:
    make, asked = ASKED[name]
    made = make()
    for found in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert {attribute: getattr(found, attribute) for attribute in asked} == asked
    assert not set(asked) & set(made.state_dict())


def test_of_ranks_it_says_the_parts_and_of_others_what_is_set() -> None:
    made = te_fuser.MultiheadAttention(16, 4, num_gqa_groups=2, tp_size=2, set_parallel_mode=True, **OWN)
    assert (made.num_attention_heads, made.num_gqa_groups) == (4, 2)
    assert (made.num_attention_heads_per_partition, made.num_gqa_groups_per_partition) == (2, 1)
    assert made.core_attention.num_gqa_groups_per_partition == 1
    made = te_fuser.Linear(4, 4, **OWN)
    assert not hasattr(made, "activation")
    made.activation = torch.nn.GELU()
    assert isinstance(made.activation, torch.nn.GELU)


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
