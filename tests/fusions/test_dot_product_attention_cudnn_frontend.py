"""Attention whose backward packs by itself, in plans: it leaves the ops before it to others, and the rest is right."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions.dot_product_attention import declare
from te_fuser.kernels.attention import AttentionProblem, Speed
from te_fuser.kernels.attention.providers.cudnn_frontend import CudaCudnnFrontend
from te_fuser.kernels.packages import cudnn_frontend
from te_fuser.kernels.packed_heads import PackedPass
from tests.fusions.attention_models import projected
from tests.kernels.packages import fake_cudnn
from tests.kernels.played import Played
from tests.twins import assert_as_meant

NAME, TWIN = "attention_cuda_cudnn_frontend", "attention_cuda_cudnn"
HEADS, DIM = 8, 128
FEATURES = 3 * HEADS * DIM


@pytest.fixture
def installed(monkeypatch):
    """The package as if it were there, for plans of a GPU that is not."""
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: fake_cudnn.VERSION)


def plan(*parts: Any) -> Plan:
    with torch.device("meta"):
        model = Sequential(*parts).to(torch.bfloat16)
        rows = (2048, 4) if parts[-1].layout == "sequence_first" else (4, 2048)
        x = torch.empty(*rows, parts[-1].packed.features, dtype=torch.bfloat16, requires_grad=True)
    return model.plan(x, device="h200")


def attention(**options: object) -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, **{"layout": "sequence_first", "mask": "causal", **options})  # type: ignore[arg-type]


def covered(p: Plan) -> dict[str, tuple[int, int]]:
    return {s.name: (s.start, s.stop) for s in p.backward}


def test_it_is_taken_for_the_pass_that_it_saves(installed) -> None:
    p = plan(ops.SiLU(), attention())
    (step,) = (s for s in p.backward if s.name == NAME)
    x, y = 2048 * 4 * FEATURES * 2, 2048 * 4 * HEADS * DIM * 2
    assert (step.cost.read, step.cost.written, step.cost.launches) == (x + 2 * y, x, 1)
    assert [s.name for s in p.forward if s.name.startswith("attention")] == [NAME]
    with fusions.disabled(NAME):
        (other,) = (s for s in plan(ops.SiLU(), attention()).backward if s.name == TWIN)
    # The packing is what is saved: as many bytes read as written, at the rate of an H200's memory; and a launch.
    same = 0.02 * step.seconds  # what the same kernels take less when they are called so
    assert other.seconds - step.seconds == pytest.approx(2 * x / 4.2e12 + 4e-6 + same, rel=0.1)
    assert other.cost.flops == step.cost.flops


def test_the_bias_before_it_gets_its_gradient_elsewhere(installed) -> None:
    p = plan(ops.Bias(FEATURES), attention())
    assert covered(p) == {NAME: (1, 2), "bias_bwd": (0, 1)}
    assert not any(isinstance(kernel, PackedPass) for kernel in p.written)


def test_a_rotation_before_it_turns_back_in_a_pass_of_its_own(installed) -> None:
    """That pass moves as much as the one that packs and turns back at once."""
    p = plan(ops.Bias(FEATURES), ops.RotaryEmbedding(DIM, heads=HEADS), attention())
    assert covered(p) == {NAME: (2, 3), "rotary_embedding_backward": (0, 2)}
    (reason,) = {r.reason for r in p.refusals if r.name == TWIN and (r.start, r.stop) == (0, 3)}
    assert re.fullmatch(rf"predicted \d\.\d us more than rotary_embedding_backward \+ {NAME}, with .*", reason)


def test_plans_say_why_it_is_not_taken(installed, monkeypatch) -> None:
    grouped = {"heads": HEADS, "kv_heads": 2, "layout": "batch_first"}
    features = (HEADS + 4) * DIM
    p = plan(ops.Bias(features), ops.DotProductAttention(head_dim=DIM, **grouped, mask="none"))
    (reason,) = {r.reason for r in p.refusals if r.name == NAME}
    assert "no common stride in packing='interleaved'" in reason and covered(p)[TWIN] == (0, 2)
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: None)
    p = plan(ops.Bias(FEATURES), attention())
    (reason,) = {r.reason for r in p.refusals if r.name == NAME}
    assert reason == 'nvidia-cudnn-frontend is not installed: pip install "nvidia-cudnn-frontend>=1.32"'
    assert covered(p)[TWIN] == (0, 2)


def test_only_where_a_backward_will_run_is_it_asked_for(monkeypatch) -> None:
    """A graph is built for the backward alone."""
    asked, of = [], AttentionProblem.of
    monkeypatch.setattr(AttentionProblem, "of", lambda *given: asked.append(given[3]) or of(*given))
    plan(ops.Bias(FEATURES), attention())
    assert asked and all(asked)
    asked.clear()
    with torch.no_grad():
        plan(ops.Bias(FEATURES), attention())
    assert asked and not any(asked)


class OnCpu(CudaCudnnFrontend):
    """The provider with what it needs of a GPU left out, and so fast that it is taken."""

    conditions = ()
    speed = Speed.constant(forward=1e3, backward=1e3)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("rope", [True, False])
def test_values_and_gradients(layout: str, packing: str, rope: bool, monkeypatch) -> None:
    fake_cudnn.in_place(monkeypatch)
    provider = OnCpu()
    monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    one = declare(provider, registered=False)
    for model, x in projected(layout, packing, rope, [("causal", kv_heads) for kv_heads in (4, 2, 1)]):
        with fusions.only(one, "stretch"):
            assert NAME in covered(model.plan(x.requires_grad_()))
            assert_as_meant(model, x, tolerance=1e-10)
    fake_cudnn.forget()
