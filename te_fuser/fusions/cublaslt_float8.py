"""Products of 8 bits by cuBLASLt, on GPUs that have them: QuantizedMatMul, and the three of Float8MatMul.

Forward reads W in 8 bits by rows, backward turned for dx = dy W, and dy and x transposed for dW = dy^T x: the kernels
that make these store them so. On GPUs whose products take factors as they lie, all are read by rows, and nothing is
turned. Each call makes what is read of W before its first step, for all products of the list at once, or it is kept
from micro-batch to micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.cublaslt import why_no_dropout
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import Optional, PatternPart
from te_fuser.fusions.registry import Costs, Fusion
from te_fuser.kernels.cublaslt import products as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantizers import KINDS, padded
from te_fuser.ops.base import FusableOperation, Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.float8_products import Float8Form
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.sizes import asked
from te_fuser.params.main_grad import put_gradient

MAIN_GRAD = torch.float32  # as it usually is

# ------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class ProductRow8:
    """A fusion whose forward is one product of 8 bits.

    Attributes:
        doc: what it computes, in a sentence.
        pattern: the ops that it stands for, the product first.
        kind: the product, of `kernels.cublaslt.products.KINDS_8`.
        adds: what that takes behind both factors and their scales.
    """

    name: str
    doc: str
    pattern: tuple[PatternPart, ...]
    kind: str = "plain"
    adds: tuple[str, ...] = ()


def declare(
    row: ProductRow8,
    takes: tuple[str, ...],
    why_not: Callable[[Match, str], str | bool],
    cost: Callable[[Match, str], Costs],
    choose: Callable[[Match, str, str], Body],
    saves: tuple[str, ...] = (),
    **more: Any,
) -> Fusion:
    """The fusion that a row says, registered; joint where it saves something. It has no body: that is chosen.

    Args:
        takes: what every such product takes.
        why_not: f(match, kind) -> why it does not take a match, or True.
        cost: f(match, kind).
        choose: f(match, method, kind).
        more: what else is said of a fusion.
    """
    return chosen(
        row.name,
        "joint" if saves else "forward",
        row.pattern,
        row.doc,
        when=lambda m: why_not(m, row.kind),
        cost=lambda m: cost(m, row.kind),
        saves=saves,
        takes=(*takes, *row.adds),
        gives=("output", *saves),
        choose=lambda m, method: choose(m, method, row.kind),
        **more,
    )


def why_no_epilogue(m: Match) -> str | None:
    """Why an op behind the product of a match is none for the epilogue of one of 8 bits; None when all are."""
    found = (why(m, k) for k, op in enumerate(m.ops) if (why := _EPILOGUES.get(op.kind)) is not None)
    return next(filter(None, found), None)


def _why_no_bias(m: Match, at: int) -> str | None:
    dtype = m[at].dtype_of("bias")
    if m.y.dtype == torch.float32:
        return "not every cuBLASLt adds a bias in float32 to products of 8 bits"
    return None if dtype == m.y.dtype else f"the bias is in {text_of(dtype)}, the product in {text_of(m.y.dtype)}"


# Kind of op -> why an epilogue cannot be that op of a match.
_EPILOGUES: dict[type[FusableOperation], Callable[[Match, int], str | None]] = {
    Bias: _why_no_bias,
    Dropout: why_no_dropout,
}


# ----------------------------------------------------------------------------------- what they run and cost


def body_of(form: ProductForm, sizes: tuple[int, int, int]) -> Body:
    """A product of 8 bits that runs in the native loop, in sizes (m, n, k)."""
    return Body(products.product_of(form).make, True, form.by_rows, functools.partial(algorithms_of, form, sizes))


def cost_of_product(sizes: tuple[int, int, int], dtype: torch.dtype, out: torch.dtype) -> Cost:
    """What a product of factors of 8 bits takes, in sizes (m, n, k): `dtype` is that of one of them."""
    rows, columns, summed = sizes
    read, written = summed * (rows + columns), rows * columns * out.itemsize
    return Cost(read, written, 2.0 * rows * columns * summed, dtype=name_of(dtype))


def put_weight_gradient(
    forms: tuple[ProductForm, ProductForm],
    dy: torch.Tensor,
    x: torch.Tensor,
    scales: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    weight: torch.Tensor,
    over: bool,
) -> torch.Tensor:
    """main_grad += dy^T x, or main_grad = dy^T x, both given as the product takes them; gives what stands for it.

    Args:
        forms: the product that adds, and the one that writes over.
        scales: f(dy, or what of it is of a part of a joined weight) -> the scales of both.
    """
    along = not forms[0].transpose_a

    def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
        dy, x = (dy.mT, x.mT) if along else (dy, x)
        products.product_of(forms[over].giving(main_grad.dtype))((dy, x, *scales(dy), main_grad))
        torch.autograd.graph.increment_version(main_grad)

    # By rows as `put` takes them: those of a part of a joined weight are then whole rows of what lies transposed.
    return put_gradient(*((dy.mT, x.mT) if along else (dy, x)), weight, over, put)


# -------------------------------------------------------------------------------------- QuantizedMatMul


def _quantized_form(m: Match, kind: str) -> ProductForm:
    fast = cast(QuantizedMatMul, m[0]).fast_accumulation
    return products.form_of_8(kind, m.dtype, m[0].dtype_of("weight"), m.y.dtype, fast)


def _quantized_sizes(m: Match, rows: int) -> tuple[int, int, int]:
    op = cast(QuantizedMatMul, m[0])
    return rows, op.out_features, op.in_features


def _why_not_quantized(m: Match, kind: str) -> str | bool:
    """Why cuBLASLt cannot multiply what a match does; True when it can."""
    if no_epilogue := why_no_epilogue(m):
        return no_epilogue
    why = products.obstacle_on(m.device, m.capability)
    if why is not None:
        return f"{why}; it is emulated"
    if m.target == "torch":
        return "this plan is one of PyTorch's operations alone"
    weight = m[0].dtype_of("weight")
    if not {m.dtype, weight} <= {*FLOAT8.values()}:
        return f"its factors are in {text_of(m.dtype)} and {text_of(weight)}"
    if m.y.dtype == torch.float64:
        return "cuBLASLt's products of 8 bits are not summed in float64"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return True
    return asked(_quantized_refusal, m, kind, m.x.rows) or True


def _quantized_refusal(m: Match, kind: str, rows: int) -> str | None:
    return products.refusal_of(_quantized_form(m, kind), _quantized_sizes(m, rows), m.device)


# In the order in which a native product takes them: both factors, the scales of both; a bias.
_OF_OUTPUT = ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse")
_OF_INPUT = ("0.weight_turned", "0.output_gradient_inverse", "0.weight_inverse")
_OF_INPUT_BY_ROWS = ("0.weight_data", "0.output_gradient_inverse", "0.weight_inverse")
_OF_WEIGHT_BY_ROWS = ("input", "0.output_gradient_inverse", "0.input_inverse")
_OF_WEIGHT = ("dy.transposed", "input.transposed", "0.output_gradient_inverse", "0.input_inverse")
_GRADIENTS = tuple(FLOAT8.values())
# Product -> its factors, of input, weight, output gradient; how these lie that lie by rows.
FACTORS: dict[str, tuple[int, int]] = {"y": (0, 1), "dx": (2, 1), "dW": (2, 0)}
_BY_ROWS = {"y": products.ALONG, "dx": (False, False), "dW": (True, False)}


def form_of(m: Match, which: str, kind: str = "plain") -> ProductForm:
    """One of the three products of op 0, "y", "dx" or "dW", as it is configured."""
    lying = _BY_ROWS[which] if _is_by_rows(m) else products.ALONG
    return product_form(cast(Float8MatMul, m[0]).form, which, kind, transposes=lying)


def product_form(form: Float8Form, which: str, kind: str, **lying: Any) -> ProductForm:
    """The same, of factors that lie so."""
    a, b = FACTORS[which]
    out = form.weight_dtype if which == "dW" else form.dtype
    fast = dict(zip(FACTORS, form.fast, strict=True))[which]
    return products.form_of_8(kind, form.formats[a], form.formats[b], out, fast, **lying)


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
    return products.refusal_of(form, sizes_of(m, which, rows), m.device)


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
    return chosen(
        name,
        "backward",
        (Float8MatMul,),
        f"dx = dy W and dW = dy^T x by cuBLASLt, of factors that {lying}{onto}.",
        when=functools.partial(_why_not_backward, main_grad=main_grad, by_rows=by_rows),
        cost=lambda m: (cost_of(m, "dx"), cost_of(m, "dW")),
        gradients=(
            Gradient(("input",), of_input, "input_gradient"),
            Gradient(("0.weight",), of_weight, "weight_gradient"),
        ),
        choose=_choose,
        takes_gradients_in=_GRADIENTS,
    )


_QUANTIZED = (
    ProductRow8("quantized_matmul", "y = (x s) (W t)^T by cuBLASLt.", (QuantizedMatMul,)),
    ProductRow8(
        "quantized_matmul_bias",
        "The product's epilogue adds the bias.",
        (QuantizedMatMul, Bias),
        kind="bias",
        adds=("1.bias",),
    ),
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
    *(
        declare(
            row,
            ("input", "0.weight", "0.input_scale", "0.weight_scale"),
            _why_not_quantized,
            lambda m, kind: cost_of_product(_quantized_sizes(m, m.x.rows), m.dtype, m.y.dtype),
            lambda m, method, kind: body_of(_quantized_form(m, kind), _quantized_sizes(m, m.x.exact().rows)),
        )
        for row in _QUANTIZED
    ),
    *map(_declare, _ROWS),
    *(_declare_backward(by_rows, main_grad) for by_rows in (False, True) for main_grad in (False, True)),
)
