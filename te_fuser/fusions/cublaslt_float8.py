"""Float8MatMul by cuBLASLt: its three products, of what lies along what is summed.

Forward quantizes W by rows; backward quantizes it again, turned, for dx = dy W, and reads dy and x transposed for
dW = dy^T x: the kernels that make these store them so. Where W is kept in 8 bits both read what is kept. On GPUs whose
products take factors as they lie, all are read by rows, and nothing is turned.
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
_OF_KEPT_INPUT_BY_ROWS = ("0.weight_data", "0.weight_inverse", "0.output_gradient_inverse")
_OF_WEIGHT_BY_ROWS = ("input", "0.input_inverse", "0.output_gradient_inverse")
_OF_WEIGHT = ("dy.transposed", "input.transposed", "0.input_inverse", "0.output_gradient_inverse")
_GRADIENTS = tuple(FLOAT8.values())


@dataclass(frozen=True)
class _Product:
    """One of the three: the dtypes of its factors and its result, how it is summed, and how its factors lie."""

    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    fast: bool
    transposes: tuple[bool, bool] = products.ALONG

    @classmethod
    def of(cls, m: Match, which: str) -> _Product:
        """`which` is "y", "dx" or "dW"."""
        form = cast(Float8MatMul, m[0]).form
        x, weight, gradient = form.formats
        fast = dict(zip(("y", "dx", "dW"), form.fast, strict=True))[which]
        by_rows = _is_by_rows(m)
        if which == "y":
            return cls(x, weight, form.dtype, fast)
        if which == "dx":
            return cls(gradient, weight, form.dtype, fast, (False, False) if by_rows else products.ALONG)
        return cls(gradient, x, form.weight_dtype, fast, (True, False) if by_rows else products.ALONG)

    def configured(self, kind: str = "plain", out: torch.dtype | None = None) -> Any:
        """The native product."""
        return products.configured(kind, self.a, self.b, out or self.out, self.fast, self.transposes)


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
    along = product.transposes == products.ALONG
    data, turned = quantize_weight_by_kernel(weight, scale, None, "turned" if along else "rows")
    return _kept_input_gradient(dy, turned if along else data, inverse, gradient_inverse, product)


def _kept_input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    gradient_inverse: torch.Tensor,
    product: _Product,
) -> torch.Tensor:
    """The same, of W^T in 8 bits, or of W where it is read by rows."""
    return cast(torch.Tensor, product.configured().make(dy, weight, gradient_inverse, inverse))


def _weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, gradient_inverse: torch.Tensor, product: _Product
) -> torch.Tensor:
    """dW = dy^T x, both given as the product takes them."""
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
    """main_grad += dy^T x, or main_grad = dy^T x, both given as the product takes them; gives what stands for it."""
    along = product.transposes == products.ALONG

    def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
        run = product.configured("plain" if over else "onto", main_grad.dtype)
        run((*((dy.mT, x.mT) if along else (dy, x)), gradient_inverse, inverse, main_grad))
        torch.autograd.graph.increment_version(main_grad)

    # By rows as `put` takes them: those of a part of a joined weight are then whole rows of what lies transposed.
    return put_gradient(*((dy.mT, x.mT) if along else (dy, x)), weight, over, put)


def _is_by_rows(m: Match) -> bool:
    """Whether the GPU's products take factors as they lie."""
    return products.takes_any_layout(m.device, m.capability)


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
        yield QuantizeWeight(weight, "rows" if _is_by_rows(m) else "turned")


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
    tokens = padded(rows) if product.transposes == products.ALONG else rows
    sizes = {"y": (rows, out, inner), "dx": (rows, inner, out), "dW": (out, inner, tokens)}[which]
    if not rows:
        return None
    out_dtype = torch.float32 if kind == "onto" else product.out
    return products.refusal(product.a, product.b, out_dtype, sizes, m.device, kind, product.fast, product.transposes)


def _why_not_backward(m: Match, main_grad: bool, kept: bool = False, by_rows: bool = False) -> str | bool:
    if _is_by_rows(m) != by_rows:
        how = "lie along what is summed" if by_rows else "may lie by rows"
        return f"factors of 8 bits {how} on this device"
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
    return _cost(m, "dx", rows, inner, out), _cost(m, "dW", out, inner, rows if _is_by_rows(m) else padded(rows))


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


def _nodes(by_rows: bool, kept: bool, main_grad: bool) -> tuple[Gradient, Gradient]:
    """dx and dW, and what they read."""
    of_kept = _OF_KEPT_INPUT_BY_ROWS if by_rows else _OF_KEPT_INPUT
    of_weight = (*(_OF_WEIGHT_BY_ROWS if by_rows else _OF_WEIGHT), *(["0.weight"] if main_grad else []))
    of_input = of_kept if kept else _OF_INPUT
    return Gradient(("input",), of_input, "input_gradient"), Gradient(("0.weight",), of_weight, "weight_gradient")


def _said_of(by_rows: bool, kept: bool, main_grad: bool) -> str:
    """What a row of backward's says of itself."""
    lying = "lie by rows" if by_rows else "lie along what is summed"
    weight = ", the weight's kept in 8 bits" if kept else ""
    onto = ", dW onto main_grad" if main_grad else ""
    return f"dx = dy W and dW = dy^T x by cuBLASLt, of factors that {lying}{weight}{onto}."


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
    *(
        _declare(
            f"float8_matmul_{'rows_' if by_rows else ''}{'kept_' if kept else ''}{'main_grad' if main else 'backward'}",
            _said_of(by_rows, kept, main),
            (Float8MatMul,),
            functools.partial(_why_not_backward, main_grad=main, kept=kept, by_rows=by_rows),
            _nodes(by_rows, kept, main),
        )
        for by_rows in (False, True)
        for kept in (False, True)
        for main in (False, True)
    ),
)
