"""Attention by kernels of others in plans, computed or told on the CPU: values and all gradients, and what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Fusion
from te_fuser.fusions.dot_product_attention import declare
from te_fuser.kernels.attention import AttentionProblem, Provider, Speed
from te_fuser.kernels.attention.cudnn import CudaCudnnFrontend
from te_fuser.kernels.attention.flash_attn_4 import CudaFlashAttn4
from tests.fusions.models import FRONT_END, attention, where, without
from tests.kernels.attention import padded, structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.packages import fake_cudnn, fake_flash_attn
from tests.kernels.played import Played
from tests.twins import assert_as_meant, sequential, tensor

FRONT, TWIN, FOUR = "attention_cuda_cudnn_frontend", "attention_cuda_cudnn", "attention_cuda_flash_attn_4"
FAST: dict[str, Any] = {"conditions": (), "speed": Speed.constant(forward=1e3, backward=1e3)}


@pytest.fixture(params=[FRONT, FOUR])
def by_package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fusion]:
    """A fusion with what it needs of a GPU left out, and so fast that it is taken."""
    if request.param == FRONT:
        fake: Any = fake_cudnn
        provider = type("OnCpu", (CudaCudnnFrontend,), FAST)()
        monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    else:
        fake, provider = fake_flash_attn, type("OnCpu", (CudaFlashAttn4,), {**FAST, "launches": 1})()
    package = fake.in_place(monkeypatch)
    yield declare(provider, registered=False)
    assert package.graphs if fake is fake_cudnn else {way for way, _ in package.calls} == {"forward", "backward"}
    fake.forget()


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_by_a_package_is_right_in_values_and_gradients(
    layout: str, packing: str, rope: bool, by_package: Fusion
) -> None:
    """Between projections; left out is where there are no strides for the packed gradient."""
    kinds = [("causal", 4), ("causal", 2), ("causal", 1)]
    for mask, kv_heads in kinds if by_package.name == FRONT else [*kinds, ("none", 4), ("none", 2)]:
        if (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue
        common: dict[str, Any] = {"heads": 4, "kv_heads": kv_heads, "layout": layout, "packing": packing}
        op = ops.DotProductAttention(head_dim=8, mask=mask, **common)
        rotation = [ops.RotaryEmbedding(8, **common)] if rope else []
        model = sequential(ops.Linear(6, op.packed.features), *rotation, op, ops.Linear(32, 6))
        x = tensor(5, 3, 6)
        with fusions.only(by_package, "stretch"):
            assert by_package.name in [s.name for s in model.plan(x).backward]
            assert_as_meant(model, x, tolerance=1e-10)


def test_front_end_is_taken_for_the_pass_that_it_saves() -> None:
    """The packing: as many bytes read as written, at the rate of an H200's memory; and a launch."""
    (step,) = (s for s in where(FRONT_END, attention, ops.SiLU(), heads=8).backward if s.name == FRONT)
    apart = where(FRONT_END, without, (FRONT,), attention, ops.SiLU(), heads=8)
    (other,) = (s for s in apart.backward if s.name == TWIN)
    same = 0.02 * step.seconds  # what the same kernels take less when they are called so
    packed = 2048 * 4 * 3 * 8 * 128 * 2
    assert other.seconds - step.seconds == pytest.approx(2 * packed / 4.2e12 + 4e-6 + same, rel=0.1)
    assert other.cost.flops == step.cost.flops


def test_problem_is_that_of_a_backward_where_one_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is built for the backward alone."""
    asked: list[Any] = []
    of = AttentionProblem.of
    monkeypatch.setattr(AttentionProblem, "of", lambda *given: asked.append(given[3]) or of(*given))
    for grad in (True, False):
        asked.clear()
        with torch.set_grad_enabled(grad):
            attention(ops.Bias(3072), heads=8, grad=grad)
        assert asked and all(needs is grad for needs in asked)


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
