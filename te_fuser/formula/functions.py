"""The functions a formula is written with: on tensors they compute, on symbols they build an expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from te_fuser.formula import expr, random
from te_fuser.formula.expr import Axes, Expr

Operand = Any  # a tensor, an expression or a number


def _lifted(name: str, on_tensor: Callable[..., torch.Tensor], on_number: Callable[..., float]) -> Callable[..., Any]:
    def function(x: Operand) -> Any:
        if isinstance(x, Expr):
            return expr.unary(name, x)
        return on_tensor(x) if isinstance(x, torch.Tensor) else on_number(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name}(x), pointwise."
    return function


exp = _lifted("exp", torch.exp, math.exp)
log = _lifted("log", torch.log, math.log)
tanh = _lifted("tanh", torch.tanh, math.tanh)
erf = _lifted("erf", torch.erf, math.erf)
sigmoid = _lifted("sigmoid", torch.sigmoid, lambda x: 1.0 / (1.0 + math.exp(-x)))
sqrt = _lifted("sqrt", torch.sqrt, math.sqrt)
rsqrt = _lifted("rsqrt", torch.rsqrt, lambda x: 1.0 / math.sqrt(x))
absolute = _lifted("abs", torch.abs, abs)
relu = _lifted("relu", torch.relu, lambda x: max(x, 0.0))


def _pair(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [t for t in (a, b) if isinstance(t, torch.Tensor)]
    like = tensors[0] if tensors else torch.as_tensor(b, device="cpu")
    return tuple(  # type: ignore[return-value]
        t if isinstance(t, torch.Tensor) else torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (a, b)
    )


def maximum(a: Operand, b: Operand) -> Any:
    """The larger of a and b; where they tie, each gets half the gradient, as in torch."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        return expr.binary("maximum", expr.lift(a), expr.lift(b))
    return torch.maximum(*_pair(a, b))


def minimum(a: Operand, b: Operand) -> Any:
    """The smaller of a and b; where they tie, each gets half the gradient, as in torch."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        return expr.binary("minimum", expr.lift(a), expr.lift(b))
    return torch.minimum(*_pair(a, b))


def clamp(x: Operand, low: float = -math.inf, high: float = math.inf) -> Any:
    """x limited to [low, high]; the gradient passes where low <= x <= high, as in torch."""
    if isinstance(x, Expr):
        return expr.unary("clamp", x, (float(low), float(high)))
    return torch.clamp(x, low, high)


def where(condition: Operand, a: Operand, b: Operand) -> Any:
    """a where the condition holds, else b."""
    if any(isinstance(v, Expr) for v in (condition, a, b)):
        return expr.written(expr.where, expr.lift(condition), expr.lift(a), expr.lift(b))
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def row_sum(x: Operand) -> Any:
    """The sum of each row over its features, [rows, 1].

    Raises:
        ValueError: when x is a number whatever the input, since its feature count is not known then.
    """
    if isinstance(x, Expr):
        if expr.is_const(x) and not expr.is_const(x, 0):
            raise ValueError(f"row_sum of the constant {x}: multiply it by the feature count instead")
        return expr.row_sum(x)
    return x.sum(-1, keepdim=True)


def row_mean(x: Operand) -> Any:
    """The mean of each row over its features, [rows, 1]."""
    if isinstance(x, Expr):
        return expr.mul(expr.const(Fraction(1, x.width)), expr.row_sum(x)) if x.axes & Axes.FEATURE else x
    return x.mean(-1, keepdim=True)


def row_max(x: Operand) -> Any:
    """The largest feature of each row, [rows, 1]; ties share the gradient evenly, as torch.amax does."""
    return expr.row_max(x) if isinstance(x, Expr) else x.amax(-1, keepdim=True)


def split(x: Operand, parts: int) -> tuple[Any, ...]:
    """x cut along its features into `parts` equal parts.

    Raises:
        ValueError: when the feature size is not a multiple of `parts`.
    """
    if isinstance(x, Expr):
        return expr.tile(x, parts)
    if x.shape[-1] % parts:
        raise ValueError(f"cannot split {x.shape[-1]} features into {parts} equal parts")
    return x.chunk(parts, -1) if x.shape[-1] else (x,) * parts


def concat(parts: Sequence[Operand]) -> Any:
    """The parts side by side along the features; a part without features is repeated to fill its place."""
    if any(isinstance(p, Expr) for p in parts):
        return expr.concat(expr.lift(p) for p in parts)
    like = next(p for p in parts if isinstance(p, torch.Tensor))
    given = [torch.as_tensor(p, dtype=like.dtype, device=like.device) for p in parts]
    rows = torch.broadcast_shapes(*(p.shape[:-1] for p in given))
    width = max(p.shape[-1] if p.dim() else 1 for p in given)
    return torch.cat([p.expand(*rows, p.shape[-1] if p.dim() and p.shape[-1] != 1 else width) for p in given], -1)


def keep_mask(x: Operand, probability: float, *, per_sample: bool = False) -> Any:
    """1 with probability 1 - `probability`, else 0: for each element of x, or once for each sample.

    The draw is a function of (seed, stream, logical element index) alone; see `te_fuser.formula.random`.
    `probability` is rounded to a multiple of 2**-16.
    """
    threshold = random.threshold(probability)
    if isinstance(x, Expr):
        axes = Axes.BATCH if per_sample else Axes.FULL
        return expr.keep_leaf("keep", threshold, axes, x.width)
    return random.current().mask(x, threshold, per_sample)
