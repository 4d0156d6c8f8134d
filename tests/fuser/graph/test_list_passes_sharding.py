"""Placements of a list's values on ranks: sums of gradients that follow, and the words of refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.graph.graph import Graph
from te_fuser.ops.sharing import Cut
from tests.refused import refusals
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


SUMS: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "whole": (lambda: [ops.LayerNorm(F), column(), ops.GELU(), row(), ops.Scale(F)], []),
    "rows": (
        lambda: [ops.LayerNorm(F), column(rows=0), ops.GELU(), row(rows=0), ops.RMSNorm(F)],
        ["layer_norm.weight", "layer_norm.bias", "bias.bias", "rms_norm.weight"],
    ),
    "the second dimension": (lambda: [ops.RMSNorm(F), column(rows=1), row(rows=1, bias=False)], ["rms_norm.weight"]),
    "norms of heads": (
        lambda: [column(outer=3 * F), ops.HeadNorm(4, heads=2, kv_heads=2, packing="blocked"), heads(), row(F)],
        ["head_norm.weight", "head_norm.key_weight"],
    ),
    "a whole product beside rows": (
        lambda: [ops.Linear(F, F), column(rows=0), row(rows=0, bias=False)],
        ["mat_mul.weight", "bias.bias"],
    ),
    "a norm alone": (lambda: [cut(ops.LayerNorm(F), None, 0)], ["layer_norm.weight", "layer_norm.bias"]),
    "residuals": (
        lambda: [te_fuser.Residual(ops.LayerNorm(F), column(rows=0), row(rows=0)), ops.Dropout(0.5)],
        ["layer_norm.weight", "layer_norm.bias", "bias.bias"],
    ),
    "blocks of a gate": (lambda: [column(), ops.SwiGLU(glu_interleave_size=2), row(F), ops.LayerNorm(F)], []),
    "one number for all features": (lambda: [column(), Temperature(), row()], ["temperature.number"]),
    "keys and values of the list's own": (
        lambda: [column(), ops.Fork("memory"), ops.SwiGLU(), heads(packing=ops.Apart(key_value="memory")), row(F)],
        [],
    ),
    "terms added up by hand": (lambda: [column(), ops.MatMul(F, F), ops.AllReduce(TP), ops.GELU()], []),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    parts, wanted = SUMS[name]
    assert sums(planned(*parts())) == wanted


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


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a norm over cut features": (
        lambda: planned(column(), ops.LayerNorm(2 * F), row()),
        "op 2 (LayerNorm '1'): LayerNorm goes over all features of a row, and x is cut by features: each rank of tp",
    ),
    "a softmax over cut features": (lambda: planned(column(), ops.Softmax(), row()), "Softmax goes over all features"),
    "a residual of whole and cut rows": (
        lambda: planned(te_fuser.Residual(column(), row(rows=0))),
        "x is cut by rows along dimension 0, 'residual' is whole",
    ),
    "a nonlinearity on a term of a sum": (
        lambda: planned(column(), ops.MatMul(F, F), ops.GELU()),
        "GELU takes a sum, and x is a term of a sum over the ranks: put ReduceScatter or AllReduce before it",
    ),
    "a bias on a term of a sum": (
        lambda: planned(column(), ops.Linear(F, F)),
        "Bias takes a sum, and x is a term of a sum over the ranks",
    ),
    "a sum of what is no term": (
        lambda: planned(column(), ops.AllReduce(TP)),
        "AllReduce takes what is a term of a sum over the ranks in the ranks of tp, and x is cut by features",
    ),
    "whole rows where they are to be cut": (
        lambda: planned(column(), row(), column(rows=0), row(rows=0)),
        "takes what is cut by rows along dimension 0 in the ranks of tp, and x is whole: make both alike",
    ),
    "columns behind columns": (
        lambda: planned(column(F, F), column(F, F), x=(4, 6, F)),
        "MatMul with parallel_mode='column' takes what is whole in the ranks of tp, and x is cut by features",
    ),
    "attention on a part of the sequence": (
        lambda: planned(cut(ops.LayerNorm(F), None, 0), ops.Linear(F, 3 * F), heads()),
        "DotProductAttention takes whole sequences, and x is cut by rows along dimension 0",
    ),
    "keys that are whole beside queries that are not": (
        lambda: planned(ops.Fork("m"), column(2 * F, F), heads(packing=ops.Apart(key_value="m")), x=(4, 6, 2 * F)),
        "DotProductAttention: x is cut by features in the ranks of tp, key_value is whole: make both alike",
    ),
    "heads that ranks cannot share": (
        lambda: planned(
            column(outer=10 * 4),
            ops.DotProductAttention(8, 4, kv_heads=1, mask="none", layout="sequence_first"),
            row(8 * 4),
        ),
        "kv_heads=1 cannot be cut into 2 equal parts, one for each rank of tp",
    ),
    "a sequence that ranks cannot share": (
        lambda: planned(column(), row(rows=0), x=(5, 6, F)),
        "dimension 0 of an input of shape [5, 6, 8] cannot be cut into 2 equal parts",
    ),
    "a product that does not say how it is shared": (
        lambda: planned(column(rows=0), row(rows=0), ops.AllGather(TP), ops.MatMul(F, F)),
        "MatMul takes whole rows, and x is whole, and gone on with in each rank's own way: set its parallel_mode",
    ),
    "an op that does not say what it makes": (
        lambda: planned(column(), Opaque(), row()),
        "Opaque does not say what it makes of an input that is cut by features in the ranks of tp: give it a rule by "
        "@te_fuser.parallel.sharding_rule(...), or put it where values are whole",
    ),
    "slopes of all heads": (
        lambda: planned(column(outer=3 * F), heads(scores=ops.AttentionScores(alibi=True)), row(F)),
        "its slopes are those of all heads, and each rank of tp has some of these: give the slopes of this rank's",
    ),
    "a gradient for what the call gives for all rows": (
        lambda: planned(
            ops.AdaptiveLayerNorm(F, batch_dim=1),
            column(rows=0),
            row(rows=0),
            shift=torch.zeros(6, F, requires_grad=True),
            scale=torch.zeros(6, F),
        ),
        "'shift' needs a gradient, of which each rank has a term alone",
    ),
}


class Opaque(ops.UnfusedOperation):
    """Says nothing of ranks."""

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 2


test_refusals = refusals({name: (call, ValueError, re.escape(words)) for name, (call, words) in REFUSED.items()})


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
