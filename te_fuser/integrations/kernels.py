"""Layers for Hugging Face's `kernels`: norms, activations and gated MLPs, each a list of ops in a module's forward.

with kernels.use_kernel_mapping(te_fuser.integrations.kernels.MAPPING):
    kernels.kernelize(model, mode=kernels.Mode.TRAINING)
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_fuser import __version__, ops
from te_fuser.convert.layer_ops import LayerParts, has_own_forward
from te_fuser.integrations import Members, OwnForward, run_list
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.hooks import hooks_of

_DEVICES = ("cpu", "cuda")


def _layer(members: Members, argument: str = "input") -> type[nn.Module]:
    """A class with a `forward` alone, which becomes another module's method."""
    forwards: dict[str, Callable[..., torch.Tensor]] = {
        "x": lambda self, x: run_list(self, members, x),
        "input": lambda self, input: run_list(self, members, input),
        "hidden_states": lambda self, hidden_states: run_list(self, members, hidden_states),
    }
    return type("Layer", (nn.Module,), {"forward": forwards[argument]})


def _norm(op_for: Callable[[Any], FusableOperation]) -> Members:
    """The op for a norm, bound to its parameters."""

    def members(parts: LayerParts) -> list[nn.Module]:
        owner: Any = parts.owner
        parts.note_eps(owner)
        names = {name: name for name, p in owner._parameters.items() if p is not None}
        if any(getattr(owner, name, None) is not None and name not in names for name in ("weight", "bias")):
            return [OwnForward(owner)]  # a parametrization's, or a buffer
        return [ops.Bound(op_for(parts.owner), parts.owner, **names)]

    return members


def layer_norm(m: Any) -> FusableOperation:
    """The op for torch.nn.LayerNorm over one dimension."""
    if len(m.normalized_shape) > 1:
        shape = list(m.normalized_shape)
        raise TypeError(f"te_fuser's LayerNorm for kernels works over one dimension, got {shape}: leave it unmapped")
    there: dict[str, Any] = {"elementwise_affine": m.weight is not None, "bias": m.bias is not None}
    return ops.LayerNorm(m.normalized_shape, m.eps, **there, device="meta")


def gated_mlp(parts: LayerParts) -> list[nn.Module]:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)); TypeError where no op gates so."""
    from te_fuser.convert.activations import gate_for  # needs transformers, whose modules these are

    act: Any = parts.module("act_fn")
    gate = gate_for(act)
    if gate is None or any(hooks_of(act)) or (has_own_forward(act) and act.forward.__func__ not in _FORWARDS):
        raise TypeError(
            f"te_fuser's gated MLP knows no gate by {type(act).__name__}, or it has hooks or a forward of its own: "
            "leave SwiGLUMLP and GeGLUMLP out of the mapping"
        )
    return [*parts.linear("gate_proj", "up_proj"), gate, *parts.linear("down_proj")]


def gelu(parts: LayerParts) -> list[nn.Module]:
    """torch.nn.GELU or transformers' exact one."""
    kept = parts.owner.__dict__
    parts.numbers.append((kept, "approximate"))
    return [ops.GELU(kept.get("approximate", "none"))]


# Name of a layer, as transformers has it -> the class whose forward takes the place of a module's.
LAYERS = {
    "RMSNorm": _layer(
        _norm(lambda m: ops.RMSNorm(m.weight.shape[0], m.variance_epsilon, device="meta")), "hidden_states"
    ),
    "RMSNormZeroCentered": _layer(
        _norm(lambda m: ops.RMSNorm(m.weight.shape[0], m.eps, zero_centered_gamma=True, device="meta")), "x"
    ),
    "LayerNorm": _layer(_norm(layer_norm)),
    "SiLU": _layer(lambda parts: [ops.SiLU()]),
    "GeLU": _layer(gelu),
    **dict.fromkeys(("GeluTanh", "NewGELU", "FastGELU"), _layer(lambda parts: [ops.GELU()])),
    "QuickGELU": _layer(lambda parts: [ops.QGELU()]),
    **dict.fromkeys(("SwiGLUMLP", "GeGLUMLP"), _layer(gated_mlp, "x")),
}
_FORWARDS = {layer.forward for layer in LAYERS.values()}


@dataclass(frozen=True)
class Here:
    """A layer of this module, where `kernels` asks for one of a repository."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class."""
        return LAYERS[self.layer_name]


# For `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`.
MAPPING = {name: {device: Here(name) for device in _DEVICES} for name in LAYERS}


def write_package(folder: str | Path) -> Path:
    """Write the layers into a folder as a package for `kernels`, without an architecture."""
    files = {
        "__init__.py": 'from . import layers\n\n__all__ = ["layers"]\n',
        "layers.py": f"from {__name__} import LAYERS\n\nglobals().update(LAYERS)\n",
    }
    digests = {name: base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for name, t in files.items()}
    for device in _DEVICES:
        variant = Path(folder) / "build" / f"torch-{device}"
        variant.mkdir(parents=True, exist_ok=True)
        metadata = {
            "name": "te-fuser-layers",
            "id": f"_te_fuser_layers_{device}_{__version__.replace('.', '_')}",
            "version": 0,
            "license": "apache-2.0",
            "python-depends": [],
            "backend": {"type": device},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        for name, text in {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"}.items():
            (variant / name).write_text(text)
    return Path(folder)
