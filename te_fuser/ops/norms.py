"""Norms of rows: over the features, with a weight and a bias or those of a condition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from te_fuser.formula import Axes, row_mean, row_sum, rsqrt
from te_fuser.ops.base import LoweredOp, NamedInput, OpCall, Spec
from te_fuser.ops.bound import Bound
from te_fuser.ops.checks import check_batch_dim, check_eps, check_features, check_floating, check_name, feature_size
from te_fuser.ops.construction import alike, empty, fill
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.sharing import Cut
from te_fuser.ops.structure import Flatten, Unflatten


class Norm(Cut, RowOp):
    """Normalize each row, then scale and shift it; a row is the last dimension of x, or several.

    Ranks may share its rows by `sequence_parallel`, see `Cut`, which a list with products that do so need not be told.

    Over several dimensions it stands for Flatten, the norm over one, and Unflatten; parameters have the shape of the
    dimensions, as torch.nn has them.
    """

    family = True
    modes = ()
    sized = True
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float,
        zero_centered_gamma: bool,
        parameters: dict[str, bool],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        sizes = tuple(features) if isinstance(features, (tuple, list)) else ()
        self.normalized_shape = tuple(map(feature_size, sizes)) if len(sizes) > 1 else (feature_size(features),)
        self.features = math.prod(self.normalized_shape)
        self.eps = check_eps(self, eps)
        self.zero_centered_gamma = zero_centered_gamma
        self.elementwise_affine = parameters["weight"]
        for name, there in parameters.items():
            made = empty(*self.normalized_shape, dtype=dtype, device=device) if there else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with factor 1 and bias 0."""
        fill(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        fill(self._parameters.get("bias"), 0.0)

    @property
    def flat_weight(self) -> torch.Tensor | None:
        """The weight as one row."""
        return None if self.weight is None else self.weight.flatten()

    @property
    def flat_bias(self) -> torch.Tensor | None:
        """The bias as one row."""
        return None if self.bias is None else self.bias.flatten()

    def lower(self) -> list[LoweredOp]:
        if len(self.normalized_shape) == 1:
            return super().lower()
        row = alike(self, self.features).shared_as(self)
        whole = Bound(row, self, **{name: f"flat_{name}" for name in row.parameter_names()})
        ops = (as_row(type(self).__name__, self.normalized_shape), whole, Unflatten(-1, self.normalized_shape))
        return [replace(low, suffix=f".{low.op.kind.__name__.lower()}") for op in ops for low in op.lower()]

    def infer(self, x: Spec) -> Spec:
        if len(self.normalized_shape) == 1:
            return super().infer(x)
        _check_sizes(type(self).__name__, x, self.normalized_shape)
        check_floating(x)
        return x

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        dims = len(self.normalized_shape)
        if dims == 1:
            return super().reference(call, x)
        flat = {name: None if t is None else t.flatten() for name, t in call.tensors.items()}
        y: Any = super().reference(replace(call, tensors=flat), x.flatten(-dims))
        return y.unflatten(-1, self.normalized_shape)

    def extra_repr(self) -> str:
        row = self.features if len(self.normalized_shape) == 1 else self.normalized_shape
        plain = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"features={row}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}{plain}"


def as_row(norm: str, sizes: tuple[int, ...]) -> Flatten:
    """Make one dimension of the last ones, which have these sizes, for that norm."""
    return _AsRow(norm, sizes)


class _AsRow(Flatten):
    """Make one dimension of those that a norm of that name was made for."""

    kind = Flatten

    def __init__(self, norm: str, sizes: tuple[int, ...]) -> None:
        super().__init__(-len(sizes))
        self.norm, self.sizes = norm, sizes

    def infer(self, x: Spec) -> Spec:
        _check_sizes(self.norm, x, self.sizes)
        return super().infer(x)


def _check_sizes(norm: str, x: Spec, sizes: tuple[int, ...]) -> None:
    """Refuse an input with other trailing dimensions; ValueError naming both."""
    if x.shape[-len(sizes) :] != sizes:
        wanted = f"[..., {', '.join(map(str, sizes))}]"
        raise ValueError(f"{norm} was made for {wanted}, got {list(x.shape)}: give it {wanted}")


def normalize(x: Any, eps: float, features: int) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) of each row; exactly 0 of one feature."""
    centered = x - (x if features == 1 else row_mean(x))
    return centered * rsqrt(row_mean(centered * centered) + eps)


class LayerNorm(Norm):
    """Normalize each row: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Args:
        features: the size of the last dimension, or the sizes of the last ones, which are a row together; x is
            [..., *features], `weight` and `bias` are [*features].
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        elementwise_affine: whether there are weight and bias.
        bias: whether there is a bias, where there is a weight; it starts at 0.
        dtype: the parameters', torch's default if None.
        device: the parameters', torch's default if None.

    Source: Ba et al., "Layer normalization" (2016).
    """

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        there = {"weight": elementwise_affine, "bias": elementwise_affine and bias}
        super().__init__(features, eps, zero_centered_gamma, there, dtype, device)

    def compute(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        y = normalize(x, self.eps, self.features)
        if weight is None:
            return y
        y = y * (weight + 1.0 if self.zero_centered_gamma else weight)
        return y if bias is None else y + bias


class RMSNorm(Norm):
    """Divide each row by its root mean square: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        features: the size of the last dimension, or the sizes of the last ones, which are a row together; x is
            [..., *features], `weight` is [*features].
        eps: added to the mean square. 1e-5 by default, as in Transformer Engine and Llama 2; torch.nn.RMSNorm's
            default is the machine epsilon of x's dtype, so give both one when they are to agree.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        elementwise_affine: whether there is a weight.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(features, eps, zero_centered_gamma, {"weight": elementwise_affine}, dtype, device)

    def compute(self, x: Any, weight: Any = None) -> Any:
        y = x * rsqrt(row_mean(x * x) + self.eps)
        return y if weight is None else y * (weight + 1.0 if self.zero_centered_gamma else weight)


class L2Norm(RowOp):
    """Divide each row by its Euclidean length: y = x / sqrt(sum(x^2) + eps).

    Args:
        eps: added to the sum of squares, as Transformer Engine does (torch.nn.functional.normalize limits the length
            from below instead).

    Source: Henry et al., "Query-key normalization for Transformers" (2020).
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = check_eps(self, eps)

    def compute(self, x: Any) -> Any:
        return x * rsqrt(row_sum(x * x) + self.eps)


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
