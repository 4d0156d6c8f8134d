"""AdaptiveLayerNorm: LayerNorm whose scale and shift are inputs, one for each sample or each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_fuser.formula import Axes
from te_fuser.ops.base import NamedInput, Spec
from te_fuser.ops.checks import check_batch_dim, check_eps, check_features, check_name, feature_size
from te_fuser.ops.layer_norm import normalize
from te_fuser.ops.parameters import alike
from te_fuser.ops.row_op import RowOp

_AXES = {"sample": Axes.SAMPLE_FEATURES, "row": Axes.FULL}


class AdaptiveLayerNorm(RowOp):
    """Normalize each row, then scale and shift by inputs: y = norm(x) * (1 + scale) + shift.

    norm(x) = (x - mean(x)) / sqrt(var(x) + eps), without parameters.

    Args:
        features: the size of the last dimension; x is [..., features].
        eps: added to the variance.
        scale: the name of the input that scales.
        shift: the name of the input that shifts.
        per: "sample" for inputs [samples, features], "row" for inputs of x's shape.
        batch_dim: the dimension of x that counts samples; needed for per="sample".

    Raises:
        ValueError: for another `per`, or without `batch_dim` when it is needed.

    Source: Peebles and Xie, "Scalable diffusion models with Transformers" (2022), section 3.2.
    """

    autocast = "float32"
    promotes = True

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        scale: str = "scale",
        shift: str = "shift",
        per: str = "sample",
        batch_dim: int | None = None,
    ) -> None:
        super().__init__()
        if per not in _AXES:
            raise ValueError(f"AdaptiveLayerNorm takes inputs per 'sample' or per 'row', got per={per!r}")
        if per == "sample" and batch_dim is None:
            raise ValueError("AdaptiveLayerNorm per sample needs batch_dim, the dimension of x that counts samples")
        self.features = feature_size(features)
        self.eps = check_eps(self, eps)
        self.scale, self.shift = check_name(scale), check_name(shift)
        self.per = per
        self.sample_dim = batch_dim if per == "sample" else None

    def batch_dim(self) -> int | None:
        return self.sample_dim

    def named_inputs(self) -> Mapping[str, NamedInput]:
        axes = _AXES[self.per]
        return {"scale": NamedInput(self.scale, axes), "shift": NamedInput(self.shift, axes)}

    def compute(self, x: Any, scale: Any, shift: Any) -> Any:
        return normalize(x, self.eps, self.features) * (1.0 + scale) + shift

    def infer(self, x: Spec) -> Spec:
        check_features(self, x, self.features)
        if self.sample_dim is not None:
            check_batch_dim(self, x, self.sample_dim)
        return super().infer(x)

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        if self.sample_dim is None:
            return
        check_batch_dim(self, x, self.sample_dim)
        wanted = (x.shape[self.sample_dim], self.features)
        for argument, name in (("scale", self.scale), ("shift", self.shift)):
            if argument in inputs and inputs[argument].shape != wanted:
                raise ValueError(
                    f"AdaptiveLayerNorm takes {name!r} of shape {list(wanted)} (samples along dimension "
                    f"{self.sample_dim} of {list(x.shape)}), got {list(inputs[argument].shape)}"
                )

    @classmethod
    def prototype(cls, features: int, name: str, **changed: Any) -> AdaptiveLayerNorm:
        return cls(features, scale=f"{name}_scale", shift=f"{name}_shift", batch_dim=0, **changed)

    def example(self, features: int, rng: torch.Generator) -> AdaptiveLayerNorm:
        return alike(self, features, batch_dim=self.sample_dim)
