"""The norms of presets: presets of their own, or the head of another one's list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from te_fuser import ops
from te_fuser.ops.norms import as_row
from te_fuser.presets.base import Asked, Preset, understands
from te_fuser.presets.keyword_arguments import (
    Common,
    PlacementArguments,
    check_call,
    check_epsilon,
    check_size,
    checked,
)
from te_fuser.presets.keyword_types import NormPresetKeys, Unpack

_OPS = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}


@dataclass(frozen=True)
class NormArguments(PlacementArguments):
    """Arguments of a norm that is a preset."""

    hidden_size: int | None = None
    zero_centered_gamma: bool = False


@dataclass(frozen=True)
class Normed(Common):
    """Arguments of a preset that begins with a norm.

    Attributes:
        normalization: "LayerNorm" or "RMSNorm"; its parameters are `layer_norm_weight` and `layer_norm_bias`.
        zero_centered_gamma: the norm's factor is 1 + its weight, which starts at 0.
        return_layernorm_output: calls return what the norm gives, too, behind everything else.
        return_layernorm_output_gathered: with `sequence_parallel` what is returned are the rows of all ranks, where the
            product behind the norm gathers them; else this rank's. Of its gradient each rank has a term.
    """

    normalization: str = checked("LayerNorm", _OPS)
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False
    return_layernorm_output_gathered: bool = False

    def norm(self, features: int, eps: float) -> PresetNorm:
        """The norm."""
        output = "layernorm_output" if self.return_layernorm_output else None
        gathered = bool(self.return_layernorm_output_gathered)
        return PresetNorm(features, eps, self.normalization, bool(self.zero_centered_gamma), output, gathered=gathered)


@dataclass(frozen=True)
class PresetNorm:
    """A norm in a preset's list, over parameters of the preset.

    Attributes:
        output: the name by which calls can ask for what it gives; None: they cannot.
        fork: the name by which later ops of the lists around may read it; None: none does.
        gathered: whether calls get the rows of all ranks, where a product behind it gathers them.
    """

    features: int
    eps: float = 1e-5
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    output: str | None = None
    fork: str | None = None
    gathered: bool = False

    def __post_init__(self) -> None:
        check_epsilon("eps", self.eps)

    def declare(self, preset: Preset, prefix: str = "layer_norm_", shape: Iterable[int] | None = None) -> None:
        """Make the parameters: prefix + "weight", and prefix + "bias" where there is one."""
        shape = (self.features,) if shape is None else tuple(shape)
        preset.declare(f"{prefix}weight", shape, 0.0 if self.zero_centered_gamma else 1.0, **preset.whole())
        preset.declare(f"{prefix}bias", shape if self.normalization == "LayerNorm" else None, 0.0, **preset.whole())

    def ops(
        self, preset: Preset, prefix: str = "layer_norm_", before: str | None = None
    ) -> Iterator[ops.FusableOperation]:
        """The ops, bound to these; `before` says how ranks share the product behind it."""
        kind = _OPS[self.normalization]
        norm = kind(self.features, self.eps, zero_centered_gamma=self.zero_centered_gamma, device="meta")
        preset.shared(norm)
        yield ops.Bound(norm, preset, **{name: prefix + name for name in norm.parameter_names()})
        gathers = self.output is not None and self.gathered and preset.sequence_parallel and before == "column"
        if self.output is not None and not gathers:
            yield ops.Output(self.output)
        if self.fork is not None:
            yield ops.Fork(self.fork, may_stay_unread=True)
        if self.output is not None and gathers:
            yield ops.AllGather(preset._group, preset.sequence_dim)
            yield ops.Output(self.output)

    def to_torch(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Module:
        """torch.nn's norm with the same function, over copies of these parameters."""
        kind = getattr(torch.nn, self.normalization)
        made: torch.nn.Module = kind(weight.shape, self.eps, device=weight.device, dtype=weight.dtype)
        factor = weight.detach() + 1 if self.zero_centered_gamma else weight
        return filled(made, weight=factor, bias=bias)


