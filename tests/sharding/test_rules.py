"""Rules of sharding that users write for ops of their own, outside of the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import te_fuser
from te_fuser import ops
from te_fuser.parallel import Partial, Placement, Replicated, Shard, ShardingContext, ShardingRule, sharding_rule
from tests.fuser.graph.test_list_passes_sharding import TP, F, column, planned, row, sums
from tests.refused import refusals


class RowByRow(ShardingRule[Any]):
    """Rows stay by themselves."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        return x if x.by_rows else super().gives(op, x, context)


class Plain(ops.UnfusedOperation):
    """y = x * weight, which has no rule."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.weight = torch.nn.Parameter(torch.ones(features))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.features,)}

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return x * call["weight"]

    def op_backward(self, call: Any, dy: torch.Tensor) -> Any:
        return dy, {"weight": dy.flatten(0, -2).sum(0)}


@sharding_rule(RowByRow())
class ByRow(Plain):
    """Plain with a rule."""


class ByRowToo(ByRow):
    """A subclass, which has its base's."""


class Block(ShardingRule[Any]):
    """Each rank has its block of the features, and of the parameter."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        return x if x == Shard(-1) else super().gives(op, x, context)

    def local(self, op: Any, x: Placement, context: ShardingContext) -> ops.FusableOperation:
        return op.with_attributes(features=op.features // context.group.size) if x == Shard(-1) else op

    def partial_gradients(self, op: Any, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        return ()


@sharding_rule(Block())
class InBlocks(Plain):
    """Plain on a block of the features."""


class Summed(ShardingRule[Any]):
    """Rule for an op that is run on terms, whose results are added up."""

    def group(self, op: Any) -> ops.Group:
        return op.ranks

    def takes(self, op: Any) -> Placement:
        return Partial()

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        return Replicated() if x == Partial() else super().gives(op, x, context)

    def local_ops(self, op: Any) -> tuple[ops.FusableOperation, ...]:
        return op, ops.AllReduce(op.ranks)

    def partial_gradients(self, op: Any, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        return tuple(context.shapes)


@sharding_rule(Summed())
class OfTerms(Plain):
    """Plain on a term of a sum, by the ranks that it says."""

    ranks = TP


@sharding_rule(type("Wrong", (ShardingRule,), {"gives": lambda self, op, x, context: None})())
class Wrong(Plain):
    """One whose rule forgets to say what it gives."""


def test_where_values_are_whole_no_rule_is_needed() -> None:
    assert sums(planned(Plain(F), column(), ops.GELU(), row(), Plain(F))) == []


@pytest.mark.parametrize("kind", [ByRow, ByRowToo])
def test_rows_that_ranks_cut(kind: Any) -> None:
    graph = planned(kind(F), column(rows=0), ops.GELU(), row(rows=0, bias=False))
    assert sums(graph) == [f"{kind.role}.weight"]


def test_classes_that_torch_makes_have_the_rule_of_the_op() -> None:
    op = ByRow(F)
    parametrize.register_parametrization(op, "weight", torch.nn.Identity())
    assert type(op) is not ByRow
    assert sums(planned(op, column(rows=0), row(rows=0, bias=False))) == ["by_row.weight"]


def test_the_op_of_a_rank_has_its_part_of_the_features() -> None:
    whole = InBlocks(2 * F)
    whole.weight = torch.nn.Parameter(torch.ones(F))
    graph = planned(column(), whole, row())
    assert [n.op.features for n in graph.nodes if isinstance(n.op, InBlocks)] == [F]
    assert whole.features == 2 * F and sums(graph) == []


def test_an_op_that_says_who_shares_it_starts_a_list() -> None:
    """Ranks have terms before it, and the collective that its rule names follows it."""
    graph = planned(OfTerms(F), ops.GELU())
    assert [n.op.kind for n in graph.nodes] == [OfTerms, ops.AllReduce, ops.GELU]
    assert sums(graph) == ["of_terms.weight"]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows without a rule": (
        lambda: planned(Plain(F), column(rows=0), row(rows=0)),
        ValueError,
        "op 0 (Plain '0'): Plain does not say what it makes of an input that is cut by rows along dimension 0 in the "
        "ranks of tp: give it a rule by @te_fuser.parallel.sharding_rule(...), or put it where values are whole",
    ),
    "features that a rule does not know": (
        lambda: planned(column(), ByRow(2 * F), row()),
        ValueError,
        "ByRow does not say what it makes of an input that is cut by features",
    ),
    "a rule that gives no placement": (
        lambda: planned(Wrong(F), column(), row()),
        ValueError,
        "op 0 (Wrong '0'): Wrong.gives() gave None: give a Placement of te_fuser.parallel",
    ),
    "a class in place of a rule": (
        lambda: sharding_rule(RowByRow),  # type: ignore[arg-type]
        TypeError,
        "sharding_rule takes a ShardingRule, as @sharding_rule(Rows()), got the class RowByRow",
    ),
    "a list of ops": (
        lambda: sharding_rule(RowByRow())(type("Both", (ops.FusedOperation,), {})),
        TypeError,
        "sharding_rule decorates a class of ops that stand for no others, got the class Both",
    ),
}


test_refusals = refusals({name: (*call, re.escape(words)) for name, (*call, words) in REFUSED.items()})


def test_a_model_without_ranks_asks_no_rule() -> None:
    model = te_fuser.Sequential(Wrong(F), ops.GELU(), kernels="reference")
    assert model(torch.randn(3, F)).shape == (3, F)


class Reading(Plain):
    """An op without a rule that reads a value by name, too."""

    def named_inputs(self) -> dict[str, ops.NamedInput]:
        return {"other": ops.NamedInput("other", None, gradient=False)}


def test_words_name_the_input_that_is_not_whole() -> None:
    with pytest.raises(ValueError, match="Reading does not say what it makes of an input that is cut by features"):
        planned(column(), ops.Fork("other"), row(), Reading(F))
