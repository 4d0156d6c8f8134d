"""RotaryEmbedding on CUDA as one kernel over packed heads, with the Bias of the projection before it: y = turn(x + b).

Backward turns dy back and adds up its columns for the bias in the same pass. For a product of 8 bits it stores 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import Optional
from te_fuser.kernels import packed_heads
from te_fuser.kernels.lanes import Scaled, reason_not
from te_fuser.ops.bias import Bias
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.rotary_embedding import RotaryEmbedding

# Of the ops before what reads heads, those that a pass over their gradients takes in.
BEFORE = (Optional(QuantizeGradient), Optional(Bias))
_FORWARD, _BACKWARD = (Optional(Bias), RotaryEmbedding), (*BEFORE, RotaryEmbedding)
SUMS = ("0.bias", "1.bias")


def rotation_of(op: RotaryEmbedding) -> packed_heads.Rotation:
    """How an op turns heads."""
    return packed_heads.Rotation(op.rotary_dim, op.base, op.style, op.position_offset, op._context)


def why_no_kernel(m: Match) -> str | None:
    """Why the kernel over packed heads cannot run on what enters the match, or None."""
    bias, why = bias_of(m), why_not_scaled(m)
    return why or m.why_no_cuda() or reason_not(m.dtype, m.dtype if bias is None else m[bias].own_dtype_of("bias"))


def why_not_scaled(m: Match) -> str | None:
    """Why a kernel that quantizes cannot stand for QuantizeGradient at the beginning of the match."""
    if m[0].kind is QuantizeGradient and m[0].own is not None:
        return "its scale follows from the gradient that it quantizes, which has to be there first"
    if m[0].kind is QuantizeGradient and not m[0].reads("amax"):
        return "its kernel raises amax, and nobody bound one to QuantizeGradient"
    return None


def bias_of(m: Match | FusionCall) -> int | None:
    """Where the bias stands among the matched ops."""
    return next((k for k in range(min(len(m), len(BEFORE))) if m[k].kind is Bias), None)


def quantizes(m: Match | FusionCall) -> torch.dtype | None:
    """The dtype in which the gradient of what enters the match is wanted, where that is of 8 bits."""
    return m[0].dtype if m[0].kind is QuantizeGradient else None  # type: ignore[no-any-return]


def scaled_by(m: FusionCall) -> Scaled | None:
    """How the kernel stores that gradient."""
    dtype = quantizes(m)
    return None if dtype is None else Scaled(dtype, m["0.scale"], m["0.amax"])


def _op(m: Match | FusionCall) -> RotaryEmbedding:
    return cast(RotaryEmbedding, m[len(m) - 1].op)


def _when(m: Match) -> bool | str:
    return why_no_kernel(m) or True


def cost_back(m: Match) -> Cost:
    """Of one pass over the gradient."""
    return Cost(m.x.nbytes, gradient_bytes(m))


def gradient_bytes(m: Match) -> float:
    """Bytes of the gradient of what enters the match."""
    dtype = quantizes(m)
    return m.x.nbytes if dtype is None else m.x.nbytes * dtype.itemsize / m.dtype.itemsize


def _compiles(m: Match, direction: str, needed: frozenset[str]) -> Iterable[packed_heads.PackedPass]:
    op, place = _op(m), bias_of(m)
    bias = None if place is None else m[place].dtype_of("bias")
    if direction == "backward":
        sums = bias if f"{place}.bias" in needed else None
        stored = quantizes(m)
        yield packed_heads.PackedPass.of(op.packed, m.dtype, rotation_of(op), back=True, sums=sums, stored=stored)
    else:
        yield packed_heads.PackedPass.of(op.packed, m.dtype, rotation_of(op), bias=bias)


@fusion(
    forward=_FORWARD,
    when=_when,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    details=Details(compiles=_compiles),
)
def rotary_embedding_forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """One pass that adds the bias, if there is one, and turns queries and keys."""
    op, bias = _op(m), m["0.bias"] if len(m) > 1 else None
    return packed_heads.turn(op.packed, rotation_of(op), x, bias=bias)[0]


@fusion(
    backward=_BACKWARD,
    when=_when,
    cost=cost_back,
    details=Details(compiles=_compiles, sums=SUMS),
)
def rotary_embedding_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """One pass that turns back, and adds up columns for the gradient of the bias."""
    op, bias = _op(m), f"{bias_of(m)}.bias"
    sums, scaled = m[bias].dtype if m.needs(bias) else None, scaled_by(m)
    dx, dbias = packed_heads.turn(op.packed, rotation_of(op), dy, back=True, sums=sums, scaled=scaled, later=m.later)
    return dx if sums is None else (dx, {bias: dbias})
