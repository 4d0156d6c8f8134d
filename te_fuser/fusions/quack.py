"""Products by quack-kernels, where that is installed: with bias, GELU and slopes, in bfloat16 and in 8 bits.

Backward of an activation and a product: dh, the gradient of the bias and the activation's output come from one kernel;
dW = dy^T act(h) follows at once, so that nothing but h is kept for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions import cublaslt_float8
from te_fuser.fusions.cublaslt import (
    cost_of,
    put_weight_gradient,
    why_no_addend,
    why_no_backward,
    why_no_bias,
    why_no_dropout,
    why_no_gelu,
    why_no_product,
)
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import Optional
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import quack
from te_fuser.ops.activations import GELU
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.casts import Quantize, QuantizeGradient
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.glu import SwiGLU
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.structure import Add

# Small products are left to others: a step counts as so many of PyTorch's calls. It takes the host some 5, but by that
# price plans took it in MLPs of 256 to 2048 tokens, where these then took 1.15 to 1.49 of their time (an H200, by hand,
# commit 66f2500).
CALLS = 33.0

# Shares of a plain product's rate. Of bfloat16, beside plain products in a loop of an MLP's six (8192 rows, 4096 and
# 16384 features, on an H200 at its power limit): the loop took 9.981 ms with GELU's in the place of a plain product,
# 10.008 with GELU's slope, which spares the pass over dh for the sum, 10.032 with neither. SwiGLU's alone, 4096 to
# 14336 features: 1.43 ms, torch.mm 1.50; the MLP, forward and backward: 13.16 ms with it, 13.31 with cuBLASLt's product
# and SwiGLU's own kernel, 13.25 as the package's own MLP. Of 8 bits, sustained, 8192 rows, cuBLASLt's product with a
# bias over this one's: 1.04 to 1.07 for 4096 to 4096, 12288 and 16384 features, 0.97 for 16384 to 4096, for which
# cuBLASLt's first guess is another one. With an addend, in turns: 0.96 for 4096 to 4096, 1.01 for 16384 to 4096; of
# that 8 and 4 us are for what is added.
_GELU, _GELU_SLOPE, _SWIGLU_SLOPE, _BIAS_8, _ADDEND_8 = 1.03, 1.01, 1.03, 1.06, 0.98
_MOST_SUMMED = 8192

# ------------------------------------------------------------------------------------------- why a match is none


def why_not_here(m: Match, unusable: Callable[[], str | None]) -> str | None:
    """Reason against the GPU or the package; `unusable` gives that against its functions."""
    if m.capability is None and not torch.cuda.is_available():
        return "no GPU is at hand"
    major, minor = m.capability or torch.cuda.get_device_capability(m.device)
    if major != 9:
        return f"it was measured on compute capability 9 alone, this GPU has {major}.{minor}"
    return quack.PACKAGE.missing() or (unusable() if torch.cuda.is_available() else None)


def _why_no_quack(m: Match, product: int, gelu: int, bias: int) -> str | None:
    """Reason against ops `product`, `gelu` and `bias` of a match for quack's kernels."""
    why = _why_no_product(m, product, "its tanh is right to 11 bits, which is enough for bfloat16 alone")
    return why or why_no_gelu(m, gelu) or why_no_bias(m, bias) or why_not_here(m, quack.unusable)


def _why_no_product(m: Match, product: int, bfloat16_alone: str) -> str | None:
    """Reason against op `product`, whatever its epilogue, for bfloat16 alone."""
    if m.device.type != "cuda":
        return f"quack's kernels run on cuda, the input is on {m.device.type}"
    if m.target == "torch":
        return "this plan is one of PyTorch's operations alone"
    if m.dtype != torch.bfloat16:
        return f"{bfloat16_alone}, and this is {m.dtype}"
    op = cast(MatMul, m[product])
    if any(not n or n % quack.MULTIPLE for n in (op.in_features, op.out_features)):
        return (
            f"it reads and writes rows of a multiple of {quack.MULTIPLE}, and the product is of "
            f"{op.in_features} to {op.out_features} features"
        )
    if m[product].dtype_of("weight") != m.dtype:
        return f"input and weight differ in dtype, {m.dtype} and {m[product].dtype_of('weight')}"
    return None


def _why_not_swiglu(m: Match) -> bool | str:
    why = _why_no_product(m, 1, "it is for bfloat16 alone")
    if not why and not cast(SwiGLU, m[0]).gate_first:
        why = "its gate is the first half of SwiGLU's input, and here it is the second (gate_first=False)"
    why = why or why_not_here(m, quack.unusable_by_gates) or _why_not_onto(m, 1)
    return why or why_no_product(m, _weight_kind(m, 1), at=1) or True


def _why_not_onto(m: Match, at: int) -> str | None:
    """Reason why the weight gradient of op `at` cannot go to its main_grad here."""
    if m[at].accumulate_into_main_grad and m[at].own_dtype_of("weight") != m[at].dtype_of("weight"):
        return "it reads the weight as it is cast, and main_grad is that of the weight itself"
    return None


