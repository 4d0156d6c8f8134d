"""Gated linear units: one half of the features, activated, times the other half."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import clamp, relu, sigmoid, split
from te_fuser.ops.base import RowOp, Spec
from te_fuser.ops.gelu import gelu_tanh


class GatedUnit(RowOp):
    """Multiply one half of the features, activated, with the other: y = activation(gate) * linear.

    x is [..., 2n], y is [..., n]. The first half of x is the gate, the one the activation is applied to, as in
    Transformer Engine; with `gate_first=False` it is the second.

    Raises:
        ValueError: for an odd number of features.

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    family = True

    def __init__(self, gate_first: bool = True) -> None:
        super().__init__()
        self.gate_first = gate_first

    def activation(self, gate: Any) -> Any:
        """What is applied to the gate."""
        raise NotImplementedError(f"{type(self).__name__} must define activation(self, gate)")

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
        return super().infer(x)


class GLU(GatedUnit):
    """Gate by a sigmoid: y = sigmoid(gate) * linear, [..., 2n] -> [..., n].

    Source: Dauphin et al., "Language modeling with gated convolutional networks" (2016).
    """

    def activation(self, gate: Any) -> Any:
        return sigmoid(gate)


class GEGLU(GatedUnit):
    """Gate by tanh-GELU: y = GELU(gate) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    def activation(self, gate: Any) -> Any:
        return gelu_tanh(gate)


class QGEGLU(GatedUnit):
    """Gate by QGELU: y = gate * sigmoid(1.702 gate) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020), with the GELU of Hendrycks and Gimpel (2016), section 2.
    """

    def activation(self, gate: Any) -> Any:
        return gate * sigmoid(1.702 * gate)


class ReGLU(GatedUnit):
    """Gate by ReLU: y = max(gate, 0) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    role = "reglu"

    def activation(self, gate: Any) -> Any:
        return relu(gate)


class SReGLU(GatedUnit):
    """Gate by squared ReLU: y = max(gate, 0)^2 * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020), with the activation of So et al., "Primer" (2021).
    """

    role = "sreglu"

    def activation(self, gate: Any) -> Any:
        positive = relu(gate)
        return positive * positive


class SwiGLU(GatedUnit):
    """Gate by SiLU: y = gate * sigmoid(gate) * linear, [..., 2n] -> [..., n].

    Source: Shazeer, "GLU variants improve Transformer" (2020).
    """

    role = "swiglu"

    def activation(self, gate: Any) -> Any:
        return gate * sigmoid(gate)


class ClampedSwiGLU(GatedUnit):
    """SwiGLU of limited inputs, with an offset: y = g sigmoid(alpha g) (l + 1), [..., 2n] -> [..., n].

    g = min(gate, limit) and l = linear limited to [-limit, limit].

    Args:
        limit: the largest gate, and the largest magnitude of the linear half.
        alpha: the slope of the sigmoid.
        gate_first: whether the first half of x is the gate.

    Raises:
        ValueError: for a limit that is not positive, or an odd number of features.

    Source: OpenAI, "gpt-oss-120b and gpt-oss-20b model card" (2025).
    """

    role = "clamped_swiglu"

    def __init__(self, limit: float = 7.0, alpha: float = 1.702, gate_first: bool = True) -> None:
        super().__init__(gate_first)
        if not limit > 0:
            raise ValueError(f"ClampedSwiGLU takes a positive limit, got {limit}")
        self.limit, self.alpha = float(limit), float(alpha)

    def activation(self, gate: Any) -> Any:
        gate = clamp(gate, high=self.limit)
        return gate * sigmoid(self.alpha * gate)

    def combine(self, gate: Any, linear: Any) -> Any:
        return self.activation(gate) * (clamp(linear, -self.limit, self.limit) + 1.0)
