"""Layers for tests, and how they compare with explicit PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import te_fuser
from tests.presets.plain import Call
from tests.presets.plain import layer as plain
from tests.twins import assert_same_gradients, tensor

S, B, F, FFN, HEADS, K = 7, 3, 24, 20, 4, 5


def layer(*sizes: int, **keywords: Any) -> Any:
    own = {"device": "cpu", "params_dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    made = te_fuser.TransformerLayer(*(sizes or (F, FFN, HEADS)), **{**own, **keywords})
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.3 + 0.05)
    return made


def batch_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1)


def assert_as_meant(
    made: Any, call: Call, x: torch.Tensor | None = None, order: Any = batch_first, **given: Any
) -> None:
    """Values and all gradients of a layer, those of a call's tensors too."""
    x = tensor(S, B, F) if x is None else x
    others = {n: t for n, t in {"x": x, "memory": call.memory, "bias": call.bias}.items() if t is not None}
    leaves = {n: t for n, t in {**others, **dict(made.named_parameters())}.items() if t.requires_grad}
    memory = None if call.memory is None else order(call.memory)
    y = made(x, **given)
    want = order(plain(made, order(x), Call(**{**vars(call), "memory": memory})))
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)
    dy = tensor(*y.shape, grad=False, seed=3)
    found = [torch.autograd.grad(t, list(leaves.values()), dy, allow_unused=True) for t in (y, want)]
    ours, theirs = (dict(zip(leaves, grads, strict=True)) for grads in found)
    assert_same_gradients(ours, theirs, 1e-9)
    assert all(g is not None for g in ours.values())


PAD = torch.zeros(B, 1, 1, S, dtype=torch.bool)
PAD[0, ..., 5:] = PAD[1, ..., :2] = PAD[2, ..., 3] = True
LENGTHS = torch.tensor([0, 4, 4, 11])  # 4, 0 and 7 positions
BY_LENGTH = torch.arange(S) >= LENGTHS.diff()[:, None, None, None]


def around(pad: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
    return pad.transpose(-1, -2) | (pad if keys is None else keys)
