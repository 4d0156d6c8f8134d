"""Gated linear units: one half of the features, activated, times the other half."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from te_fuser.formula import clamp, sigmoid, split
from te_fuser.ops.activations import GELU, QGELU, ReLU, Sigmoid, SiLU, SReLU, known_form
from te_fuser.ops.base import LoweredOp, OpCall, Spec
from te_fuser.ops.checks import count, real_number, yes_or_no
from te_fuser.ops.construction import alike
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.structure import Flatten, Unflatten


class GatedUnit(RowOp):
    """Multiply one half of the features, activated, with the other: y = activation(gate) * linear.

    x is [..., 2n], y is [..., n]. The first half of x is the gate, the one the activation is applied to, as in
    Transformer Engine; with `gate_first=False` it is the second. With `glu_interleave_size=s` gate and linear half lie
    in blocks of s features in turn, and the op stands for a view of x as [..., n / s, 2s], itself, and the view back.

    Args:
        gate_first: whether the first half, or of each two blocks the first, is the gate.
        glu_interleave_size: the features of a block; None: the halves lie one behind the other.

    Raises:
        ValueError: for an odd number of features, one that is no multiple of two blocks, or a block without features.

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    family = True
    _gated_by: ClassVar[type[RowOp] | None] = None  # the op whose formula is the activation, where there is one

    def __init__(self, gate_first: bool = True, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        who = type(self).__name__
        if glu_interleave_size is not None:
            count(who, "glu_interleave_size", glu_interleave_size)
        self.gate_first, self.glu_interleave_size = yes_or_no(who, "gate_first", gate_first), glu_interleave_size

    def activation(self, gate: Any) -> Any:
        """Apply the activation to the gate."""
        if self._gated_by is None:
            raise NotImplementedError(f"{type(self).__name__} must define activation(self, gate)")
        return self._gated_by.compute(self, gate)  # which reads no more of itself than `approximate`

    def combine(self, gate: Any, linear: Any) -> Any:
        """The output from the two halves."""
        return self.activation(gate) * linear

    def compute(self, x: Any) -> Any:
        first, second = split(x, 2)
        return self.combine(first, second) if self.gate_first else self.combine(second, first)

    def infer(self, x: Spec) -> Spec:
        if not x.shape or x.features % 2:
            got = x.features if x.shape else "a scalar"
            raise ValueError(
                f"{type(self).__name__} takes an even number of features, a gate and a linear half, got {got} "
                f"(input shape {list(x.shape)}): make the layer before it twice as wide as what shall come out"
            )
        if self.glu_interleave_size is not None and x.features % (2 * self.glu_interleave_size):
            raise ValueError(
                f"{type(self).__name__} takes blocks of glu_interleave_size = {self.glu_interleave_size} features, two "
                f"by two, got {x.features} features (input shape {list(x.shape)})"
            )
        return super().infer(x)

    def lower(self) -> list[LoweredOp]:
        """Itself, or with interleaved blocks the same over two blocks at a time, between two views."""
        size = self.glu_interleave_size
        if size is None:
            return super().lower()
        return [
            LoweredOp(Unflatten(-1, (-1, 2 * size)), {}, ".unflatten"),
            LoweredOp(alike(self, 2 * size, glu_interleave_size=None), {}),
            LoweredOp(Flatten(-2, -1), {}, ".flatten"),
        ]

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        size = self.glu_interleave_size
        if size is None:
            return super().reference(call, x)
        return super().reference(call, x.unflatten(-1, (-1, 2 * size))).flatten(-2)  # type: ignore[union-attr]


class GLU(GatedUnit):
    """Gate by a sigmoid: y = sigmoid(gate) * linear, [..., 2n] -> [..., n].

    Source: Dauphin et al., "Language modeling with gated convolutional networks" (2016).
    """

    _gated_by = Sigmoid


class GEGLU(GatedUnit):
    """Gate by GELU: y = GELU(gate) * linear, [..., 2n] -> [..., n].

    Args:
        gate_first, glu_interleave_size: where the gate lies, see `GatedUnit`.
        approximate: "tanh" (the default) or "none", see `GELU`.

    Raises:
        ValueError: for another `approximate`, or an odd number of features.

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    _gated_by = GELU

    def __init__(
        self, gate_first: bool = True, glu_interleave_size: int | None = None, approximate: str = "tanh"
    ) -> None:
        super().__init__(gate_first, glu_interleave_size)
        self.approximate = known_form(self, approximate)


class QGEGLU(GatedUnit):
    """Gate by QGELU: y = gate * sigmoid(1.702 gate) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020), with the GELU of Hendrycks and Gimpel (2016), section 2.
    """

    _gated_by = QGELU


class ReGLU(GatedUnit):
    """Gate by ReLU: y = max(gate, 0) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    role = "reglu"
    _gated_by = ReLU


class SReGLU(GatedUnit):
    """Gate by squared ReLU: y = max(gate, 0)^2 * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020), with the activation of So et al., "Primer" (2021).
    """

    role = "sreglu"
    _gated_by = SReLU


class SwiGLU(GatedUnit):
    """Gate by SiLU: y = gate * sigmoid(gate) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    role = "swiglu"
    _gated_by = SiLU


class ClampedSwiGLU(GatedUnit):
    """SwiGLU of limited inputs, with an offset: y = g sigmoid(alpha g) (l + offset), [..., 2n] -> [..., n].

    g = min(gate, limit) and l = linear limited to [-limit, limit].

    Args:
        limit: the largest gate, and the largest magnitude of the linear half.
        alpha: the slope of the sigmoid.
        gate_first, glu_interleave_size: where the gate lies, see `GatedUnit`.
        offset: what is added to the linear half, after it was limited.

    Raises:
        TypeError: for what is no number.
        ValueError: for a limit that is not positive, or an odd number of features.

    Source: OpenAI, "gpt-oss-120b and gpt-oss-20b model card" (2025).
    """

    role = "clamped_swiglu"

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        gate_first: bool = True,
        offset: float = 1.0,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(gate_first, glu_interleave_size)
        said = (("limit", limit), ("alpha", alpha), ("offset", offset))
        self.limit, self.alpha, self.offset = (real_number(type(self).__name__, *pair) for pair in said)
        if not self.limit > 0:
            raise ValueError(f"ClampedSwiGLU takes a positive limit, got {limit}")

    def activation(self, gate: Any) -> Any:
        gate = clamp(gate, high=self.limit)
        return gate * sigmoid(self.alpha * gate)

    def combine(self, gate: Any, linear: Any) -> Any:
        return self.activation(gate) * (clamp(linear, -self.limit, self.limit) + self.offset)
