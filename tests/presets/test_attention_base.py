"""Common parts of presets with heads: sizes that are planned ahead, with masks and inputs of cross attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser.fuser import pipeline
from tests.presets.layers import PAD, B, F, S, layer
from tests.twins import tensor

OWN = {"device": "cpu", "params_dtype": torch.float64, "seq_length": S, "micro_batch_size": B}
MASK = PAD.expand(B, 1, S, S)
ENDS = torch.arange(B + 1, dtype=torch.int32) * S


def attention(**keywords: Any) -> Any:
    return te_fuser.MultiheadAttention(F, 4, attention_dropout=0.0, **{**OWN, **keywords})


def ahead(**keywords: Any) -> Any:
    return layer(**{**OWN, **keywords})


def mlp(**keywords: Any) -> Any:
    return te_fuser.LayerNormMLP(F, 20, **{**OWN, **keywords})


X, TOKENS, MEMORY = tensor(S, B, F), tensor(S * B, F), tensor(S, B, F, seed=5)
CASES: dict[str, tuple[Any, torch.Tensor, dict[str, Any]]] = {
    "mlp": (mlp, X, {}),
    "mlp, again": (lambda: mlp(checkpoint=True), X, {}),
    "mlp, beside": (lambda: mlp(return_bias=True, return_layernorm_output=True), X, {}),
    "attention": (attention, X, {}),
    "attention, beside": (lambda: attention(input_layernorm=True, return_layernorm_output=True), X, {}),
    "attention, padding": (lambda: attention(attn_mask_type="padding"), X, {"attention_mask": PAD}),
    "attention, cross": (
        lambda: attention(attention_type="cross", attn_mask_type="padding"),
        X,
        {"encoder_output": MEMORY, "attention_mask": (PAD, PAD)},
    ),
    "layer": (ahead, X, {}),
    "layer, batch first": (lambda: ahead(attn_input_format="bshd"), tensor(B, S, F), {}),
    "layer, padding": (lambda: ahead(self_attn_mask_type="padding_causal"), X, {"attention_mask": PAD}),
    "layer, arbitrary": (lambda: ahead(self_attn_mask_type="arbitrary"), X, {"attention_mask": MASK}),
    "layer, tokens": (lambda: ahead(attn_input_format="thd"), TOKENS, {"cu_seqlens_q": ENDS}),
    "decoder": (lambda: ahead(layer_type="decoder"), X, {"encoder_output": MEMORY}),
    "decoder, padding": (
        lambda: ahead(layer_type="decoder", self_attn_mask_type="padding", enc_dec_attn_mask_type="padding"),
        X,
        {"attention_mask": PAD, "encoder_output": MEMORY, "enc_dec_attn_mask": (PAD, PAD)},
    ),
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records of plans made, and of plans loaded, for which kernels are compiled."""
    found: list[str] = []
    make_plan, load = pipeline.make_plan, pipeline.load
    monkeypatch.setattr(pipeline, "make_plan", lambda *args: found.append("planned") or make_plan(*args))
    monkeypatch.setattr(pipeline, "load", lambda *args: found.append("loaded") or load(*args))
    yield found


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_are_planned_ahead(name: str, planned: list[str]) -> None:
    """The first call of them neither plans nor compiles, and its backward neither."""
    make, x, call = CASES[name]
    made = make()
    assert planned == ["planned", "loaded"]
    planned.clear()
    y = made(x, **call)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert planned == []


def test_one_of_the_two_or_a_group_that_comes_later_plans_nothing(planned: list[str]) -> None:
    for make in (mlp, attention, ahead):
        make(seq_length=None), make(micro_batch_size=None)
    mlp(device="meta"), attention(device="meta")
    assert planned == []
    for make in (mlp, attention, ahead):
        assert make(tp_size=2, set_parallel_mode=True).tp_size == 2
    assert planned == []


def test_hooks_for_all_modules() -> None:
    """Hooks for all modules make every op a part by itself: there is no plan to be made ahead."""
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        made = ahead()
    finally:
        hook.remove()
    torch.testing.assert_close(made(X), layer()(X))
