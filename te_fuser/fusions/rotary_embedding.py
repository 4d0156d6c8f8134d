"""RotaryEmbedding on CUDA as one kernel over packed heads, with the Bias of the projection before it: y = turn(x + b).

Backward turns dy back and adds up its columns for the bias in the same pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import Optional
from te_fuser.fusions.registry import Details, fusion
from te_fuser.kernels import packed_heads
from te_fuser.kernels.lanes import reason_not
from te_fuser.ops.bias import Bias
from te_fuser.ops.rotary_embedding import RotaryEmbedding

_PATTERN = (Optional(Bias), RotaryEmbedding)


def rotation_of(op: RotaryEmbedding) -> packed_heads.Rotation:
    """How an op turns heads."""
    return packed_heads.Rotation(op.rotary_dim, op.base, op.style, op.position_offset)


def why_no_kernel(m: Match) -> str | None:
    """Why the kernel over packed heads cannot run on what enters the match, or None."""
    return m.why_no_cuda() or reason_not(m.dtype, m[0].own_dtype_of("bias") if m[0].kind is Bias else m.dtype)


def _op(m: Match | FusionCall) -> RotaryEmbedding:
    return cast(RotaryEmbedding, m[len(m) - 1].op)


def _when(m: Match) -> bool | str:
    return why_no_kernel(m) or True


def _cost(m: Match) -> Cost:
    return Cost(m.x.nbytes, m.x.nbytes)


def _compiles(m: Match, direction: str, needed: frozenset[str]) -> Iterable[packed_heads.PackedPass]:
    op, bias = _op(m), m[0].dtype_of("bias") if len(m) > 1 else None
    back = direction == "backward"
    sums = bias if "0.bias" in needed else None
    yield packed_heads.PackedPass.of(
        op.packed, m.dtype, rotation_of(op), back=back, bias=None if back else bias, sums=sums
    )


@fusion(forward=_PATTERN, when=_when, cost=_cost, details=Details(compiles=_compiles))
def rotary_embedding_forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """One pass that adds the bias, if there is one, and turns queries and keys."""
    op, bias = _op(m), m["0.bias"] if len(m) > 1 else None
    return packed_heads.turn(op.packed, rotation_of(op), x, bias=bias)[0]


@fusion(
    backward=_PATTERN,
    when=_when,
    cost=_cost,
    details=Details(compiles=_compiles, sums=("0.bias",)),
)
def rotary_embedding_backward(m: FusionCall, dy: torch.Tensor) -> Any:
    """One pass that turns back, and adds up columns for the gradient of the bias."""
    op, wanted = _op(m), m.needs("0.bias")
    sums = m["0.bias"].dtype if wanted else None
    dx, dbias = packed_heads.turn(op.packed, rotation_of(op), dy, back=True, sums=sums, later=m.later)
    return (dx, {"0.bias": dbias}) if wanted else dx
