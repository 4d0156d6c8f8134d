"""Float8MatMul by cuBLASLt: its three products, of what lies along what is summed.

Forward quantizes W by rows; backward quantizes it again, turned, for dx = dy W, and reads dy and x transposed for
dW = dy^T x: the kernels that make these store them so. Where W is kept in 8 bits both read what is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.codegen.written import WrittenKernel
from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.cublaslt_quantized import why_no_bias
from te_fuser.fusions.match import Body, Cost, FusionCall, Match
from te_fuser.fusions.pattern import Optional, PatternPart, check
from te_fuser.fusions.registry import Fusion, register
from te_fuser.kernels import quantized_matmul as products
from te_fuser.kernels.quantize_weights import KINDS, QuantizeWeight, quantize_weight_by_kernel
from te_fuser.kernels.transposed8 import padded
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.main_grad import put_gradient
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.sizes import asked

_OF_INPUT = ("0.weight", "0.weight_scale", "0.weight_inverse", "0.output_gradient_inverse")
_OF_KEPT_INPUT = ("0.weight_turned", "0.weight_inverse", "0.output_gradient_inverse")
_OF_WEIGHT = ("dy.transposed", "input.transposed", "0.input_inverse", "0.output_gradient_inverse")
_GRADIENTS = tuple(FLOAT8.values())


@dataclass(frozen=True)
class _Product:
    """One of the three: the dtypes of its factors and its result, and how it is summed."""

    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    fast: bool

    @classmethod
    def of(cls, m: Match, which: str) -> _Product:
        """`which` is "y", "dx" or "dW"."""
        form = cast(Float8MatMul, m[0]).form
        x, weight, gradient = form.formats
        fast = dict(zip(("y", "dx", "dW"), form.fast, strict=True))[which]
        if which == "y":
            return cls(x, weight, form.dtype, fast)
        return cls(gradient, weight, form.dtype, fast) if which == "dx" else cls(gradient, x, form.weight_dtype, fast)

    def configured(self, kind: str = "plain", out: torch.dtype | None = None) -> Any:
        """The native product."""
        return products.configured(kind, self.a, self.b, out or self.out, self.fast)


# ------------------------------------------------------------------------------------------- what runs


def _output(m: FusionCall, x: torch.Tensor, product: _Product, bias: bool, records: bool, kept: bool) -> torch.Tensor:
    """y = x W^T + b; raises the weight's amax."""
    op = m[0]
    if kept:
        weight = op.weight_data
    else:
        weight, _ = quantize_weight_by_kernel(op.weight, op.weight_scale, op.weight_amax if records else None, "rows")
    given = x, weight, op.input_inverse, op.weight_inverse
    made = product.configured("bias").make(*given, m[len(m) - 1].bias) if bias else product.configured().make(*given)
    return cast(torch.Tensor, made)


def _input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    gradient_inverse: torch.Tensor,
    product: _Product,
) -> torch.Tensor:
    """dx = dy W."""
    _, turned = quantize_weight_by_kernel(weight, scale, None, "turned")
    return _kept_input_gradient(dy, turned, inverse, gradient_inverse, product)


def _kept_input_gradient(
    dy: torch.Tensor,
    turned: torch.Tensor,
    inverse: torch.Tensor,
    gradient_inverse: torch.Tensor,
    product: _Product,
) -> torch.Tensor:
    """The same, of W^T in 8 bits."""
    return cast(torch.Tensor, product.configured().make(dy, turned, gradient_inverse, inverse))


def _weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, gradient_inverse: torch.Tensor, product: _Product
) -> torch.Tensor:
    """dW = dy^T x, both given transposed."""
    return cast(torch.Tensor, product.configured().make(dy, x, gradient_inverse, inverse))


def _main_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    gradient_inverse: torch.Tensor,
    weight: torch.Tensor,
    product: _Product,
    over: bool,
) -> torch.Tensor:
    """main_grad += dy^T x, or main_grad = dy^T x, both given transposed; gives what stands for it."""

    def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
        run = product.configured("plain" if over else "onto", main_grad.dtype)
        run((dy.mT, x.mT, gradient_inverse, inverse, main_grad))
        torch.autograd.graph.increment_version(main_grad)

    # By rows as `put` takes them: those of a part of a joined weight are then whole rows of what lies transposed.
    return put_gradient(dy.mT, x.mT, weight, over, put)


def _is_kept(m: Match) -> bool:
    return m[0].reads("weight_data")


def _choose(m: Match, method: str) -> Body:
    if method == "forward":
        records = m[0].reads("weight_amax")
        run: Callable[..., Any] = functools.partial(
            _output,
            product=_Product.of(m, "y"),
            bias=m[len(m) - 1].kind is Bias,
            records=records,
            kept=_is_kept(m),
        )
        return Body(run, plain=True)
    if method == "input_gradient":
        dx = _kept_input_gradient if _is_kept(m) else _input_gradient
        return Body(functools.partial(dx, product=_Product.of(m, "dx")), plain=True)
    product = _Product.of(m, "dW")
    if m[0].accumulate_into_main_grad:
        return Body(functools.partial(_main_gradient, product=product, over=m[0].overwrite_main_grad))
    return Body(functools.partial(_weight_gradient, product=product), plain=True)


def _kernels(m: Match, direction: str, needed: frozenset[str]) -> Iterator[WrittenKernel]:
    """Those that its bodies launch beside the products."""
    weight, kept = m[0].dtype_of("weight"), _is_kept(m)
    if direction == "forward" and not kept:
        yield QuantizeWeight(weight, "rows", m[0].reads("weight_amax"))
    if "input" in needed and not kept:
        yield QuantizeWeight(weight, "turned")


