"""Placements of a list's values on ranks: sums of gradients that follow, and the words of refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.fuser.graph.graph import Graph
from te_fuser.ops.sharing import Cut
from tests.twins import sequential

TP = ops.Group("ranks", 2, "tp")
F = 8


def cut(op: Any, mode: str | None, rows: int | None = None, group: ops.Group = TP) -> Any:
    """An op that two ranks share, with the parameters of one."""
    op.parallel_mode, op.group = mode, group
    if rows is not None:
        op.sequence_parallel, op.sequence_dim = True, rows
    for part in [low.op for low in op.lower()]:
        for name, shape in part.parameter_shapes().items() if isinstance(part, Cut) else ():
            setattr(op, name, torch.nn.Parameter(torch.zeros(shape)))
    return op


def column(inner: int = F, outer: int = 2 * F, rows: int | None = None, **keywords: Any) -> Any:
    return cut(ops.Linear(inner, outer, **keywords), "column", rows)


def row(inner: int = 2 * F, outer: int = F, rows: int | None = None, **keywords: Any) -> Any:
    return cut(ops.Linear(inner, outer, **keywords), "row", rows)


def planned(*parts: Any, x: tuple[int, ...] = (4, 6, F), **inputs: torch.Tensor) -> Graph:
    model = sequential(*parts, dtype=torch.float32)
    return model.plan(torch.zeros(*x, requires_grad=True), **inputs).graph


def sums(graph: Graph) -> list[str]:
    """The ops and names of parameters whose gradients are added up."""
    names = {number: f"{n.traits.role}.{name}" for n in graph.nodes for name, number in n.parameters.items()}
    return [names[number] for number in sorted(graph.sums)]


def heads(**keywords: Any) -> ops.DotProductAttention:
    return ops.DotProductAttention(
        2, 4, **{"mask": "none", "layout": "sequence_first", "kv_heads": 2, "packing": "blocked", **keywords}
    )


class Temperature(ops.RowOp):
    """y = x * number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.ones(1))

    def compute(self, x: Any, number: Any) -> Any:
        return x * number


def test_heads_of_a_plain_list_are_those_of_the_whole() -> None:
    """Each rank has its part of them, and the op of the model stays as it was."""
    attention = heads()
    graph = planned(column(outer=3 * F), attention, row(F))
    assert [n.op.heads for n in graph.nodes if isinstance(n.op, ops.DotProductAttention)] == [1]
    assert attention.heads == 2


def test_positions_of_a_context_are_turned_by_an_op_that_is_not_told_of_it() -> None:
    turned, core = ops.RotaryEmbedding(4, heads=2, kv_heads=2, packing="blocked", layout="sequence_first"), heads()
    core.context = TP
    nodes = planned(ops.Linear(F, 3 * F), turned, core).nodes
    assert [n.op.context for n in nodes if isinstance(n.op, ops.RotaryEmbedding)] == [TP]


def test_keys_and_values_of_a_context_are_exchanged_each_on_its_own() -> None:
    op = heads(packing=ops.Apart(key_value="memory", packing="blocked", value_dim=8))
    op.context = TP
    nodes = planned(op, memory=torch.zeros(4, 6, 2 * (4 + 8))).nodes
    assert [n.op.parts for n in nodes if isinstance(n.op, ops.AllToAll)] == [(4, 8), (1,), (1,)]


class Opaque(ops.UnfusedOperation):
    """Says nothing of ranks."""

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 2


def test_one_parameter_of_which_one_op_has_all_and_another_a_term() -> None:
    bias = ops.Bias(F)
    with pytest.raises(ValueError, match="read one parameter, of whose gradient ranks have a term by the one"):
        planned(
            column(),
            row(),
            bias,
            cut(ops.LayerNorm(F), None),
            ops.AllReduceGradient(TP),
            ops.Bound(ops.Bias(F), bias, bias="bias"),
        )


def test_lists_that_no_op_says_are_shared_stay_as_they_are() -> None:
    """Whoever writes collectives by hand adds up gradients by hand."""
    graph = planned(
        ops.LayerNorm(F), ops.AllGather(TP), ops.Linear(F, F), ops.GELU(), ops.MatMul(F, F), ops.ReduceScatter(TP)
    )
    assert not graph.sums
    alone = ops.Group()
    parts = cut(ops.Linear(F, F), "column", 0, alone), cut(ops.LayerNorm(F), None, 0, alone)
    assert not planned(*parts).sums
