"""The norms of presets: a preset of their own each, or the head of another one's list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from te_fuser import ops
from te_fuser.presets.arguments import check_choice, check_flag
from te_fuser.presets.base import Preset

_OPS = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}


@dataclass(frozen=True)
class Norm:
    """A norm in a preset's list, over parameters of the preset.

    Attributes:
        features: those of a row.
        eps: added to the variance or the mean square.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the factor is 1 + weight, which starts at 0.
        output: the name by which calls can ask for what it gives; None: they cannot.
    """

    features: int
    eps: float = 1e-5
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        check_choice("normalization", self.normalization, _OPS)
        check_flag("zero_centered_gamma", self.zero_centered_gamma)

    def declare(self, preset: Preset, prefix: str = "layer_norm_") -> None:
        """Make the parameters: prefix + "weight", and prefix + "bias" where there is one."""
        start = 0.0 if self.zero_centered_gamma else 1.0
        preset.declare(f"{prefix}weight", [self.features], start, **preset.whole())
        if self.normalization == "LayerNorm":
            preset.declare(f"{prefix}bias", [self.features], 0.0, **preset.whole())

    def ops(self, preset: Preset, prefix: str = "layer_norm_") -> Iterator[ops.FusableOperation]:
        """The ops, bound to these."""
        kind = _OPS[self.normalization]
        norm = kind(self.features, self.eps, zero_centered_gamma=bool(self.zero_centered_gamma), device="meta")
        yield ops.Bound(norm, preset, **{name: prefix + name for name in norm.parameter_names()})
        if self.output is not None:
            yield ops.Output(self.output)