# ------------------------------------------------------------------------------ why not, and what it costs


def _why_not(m: Match, which: Iterable[str], kind: str = "plain") -> str | bool:
    """Why cuBLASLt cannot run these products of a match; True when it can."""
    why = products.obstacle_on(m.device, m.capability)
    if why is not None:
        return f"{why}; it is emulated"
    if m.target != "cuda":
        return "the kernels that lay out its factors are compiled for the GPU at hand, and this plan has none of these"
    weight = m[0].dtype_of("weight")
    if weight not in KINDS:
        return f"weights are quantized from {', '.join(map(text_of, KINDS))}, this one is in {text_of(weight)}"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return True
    found = (asked(_refusal, m, _Product.of(m, product), product, m.x.rows, kind) for product in which)
    return next((words for words in found if words), True)


def _refusal(m: Match, product: _Product, which: str, rows: int, kind: str) -> str | None:
    op = cast(Float8MatMul, m[0])
    inner, out = op.in_features, op.out_features
    sizes = {"y": (rows, out, inner), "dx": (rows, inner, out), "dW": (out, inner, padded(rows))}[which]
    if not rows:
        return None
    out_dtype = torch.float32 if kind == "onto" else product.out
    return products.refusal(product.a, product.b, out_dtype, sizes, m.device, kind, product.fast)


def _why_not_backward(m: Match, main_grad: bool, kept: bool = False) -> str | bool:
    if _is_kept(m) != kept:
        return "no weight in 8 bits is kept" if kept else "the weight is kept in 8 bits"
    if m[0].accumulate_into_main_grad != main_grad:
        return "accumulate_into_main_grad is off" if main_grad else "the weight's gradient goes to its main_grad"
    onto = _why_not(m, ("dW",), "onto") if main_grad else True
    return onto if isinstance(onto, str) else _why_not(m, ("dx",) if main_grad else ("dx", "dW"))


def _forward_cost(m: Match) -> Cost:
    return _cost(m, "y", m.x.rows, m[0].out_features, m[0].in_features)


def _backward_costs(m: Match) -> tuple[Cost, Cost]:
    rows, inner, out = m.x.rows, m[0].in_features, m[0].out_features
    return _cost(m, "dx", rows, inner, out), _cost(m, "dW", out, inner, padded(rows))


def _cost(m: Match, which: str, rows: int, columns: int, summed: int) -> Cost:
    """What is quantized before counts as bytes apart."""
    product = _Product.of(m, which)
    if which == "dW":
        before, launches, written = 0, 1, rows * columns * m[0].dtype_of("weight").itemsize
    elif _is_kept(m):
        before, launches, written = 0, 1, rows * columns * product.out.itemsize
    else:
        before, launches = (1 + m[0].dtype_of("weight").itemsize) * columns * summed, 2
        written = rows * columns * product.out.itemsize
    read = summed * (rows + columns)
    return Cost(
        read + before // 2,
        written + before - before // 2,
        2.0 * rows * columns * summed,
        launches,
        apart=before,
        dtype=name_of(product.a),
    )


# ---------------------------------------------------------------------------------------------- the fusions

_INPUT = Gradient(("input",), _OF_INPUT, "input_gradient")
_KEPT_INPUT = Gradient(("input",), _OF_KEPT_INPUT, "input_gradient")
_WEIGHT = Gradient(("0.weight",), _OF_WEIGHT, "weight_gradient")
_MAIN = Gradient(("0.weight",), (*_OF_WEIGHT, "0.weight"), "weight_gradient")


def _declare(
    name: str,
    doc: str,
    pattern: tuple[PatternPart, ...],
    when: Callable[[Match], str | bool],
    gradients: tuple[Gradient, ...] = (),
) -> Fusion:
    return register(
        Fusion(
            name,
            "backward" if gradients else "forward",
            check(pattern, name),
            run_forward=None,
            run_backward=None,
            when=when,
            cost=_backward_costs if gradients else _forward_cost,
            doc=doc,
            gradients=gradients,
            choose=_choose,
            compiles=_kernels,
            takes_gradients_in=_GRADIENTS if gradients else (),
        )
    )


FUSIONS = (
    _declare(
        "float8_matmul",
        "y = (x s) (W t)^T by cuBLASLt, W quantized before.",
        (Float8MatMul,),
        lambda m: _why_not(m, ("y",)),
    ),
    _declare(
        "float8_matmul_bias",
        "The product's epilogue adds the bias.",
        (Float8MatMul, Optional(QuantizeGradient), Bias),
        lambda m: why_no_bias(m, len(m) - 1) or _why_not(m, ("y",), "bias"),
    ),
    _declare(
        "float8_matmul_backward",
        "dx = dy W and dW = dy^T x by cuBLASLt, of factors that lie along what is summed.",
        (Float8MatMul,),
        lambda m: _why_not_backward(m, main_grad=False),
        (_INPUT, _WEIGHT),
    ),
    _declare(
        "float8_matmul_main_grad",
        "The same, where the product adds dW to main_grad.",
        (Float8MatMul,),
        lambda m: _why_not_backward(m, main_grad=True),
        (_INPUT, _MAIN),
    ),
    _declare(
        "float8_matmul_kept_backward",
        "dx and dW where the weight is kept in 8 bits, turned too.",
        (Float8MatMul,),
        lambda m: _why_not_backward(m, main_grad=False, kept=True),
        (_KEPT_INPUT, _WEIGHT),
    ),
    _declare(
        "float8_matmul_kept_main_grad",
        "The same, where the product adds dW to main_grad.",
        (Float8MatMul,),
        lambda m: _why_not_backward(m, main_grad=True, kept=True),
        (_KEPT_INPUT, _MAIN),
    ),
)
