"""Products of 8 bits by cuBLASLt, on GPUs that have them: a row for each, of QuantizedMatMul and of Float8MatMul.

Forward of the latter reads W in 8 bits by rows, backward turned for dx = dy W, and dy and x transposed for dW = dy^T x:
the kernels that make these store them so. On GPUs whose products take factors as they lie, all are read by rows, and
nothing is turned. Each call makes what is read of W before its first step, for all products of the list at once, or it
is kept from micro-batch to micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.codegen.description import padded
from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.cublaslt import why_no_dropout
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import Optional, PatternPart
from te_fuser.fusions.registry import Costs, Fusion
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantizers import DTYPES, FOUR, KINDS
from te_fuser.ops.base import FusableOperation, Gradient
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.casts import QuantizeGradient
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.float8_matmul import Float8Form, Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.sizes import asked
from te_fuser.params.main_grad import put_gradient
from te_fuser.recipe.recipes import OwnScales

MAIN_GRAD = torch.float32  # as it usually is
# In the order in which a native product takes them: both factors, the scales of both; a bias.
TAKES: dict[type[FusableOperation], tuple[str, ...]] = {
    QuantizedMatMul: ("input", "0.weight", "0.input_scale", "0.weight_scale"),
    Float8MatMul: ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse"),
    OwnScalesMatMul: ("input", "0.weight"),
}
# Whether factors lie by rows -> what dx reads, and dW.
_OF_GRADIENTS = {
    False: (
        ("0.weight_turned", "0.output_gradient_inverse", "0.weight_inverse"),
        ("dy.transposed", "input.transposed", "0.output_gradient_inverse", "0.input_inverse"),
    ),
    True: (
        ("0.weight_data", "0.output_gradient_inverse", "0.weight_inverse"),
        ("input", "0.output_gradient_inverse", "0.input_inverse"),
    ),
}
_FACTORS = {"y": (0, 1), "dx": (2, 1), "dW": (2, 0)}  # product -> its factors: of x, W and dy
_LYING_BY_ROWS = {"y": products.ALONG, "dx": (False, False), "dW": (True, False)}

# ----------------------------------------------------------------------------- the products of op 0: "y", "dx", "dW"


def _form(m: Match) -> Float8Form:
    """Formats and sums of the products of op 0; of a QuantizedMatMul y alone."""
    if m[0].kind is not QuantizedMatMul:
        return cast(Float8MatMul, m[0]).form
    formats = (m.dtype, m[0].dtype_of("weight"), m.dtype)
    return Float8Form(m.y.dtype, m.y.dtype, formats, fast=(m[0].fast_accumulation, False, False))


def _own_scalings(m: Match) -> tuple[OwnScales, ...] | None:
    """Rules by which factors get scales where a product quantizes them itself."""
    form = _form(m)
    return None if form.comes_quantized else form.scalings


def _lies_by_rows(m: Match) -> bool:
    """True where the GPU's products take factors as they lie."""
    return products.takes_any_layout(m.device, m.capability)


def form_of(m: Match, which: str, kind: str = "plain") -> ProductForm:
    """Form of one of the products, as it is configured."""
    form, own, (a, b) = _form(m), _own_scalings(m), _FACTORS[which]
    out = form.weight_dtype if which == "dW" else form.dtype
    fast = dict(zip(_FACTORS, form.fast, strict=True))[which]
    lying = _LYING_BY_ROWS[which] if _lies_by_rows(m) else products.ALONG
    scales = products.ONE if own is None else (_scales_of(own[a]), _scales_of(own[b]))
    return products.form_of_8(kind, form.formats[a], form.formats[b], out, fast, lying, scales)


def _scales_of(scaling: OwnScales) -> str:
    """Layout of a factor's scales, as the native product calls it."""
    return "squares" if scaling.block is not None and scaling.block[0] > 1 else "rows"


def onto_main_grad(m: Match) -> tuple[ProductForm, ProductForm]:
    """The product dW that is added to main_grad, and that which is written over it."""
    onto, over = (form_of(m, "dW", kind).giving(MAIN_GRAD) for kind in ("onto", "plain"))
    return onto, over


