"""Norm: what LayerNorm and RMSNorm share: their parameters, and rows that are several dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from te_fuser.ops.base import LoweredOp, OpCall, Spec
from te_fuser.ops.bound import Bound
from te_fuser.ops.checks import check_eps, check_floating, feature_size
from te_fuser.ops.cut import Cut
from te_fuser.ops.parameters import alike, empty, fill, randomized
from te_fuser.ops.reshape import Flatten, Unflatten
from te_fuser.ops.row_op import RowOp


class Norm(Cut, RowOp):
    """Normalize each row, then scale and shift it; a row is the last dimension of x, or several.

    Ranks may share its rows by `sequence_parallel`, see `Cut`, which a list with products that do so need not be told.

    Over several dimensions it stands for Flatten, the norm over one, and Unflatten; parameters have the shape of the
    dimensions, as torch.nn has them.
    """

    family = True
    modes = ()
    autocast = "float32"
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

    def references(self, call: OpCall, x: torch.Tensor) -> dict[str, torch.Tensor]:
        dims = len(self.normalized_shape)
        if dims == 1:
            return super().references(call, x)
        flat = {name: None if t is None else t.flatten() for name, t in call.tensors.items()}
        found = super().references(replace(call, tensors=flat), x.flatten(-dims))
        return {name: y.unflatten(-1, self.normalized_shape) for name, y in found.items()}

    def extra_repr(self) -> str:
        row = self.features if len(self.normalized_shape) == 1 else self.normalized_shape
        plain = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"features={row}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}{plain}"

    def example(self, features: int, rng: torch.Generator) -> Norm:
        return randomized(alike(self, features), rng, center=0.0 if self.zero_centered_gamma else 1.0)


def as_row(norm: str, sizes: tuple[int, ...]) -> Flatten:
    """Make one dimension of the last ones, which are to have these sizes, for a norm of that name."""
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
    """Refuse an input with other trailing dimensions.

    Raises:
        ValueError: naming both.
    """
    if x.shape[-len(sizes) :] != sizes:
        wanted = f"[..., {', '.join(map(str, sizes))}]"
        raise ValueError(f"{norm} was made for {wanted}, got {list(x.shape)}: give it {wanted}")
