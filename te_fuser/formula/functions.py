"""The functions a formula is written with: on tensors they compute, on symbols they build an expression.

`FUNCTIONS` has a row for each kind of node, with all that is particular to it on every target.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import torch

from te_fuser.dtypes import FLOAT8, TABLE, name_of
from te_fuser.formula import expr, random, reductions
from te_fuser.formula.expr import ONE, ZERO, Axes, Expr, add, const, div, mul, pointwise, sub, unary
from te_fuser.formula.float8 import Quantized, QuantizedGradient, check_float8, rounded

Operand = Any  # a tensor, an expression or a number
Contributions = tuple[Expr | None, ...]


@dataclass(frozen=True)
class Function:
    """A kind of node. Its costs are three, as three decide by them: plans, schedules on a GPU, schedules on a CPU.

    Attributes:
        name: of the node, and of the C++ function in namespace te.
        compute: from its arguments, of which one of two may be a number, and attributes; None: as the interpreter does.
        adjoint: node, its adjoint -> the contribution to each argument; as it is, where nothing is computed.
        number: the same of a number, where formulas know it.
        cuda: the CUDA function, with {} for `te::precise` or `te::fast`; empty: each of these has one of its name.
        operations: float32 operations that a call amounts to in a generated kernel.
        gpu, cpu: about how many instructions it takes, for an element on a GPU and for a vector on a CPU.
        joins, start: for a row reduction, the function that adds a feature to what was found so far, and its beginning.
        picks: whether backward takes it anew from the features that it reads, which may be rounded: its gradient asks
            which of them was taken, or is right only where it and they are of one row.
        tells_sign: whether it is zero or less where its argument is and nowhere else.
        rises: of one that nowhere falls its least value, that of 0 and its largest, those of infinite arguments too.
    """

    name: str
    compute: Callable[..., torch.Tensor] | None = None
    adjoint: Callable[[Expr, Expr], Contributions] = lambda e, g: (g,)
    number: Callable[[float], float] | None = None
    cuda: str = ""
    operations: int = 1
    gpu: int = 1
    cpu: int = 1
    joins: str = ""
    start: float = 0.0
    picks: bool = False
    tells_sign: bool = False
    rises: tuple[float, float, float] | None = None


# ------------------------------------------------------------------------------------------------ adjoints

_HALF = const(Fraction(1, 2))


def _tie(g: Expr, a: Expr, b: Expr, loses: str, wins: str) -> Contributions:
    """Half to each of two that are equal, nothing to one that `loses`, all to both of a NaN."""
    shared = expr.where(pointwise("eq", a, b), mul(_HALF, g), g)
    return expr.where(pointwise(loses, a, b), ZERO, shared), expr.where(pointwise(wins, a, b), ZERO, shared)


def _shared(e: Expr, g: Expr, reaches: str) -> Contributions:
    hit = expr.where(pointwise(reaches, e.args[0], e), ONE, ZERO)
    return (mul(hit, div(g, reductions.row_sum(hit))),)


def _limited(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """torch.clamp with a gradient that passes at the limits, too; that of PyTorch does so up to 2.13."""
    return torch.where((x >= low) & (x <= high), x, torch.clamp(x.detach(), low, high))


def _clamp(e: Expr, g: Expr) -> Contributions:
    low, high = e.attrs
    inside = g
    if high != math.inf:
        inside = expr.where(pointwise("le", e.args[0], const(high)), inside, ZERO)
    if low != -math.inf:
        inside = expr.where(pointwise("ge", e.args[0], const(low)), inside, ZERO)
    return (inside,)


def _abs(e: Expr, g: Expr) -> Contributions:
    x = e.args[0]
    sign = expr.where(pointwise("gt", x, ZERO), ONE, expr.where(pointwise("lt", x, ZERO), const(-1), ZERO))
    return (mul(sign, g),)


def _erf(e: Expr, g: Expr) -> Contributions:
    x = e.args[0]
    return (mul(g, mul(const(2 / math.sqrt(math.pi)), unary("exp", mul(const(-1), mul(x, x))))),)


def _nothing(e: Expr, g: Expr) -> Contributions:
    return None, None


# ------------------------------------------------------------------------------------------------ the table


def _pair(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [t for t in (a, b) if isinstance(t, torch.Tensor)]
    like = tensors[0] if tensors else torch.as_tensor(b, device="cpu")
    return tuple(  # type: ignore[return-value]
        t if isinstance(t, torch.Tensor) else torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (a, b)
    )


_ROWS = (
    Function("add", operator.add, lambda e, g: (g, g)),
    Function("sub", operator.sub, lambda e, g: (g, mul(const(-1), g))),
    Function("mul", operator.mul, lambda e, g: (mul(g, e.args[1]), mul(g, e.args[0]))),
    Function(
        "div",
        operator.truediv,
        lambda e, g: (div(g, e.args[1]), mul(const(-1), div(mul(g, e), e.args[1]))),
        cuda="{}::divide", operations=4, gpu=3, cpu=8,
    ),
    Function("lt", operator.lt, _nothing),
    Function("le", operator.le, _nothing),
    Function("gt", operator.gt, _nothing),
    Function("ge", operator.ge, _nothing),
    Function("eq", operator.eq, _nothing),
    Function(
        "where",
        lambda condition, a, b: torch.where(condition != 0, a, b),
        lambda e, g: (None, expr.where(e.args[0], g, ZERO), expr.where(e.args[0], ZERO, g)),
        cpu=2,
    ),
    Function(
        "maximum",
        lambda a, b: torch.maximum(*_pair(a, b)),
        lambda e, g: _tie(g, e.args[0], e.args[1], "lt", "gt"),
        cuda="te::maximum", cpu=3,
    ),
    Function(
        "minimum",
        lambda a, b: torch.minimum(*_pair(a, b)),
        lambda e, g: _tie(g, e.args[0], e.args[1], "gt", "lt"),
        cuda="te::minimum", cpu=3,
    ),
    Function("clamp", _limited, _clamp, cuda="te::clamp", gpu=2, cpu=2),
    Function("abs", torch.abs, _abs, abs, cuda="fabsf"),
    Function(
        "relu",
        torch.relu,
        lambda e, g: (expr.where(pointwise("le", e.args[0], ZERO), ZERO, g),),  # a NaN hands on its gradient
        lambda x: max(x, 0.0),
        cuda="te::relu", tells_sign=True,
    ),
    Function("exp", torch.exp, lambda e, g: (mul(g, e),), math.exp, operations=8, gpu=3, cpu=16),
    Function("log", torch.log, lambda e, g: (div(g, e.args[0]),), math.log, operations=10, gpu=12, cpu=24),
    Function(
        "log1p",
        torch.log1p,
        lambda e, g: (div(g, add(ONE, e.args[0])),),
        math.log1p,
        cuda="log1pf", operations=16, gpu=15, cpu=36,
    ),
    Function(
        "softplus",
        functools.partial(torch.nn.functional.softplus, threshold=40.0),  # from there on x itself, in float64 too
        lambda e, g: (mul(g, unary("sigmoid", e.args[0])),),
        lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
        cuda="te::softplus", operations=26, gpu=20, cpu=54,
    ),
    Function(
        "sin",
        torch.sin,
        lambda e, g: (mul(g, unary("cos", e.args[0])),),
        math.sin,
        cuda="sinf", operations=20, gpu=20, cpu=44,
    ),
    Function(
        "cos",
        torch.cos,
        lambda e, g: (mul(const(-1), mul(g, unary("sin", e.args[0]))),),
        math.cos,
        cuda="cosf", operations=20, gpu=20, cpu=44,
    ),
    Function(
        "tanh",
        torch.tanh,
        lambda e, g: (mul(g, sub(ONE, mul(e, e))),),
        math.tanh,
        operations=14, gpu=12, cpu=28, rises=(-1.0, 0.0, 1.0),
    ),
    Function("erf", torch.erf, _erf, math.erf, operations=18, gpu=24, cpu=28, rises=(-1.0, 0.0, 1.0)),
    Function(
        "sigmoid",
        torch.sigmoid,
        lambda e, g: (mul(g, mul(e, sub(ONE, e))),),
        lambda x: 1.0 / (1.0 + math.exp(-x)),
        operations=12, gpu=5, cpu=26, rises=(0.0, 0.5, 1.0),
    ),
    Function("sqrt", torch.sqrt, lambda e, g: (mul(_HALF, div(g, e)),), math.sqrt, operations=4, gpu=3, cpu=10),
    Function(
        "rsqrt",
        torch.rsqrt,
        lambda e, g: (mul(const(Fraction(-1, 2)), mul(g, mul(e, mul(e, e)))),),
        lambda x: 1.0 / math.sqrt(x),
        operations=4, gpu=3, cpu=16,
    ),
    Function(
        "pow",
        torch.pow,
        lambda e, g: (mul(g, mul(const(e.attrs[0]), expr.power(e.args[0], e.attrs[0] - 1))),),
        cuda="powf", operations=60, gpu=40, cpu=110,
    ),
    Function("row_sum", lambda x: x.sum(-1, keepdim=True), cuda="te::Sum", joins="add"),
    Function(
        "row_max",
        lambda x: x.amax(-1, keepdim=True),
        lambda e, g: _shared(e, g, "ge"),
        cuda="te::Max", joins="maximum", start=-math.inf, picks=True,
    ),
    Function(
        "row_min",
        lambda x: x.amin(-1, keepdim=True),
        lambda e, g: _shared(e, g, "le"),
        cuda="te::Min", joins="minimum", start=math.inf, picks=True,
    ),
    Function(
        "quantize",
        lambda x, scale, name: rounded(x * scale, FLOAT8[name]),
        lambda e, g: (g, None),
        operations=6, gpu=4, cpu=12,
    ),
    Function(
        "quantize_gradient",
        lambda x, scale, name: x,
        lambda e, g: (pointwise("quantize", g, e.args[1], attrs=e.attrs), None),
        cpu=0,
    ),
    # What kernels have of it: a product, and a number rounded to the dtype of that name.
    *(
        Function(
            name, lambda x, dtype=row.torch: rounded(x, dtype), cuda=f"te::nearest<{row.cuda}>",
            operations=6, gpu=4, cpu=12,
        )
        for name, row in TABLE.items() if not row.computes
    ),
    # What only the text of CUDA kernels has, where a formula is written in base two.
    Function("exp2", torch.exp2),
    Function("sigmoid2", lambda x: torch.sigmoid(math.log(2) * x), gpu=4, rises=(0.0, 0.5, 1.0)),
    Function("masked"),
    # Leaves and marks.
    *map(Function, ("input", "value", "broadcast", "concat")),
    Function("detach", lambda x: x, lambda e, g: (None,), cpu=0, picks=True),
    Function("const", cpu=0),
    Function("keep", operations=16, gpu=8, cpu=3),
)  # fmt: skip
FUNCTIONS = {f.name: f for f in _ROWS}


# --------------------------------------------------------------------------------------------- as they are written


def _lifted(name: str) -> Callable[..., Any]:
    row = FUNCTIONS[name]

    def function(x: Operand) -> Any:
        if isinstance(x, Expr):
            return unary(name, x)
        return row.compute(x) if isinstance(x, torch.Tensor) else row.number(x)  # type: ignore[misc]

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name}(x), pointwise."
    return function


exp = _lifted("exp")
log = _lifted("log")
log1p = _lifted("log1p")
softplus = _lifted("softplus")
sin = _lifted("sin")
cos = _lifted("cos")
tanh = _lifted("tanh")
erf = _lifted("erf")
sigmoid = _lifted("sigmoid")
sqrt = _lifted("sqrt")
rsqrt = _lifted("rsqrt")
absolute = _lifted("abs")
relu = _lifted("relu")


def maximum(a: Operand, b: Operand) -> Any:
    """The larger of a and b; where they tie, each gets half the gradient, as in torch; NaN where either is."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        return expr.binary("maximum", expr.lift(a), expr.lift(b))
    return torch.maximum(*_pair(a, b))


