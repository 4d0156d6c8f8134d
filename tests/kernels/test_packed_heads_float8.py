"""Gradients of packed heads that fusions store in 8 bits, for the product of 8 bits before them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser.graph.refs import GRADIENT, Ref
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions.match import Match
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.recipe import DelayedScaling
from tests.fake_cuda import Emulation, FakeDriver
from tests.fuser.plan.test_layouts_transposed import agree, on_an_emulated_gpu, trained
from tests.kernels.packed_cases import ATTENTION
from tests.needs import needs_compiler
from tests.twins import randomize

F, HEADS, DIM = 64, 4, 16
BF16 = torch.bfloat16


ROTARY = ("rotary_embedding_forward", "rotary_embedding_backward", "turned_heads_forward", "turned_heads_backward")


def linear(bias: bool) -> list[Any]:
    return [ops.Linear(F, 3 * F, bias=bias)]


def rotary() -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(DIM, heads=HEADS)


def by_angles() -> ops.RotaryByAngles:
    return ops.RotaryByAngles(DIM, heads=HEADS, kv_heads=HEADS, angles="angles")


def attention() -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, mask="none", layout="sequence_first")


MODELS: dict[str, Callable[[], list[Any]]] = {
    "bias": lambda: [*linear(True), attention()],
    "no bias": lambda: [*linear(False), attention()],
    "bias and rotation": lambda: [*linear(True), rotary(), attention()],
    "rotation": lambda: [*linear(False), rotary(), attention()],
    "bias and angles": lambda: [*linear(True), by_angles(), attention()],
    "angles": lambda: [*linear(False), by_angles(), attention()],
}
BIASED = [name for name in MODELS if name.startswith("bias")]
# Step that stores the gradient of the first product where attention does not pack it, and where it does.
BY = {
    "bias": ("attention", "bwd"),
    "no bias": ("attention", "bwd"),
    "bias and rotation": ("attention", "rotary_embedding_backward"),
    "rotation": ("attention", "rotary_embedding_backward"),
    "bias and angles": ("turned_heads_backward", "turned_heads_backward"),
    "angles": ("turned_heads_backward", "turned_heads_backward"),
}


def made(name: str) -> Any:
    return te.Sequential(*MODELS[name](), ops.Linear(F, F))


def named(model: Any) -> dict[str, torch.Tensor]:
    """The angles, of a list that turns by some."""
    turns = any(isinstance(op, ops.RotaryByAngles) for op in model)
    return {"angles": torch.arange(40.0)[:, None, None, None] / 8 + torch.ones(DIM)} if turns else {}


def one_sample(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x.unsqueeze(1), **named(model))  # type: ignore[no-any-return]


def who_stores_8_bits(plan: Plan) -> set[str]:
    """The steps that store gradients of the first product's output."""
    product = next(n for n in plan.graph.nodes if n.op.kind is Float8MatMul)
    return {s.name for s in plan.backward if Ref(GRADIENT, product.output) in s.writes()}


@needs_compiler
@pytest.mark.parametrize(("name", "packs"), [*((name, False) for name in MODELS), *((name, True) for name in BIASED)])
def test_values_and_gradients(
    name: str, packs: bool, driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass packs, turns, adds up and quantizes; where attention packs by itself, that of the rotation does."""
    model = randomize(made(name)).to(BF16)
    with torch.no_grad():
        model[0].weight.mul_(0.125)  # scores near 0: else attention takes steps of 8 bits for more than they are
    twin, looked_at = copy.deepcopy(model), copy.deepcopy(model)
    looked_at.verify = True
    wanted = trained(twin, one_sample)
    products = [n for n in fusions.names() if n.startswith("float8_matmul")]
    attention_by = "attention_cpu_flash" if packs else ATTENTION
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    # Of so few rows bytes decide, as of many.
    monkeypatch.setitem(DEVICES, "h200", dataclasses.replace(DEVICES["h200"], launch=0.0, replayed=True))
    with on_an_emulated_gpu(emulation), fusions.only("stretch", *ROTARY, *products, attention_by):
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=2)):
            plan = model.plan(torch.empty(37, 1, F, dtype=BF16, requires_grad=True), **named(model))
        agree(trained(model, one_sample), wanted, share=0.04)
        agree(trained(looked_at, one_sample), wanted, share=0.04)
    (by,) = who_stores_8_bits(plan)
    assert (ATTENTION.name if BY[name][packs] == "attention" else BY[name][packs]) in by
