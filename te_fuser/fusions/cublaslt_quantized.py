"""Rows of cuBLASLt's for products of 8 bits, on GPUs that have them: QuantizedMatMul alone, and with a bias."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from te_fuser.dtypes import FLOAT8, name_of, text_of
from te_fuser.fusions.cublaslt import why_no_dropout
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.pattern import PatternPart, check
from te_fuser.fusions.registry import Costs, Fusion, register
from te_fuser.kernels import quantized_matmul as products
from te_fuser.kernels.cublaslt.products import algorithms_of
from te_fuser.kernels.cublaslt.tuned import ProductForm
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bias import Bias
from te_fuser.ops.dropout import Dropout
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
        kind: the product, of `kernels.quantized_matmul.KINDS`.
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
    return register(
        Fusion(
            row.name,
            "joint" if saves else "forward",
            check(row.pattern, row.name),
            run_forward=None,
            run_backward=None,
            when=lambda m: why_not(m, row.kind),
            cost=lambda m: cost(m, row.kind),
            saves=saves,
            doc=row.doc,
            takes=(*takes, *row.adds),
            gives=("output", *saves),
            choose=lambda m, method: choose(m, method, row.kind),
            **more,
        )
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
    return Body(products.configured(form).make, True, form.by_rows, functools.partial(algorithms_of, form, sizes))


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
        products.configured(forms[over].giving(main_grad.dtype))((dy, x, *scales(dy), main_grad))
        torch.autograd.graph.increment_version(main_grad)

    # By rows as `put` takes them: those of a part of a joined weight are then whole rows of what lies transposed.
    return put_gradient(*((dy.mT, x.mT) if along else (dy, x)), weight, over, put)


# -------------------------------------------------------------------------------------- QuantizedMatMul

_TAKES = ("input", "0.weight", "0.input_scale", "0.weight_scale")


def _form_of(m: Match, kind: str) -> ProductForm:
    fast = cast(QuantizedMatMul, m[0]).fast_accumulation
    return products.form_of(kind, m.dtype, m[0].dtype_of("weight"), m.y.dtype, fast)


def _sizes(m: Match, rows: int) -> tuple[int, int, int]:
    op = cast(QuantizedMatMul, m[0])
    return rows, op.out_features, op.in_features


def _why_not(m: Match, kind: str) -> str | bool:
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
    return asked(_refusal, m, kind, m.x.rows) or True


def _refusal(m: Match, kind: str, rows: int) -> str | None:
    return products.refusal(_form_of(m, kind), _sizes(m, rows), m.device)


_ROWS = (
    ProductRow8("quantized_matmul", "y = (x s) (W t)^T by cuBLASLt.", (QuantizedMatMul,)),
    ProductRow8(
        "quantized_matmul_bias",
        "The product's epilogue adds the bias.",
        (QuantizedMatMul, Bias),
        kind="bias",
        adds=("1.bias",),
    ),
)
FUSIONS = tuple(
    declare(
        row,
        _TAKES,
        _why_not,
        lambda m, kind: cost_of_product(_sizes(m, m.x.rows), m.dtype, m.y.dtype),
        lambda m, method, kind: body_of(_form_of(m, kind), _sizes(m, m.x.exact().rows)),
    )
    for row in _ROWS
)
