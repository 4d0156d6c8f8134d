"""PartlyFloat8MatMul by cuBLASLt: products of 8 bits of what is quantized right before them, and others as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import cast

import torch

from te_fuser.codegen.cuda_source_kernel import WrittenKernel
from te_fuser.codegen.description import padded
from te_fuser.dtypes import name_of, text_of
from te_fuser.fusions.cublaslt import why_no_product
from te_fuser.fusions.cublaslt_float8 import form_of, why_no_float8
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Body, Cost, FusionCall, Match
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.kernels.quantizers import KINDS, QuantizeWeights, Transposed8, Weight8, quantizer_on
from te_fuser.ops.base import Gradient
from te_fuser.ops.float8_matmul import PartlyFloat8MatMul, raise_to_largest
from te_fuser.ops.matmul import as_rows, in_shape_of

_WHICH = ("y", "dx", "dW")
_KINDS = dict(zip(_WHICH, ("forward", "dgrad", "wgrad"), strict=True))
_GRADIENT = ("0.output_gradient_scale", "0.output_gradient_inverse", "0.output_gradient_amax")
_OF_INPUT = ("0.weight", "0.weight_scale", "0.weight_inverse", *_GRADIENT)
_OF_WEIGHT = ("input", "0.input_scale", "0.input_inverse", *_GRADIENT)


def _quantized(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor | None = None, turned: bool = False
) -> torch.Tensor:
    """x in 8 bits as rows, or turned; raises its amax."""
    wanted = Weight8(x.dtype, not turned, turned, amax is not None)
    numbers = (scale,) if amax is None else (scale, amax)
    return cast(torch.Tensor, quantizer_on(x.device, [wanted], dtype)(as_rows(x), *numbers))


def _output(m: FusionCall, x: torch.Tensor, product: ProductForm | None, records: bool) -> torch.Tensor:
    """y = x W^T; raises the amaxes of x and W."""
    op = m[0]
    if product is None:
        for t, amax in ((x, op.input_amax), (op.weight, op.weight_amax)) if records else ():
            raise_to_largest(amax, t)
        return products.multiply("forward", x, op.weight)
    slots = (op.input_amax, op.weight_amax) if records else (None, None)
    x8 = _quantized(x, op.input_scale, product.dtype, slots[0])
    weight = _quantized(op.weight, op.weight_scale, product.b_dtype, slots[1])
    return in_shape_of(x, products.product_of(product).make(x8, weight, op.input_inverse, op.weight_inverse))


def _gradient(
    dy: torch.Tensor,
    other: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    gradient_scale: torch.Tensor,
    gradient_inverse: torch.Tensor,
    amax: torch.Tensor,
    which: str,
    product: ProductForm | None,
) -> torch.Tensor:
    """dx = dy W, or dW = dy^T x, of W or x with scale and inverse; raises the amax of dy."""
    if product is None:
        raise_to_largest(amax, dy)
        return products.multiply(_KINDS[which], dy, other)
    factors = (
        _quantized(dy, gradient_scale, product.dtype, amax),
        _quantized(other, scale, product.b_dtype, turned=which == "dx"),
    )
    if which == "dx":
        return in_shape_of(dy, products.product_of(product).make(*factors, gradient_inverse, inverse))
    turned = map(quantizers.transpose_by_kernel, factors)
    return cast(torch.Tensor, products.product_of(product).make(*turned, gradient_inverse, inverse))


def _product(m: Match, which: str) -> ProductForm | None:
    """The product in 8 bits; None where it is one of factors as they are."""
    kept = dict(zip(_WHICH, cast(PartlyFloat8MatMul, m[0]).form.kept, strict=True))
    return None if kept[which] else form_of(m, which)


def _choose(m: Match, method: str) -> Body:
    if method == "forward":
        return Body(functools.partial(_output, product=_product(m, "y"), records=m[0].reads("weight_amax")), plain=True)
    which = "dx" if method == "input_gradient" else "dW"
    return Body(functools.partial(_gradient, which=which, product=_product(m, which)), plain=True)


def _kernels(m: Match, direction: str, needed: frozenset[str]) -> Iterator[WrittenKernel]:
    """Kernels that quantize and turn factors."""
    asked = {"y": direction == "forward", "dx": "input" in needed, "dW": "0.weight" in needed}
    for found in filter(None, (_product(m, which) for which, is_asked in asked.items() if is_asked)):
        yield from (QuantizeWeights(dtype) for dtype in dict.fromkeys((found.dtype, found.b_dtype)))
    of_weight = _product(m, "dW") if asked["dW"] else None
    if of_weight is not None:
        yield from (Transposed8(dtype) for dtype in dict.fromkeys((of_weight.dtype, of_weight.b_dtype)))


def _why_not(m: Match, which: Iterable[str]) -> str | bool:
    narrow = [product for product in which if _product(m, product) is not None]
    if all(cast(PartlyFloat8MatMul, m[0]).form.kept):
        return "it is calibrating: amaxes are found by PyTorch's operations"
    if m.dtype not in KINDS or m[0].dtype_of("weight") != m.dtype:
        return f"x is in {text_of(m.dtype)}, its weight in {text_of(m[0].dtype_of('weight'))}"
    wide = (why_no_product(m, _KINDS[product]) for product in which if product not in narrow)
    return next(filter(None, wide), None) or why_no_float8(m, narrow)


def _cost(m: Match, which: str) -> Cost:
    rows, inner, out = m.x.rows, m[0].in_features, m[0].out_features
    rows = padded(rows) if which == "dW" else rows
    sizes = {"y": (rows, inner, out), "dx": (rows, out, inner), "dW": (out, rows, inner)}[which]
    wide, product = m.dtype.itemsize, _product(m, which)
    factors = sizes[1] * (sizes[0] + sizes[2])
    apart = 0 if product is None else (1 + wide + 2 * (which == "dW")) * factors
    width = wide if product is None else 1
    dtype = None if product is None else name_of(product.dtype)
    launches = 1 if product is None else 5 if which == "dW" else 3
    moved = width * factors + apart / 2, wide * sizes[0] * sizes[2] + apart / 2
    return Cost(*moved, 2.0 * sizes[0] * sizes[1] * sizes[2], launches, apart=apart, dtype=dtype)


chosen(
    "partly_float8_mat_mul",
    "forward",
    [PartlyFloat8MatMul],
    "y = (x s) (W t)^T of what is quantized before, or x W^T, by cuBLASLt.",
    when=lambda m: _why_not(m, ("y",)),
    cost=lambda m: _cost(m, "y"),
    choose=_choose,
    compiles=_kernels,
)
chosen(
    "partly_float8_mat_mul_backward",
    "backward",
    [PartlyFloat8MatMul],
    "dx = dy W and dW = dy^T x, each of what is quantized before or as it is, by cuBLASLt.",
    when=lambda m: (
        "the weight's gradient goes to its main_grad" if m[0].accumulate_into_main_grad else _why_not(m, ("dx", "dW"))
    ),
    cost=lambda m: (_cost(m, "dx"), _cost(m, "dW")),
    gradients=(
        Gradient(("input",), _OF_INPUT, "input_gradient"),
        Gradient(("0.weight",), _OF_WEIGHT, "weight_gradient"),
    ),
    choose=_choose,
    compiles=_kernels,
)