def share_norm(preset: Any, name: str) -> None:
    """Let later ops around a preset read by `name` what the norm at its head gives."""
    preset.norm = replace(preset.norm, fork=name)
    preset.shares_names = True
    preset.relist()


def filled(module: torch.nn.Module, **tensors: torch.Tensor | None) -> torch.nn.Module:
    """The module with these values in its parameters."""
    with torch.no_grad():
        for name, t in tensors.items():
            if t is not None:
                module.get_parameter(name).copy_(t)
    return module


class NormPreset(Preset):
    """A norm that is a preset of its own, over the last dimension or several."""

    flattens = True
    arguments = NormArguments
    normalization: ClassVar[str]

    def __init__(
        self, normalized_shape: int | Iterable[int] | None = None, eps: float = 1e-5, **keywords: Unpack[NormPresetKeys]
    ) -> None:
        super().__init__(**keywords)
        self.normalized_shape = _sizes(normalized_shape, self.common.hidden_size)
        self.zero_centered_gamma = bool(self.common.zero_centered_gamma)
        self.norm = PresetNorm(math.prod(self.normalized_shape), eps, self.normalization, self.zero_centered_gamma)
        self.eps = eps
        self.norm.declare(self, "", self.normalized_shape)
        self.reset_parameters()
        self.relist()

    @property
    def flat_weight(self) -> torch.Tensor:
        """The weight as one row."""
        return self.get_parameter("weight").flatten()

    @property
    def flat_bias(self) -> torch.Tensor:
        """The bias as one row."""
        return self.get_parameter("bias").flatten()

    def variant_ops(self) -> Iterator[torch.nn.Module]:  # type: ignore[override]
        """The norm; over several dimensions between a view as one and the view back."""
        if len(self.normalized_shape) == 1:
            yield from self.norm.ops(self, "")
            return
        yield as_row(type(self).__name__, self.normalized_shape)
        yield from self.norm.ops(self, "flat_")
        yield ops.Unflatten(-1, self.normalized_shape)

    @understands
    def forward(self, inp: torch.Tensor, **call: Any) -> Asked:
        """Normalized rows, in inp's shape [..., *normalized_shape].

        Raises:
            TypeError, ValueError, RuntimeError: for what the preset was not made for, before anything runs.
        """
        self.check_group()
        check_call(self, call)
        return Asked(self, inp, call)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn's norm with the same function, over copies of the parameters."""
        return self.norm.to_torch(self.get_parameter("weight"), self._parameters.get("bias")).train(self.training)

    def extra_repr(self) -> str:
        shape = ", ".join(map(str, self.normalized_shape))
        return f"[{shape}], eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _sizes(normalized_shape: int | Iterable[int] | None, hidden_size: int | None) -> tuple[int, ...]:
    if (normalized_shape is None) == (hidden_size is None):
        raise TypeError("a norm takes its size once, as normalized_shape or as hidden_size")
    name = "hidden_size" if normalized_shape is None else "normalized_shape"
    given = hidden_size if normalized_shape is None else normalized_shape
    if isinstance(given, (str, bytes, bytearray, torch.Tensor)) or not isinstance(given, Iterable):
        return (check_size(name, given),)
    sizes = tuple(given)
    if not sizes:
        raise ValueError(f"{name} has at least one size, got none")
    return tuple(check_size(name, size) for size in sizes)


class LayerNorm(NormPreset):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, of each row.

    Args:
        normalized_shape, hidden_size: the size of the last dimension, or the sizes of the last ones, which are a row
            together; one of the two names.
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + weight, which starts at 0.
        **keywords: params_dtype, device, sequence_parallel, tp_group, tp_size, see
            `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    normalization = "LayerNorm"


class RMSNorm(NormPreset):
    """y = x / sqrt(mean(x^2) + eps) * weight, of each row.

    Args:
        normalized_shape, hidden_size: the size of the last dimension, or the sizes of the last ones, which are a row
            together; one of the two names.
        eps: added to the mean square.
        zero_centered_gamma: the factor is 1 + weight, which starts at 0.
        **keywords: params_dtype, device, sequence_parallel, tp_group, tp_size, see
            `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    normalization = "RMSNorm"
