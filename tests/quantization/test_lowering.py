"""Regions around lists and presets: what they compute and how scales follow, against an emulation by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import lowering
from te_fuser.recipe import DelayedScaling, Format
from tests.float8 import models
from tests.quantization.emulation import Emulated

F, FFN, HEADS = 32, 64, 2
RECIPE = DelayedScaling(amax_history_len=3)
RECIPES = {
    "hybrid": RECIPE,
    "e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2, margin=1),
    "most_recent": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    **{
        f"kept_{y:d}{dx:d}{dw:d}": DelayedScaling(amax_history_len=3, override_linear_precision=(y, dx, dw))
        for y, dx, dw in [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
    },
}
MODELS: dict[str, Callable[[], Any]] = {
    **models(F, FFN),
    "odd": lambda: te.Sequential(ops.Linear(F, 24), ops.GELU(), ops.Linear(24, F), ops.GELU(), ops.Linear(F, F)),
    "te.Linear": lambda: te.Linear(F, FFN),
    "te.LayerNormLinear": lambda: te.LayerNormLinear(F, FFN),
    "te.LayerNormMLP": lambda: te.LayerNormMLP(F, FFN),
    "te.LayerNormMLP gated": lambda: te.LayerNormMLP(F, FFN, normalization="RMSNorm", activation="swiglu"),
    "te.MultiheadAttention": lambda: te.MultiheadAttention(F, HEADS, attention_dropout=0.0, attn_mask_type="causal"),
    "te.TransformerLayer": lambda: te.TransformerLayer(F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
    "te.TransformerLayer fused": lambda: te.TransformerLayer(
        F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, num_gqa_groups=1
    ),
}


def close(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Close but for numbers next to a tie, which one or the other may have rounded the other way.

    In half precision there are more of these: what is fused is not rounded twice.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    apart, size = (found - wanted).detach().float(), wanted.detach().float()
    often, far = (2e-3, 0.03) if wanted.dtype == torch.float32 else (0.1, 0.3)
    assert apart.square().mean().sqrt() <= often * size.square().mean().sqrt() + 1e-6, name
    assert apart.abs().max() <= far * size.abs().max() + 1e-6, name


def data(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (5, 3, F)), generator=rng) * scale


def gradients(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad} if x.grad is not None else found


def followed(model: Any, recipe: DelayedScaling, steps: int = 4, dtype: torch.dtype = torch.float32) -> None:
    """Train for some steps; each one's values, gradients and scales are those of the emulation."""
    twin, emulated = copy.deepcopy(model), Emulated(recipe)
    for step in range(steps):
        x, dy = data(step, scale=1.0 + step), data(100 + step) * 2.0**step
        ours, theirs = (x.clone().to(dtype).requires_grad_() for _ in range(2))
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = model(ours)
        with emulated.region():
            wanted = twin.reference(theirs)
        close("output", y, wanted)
        dy = dy.reshape(-1)[:1].expand(y.shape) if dy.shape != y.shape else dy
        dy = (dy * data(7, *y.shape)).to(dtype)
        y.backward(dy)
        wanted.backward(dy)
        found, right = gradients(model, ours), gradients(twin, theirs)
        assert found.keys() == right.keys()
        for name, gradient in right.items():
            if name.endswith("key_bias"):  # which softmax takes away: nothing but rounding
                continue
            close(f"{name} in step {step}", found[name], gradient)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p -= 0.05 * p.grad
                q.copy_(p)
                p.grad = q.grad = None


@pytest.mark.parametrize("name", MODELS)
def test_followed(name: str) -> None:
    torch.manual_seed(0)
    followed(MODELS[name](), RECIPE)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    torch.manual_seed(0)
    followed(MODELS["mlp"](), RECIPES[name])


@pytest.mark.parametrize(("name", "dtype"), [("mlp", torch.float16), ("te.TransformerLayer", torch.bfloat16)])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    followed(MODELS[name]().to(dtype), RECIPE, 2, dtype)


def test_machines_that_would_emulate_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is kept; calibrating quantizes nothing, and runs anywhere."""
    asked: list[torch.device] = []

    def refuse(device: torch.device, scales: str) -> None:
        assert scales == "tensor"
        asked.append(device)
        raise RuntimeError("no products of 8 bits")

    monkeypatch.setattr(lowering, "check_machine", refuse)
    model, x = te.Sequential(ops.Linear(F, FFN)), torch.randn(3, F)
    with pytest.raises(RuntimeError, match="no products of 8 bits"), te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        model(x)
    assert asked == [torch.device("cpu")] and not [name for name, _ in model.named_buffers()]
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=RECIPE):
        model(x)
    assert len(asked) == 1