def problem_of(m: Match, which: str, rows: int, kind: str = "plain") -> tuple[ProductForm, tuple[int, int, int]]:
    """A product of so many rows, and its sizes (m, n, k)."""
    inner, out = m[0].in_features, m[0].out_features
    if _own_scalings(m) is not None and rows % FOUR:
        rows = padded(rows)
    tokens = rows if which != "dW" or _lies_by_rows(m) else padded(rows)
    sizes = {"y": (rows, out, inner), "dx": (rows, inner, out), "dW": (out, inner, tokens)}[which]
    if which == "dW" and m[0].accumulate_into_main_grad:
        return onto_main_grad(m)[0], sizes
    return form_of(m, which, kind if which == "y" else "plain"), sizes


def cost_of(m: Match, which: str) -> Cost:
    """Cost of one of the products, of factors that are there."""
    form, (rows, columns, summed) = form_of(m, which), problem_of(m, which, m.x.rows)[1]
    out = m[0].dtype_of("weight") if which == "dW" else form.out_dtype
    written, flops = rows * columns * out.itemsize, 2.0 * rows * columns * summed
    return Cost(summed * (rows + columns), written, flops, dtype=name_of(form.dtype))


def body_of(m: Match, which: str, kind: str = "plain") -> Body:
    """A product that runs in the native loop."""
    form, sizes = problem_of(m, which, m.x.exact().rows, kind)
    return Body(products.product_of(form).make, True, form.by_rows, functools.partial(algorithms_of, form, sizes))


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


# -------------------------------------------------------------------------------------------------------- why not


def why_no_float8(m: Match, which: Iterable[str], kind: str = "plain") -> str | bool:
    """Reason why cuBLASLt cannot run these products of a match, or True."""
    own = _own_scalings(m)
    block = None if own is None else own[0].block
    scales = "tensor" if own is None else "block" if block is not None and block[1] == 128 else "mx"
    why = products.obstacle_on(m.device, m.capability, scales)
    if why is not None:
        return f"{why}; it is emulated"
    why = _WHY_NO_FACTORS[m[0].kind](m)
    if why is not None:
        return why
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return True
    found = (asked(_refusal, m, product, m.x.rows, kind) for product in which)
    return next((words for words in found if words), True)


def _refusal(m: Match, which: str, rows: int, kind: str) -> str | None:
    return products.refusal_of(*problem_of(m, which, rows, kind), m.device) if rows else None


_NO_KERNELS = "the kernels that {} its factors are compiled for the GPU at hand, and this plan has none of these"


def _why_not_given(m: Match) -> str | None:
    weight = m[0].dtype_of("weight")
    if m.target == "torch":
        return "this plan is one of PyTorch's operations alone"
    if not {m.dtype, weight} <= {*FLOAT8.values()}:
        return f"its factors are in {text_of(m.dtype)} and {text_of(weight)}"
    return "cuBLASLt's products of 8 bits are not summed in float64" if m.y.dtype == torch.float64 else None


def _why_not_laid_out(m: Match) -> str | None:
    if m.target != "cuda":
        return _NO_KERNELS.format("lay out")
    weight = m[0].dtype_of("weight")
    if weight in KINDS or m[0].form.weight_is_kept:
        return None
    return f"weights are quantized from {', '.join(map(text_of, KINDS))}, this one is in {text_of(weight)}"


def _why_not_quantized(m: Match) -> str | None:
    if m.target != "cuda":
        return _NO_KERNELS.format("quantize")
    found = {"x": m.dtype, "the weight": m[0].dtype_of("weight")}
    has = next((f"{name} is in {text_of(dtype)}" for name, dtype in found.items() if dtype not in DTYPES), None)
    return has and f"it quantizes {', '.join(map(text_of, DTYPES))}, {has}"


# Kind of op -> why its factors are none of 8 bits that cuBLASLt takes.
_WHY_NO_FACTORS: dict[type[FusableOperation], Callable[[Match], str | None]] = {
    QuantizedMatMul: _why_not_given,
    Float8MatMul: _why_not_laid_out,
    PartlyFloat8MatMul: _why_not_laid_out,
    OwnScalesMatMul: _why_not_quantized,
}


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

