"""Kernels that are told the structure, in models on the CPU: their fusions pass on what they read, save and give."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.kernels.attention import Provider, Speed
from tests.kernels.attention import padded, structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.twins import assert_as_meant, sequential

CASES = {name: (op, tensors) for name, op, tensors in structured.cases() if op.settings().mask.beyond}
SINKS = {name: (op, t) for name, op, t in structured.cases(sink="learned", soft_cap=2.0) if "offsets" in name}


def model_of(
    op: ops.DotProductAttention, tensors: structured.Tensors
) -> tuple[te_fuser.Sequential, structured.Tensors]:
    inputs = {op.hides.names.get(argument, argument): t for argument, t in tensors.items()}
    return sequential(op), inputs


def take(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and for its price."""
    monkeypatch.setattr(type(provider), "conditions", ())
    monkeypatch.setattr(type(provider), "calls", (0.0, 0.0))
    monkeypatch.setattr(type(provider), "speed", Speed.constant(100.0, 100.0))


def check(name: str, model: te_fuser.Sequential, inputs: structured.Tensors) -> None:
    x = inputs.pop("input").requires_grad_()
    with fusions.only(name):
        plan = model.plan(x, **inputs)
        assert [step.name for step in (*plan.forward, *plan.backward)] == [name] * 2
        assert_as_meant(model, x, tolerance=1e-6, **inputs)


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_in_a_model_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(BY_NAME["cuda_flash"], monkeypatch)
    with told.in_place():
        check("attention_cuda_flash", *model_of(*CASES[name]))


@pytest.mark.parametrize("name", SINKS)
def test_flash_attention_4_in_a_model_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(BY_NAME["cuda_flash_attn_4"], monkeypatch)
    model, inputs = model_of(*SINKS[name])
    assert any(isinstance(p, torch.nn.Parameter) for p in model.parameters())
    with told.in_place():
        check("attention_cuda_flash_attn_4", model, inputs)


@pytest.mark.parametrize("kind", ["end", "anywhere"])
@pytest.mark.parametrize("name", padded.MASKS)
def test_padding_by_a_boolean_tensor_in_a_model_is_told(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both providers, which are told lengths and offsets."""
    with told.in_place(all_rows=False):
        for provider in (BY_NAME["cuda_flash"], BY_NAME["cuda_flash_attn_4"]):
            take(provider, monkeypatch)
            for layout in padded.LAYOUTS:
                check(f"attention_{provider.name}", *model_of(*padded.case(name, layout, kind)))
