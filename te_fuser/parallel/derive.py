"""Choice of the products that ranks share, and how: of each pair in a branch the first by column, the last by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_fuser.distributed.group import Group
from te_fuser.formula import expr
from te_fuser.formula.expr import Axes
from te_fuser.ops import (
    Bias,
    Bound,
    DotProductAttention,
    Dropout,
    FusableOperation,
    HeadNorm,
    Linear,
    MatMul,
    RotaryByAngles,
    RotaryEmbedding,
)
from te_fuser.ops.attention.heads import LAYOUTS, PackedHeads
from te_fuser.ops.glu import GatedUnit
from te_fuser.ops.row_op import RowOp
from te_fuser.parallel.styles import Column, Heads, Parts, Row
from te_fuser.presets.base import Preset
from te_fuser.sequential import Residual, Sequential

Named = tuple[str, FusableOperation]
Style = Column | Row | Heads
_OF_HEADS = (DotProductAttention, HeadNorm, RotaryByAngles, RotaryEmbedding)


def derived_plan(model: torch.nn.Module, group: Group) -> dict[str, Style]:
    """Default plan of `parallelize`: {name of a module: style}.

    In each branch (a Residual, or the ops between two) products are paired, by column then by row, if only biases,
    pointwise ops and attention are between them. A product without a partner stays whole.

    Raises:
        ValueError: where attention's key/value heads, or the parts of a gated unit, cannot be cut into equal shares.
    """
    plan: dict[str, Style] = {}
    for run in _branches(model, "") if not isinstance(model, Preset) else ():
        for first, between, last in _pairs(run):
            parts = _parts(first[1], between, group)
            plan[first[0]] = Column(parts=parts)
            plan.update({name: Column(parts=parts) for name, op in between if isinstance(_own(op), Bias)})
            plan.update({name: Heads() for name, op in between if getattr(_own(op), "sink", None) is not None})
            plan[last[0]] = Row()
    return plan


def sequence_dim(model: torch.nn.Module) -> int:
    """The dimension along which ranks cut sequences: attention's layout says it, else it is 0."""
    ops = [_own(m) for m in model.modules() if isinstance(m, FusableOperation)]
    layouts = {op.layout for op in ops if isinstance(op, DotProductAttention)}
    dims = {LAYOUTS[layout][0] if layout in LAYOUTS else 0 for layout in layouts}
    if len(dims) > 1:
        raise ValueError(
            f"sequence_parallel: attentions of this model have the layouts {', '.join(sorted(layouts))}: parallelize "
            "its parts by themselves"
        )
    return dims.pop() if dims else 0


def _own(op: torch.nn.Module) -> torch.nn.Module:
    return op.op if isinstance(op, Bound) else op


def _branches(module: torch.nn.Module, prefix: str) -> Iterator[list[Named]]:
    """The ops that run one after the other, by name; a branch ends what is around it."""
    run: list[Named] = []
    for part in _parts_in_order(module, prefix):
        if isinstance(part, tuple):
            run.append(part)
        else:
            yield run
            run = []
            yield from part
    yield run


def _parts_in_order(module: torch.nn.Module, prefix: str) -> Iterator[Named | Iterator[list[Named]]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, FusableOperation):
            yield path, child
        elif isinstance(child, Preset):
            yield iter(())  # which knows by itself what is cut
        elif isinstance(child, Sequential) and not isinstance(child, Residual):
            yield from _parts_in_order(child, f"{path}.")
        else:
            yield _branches(child, f"{path}.")


def _pairs(run: list[Named]) -> Iterator[tuple[Named, list[Named], Named]]:
    """Products with what is between them."""
    first, between = None, list[Named]()
    for name, op in run:
        if not isinstance(_own(op), (MatMul, Linear)):
            between.append((name, op))
            first = first if _takes_its_share(_own(op)) else None
        elif first is None:
            first, between = (name, op), []
        else:
            yield first, between, (name, op)
            first = None


def _takes_its_share(op: torch.nn.Module) -> bool:
    """True where an op can run on a rank's part of the features."""
    if isinstance(op, GatedUnit):
        return op.glu_interleave_size is None
    if isinstance(op, DotProductAttention):
        return isinstance(op.packed, PackedHeads)
    if isinstance(op, (Bias, Dropout, *_OF_HEADS)):
        return True
    if not isinstance(op, RowOp) or op.arguments() or op.named_outputs():
        return False
    features: Any = expr.leaf("x", Axes.FULL, 8)
    return expr.lift(op.compute(features)).depth == 0


def _parts(product: FusableOperation, between: list[Named], group: Group) -> Parts:
    """Parts that lie side by side in a weight, each of which is cut by itself."""
    joined = isinstance(product, Bound) and not isinstance(product.names["weight"], str)
    for name, module in between:
        op = _own(module)
        if isinstance(op, GatedUnit):
            return 1 if joined else 2
        if isinstance(op, DotProductAttention):
            if op.kv_heads % group.size:
                raise ValueError(
                    f"{type(op).__name__} {name!r} on {group}: kv_heads={op.kv_heads} cannot be cut into {group.size} "
                    "equal parts: take fewer ranks, or more key/value heads"
                )
            return 1 if op.packing != "blocked" or joined else (op.heads, op.kv_heads, op.kv_heads)
    return 1
