"""Rows of cuBLASLt's for products of 8 bits, on GPUs that have them: QuantizedMatMul alone, and with a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch

from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import check
from te_fuser.fusions.registry import Fusion, register
from te_fuser.kernels import quantized_matmul as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bias import Bias
from te_fuser.ops.main_grad import put_gradient
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.sizes import asked

MAIN_GRAD = torch.float32  # as it usually is
_TAKES = ("input", "0.weight", "0.input_scale", "0.weight_scale")


def body_of(form: ProductForm, sizes: tuple[int, int, int]) -> Body:
    """A product of 8 bits that runs in the native loop, in sizes (m, n, k)."""
    return Body(products.configured(form).make, plain=True, describe=functools.partial(algorithms_of, form, sizes))


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
        products.configured(forms[over].giving(main_grad.dtype))((dy, x, *scales(dy), main_grad))
        torch.autograd.graph.increment_version(main_grad)

    # By rows as `put` takes them: those of a part of a joined weight are then whole rows of what lies transposed.
    return put_gradient(*((dy.mT, x.mT) if along else (dy, x)), weight, over, put)


def _form_of(m: Match, kind: str) -> ProductForm:
    fast = cast(QuantizedMatMul, m[0]).fast_accumulation
    return products.form_of(kind, m.dtype, m[0].dtype_of("weight"), m.y.dtype, fast)


def _sizes(m: Match, rows: int) -> tuple[int, int, int]:
    op = cast(QuantizedMatMul, m[0])
    return rows, op.out_features, op.in_features


def _choose(m: Match, method: str, kind: str) -> Body:
    return body_of(_form_of(m, kind), _sizes(m, m.x.exact().rows))


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
    return asked(_refusal, m, kind, m.x.rows)


def _refusal(m: Match, kind: str, rows: int) -> str | None:
    return products.refusal(_form_of(m, kind), _sizes(m, rows), m.device)


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
            choose=functools.partial(_choose, kind=kind),
        )
    )


FUSIONS = (
    _declare("quantized_matmul", "y = (x s) (W t)^T by cuBLASLt.", "plain", (QuantizedMatMul,)),
    _declare("quantized_matmul_bias", "The product's epilogue adds the bias.", "bias", (QuantizedMatMul, Bias)),
)
