"""Attention by FlashAttention-4 in plans: taken where it was measured to be faster, else why not; and it is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions.dot_product_attention import declare
from te_fuser.kernels.attention import Speed
from te_fuser.kernels.attention.providers.flash_attn_4 import CudaFlashAttn4
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4
from te_fuser.kernels.packed_heads import PackedPass
from tests.fusions.attention_models import projected
from tests.kernels.packages import fake_flash_attn
from tests.twins import assert_as_meant

NAME, CUDNN, FRONT_END = "attention_cuda_flash_attn_4", "attention_cuda_cudnn", "attention_cuda_cudnn_frontend"
HEADS, DIM = 32, 128


@pytest.fixture
def installed(monkeypatch):
    """The package as if it were there, for plans of a GPU that is not."""
    monkeypatch.setattr(flash_attn_4.PACKAGE, "version", lambda: fake_flash_attn.VERSION)
    monkeypatch.setattr(flash_attn_4, "unusable", lambda: None)


def plan(*parts: Any, device: str = "h200", training: bool = True, positions: int = 2048) -> Plan:
    with torch.device("meta"):
        model = Sequential(*parts).to(torch.bfloat16).train(training)
        rows = (positions, 4) if parts[-1].layout == "sequence_first" else (4, positions)
        features = getattr(parts[0], "in_features", None) or parts[-1].packed.features
        x = torch.empty(*rows, features, dtype=torch.bfloat16, requires_grad=True)
    return model.plan(x, device=device)


def attention(dropout: float = 0.0, dim: int = DIM, **options: object) -> ops.DotProductAttention:
    return ops.DotProductAttention(
        HEADS, dim, dropout=dropout, **{"layout": "sequence_first", "mask": "causal", **options}
    )  # type: ignore[arg-type]


def seed_layer(**options: Any) -> list[Any]:
    """Up to attention: rows of 4 x 2048, 32 heads of 128 features."""
    return [ops.Linear(HEADS * DIM, 3 * HEADS * DIM), attention(**options)]


def taken(p: Plan) -> list[str]:
    """The attention of each direction."""
    return [s.name for s in (*p.forward, *p.backward) if s.name.startswith("attention")]


def reasons(p: Plan) -> set[str]:
    return {r.reason for r in p.refusals if r.name == NAME}


def test_the_seed_layer_takes_it_and_nothing_is_left_to_pack(installed) -> None:
    p = plan(*seed_layer())
    assert taken(p) == [NAME, NAME] and not any(isinstance(kernel, PackedPass) for kernel in p.written)
    (step,) = (s for s in p.backward if s.name == NAME)
    x, y = (2048 * 4 * n * HEADS * DIM * 2 for n in (3, 1))
    assert (step.cost.read, step.cost.written, step.stop - step.start) == (x + 2 * y, x, 1)
    with fusions.disabled(NAME):
        assert taken(plan(*seed_layer())) == [CUDNN, CUDNN]


def test_short_attention_is_left_to_others(installed) -> None:
    p = plan(*seed_layer(), positions=64)
    assert taken(p) == [CUDNN, CUDNN] and any("us more than" in reason for reason in reasons(p))


def test_its_times_are_those_that_were_measured(installed) -> None:
    """Beside cuDNN's own: 0.292 to 0.298 ms forward, 0.800 to 0.915 ms backward."""
    p = plan(*seed_layer())
    with fusions.disabled(NAME):
        other = plan(*seed_layer())
    for steps, others, ratio in (
        (p.forward, other.forward, 0.292 / 0.298),
        (p.backward, other.backward, 0.800 / 0.915),
    ):
        ours, theirs = (next(s.cost for s in ss if s.name.startswith("attention")) for ss in (steps, others))
        assert ours.flops == theirs.flops
        assert theirs.efficiency / ours.efficiency == pytest.approx(ratio, rel=1e-3)


def test_with_dropout_it_is_not_taken(installed) -> None:
    p = plan(*seed_layer(dropout=0.1))
    assert taken(p) == [CUDNN, CUDNN]
    assert reasons(p) == {"it has no dropout, and 0.1 of the probabilities are to be dropped"}
    assert taken(plan(*seed_layer(dropout=0.1), training=False)) == [NAME, NAME]


def test_beside_the_front_end_the_cheaper_one_is_taken(installed, monkeypatch) -> None:
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: "1.32.0")
    assert taken(plan(*seed_layer())) == [NAME, NAME]
    with fusions.disabled(NAME):
        assert taken(plan(*seed_layer())) == [FRONT_END, FRONT_END]
    assert taken(plan(*seed_layer(dropout=0.1))) == [FRONT_END, FRONT_END]


def test_plans_say_why_it_is_not_taken(installed, monkeypatch) -> None:
    p = plan(attention(kv_heads=2, layout="batch_first"))
    (reason,) = reasons(p)
    assert "no common stride in packing='interleaved'" in reason
    for device in ("b200", "a100"):
        (reason,) = reasons(plan(attention(), device=device))
        assert "it is meant for compute capability 9 alone" in reason
    monkeypatch.setattr(flash_attn_4.PACKAGE, "version", lambda: None)
    assert reasons(plan(attention())) == {'flash-attn-4 is not installed: pip install "flash-attn-4>=4.0.0b36"'}


class OnCpu(CudaFlashAttn4):
    """The provider with what it needs of a GPU left out, and so fast that it is taken."""

    conditions, launches = (), 1
    speed = Speed.constant(forward=1e3, backward=1e3)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("rope", [True, False])
def test_values_and_gradients(layout: str, packing: str, rope: bool, monkeypatch) -> None:
    package = fake_flash_attn.in_place(monkeypatch)
    one = declare(OnCpu(), registered=False)
    kinds = (("causal", 4), ("causal", 2), ("causal", 1), ("none", 4), ("none", 2))
    for model, x in projected(layout, packing, rope, kinds):
        with fusions.only(one, "stretch"):
            assert taken(model.plan(x.requires_grad_())) == [NAME, NAME]
            assert_as_meant(model, x, tolerance=1e-10)
    assert {direction for direction, _ in package.calls} == {"forward", "backward"}
    fake_flash_attn.forget()
