"""Rows of cuBLASLt's for products of 8 bits, on GPUs that have them: QuantizedMatMul alone, and with a bias."""

from __future__ import annotations

import functools
from typing import cast

import torch

from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import check
from te_fuser.fusions.registry import Fusion, register
from te_fuser.kernels import quantized_matmul as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bias import Bias
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.sizes import asked

_TAKES = ("input", "0.weight", "0.input_scale", "0.weight_scale")


def _body(m: Match, method: str, kind: str) -> Body:
    op, weight = cast(QuantizedMatMul, m[0]), m[0].dtype_of("weight")
    how = kind, m.dtype, weight, m.y.dtype, op.fast_accumulation
    sizes = m.x.exact().rows, op.out_features, op.in_features
    algorithms = functools.partial(algorithms_of, products.form_of(*how), sizes)
    return Body(products.configured(*how).make, plain=True, describe=algorithms)


def _cost(m: Match) -> Cost:
    op = cast(QuantizedMatMul, m[0])
    inner, columns = op.in_features, op.out_features
    read, written = inner * (m.x.rows + columns), m.x.rows * columns * m.y.dtype.itemsize
    return Cost(read, written, 2.0 * m.x.rows * inner * columns, dtype=name_of(m.dtype))


def _why_no_product(m: Match, kind: str) -> str | None:
    """Why cuBLASLt cannot multiply what a match does; None when it can."""
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
        return None
    op = cast(QuantizedMatMul, m[0])
    return asked(_refusal, m, kind, weight, m.x.rows, op.out_features, op.in_features)


def _refusal(m: Match, kind: str, weight: torch.dtype, rows: int, n: int, k: int) -> str | None:
    op = cast(QuantizedMatMul, m[0])
    return products.refusal(m.dtype, weight, m.y.dtype, (rows, n, k), m.device, kind, op.fast_accumulation)


def why_no_bias(m: Match, at: int = 1) -> str | None:
    """Why the bias behind a product of 8 bits is none for its epilogue; None when it is."""
    dtype = m[at].dtype_of("bias")
    if m.y.dtype == torch.float32:
        return "not every cuBLASLt adds a bias in float32 to products of 8 bits"
    return None if dtype == m.y.dtype else f"the bias is in {text_of(dtype)}, the product in {text_of(m.y.dtype)}"


def _declare(name: str, doc: str, kind: str, pattern: tuple[type[FusableOperation], ...]) -> Fusion:
    bias = Bias in pattern
    return register(
        Fusion(
            name,
            "forward",
            check(pattern, name),
            run_forward=None,
            run_backward=None,
            when=lambda m: (why_no_bias(m) if bias else None) or _why_no_product(m, kind) or True,
            cost=_cost,
            doc=doc,
            takes=(*_TAKES, *(["1.bias"] if bias else [])),
            gives=("output",),
            choose=functools.partial(_body, kind=kind),
        )
    )


FUSIONS = (
    _declare("quantized_matmul", "y = (x s) (W t)^T by cuBLASLt.", "plain", (QuantizedMatMul,)),
    _declare("quantized_matmul_bias", "The product's epilogue adds the bias.", "bias", (QuantizedMatMul, Bias)),
)