# ----------------------------------------------------------------------------------------------------------- rows


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
    which: tuple[str, ...] = ("y",),
    when: Callable[[Match], str | None] = lambda m: None,
    cost: Callable[[Match, str], Costs] = lambda m, kind: cost_of(m, "y"),
    choose: Callable[[Match, str, str], Body] = lambda m, method, kind: body_of(m, "y", kind),
    saves: tuple[str, ...] = (),
    **more: Any,
) -> Fusion:
    """The fusion that a row says, registered; joint where it saves something. It has no body: that is chosen.

    `when` gives why it does not take a match, whatever cuBLASLt can.
    """

    def accepts(m: Match) -> str | bool:
        in_epilogue = (why(m, k) for k, op in enumerate(m.ops) if (why := _EPILOGUES.get(op.kind)) is not None)
        return when(m) or next(filter(None, in_epilogue), None) or why_no_float8(m, which, row.kind)

    return chosen(
        row.name,
        "joint" if saves else "forward",
        row.pattern,
        row.doc,
        when=accepts,
        cost=lambda m: cost(m, row.kind),
        saves=saves,
        takes=(*TAKES[cast(type[FusableOperation], row.pattern[0])], *row.adds),
        gives=("output", *saves),
        choose=lambda m, method: choose(m, method, row.kind),
        **more,
    )


def _declare_backward(by_rows: bool, main_grad: bool) -> Fusion:
    """dx and dW of factors by rows or along what is summed; dW may go onto main_grad."""
    name = f"float8_matmul_{'rows_' if by_rows else ''}{'main_grad' if main_grad else 'backward'}"
    lying = "lie by rows" if by_rows else "lie along what is summed"
    onto = ", dW onto main_grad" if main_grad else ""
    of_input, of_weight = _OF_GRADIENTS[by_rows]

    def why_not(m: Match) -> str | bool:
        if _lies_by_rows(m) != by_rows:
            return f"factors of 8 bits {'lie along what is summed' if by_rows else 'may lie by rows'} on this device"
        if m[0].accumulate_into_main_grad != main_grad:
            return "accumulate_into_main_grad is off" if main_grad else "the weight's gradient goes to its main_grad"
        return why_no_float8(m, ("dW", "dx") if main_grad else ("dx", "dW"))

    return chosen(
        name,
        "backward",
        (Float8MatMul,),
        f"dx = dy W and dW = dy^T x by cuBLASLt, of factors that {lying}{onto}.",
        when=why_not,
        cost=lambda m: (cost_of(m, "dx"), cost_of(m, "dW")),
        gradients=(
            Gradient(("input",), of_input, "input_gradient"),
            Gradient(("0.weight",), (*of_weight, *(["0.weight"] if main_grad else [])), "weight_gradient"),
        ),
        choose=_choose_gradient,
        takes_gradients_in=tuple(FLOAT8.values()),
    )


def _choose_gradient(m: Match, method: str) -> Body:
    if method == "input_gradient" or not m[0].accumulate_into_main_grad:
        return body_of(m, "dx" if method == "input_gradient" else "dW")
    forms, over = onto_main_grad(m), m[0].overwrite_main_grad
    algorithms = functools.partial(algorithms_of, forms[bool(over)], problem_of(m, "dW", m.x.exact().rows)[1])

    def main_gradient(
        dy: torch.Tensor, x: torch.Tensor, dy_inverse: torch.Tensor, x_inverse: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return put_weight_gradient(forms, dy, x, lambda dy: (dy_inverse, x_inverse), weight, over)

    return Body(main_gradient, describe=algorithms)


_ALONE, _BIAS = "y = (x s) (W t)^T by cuBLASLt.", "The product's epilogue adds the bias."
_FLOAT8_BIAS = (Float8MatMul, Optional(QuantizeGradient), Bias)
_ROWS = (
    ProductRow8("quantized_matmul", _ALONE, (QuantizedMatMul,)),
    ProductRow8("quantized_matmul_bias", _BIAS, (QuantizedMatMul, Bias), kind="bias", adds=("1.bias",)),
    ProductRow8("float8_matmul", _ALONE, (Float8MatMul,)),
    ProductRow8("float8_matmul_bias", _BIAS, _FLOAT8_BIAS, kind="bias", adds=("-1.bias",)),
)
FUSIONS = (
    *map(declare, _ROWS),
    *(_declare_backward(by_rows, main_grad) for by_rows in (False, True) for main_grad in (False, True)),
)
