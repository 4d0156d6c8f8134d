"""Adapters by peft in converted models: they give what they give in the original, and merging them fuses it again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import assert_alike, model_of, results, tokens

peft: Any = pytest.importorskip("peft")
IDS = tokens()
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gemma2": ["k_proj", "o_proj", "gate_proj"], "gpt2": ["c_attn"]}
LAYERS = {"llama": "layers", "gemma2": "layers", "gpt2": "h"}


def adapted(model: Any, family: str) -> Any:
    """The model with adapters in float64 whose products are no zeros, as after some steps."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2")
    made = peft.get_peft_model(model, config).double()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1, generator=draw)
    return made


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("first", ["converted", "adapted"])
def test_lora(family: str, first: str) -> None:
    original = model_of(family)
    model = copy.deepcopy(original)
    if first == "converted":
        te_fuser.convert(model)
    want, got = adapted(original, family), adapted(model, family)
    if first == "adapted":
        te_fuser.convert(got)
    assert_alike(results(got, IDS), results(want, IDS))
    left = [layer.left() for layer in got.get_base_model().base_model.get_submodule(LAYERS[family])]
    assert left and {path.rpartition(".")[2] for why in left for path in why} == set(TARGETS[family])
    assert all("no " in reason for why in left for reason in why.values())
    call: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(got.generate(input_ids=IDS, **call), want.generate(input_ids=IDS, **call))
    merged = got.merge_and_unload()
    with torch.no_grad():
        assert_alike({"logits": merged(IDS).logits}, {"logits": want.merge_and_unload()(IDS).logits})
    te_fuser.revert(merged)
    assert te_fuser.convert(merged).left == {}


def test_what_is_left_names_the_adapter() -> None:
    model = model_of("llama")
    made = te_fuser.convert(model)
    adapted(model, "llama")
    why = model.model.layers[0].left()
    assert set(why) == {"self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"} and made.converted
    assert all("Linear" in reason for reason in why.values())