# ---------------------------------------------------------------------------------------------------- in bfloat16


def _cost(m: Match, kind: str, share: float, at: int = 0) -> Cost:
    """Cost of a product that moves as cuBLASLt's, at a share of a plain one's rate."""
    return replace(cost_of(m, kind, at), efficiency=share, calls=CALLS)


@fusion(
    forward=[MatMul, Bias, GELU],
    details=Details(takes=("input", "0.weight", "1.bias")),
    when=lambda m: why_no_backward(m) or _why_no_quack(m, 0, 2, 1) or True,
    cost=lambda m: _cost(m, "forward_bias_gelu", _GELU),
)
def matmul_bias_gelu_quack(*tensors: torch.Tensor) -> torch.Tensor:
    """Gives the output alone."""
    return quack.linear_bias_gelu(*tensors)


@fusion(
    forward=[MatMul, Bias, GELU],
    details=Details(takes=("input", "0.weight", "1.bias"), gives=("output", "1.output")),
    emits=("1.output",),
    when=lambda m: _why_no_quack(m, 0, 2, 1) or True,
    cost=lambda m: _cost(m, "forward_bias_gelu_aux", _GELU),
)
def matmul_bias_gelu_quack_aux(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the value before GELU too, which backward reads."""
    return quack.linear_bias_gelu_aux(*tensors)


def _weight_kind(m: Match, at: int) -> str:
    """The product of cuBLASLt's that gives the gradient of the weight of op `at`."""
    return "wgrad_onto" if m[at].accumulate_into_main_grad else "wgrad"


def _cost_back(m: Match, kind: str, share: float, at: int, *, read: float = 0, written: float) -> Cost:
    """Cost of dy W, and then of the gradient of the weight of op `at`, where it is needed.

    `kind` and `share` are of dy W, as in `_cost`; `read` and `written` are bytes beside those of that product.
    """
    product = _cost(m, kind, share, at) + Cost(read, written, launches=0, efficiency=share)
    if not m[at].weight.requires_grad:
        return product
    weight = cost_of(m, _weight_kind(m, at), at)
    # Products of as many operations each: their rate together, where a sum of costs has the lesser one.
    return replace(product + weight, efficiency=2 / (1 / product.efficiency + 1 / weight.efficiency))


def _weight_gradient(m: FusionCall, at: int, dy: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """dy^T x for the weight of op `at`, if needed, as a gradient or in its main_grad."""
    name = f"{at}.weight"
    if not m.needs(name):
        return {}
    op = m[at]
    if op.accumulate_into_main_grad:
        return {name: put_weight_gradient(dy, x, m[name], op.overwrite_main_grad)}
    return {name: products.multiply("wgrad", dy, x)}


@fusion(
    backward=[Bias, GELU, MatMul],
    reads=("0.output", "2.weight"),
    when=lambda m: (
        _why_no_quack(m, 2, 1, 0) or _why_not_onto(m, 2) or why_no_product(m, _weight_kind(m, 2), at=2) or True
    ),
    cost=lambda m: _cost_back(m, "dgrad_dgelu", _GELU_SLOPE, 2, written=m.x.nbytes),  # gelu(h), made again
)
def bias_gelu_matmul_quack(m: FusionCall, dy: torch.Tensor) -> Any:
    """The gradients of what enters the bias, of the bias, and of the weight."""
    dh, y, total = quack.input_gradient_dgelu_sum(dy, m["2.weight"], m["0.output"])
    made = {"0.bias": total.to(dh.dtype)} if m.needs("0.bias") else {}
    return dh, made | _weight_gradient(m, 2, dy, y)


@fusion(
    backward=[SwiGLU, MatMul],
    reads=("input", "1.weight"),
    when=_why_not_swiglu,
    # dy W reads both halves of SwiGLU's input, and writes two results of its size beside the plain product's one.
    cost=lambda m: _cost_back(m, "dgrad", _SWIGLU_SLOPE, 1, read=m.x.nbytes, written=m.x.nbytes),
)
def swiglu_matmul_quack(m: FusionCall, dy: torch.Tensor) -> Any:
    """The gradients of SwiGLU's input, and of the weight."""
    dh, y = quack.input_gradient_dswiglu(dy, m["1.weight"], m["input"])
    return dh, _weight_gradient(m, 1, dy, y)


# ------------------------------------------------------------------------------------------------------ in 8 bits

_FACTORS = ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse")


def _why_no_quack_8(m: Match, bias: int) -> str | None:
    """Reason against op 0 and a bias behind it for quack's kernels."""
    why = cublaslt_float8.why_no_float8(m, ("y",))
    if isinstance(why, str):
        return why
    form = cast(Float8MatMul, m[0]).form
    if form.dtype != torch.bfloat16:
        return f"it was written for bfloat16, and this is {text_of(form.dtype)}"
    if set(form.formats[:2]) != {torch.float8_e4m3fn}:
        return f"its factors are in float8_e4m3fn, these in {', '.join(map(text_of, form.formats[:2]))}"
    if not form.fast[0]:
        return "it sums in fewer bits than float32 has, and the recipe says use_split_accumulator for forward"
    if (dtype := m[bias].dtype_of("bias")) != torch.bfloat16:
        return f"the bias is in {text_of(dtype)}, the product in bfloat16"
    return why_not_here(m, quack.unusable_8)


def _why_not_alone(m: Match) -> str | bool:
    summed = cast(Float8MatMul, m[0]).in_features
    slow = f"of {summed} terms cuBLASLt's is faster, it was up to {_MOST_SUMMED}" if summed > _MOST_SUMMED else None
    return slow or _why_no_quack_8(m, len(m) - 1) or True


def _why_not_added(m: Match, dropout: bool) -> str | bool:
    why = why_no_dropout(m, len(m) - 2) if dropout else None
    why = why or why_no_addend(m, len(m) - 1, cast(Float8MatMul, m[0]).form.dtype)
    return why or _why_no_quack_8(m, len(m) - 2 - dropout) or True


def _why_not_gelu_8(m: Match, bias: int, recorded: bool) -> str | bool:
    quantize = cast(Quantize, m[len(m) - 1])
    if quantize.dtype != torch.float8_e4m3fn:
        return f"it quantizes to float8_e4m3fn, and this is {text_of(quantize.dtype)}"
    if quantize.own is not None:
        return "its scale follows from what it quantizes, which has to be there first"
    if quantize.reads("amax") != recorded or not quantize.reads("scale"):
        return "its scale comes with the call" if quantize.op.scale else "its amax is for plans with a backward alone"
    return why_no_gelu(m, len(m) - 2) or _why_no_quack_8(m, bias) or True


def _cost_8(m: Match, more: int = 0) -> Cost:
    """Cost of the product, with so many bytes more for a number of its output."""
    made = cublaslt_float8.cost_of(m, "y")
    return replace(made, written=made.written + more * (made.written / 2), efficiency=_BIAS_8, calls=CALLS)


def _cost_added(m: Match) -> Cost:
    """The product's, and what is added read.

    cuBLASLt starts from what is added as well, and has no row: on an H200 that took 18 and 41 us more than its products
    with a bias (8192 rows, 4096 and 16384 to 4096 features), as much as is saved behind them. Here one group of warps
    loads it while the other one multiplies.
    """
    made = cublaslt_float8.cost_of(m, "y")
    return replace(made, read=made.read + made.written, efficiency=_ADDEND_8, calls=CALLS)


@fusion(forward=[Float8MatMul, Optional(QuantizeGradient), Bias], when=_why_not_alone, cost=_cost_8)
def float8_matmul_bias_quack(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias."""
    op = m[0]
    return quack.linear_bias_8(x, op.weight_data, op.input_inverse, op.weight_inverse, m[len(m) - 1].bias)


@fusion(
    forward=[Float8MatMul, Optional(QuantizeGradient), Bias, Add],
    details=Details(takes=(*_FACTORS, "-2.bias", "-1.other")),
    when=functools.partial(_why_not_added, dropout=False),
    cost=_cost_added,
)
def float8_matmul_add_bias_quack(*tensors: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias and what a residual adds."""
    return quack.linear_bias_add_8(*tensors)


@fusion(
    forward=[Float8MatMul, Optional(QuantizeGradient), Bias, Dropout, Add],
    details=Details(takes=(*_FACTORS, "-3.bias", "-1.other")),
    when=functools.partial(_why_not_added, dropout=True),
    cost=_cost_added,
)
def float8_matmul_add_bias_quack_dropout(*tensors: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias and what a residual adds, where Dropout drops nothing."""
    return quack.linear_bias_add_8(*tensors)


@fusion(
    forward=[Float8MatMul, Bias, GELU, Quantize],
    details=Details(takes=(*_FACTORS, "1.bias", "3.scale")),
    when=lambda m: why_no_backward(m) or _why_not_gelu_8(m, 1, recorded=False),
    cost=lambda m: _cost_8(m, -1),
)
def float8_matmul_gelu_quack(*tensors: torch.Tensor) -> torch.Tensor:
    """Gives GELU's output in 8 bits alone."""
    return quack.linear_bias_gelu_8(*tensors)


@fusion(
    forward=[Float8MatMul, QuantizeGradient, Bias, GELU, Quantize],
    details=Details(takes=(*_FACTORS, "2.bias", "4.scale", "4.amax"), gives=("output", "2.output")),
    emits=("2.output",),
    when=lambda m: _why_not_gelu_8(m, 2, recorded=True),
    cost=lambda m: _cost_8(m, 1),
)
def float8_matmul_gelu_quack_aux(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the value before GELU too, which backward reads, and raises the amax of its output."""
    return quack.linear_bias_gelu_aux_8(*tensors)