def minimum(a: Operand, b: Operand) -> Any:
    """The smaller of a and b; where they tie, each gets half the gradient, as in torch; NaN where either is."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        return expr.binary("minimum", expr.lift(a), expr.lift(b))
    return torch.minimum(*_pair(a, b))


def clamp(x: Operand, low: float = -math.inf, high: float = math.inf) -> Any:
    """x limited to [low, high], two numbers; the gradient passes where low <= x <= high."""
    for bound in (low, high):
        if not isinstance(bound, Real):
            kind = "a tensor" if isinstance(bound, (Expr, torch.Tensor)) else repr(bound)
            raise TypeError(f"clamp takes numbers as limits, got {kind}; by tensors: minimum(maximum(x, low), high)")
    if isinstance(x, Expr):
        return expr.unary("clamp", x, (float(low), float(high)))
    return _limited(x, low, high)


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
        return reductions.row_sum(x)
    return x.sum(-1, keepdim=True)


def row_mean(x: Operand) -> Any:
    """The mean of each row over its features, [rows, 1]."""
    if isinstance(x, Expr):
        return mul(const(Fraction(1, x.width)), reductions.row_sum(x)) if x.has_features else x
    return x.mean(-1, keepdim=True)


def row_max(x: Operand) -> Any:
    """The largest feature of each row, [rows, 1]; ties share the gradient evenly, as torch.amax does."""
    return reductions.extreme("row_max", x) if isinstance(x, Expr) else x.amax(-1, keepdim=True)


def row_min(x: Operand) -> Any:
    """The smallest feature of each row, [rows, 1]; ties share the gradient evenly, as torch.amin does."""
    return reductions.extreme("row_min", x) if isinstance(x, Expr) else x.amin(-1, keepdim=True)


def quantize(x: Operand, scale: Operand, dtype: torch.dtype) -> Any:
    """x * scale rounded to a dtype of 8 bits, as `float8` says; the gradient passes to x as it is, none to scale.

    Backward so ignores the rounding.

    Raises:
        TypeError: for a dtype that is not one of 8 bits.
    """
    check_float8(dtype)
    if isinstance(x, Expr) or isinstance(scale, Expr):
        return expr.pointwise("quantize", expr.lift(x), expr.lift(scale), attrs=(name_of(dtype),))
    return Quantized.apply(x, scale, dtype)


def quantize_gradient(x: Operand, scale: Operand, dtype: torch.dtype) -> Any:
    """x as it is; its gradient is that of the result, times scale, rounded to a dtype of 8 bits as `quantize` does.

    Raises:
        TypeError: for a dtype that is not one of 8 bits.
    """
    check_float8(dtype)
    if isinstance(x, Expr) or isinstance(scale, Expr):
        return expr.pointwise("quantize_gradient", expr.lift(x), expr.lift(scale), attrs=(name_of(dtype),))
    return QuantizedGradient.apply(x, scale, dtype)


def detach(x: Operand) -> Any:
    """x without a gradient, as torch's detach: for a maximum that is subtracted to stay in range, say."""
    if isinstance(x, Expr):
        return unary("detach", x)
    return x.detach() if isinstance(x, torch.Tensor) else x


def split(x: Operand, parts: int) -> tuple[Any, ...]:
    """x divided along its features into `parts` equal parts.

    Raises:
        ValueError: when the feature size is not a multiple of `parts`.
    """
    if isinstance(x, Expr):
        return expr.tile(x, parts)
    if x.shape[-1] % parts:
        raise ValueError(f"cannot split {x.shape[-1]} features into {parts} equal parts")
    return x.chunk(parts, -1) if x.shape[-1] else (x,) * parts


def concat(parts: Sequence[Operand]) -> Any:
    """Concatenation of the parts along the features; a part without features (one number a row) is repeated."""
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
