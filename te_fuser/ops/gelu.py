"""GELU: the input times the probability that a normal variable lies below it."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch.nn import functional

from te_fuser.formula import erf, sigmoid
from te_fuser.ops.base import Spec
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import TorchFunction

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
    """What an op was given as `approximate`.

    Raises:
        ValueError: where there is no such form.
    """
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

    other_choices = {"approximate": "none"}

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = known_form(self, approximate)

    def compute(self, x: Any) -> Any:
        return GELU_FORMS[self.approximate](x)

    def by_torch(self, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
        gelu = functools.partial(functional.gelu, approximate=self.approximate)
        return TorchFunction("F.gelu", gelu, keeps={"input": ("input",)})
