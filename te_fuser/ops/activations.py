"""Activations of one argument, by formulas; softmax and its logarithm, over the features of each row."""

from __future__ import annotations

import math
from typing import Any

from te_fuser.formula import detach, erf, exp, log, relu, row_max, row_sum, sigmoid, tanh
from te_fuser.ops.checks import check_last
from te_fuser.ops.row_op import RowOp


class Identity(RowOp):
    """Return the input: y = x."""

    def compute(self, x: Any) -> Any:
        return x


class Sigmoid(RowOp):
    """Bring each feature into (0, 1): y = 1 / (1 + exp(-x)), pointwise."""

    def compute(self, x: Any) -> Any:
        return sigmoid(x)


class Tanh(RowOp):
    """Bring each feature into (-1, 1): y = tanh(x), pointwise."""

    def compute(self, x: Any) -> Any:
        return tanh(x)


class ReLU(RowOp):
    """Zero what is negative: y = max(x, 0), pointwise; the gradient at 0 is 0.

    Source: Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines" (2010).
    """

    role = "relu"

    def compute(self, x: Any) -> Any:
        return relu(x)


class SReLU(RowOp):
    """The square of ReLU: y = max(x, 0)^2, pointwise.

    Source: So et al., "Primer: searching for efficient Transformers for language modeling" (2021).
    """

    role = "srelu"

    def compute(self, x: Any) -> Any:
        positive = relu(x)
        return positive * positive


class SiLU(RowOp):
    """The input gated by its own sigmoid (swish): y = x * sigmoid(x), pointwise.

    Source: Elfwing et al., "Sigmoid-weighted linear units for neural network function approximation" (2017).
    """

    role = "silu"

    def compute(self, x: Any) -> Any:
        return x * sigmoid(x)


# 0.5 * (1 + tanh(u)) = sigmoid(2 u): one exponential and no cancellation in the negative tail.
_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return x * sigmoid(_SLOPE * (x + 0.044715 * (x * x * x)))


def gelu_erf(x: Any) -> Any:
    """x Phi(x) = 0.5 x (1 + erf(x / sqrt(2)))."""
    return x * (0.5 + 0.5 * erf(x * math.sqrt(0.5)))


GELU_FORMS = {"tanh": gelu_tanh, "none": gelu_erf}


def known_form(op: RowOp, approximate: str) -> str:
    """Check the form that an op was given as `approximate`, and return it."""
    if approximate not in GELU_FORMS:
        raise ValueError(f"{type(op).__name__} knows approximate='tanh' and 'none', got {approximate!r}")
    return approximate


class GELU(RowOp):
    """Weigh the input by the normal distribution: y = x Phi(x), pointwise.

    approximate="tanh" (the default, as Transformers use it) is 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))),
    approximate="none" is 0.5 x (1 + erf(x / sqrt(2))).

    Raises:
        ValueError: for another `approximate`.

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)" (2016).
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = known_form(self, approximate)

    def compute(self, x: Any) -> Any:
        return GELU_FORMS[self.approximate](x)


class QGELU(RowOp):
    """GELU approximated by a logistic gate: y = x * sigmoid(1.702 * x), pointwise.

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)" (2016), section 2.
    """

    def compute(self, x: Any) -> Any:
        return x * sigmoid(1.702 * x)


def shifted(x: Any) -> Any:
    """x less its row's largest feature, so that no exponential overflows."""
    return x - detach(row_max(x))


class Softmax(RowOp):
    """Turn the features of each row into probabilities: y = exp(x) / sum(exp(x)).

    Like torch.nn.Softmax(dim=-1): -inf gives 0, and a row of nothing else NaN.

    Args:
        dim: -1; what goes over another dimension stays torch.nn's module.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        check_last(self, dim)

    def compute(self, x: Any) -> Any:
        e = exp(shifted(x))
        return e / row_sum(e)


class LogSoftmax(RowOp):
    """Turn the features of each row into logarithms of probabilities: y = x - log(sum(exp(x))).

    Like torch.nn.LogSoftmax(dim=-1): right also where the probability is too small for its dtype.

    Args:
        dim: -1; what goes over another dimension stays torch.nn's module.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        check_last(self, dim)

    def compute(self, x: Any) -> Any:
        z = shifted(x)
        return z - log(row_sum(exp(z)))
