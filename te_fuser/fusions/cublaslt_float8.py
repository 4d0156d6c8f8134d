"""Float8MatMul by cuBLASLt: its three products, of what lies along what is summed.

Forward reads W in 8 bits by rows, backward turned for dx = dy W, and dy and x transposed for dW = dy^T x: the kernels
that make these store them so. On GPUs whose products take factors as they lie, all are read by rows, and nothing is
turned. Each call makes what is read of W before its first step, for all products of the list at once, or it is kept
from micro-batch to micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

import torch

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.fusions.cublaslt_quantized import (
    MAIN_GRAD,
    ProductRow8,
    body_of,
    cost_of_product,
    declare,
    put_weight_gradient,
    why_no_epilogue,
)
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import Optional
from te_fuser.fusions.registry import Fusion, register
from te_fuser.kernels import quantized_matmul as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantize_weights import KINDS
from te_fuser.kernels.transposed8 import padded
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.sizes import asked

# In the order in which a native product takes them: both factors, the scales of both; a bias.
_OF_OUTPUT = ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse")
_OF_INPUT = ("0.weight_turned", "0.output_gradient_inverse", "0.weight_inverse")
_OF_INPUT_BY_ROWS = ("0.weight_data", "0.output_gradient_inverse", "0.weight_inverse")
_OF_WEIGHT_BY_ROWS = ("input", "0.output_gradient_inverse", "0.input_inverse")
_OF_WEIGHT = ("dy.transposed", "input.transposed", "0.output_gradient_inverse", "0.input_inverse")
_GRADIENTS = tuple(FLOAT8.values())


def form_of(m: Match, which: str, kind: str = "plain") -> ProductForm:
    """One of the three products of op 0, "y", "dx" or "dW", as it is configured."""
    form = cast(Float8MatMul, m[0]).form
    x, weight, gradient = form.formats
    a, b, out, lying = {
        "y": (x, weight, form.dtype, products.ALONG),
        "dx": (gradient, weight, form.dtype, (False, False)),
        "dW": (gradient, x, form.weight_dtype, (True, False)),
    }[which]
    fast = dict(zip(("y", "dx", "dW"), form.fast, strict=True))[which]
    return products.form_of(kind, a, b, out, fast, lying if _is_by_rows(m) else products.ALONG)


def _onto_main_grad(m: Match, over: bool = False) -> ProductForm:
    """dW as it is added to main_grad, or written over it."""
    return form_of(m, "dW", "plain" if over else "onto").giving(MAIN_GRAD)


def sizes_of(m: Match, which: str, rows: int) -> tuple[int, int, int]:
    """(rows, columns, what is summed over) of one of the products of op 0, for so many rows of its input."""
    inner, out = m[0].in_features, m[0].out_features
    tokens = rows if _is_by_rows(m) else padded(rows)
    return {"y": (rows, out, inner), "dx": (rows, inner, out), "dW": (out, inner, tokens)}[which]


# ------------------------------------------------------------------------------------------- what runs


def _is_by_rows(m: Match) -> bool:
    """Whether the GPU's products take factors as they lie."""
    return products.takes_any_layout(m.device, m.capability)


