"""Presets for tests, and how they compare with explicit PyTorch and with bare lists."""

from __future__ import annotations

from typing import Any

import torch

import te_fuser
from tests.presets.plain import Call
from tests.presets.plain import layer as plain
from tests.twins import assert_same, randomize, tensor

S, B, F, FFN, HEADS, K = 7, 3, 24, 20, 4, 5
OWN: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float64}
# Presets of small sizes by name, for [.., WIDTH], as often [tokens, samples, WIDTH].
WIDTH = 8
PRESETS: dict[str, Any] = {
    "Linear": lambda **k: te_fuser.Linear(WIDTH, 6, **k),
    "LayerNormLinear": lambda **k: te_fuser.LayerNormLinear(WIDTH, 6, **k),
    "LayerNormMLP": lambda **k: te_fuser.LayerNormMLP(WIDTH, 6, **k),
    "LayerNorm": lambda **k: te_fuser.LayerNorm(WIDTH, **k),
    "RMSNorm": lambda **k: te_fuser.RMSNorm(WIDTH, **k),
    "DotProductAttention": lambda **k: te_fuser.DotProductAttention(2, 4, softmax_type="learnable", **k),
    "MultiheadAttention": lambda **k: te_fuser.MultiheadAttention(WIDTH, 2, **{"attention_dropout": 0.0, **k}),
    "TransformerLayer": lambda **k: te_fuser.TransformerLayer(
        WIDTH, 6, 2, **{"attention_dropout": 0.0, "hidden_dropout": 0.0, **k}
    ),
}


def sample(name: str) -> tuple[torch.Tensor, ...]:
    """Arguments of a call of that preset."""
    return tuple(torch.randn(3, 2, 2, 4) for _ in range(3)) if name.startswith("Dot") else (torch.randn(3, 2, WIDTH),)


def layer(*sizes: int, **keywords: Any) -> Any:
    own = {**OWN, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    made = te_fuser.TransformerLayer(*(sizes or (F, FFN, HEADS)), **{**own, **keywords})
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.3 + 0.05)
    return made


def attention(**keywords: Any) -> Any:
    return randomize(te_fuser.MultiheadAttention(F, HEADS, **{**OWN, "attention_dropout": 0.0, **keywords}))


def batch_first(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1)


def leaves_of(preset: torch.nn.Module, x: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The input, all parameters, and more."""
    return {"input": x, **dict(preset.named_parameters()), **more}


def assert_as_meant(
    made: Any, call: Call, x: torch.Tensor | None = None, order: Any = batch_first, **given: Any
) -> None:
    """Values and all gradients of a layer, those of a call's tensors too."""
    x = tensor(S, B, F) if x is None else x
    memory = None if call.memory is None else order(call.memory)
    want = order(plain(made, order(x), Call(**{**vars(call), "memory": memory})))
    others = {n: t for n, t in {"memory": call.memory, "bias": call.bias}.items() if t is not None and t.requires_grad}
    assert_same(made(x, **given), want, leaves_of(made, x, **others))


def bare_list(preset: Any, *ops: Any) -> te_fuser.Sequential:
    """Ops of their own with the parameters of a preset, in its order of those."""
    bare = te_fuser.Sequential(*ops)
    given = iter(preset.parameters())
    for op in bare.modules():
        for name in list(op._parameters):
            if op._parameters[name] is not None:
                setattr(op, name, next(given))
    assert next(given, None) is None
    return bare


def forward_hook(module: torch.nn.Module) -> list[int]:
    """A list that grows at each forward of a module."""
    seen: list[int] = []
    module.register_forward_hook(lambda *args: seen.append(1))
    return seen


PAD = torch.zeros(B, 1, 1, S, dtype=torch.bool)
PAD[0, ..., 5:] = PAD[1, ..., :2] = PAD[2, ..., 3] = True
LENGTHS = torch.tensor([0, 4, 4, 11])  # 4, 0 and 7 positions
BY_LENGTH = torch.arange(S) >= LENGTHS.diff()[:, None, None, None]


def around(pad: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
    return pad.transpose(-1, -2) | (pad if keys is None else keys)
