"""What pipelines share: a product that multiplies the rows that are there while ranks exchange others, as one step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from te_fuser.fusions.cublaslt import body_of, cost_of, why_no_product
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.matmul_main_grad import put_weight_gradient
from te_fuser.fusions.registry import Costs, Fusion
from te_fuser.kernels import symmetric
from te_fuser.ops.all_gather import AllGather
from te_fuser.ops.base import FusableOperation, Gradient, Spec
from te_fuser.ops.group import Group
from te_fuser.ops.matmul import MatMul, main_gradient_of, weight_gradient_of


def why_no_pipeline(m: Match) -> str | None:
    """Why the product and the exchange of a match are no step of symmetric memory; None if they are."""
    exchange = m[_exchange(m)]
    group: Group = exchange.group
    if group.size == 1:
        return "one rank exchanges nothing"
    if len(m.x.shape) < 2 or exchange.dim % len(m.x.shape):
        return (
            f"it takes rows that ranks cut along the first dimension, and these are cut along dimension {exchange.dim}"
        )
    # A GPU that is not at hand cannot be asked.
    return symmetric.obstacle(group, m.device) if m.capability is None else None


def _exchange(m: Match) -> int:
    return 1 if m[0].kind is MatMul else 0


def group_of(m: Match) -> Group:
    """The ranks of a match."""
    return cast(Group, m[_exchange(m)].group)


def as_multiplied(m: Match) -> Match:
    """A match with the x that its product sees."""
    return replace(m, x=cast(Spec, m[0].op.infer(m.x))) if m[0].kind is AllGather else m


# -------------------------------------------------------------------------------------------------- what it costs

# Ranks -> the share of the time of sending that products beside it do not feel. Compiled by PyTorch, a layer of 8192
# tokens, hidden 4096, took 9.63 ms with these operators on two H200 and 9.85 without, which is what 37% give; on four
# 7.73 and 5.88 (2026-11-22). No plan with them has been measured, so nothing is taken to be hidden: `tune` tries them.
_BESIDE: dict[int, float] = {}
# What a call launches behind one another, and what it asks of PyTorch: once, and for each rank.
_LAUNCHES, _CALLS = (2, 1), (15.0, 10.0)


def _cost(product: Cost, ranks: int, whole: float, apart: float) -> Cost:
    """What a product takes beside which ranks exchange a tensor of so many bytes, of which some are moved apart."""
    return replace(
        product,
        read=product.read + apart / 2,
        written=product.written + apart / 2,
        launches=_LAUNCHES[0] + _LAUNCHES[1] * ranks,
        apart=apart,
        calls=_CALLS[0] + _CALLS[1] * ranks,
        sent=whole * (ranks - 1) / ranks,
        ranks=ranks,
        beside=_BESIDE.get(ranks, 0.0),
    )


def cost_of_gathering(m: Match, kind: str, features: int) -> Cost:
    """What a product of that kind takes of gathered rows of so many features; a rank's own are copied before it."""
    m, ranks = as_multiplied(m), group_of(m).size
    whole = float(m.x.rows * features * m.dtype.itemsize)
    return _cost(cost_of(m, kind, 1 - _exchange(m)), ranks, whole, 2 * whole / ranks)


def cost_of_scattering(m: Match, kind: str, features: int) -> Cost:
    """What a product of that kind takes whose rows are scattered; behind it the terms are read again, and added up."""
    m, ranks = as_multiplied(m), group_of(m).size
    whole = float(m.x.rows * features * m.dtype.itemsize)
    return _cost(cost_of(m, kind, 1 - _exchange(m)), ranks, whole, whole + whole / ranks)


# ------------------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True)
class Backward:
    """The backward of a product and an exchange: a node for dx, which exchanges, and one for dW, which may wait.

    Attributes:
        pattern: the ops.
        nodes: the two; the second reads dy and x, each as the product has them.
        run: f(dy, weight, group=group) -> what the first produces.
        cost: what that takes.
    """

    pattern: tuple[type[FusableOperation], type[FusableOperation]]
    nodes: tuple[Gradient, Gradient]
    run: Callable[..., Any]
    cost: Callable[[Match], Cost]

    @property
    def _at(self) -> int:
        """The product."""
        return self.pattern.index(MatMul)

    def declared(self, onto: bool = False) -> Callable[[Any], Fusion]:
        """The decorator of a fusion, of products whose dW goes to main_grad, or of others."""
        first, second = self.nodes
        if onto:
            weight = (f"{self._at}.weight",)
            second = replace(second, reads=(*second.reads, *weight), by_attributes=weight)

        def why_not(m: Match) -> bool | str:
            if m[self._at].accumulate_into_main_grad != onto:
                return "accumulate_into_main_grad is off" if onto else "the weight's gradient goes to its main_grad"
            return why_no_pipeline(m) or True

        def costs(m: Match) -> Costs:
            return self.cost(m), cost_of(as_multiplied(m), "wgrad_onto" if onto else "wgrad", self._at)

        return fusion(
            backward=self.pattern,
            when=why_not,
            cost=costs,
            details=Details(gradients=(first, second), choose=self._choose),
        )

    def _choose(self, m: Match, method: str) -> Body | Callable[..., Any]:
        if method == self.nodes[0].method:
            return functools.partial(self.run, group=group_of(m))
        op, at = m[self._at], self._at
        if op.accumulate_into_main_grad:
            put = main_gradient_of if why_no_product(m, "wgrad_onto", at) else put_weight_gradient
            return functools.partial(put, over=op.overwrite_main_grad)
        return weight_gradient_of if why_no_product(m, "wgrad", at) else body_of(as_multiplied(m), "wgrad", at)
