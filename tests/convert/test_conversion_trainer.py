"""Converted models in transformers' Trainer and with peft's adapters: they give what the originals give, and go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import assert_alike, model_of, results, tokens, ways
from tests.convert.training import STEPS, logged, trainer

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
    original = model_of(family, num_hidden_layers=1)
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


pytest.importorskip("accelerate")
# Arguments -> how far losses may lie from the original's.
ARGUMENTS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5),
    "evaluating": ({"eval_strategy": "steps", "eval_steps": 2}, 1e-5),
    "accumulating": ({"gradient_accumulation_steps": 2}, 1e-5),
    "checkpointing": ({"gradient_checkpointing": True}, 1e-5),
    "re-entering": ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, 1e-5),
    "bfloat16": ({"bf16": True}, 2e-2),
    "all": ({"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
     2e-2),
}  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_losses_are_the_originals(family: str, arguments: str, tmp_path: Path) -> None:
    original = model_of(family, torch.float32)
    model = copy.deepcopy(original)
    conversion = te_fuser.convert(model)
    chosen, tolerance = ARGUMENTS[arguments]
    want, got = (trainer(m, tmp_path, **chosen) for m in (original, model))
    want.train()
    with ways(model) as ran:
        got.train()
    assert conversion.left == {} and len(ran) >= 2 * STEPS and set(ran) <= {"none", "given", "added"}
    for name in ("loss", "eval_loss"):
        assert logged(got, name) == pytest.approx(logged(want, name), abs=tolerance), name
    assert logged(got, "grad_norm") == pytest.approx(logged(want, "grad_norm"), rel=100 * tolerance)
    losses = logged(got, "loss")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1
    assert (len(logged(got, "eval_loss")) > 0) == (arguments == "evaluating")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_goes_on_from_a_checkpoint_of_either(family: str, tmp_path: Path) -> None:
    """Converted or not: names in safetensors, and the optimizer's state, are the model's own."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": STEPS // 2}
    models = [model_of(family, torch.float32) for _ in range(4)]
    te_fuser.convert(models[0])
    te_fuser.convert(models[2])
    whole = [trainer(m, tmp_path / str(k), **saving) for k, m in enumerate(models[:2])]
    for one in whole:
        one.train()
    with torch.no_grad():
        for m in models[2:]:
            for p in m.parameters():
                p.mul_(0.5)
    for resumed, folder in zip(models[2:], (1, 0), strict=True):
        again = trainer(resumed, tmp_path / "again")
        again.train(resume_from_checkpoint=str(tmp_path / str(folder) / f"checkpoint-{STEPS // 2}"))
        assert logged(again, "loss") == pytest.approx(logged(whole[0], "loss"), abs=1e-5)
    back = type(models[0]).from_pretrained(tmp_path / "0" / f"checkpoint-{STEPS}")
    assert back.state_dict().keys() == models[0].state_dict().keys()
    assert all(torch.equal(t, models[0].state_dict()[name]) for name, t in back.state_dict().items())
