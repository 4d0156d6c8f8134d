"""How the tests of presets compare: with an independent form in plain PyTorch, and with the bare list bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import te_fuser
from tests.twins import tensor

# What a gated activation applies to its gate, and what others are; the gate is the first half.
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
GATES = {
    "geglu": PLAIN["gelu"],
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "qgeglu": PLAIN["qgelu"],
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "swiglu": PLAIN["silu"],
}
ACTIVATIONS = [*PLAIN, *GATES, "clamped_swiglu"]


def activated(name: str, x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Any:
    """The activation of that name, as published."""
    if name in PLAIN:
        return PLAIN[name](x)
    half = x.shape[-1] // 2
    gate, linear = x[..., :half], x[..., half:]
    if name in GATES:
        return GATES[name](gate) * linear
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (linear + offset)


def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm where there is a bias, else RMSNorm, by their formulas."""
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, not by F.linear."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _tensors(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def assert_same(got: Any, want: Any, leaves: Mapping[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    """Values and the gradients of all leaves, for one set of random output gradients; 0: bit for bit."""
    ours, theirs = _tensors(got), _tensors(want)
    assert len(ours) == len(theirs)
    dys = [tensor(*y.shape, dtype=y.dtype, grad=False, seed=7 + k) for k, y in enumerate(ours)]
    grads = [torch.autograd.grad(ys, list(leaves.values()), dys) for ys in (ours, theirs)]
    names = [*(f"output {k}" for k in range(len(ours))), *leaves]
    for name, mine, other in zip(names, (*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def leaves_of(preset: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The input and all parameters."""
    return {"input": x, **dict(preset.named_parameters())}


def bare_list(preset: Any, *ops: Any) -> te_fuser.Sequential:
    """Ops of their own with the parameters of a preset, in its order of those."""
    bare = te_fuser.Sequential(*ops)
    given = iter(preset.parameters())
    for op in bare:
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
