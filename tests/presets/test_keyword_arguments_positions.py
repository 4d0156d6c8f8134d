"""Arguments of presets that go by position, in constructors and in calls; tests/public.txt has their defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import te_fuser

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


each = pytest.mark.parametrize("name", GIVEN)


def by_position(function: Any) -> list[str]:
    found = inspect.signature(function).parameters
    return [n for n, p in found.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


@each
def test_what_goes_by_position_is_what_its_name_says(name: str) -> None:
    kind, positions = getattr(te_fuser, name), by_position(getattr(te_fuser, name))
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
    last = by_position(getattr(te_fuser, name))[-1]
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
    found = by_position(getattr(te_fuser, name).forward)
    assert found[1 : 1 + len(CALLS[name])] == CALLS[name]