def _choose(m: Match, method: str) -> Body:
    if method == "input_gradient" or not m[0].accumulate_into_main_grad:
        return _native(m, "dx" if method == "input_gradient" else "dW")
    forms, over = (_onto_main_grad(m), _onto_main_grad(m, over=True)), m[0].overwrite_main_grad
    algorithms = functools.partial(algorithms_of, forms[over], sizes_of(m, "dW", m.x.exact().rows))

    def main_gradient(
        dy: torch.Tensor, x: torch.Tensor, dy_inverse: torch.Tensor, x_inverse: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return put_weight_gradient(forms, dy, x, lambda dy: (dy_inverse, x_inverse), weight, over)

    return Body(main_gradient, describe=algorithms)


def _native(m: Match, which: str, kind: str = "plain") -> Body:
    """A product that runs in the native loop."""
    return body_of(form_of(m, which, kind), sizes_of(m, which, m.x.exact().rows))


# ------------------------------------------------------------------------------ why not, and what it costs


def why_no_float8(m: Match, which: Iterable[str], kind: str = "plain") -> str | bool:
    """Why cuBLASLt cannot run these products of a match; True when it can."""
    why = products.obstacle_on(m.device, m.capability)
    if why is not None:
        return f"{why}; it is emulated"
    if m.target != "cuda":
        return "the kernels that lay out its factors are compiled for the GPU at hand, and this plan has none of these"
    weight = m[0].dtype_of("weight")
    if weight not in KINDS and not m[0].form.weight_is_kept:
        return f"weights are quantized from {', '.join(map(text_of, KINDS))}, this one is in {text_of(weight)}"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return True
    found = (asked(_refusal, m, product, m.x.rows, kind) for product in which)
    return next((words for words in found if words), True)


def _refusal(m: Match, which: str, rows: int, kind: str) -> str | None:
    if not rows:
        return None
    form = _onto_main_grad(m) if kind == "onto" else form_of(m, which, kind)
    return products.refusal(form, sizes_of(m, which, rows), m.device)


def _why_not_backward(m: Match, main_grad: bool, by_rows: bool = False) -> str | bool:
    if _is_by_rows(m) != by_rows:
        how = "lie along what is summed" if by_rows else "may lie by rows"
        return f"factors of 8 bits {how} on this device"
    if m[0].accumulate_into_main_grad != main_grad:
        return "accumulate_into_main_grad is off" if main_grad else "the weight's gradient goes to its main_grad"
    onto = why_no_float8(m, ("dW",), "onto") if main_grad else True
    return onto if isinstance(onto, str) else why_no_float8(m, ("dx",) if main_grad else ("dx", "dW"))


def cost_of(m: Match, which: str) -> Cost:
    """What one of the products of op 0 takes: "y", "dx" or "dW"."""
    form = form_of(m, which)
    out = m[0].dtype_of("weight") if which == "dW" else form.out_dtype
    return cost_of_product(sizes_of(m, which, m.x.rows), form.dtype, out)


# ---------------------------------------------------------------------------------------------- the fusions


def _declare(row: ProductRow8) -> Fusion:
    """y."""
    return declare(
        row,
        _OF_OUTPUT,
        lambda m, kind: why_no_epilogue(m) or why_no_float8(m, ("y",), kind),
        lambda m, kind: cost_of(m, "y"),
        lambda m, method, kind: _native(m, "y", kind),
    )


def _declare_backward(by_rows: bool, main_grad: bool) -> Fusion:
    """dx and dW of factors that lie by rows or along what is summed; dW onto main_grad, or as a gradient."""
    name = f"float8_matmul_{'rows_' if by_rows else ''}{'main_grad' if main_grad else 'backward'}"
    lying = "lie by rows" if by_rows else "lie along what is summed"
    onto = ", dW onto main_grad" if main_grad else ""
    of_input = _OF_INPUT_BY_ROWS if by_rows else _OF_INPUT
    of_weight = (*(_OF_WEIGHT_BY_ROWS if by_rows else _OF_WEIGHT), *(["0.weight"] if main_grad else []))
    return register(
        Fusion(
            name,
            "backward",
            (Float8MatMul,),
            run_forward=None,
            run_backward=None,
            when=functools.partial(_why_not_backward, main_grad=main_grad, by_rows=by_rows),
            cost=lambda m: (cost_of(m, "dx"), cost_of(m, "dW")),
            doc=f"dx = dy W and dW = dy^T x by cuBLASLt, of factors that {lying}{onto}.",
            gradients=(
                Gradient(("input",), of_input, "input_gradient"),
                Gradient(("0.weight",), of_weight, "weight_gradient"),
            ),
            choose=_choose,
            takes_gradients_in=_GRADIENTS,
        )
    )


_ROWS = (
    ProductRow8("float8_matmul", "y = (x s) (W t)^T by cuBLASLt.", (Float8MatMul,)),
    ProductRow8(
        "float8_matmul_bias",
        "The product's epilogue adds the bias.",
        (Float8MatMul, Optional(QuantizeGradient), Bias),
        kind="bias",
        adds=("-1.bias",),
    ),
)
FUSIONS = (
    *map(_declare, _ROWS),
    *(_declare_backward(by_rows, main_grad) for by_rows in (False, True) for main_grad in (False, True)),
)
