"""The activations of presets by name: the ops, and torch modules that mean the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.presets.arguments import check_choice

ACTIVATIONS: dict[str, type[ops.FusableOperation]] = {
    "gelu": ops.GELU,
    "geglu": ops.GEGLU,
    "glu": ops.GLU,
    "qgelu": ops.QGELU,
    "qgeglu": ops.QGEGLU,
    "relu": ops.ReLU,
    "reglu": ops.ReGLU,
    "srelu": ops.SReLU,
    "sreglu": ops.SReGLU,
    "silu": ops.SiLU,
    "swiglu": ops.SwiGLU,
    "clamped_swiglu": ops.ClampedSwiGLU,
}
# What activation_params may say -> the op's argument.
_PARAMS = {"clamped_swiglu": {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}}


def activation_op(name: str, params: Mapping[str, Any] | None = None) -> ops.FusableOperation:
    """The activation of that name; of a gated one, [..., 2n] -> [..., n], the gate comes first.

    Args:
        params: for "clamped_swiglu" limit (7.0), alpha (1.702) and glu_linear_offset (1.0); others take none.

    Raises:
        ValueError: for an unknown name, or parameters that it does not take.
        TypeError: for parameters that are no mapping.
    """
    name = check_choice("activation", name, ACTIVATIONS)
    if not (params is None or isinstance(params, Mapping)):
        raise TypeError(f"activation_params is a mapping of names to numbers, got {params!r}")
    takes = _PARAMS.get(name, {})
    unknown = sorted(str(key) for key in params or () if key not in takes)
    if unknown:
        raise ValueError(
            f"activation_params: {name!r} takes {', '.join(takes) or 'none'}, got {', '.join(unknown)}: leave it out"
        )
    return ACTIVATIONS[name](**{takes[key]: value for key, value in (params or {}).items()})


def widens(name: str) -> bool:
    """Whether the activation takes twice the features that it gives."""
    return issubclass(ACTIVATIONS[check_choice("activation", name, ACTIVATIONS)], ops.GatedUnit)


def activation_to_torch(op: ops.FusableOperation) -> torch.nn.Module:
    """A torch module with the same function."""
    make = _MODULES.get(type(op))
    return TorchActivation(op) if make is None else make()


class TorchActivation(torch.nn.Module):
    """An activation that torch.nn lacks, in torch's functions; `as_ops` gives the op back."""

    def __init__(self, op: ops.FusableOperation) -> None:
        super().__init__()
        self._op = (op,)  # no child: it has no state

    def as_ops(self, convert: Callable[[str, torch.nn.Module], torch.nn.Module]) -> ops.FusableOperation:
        """The op."""
        return self._op[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x."""
        op = self._op[0]
        if isinstance(op, ops.ClampedSwiGLU):
            gate, linear = x.chunk(2, -1)
            gate, linear = gate.clamp(max=op.limit), linear.clamp(-op.limit, op.limit)
            return gate * torch.sigmoid(op.alpha * gate) * (linear + op.offset)
        if isinstance(op, ops.GatedUnit):
            gate, linear = x.chunk(2, -1)
            return _FUNCTIONS[type(op)](gate) * linear
        return _FUNCTIONS[type(op)](x)

    def extra_repr(self) -> str:
        return type(self._op[0]).__name__


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_MODULES: dict[type[ops.FusableOperation], Callable[[], torch.nn.Module]] = {
    ops.GELU: lambda: torch.nn.GELU("tanh"),
    ops.ReLU: torch.nn.ReLU,
    ops.SiLU: torch.nn.SiLU,
}
# Op -> its function; of a gated one, what is applied to the gate.
_FUNCTIONS: dict[type[ops.FusableOperation], Callable[[torch.Tensor], torch.Tensor]] = {
    ops.QGELU: _qgelu,
    ops.SReLU: _srelu,
    ops.GEGLU: lambda gate: F.gelu(gate, approximate="tanh"),
    ops.GLU: torch.sigmoid,
    ops.QGEGLU: _qgelu,
    ops.ReGLU: F.relu,
    ops.SReGLU: _srelu,
    ops.SwiGLU: F.silu,
}
