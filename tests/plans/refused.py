"""Declarations and lists that are refused, and sums over ranks, in words that are written down as plans are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.functional import gelu

import te_fuser
from te_fuser import fusions, ops
from te_fuser.formula import Axes
from te_fuser.fusions import Cost
from te_fuser.ops import op_table
from te_fuser.ops.autocast import autocast_policy
from te_fuser.ops.base import Gradient
from te_fuser.ops.operations import UnfusedOperation
from tests.fuser.graph.test_graph import NoGradients, reader
from tests.fuser.graph.test_list_passes_sharding import (
    TP,
    F,
    Opaque,
    Temperature,
    column,
    cut,
    heads,
    planned,
    row,
    sums,
)
from tests.fuser.plan.test_problem import GatedProjection
from tests.fusions.registered import FREE, X, declared, mlp
from tests.twins import sequential, tensor

Options = dict[str, Any]


def words(call: Callable[[], object]) -> str:
    """Kind and words of the error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of whatever kind it is, that is written down
        return f"{type(error).__name__}: {error}"
    return "nothing is raised"


def all_words(call: Callable[[Any], object], rows: Mapping[str, Any] | Iterable[Options]) -> Callable[[], str]:
    """The words for each row of a table; a fusion that one declares is none for the next."""

    def each(given: Any) -> str:
        before = fusions.names()
        try:
            return words(lambda: call(given))
        finally:
            for name in {*fusions.names()} - {*before}:
                fusions.unregister(name)

    named = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
    return lambda: "\n".join(f"{name}: {each(given)}" for name, given in named)


# ------------------------------------------------------------------------------------------------------- of fusions


def declare(options: Options) -> None:
    body, how = options.get("body", len), te_fuser.fusion if "details" in options else declared
    how(**{"name": "mine", **{name: given for name, given in options.items() if name != "body"}})(body)


def run_declared(options: Options) -> None:
    """A call and its backward with a fusion that breaks its word."""
    forward = {} if "backward" in options else {"forward": [ops.GELU]}
    given = {"body": gelu, "name": "mine", **forward, **FREE, **options}
    declared(**{name: one for name, one in given.items() if name != "body"})(given["body"])
    mlp()(X).sum().backward()


def lie(x, weight):
    return (x @ weight.t())[:, :4]


def backward_of(pattern, body, **options):
    return {"backward": pattern, "body": lambda m, dy: body(m, dy), **options}


BIAS_GELU = [ops.Bias, ops.GELU]
DECLARED: dict[str, Options] = {
    "no_pattern": {},
    "two_patterns": {"forward": [ops.GELU], "backward": [ops.GELU]},
    "joint_function": {"joint": [ops.GELU]},
    "reads_in_forward": {"forward": [ops.GELU], "reads": ["input"]},
    "emits_in_backward": {"backward": [ops.GELU], "emits": ["0.output"]},
    "saves_in_forward": {"forward": [ops.GELU], "saves": ["a"]},
    "emits_a_word": {"forward": [ops.GELU], "emits": ["mean"]},
    "emits_beyond_its_pattern": {
        "forward": [ops.MatMul, fusions.Optional(ops.Bias), fusions.OneOf(ops.GELU, ops.ReLU)],
        "emits": ["3.output"],
    },
    "a_node_that_waits": {"backward": [ops.GELU], "gradients": [Gradient(("input",), (), "start", wait="end")]},
    "a_node_that_is_delayed": {
        "backward": [ops.GELU],
        "gradients": [Gradient(("input",), (), "input_gradient", delayed=True)],
    },
    "reads_a_word": {"backward": [ops.GELU], "reads": ["inpt"]},
    "takes_beyond_its_pattern": {"forward": [ops.MatMul], "takes": ["input", "1.weight"]},
    "takes_of_backward": {"forward": [ops.GELU], "takes": ["dy"]},
    "takes_what_it_does_not_read": {"backward": [ops.GELU], "takes": ["dy", "input"]},
    "gives_without_takes": {"backward": [ops.Bias], "gives": ["input", "0.bias"]},
    "gradients_of_a_function": {"backward": [ops.GELU], "gradients": [Gradient(("input",), (), "apart")]},
    "saved_bytes_in_forward": {"forward": [ops.GELU], "saved_bytes": dict},
    "name_taken": {"forward": [ops.GELU], "name": "matmul_bias"},
    "name_of_the_kernel": {"forward": [ops.GELU], "name": "stretch"},
    "forward_ops_of_forward": {"forward": [ops.SiLU], "forward_ops": 1},
    "forward_ops_below_none": {"joint": [ops.SiLU], "forward_ops": -1},
    "forward_ops_of_text": {"joint": [ops.GELU], "forward_ops": "1"},
    "backward_ops_in_steps": {"joint": [ops.SiLU, ops.Bias], "backward_ops": slice(None, None, 2)},
    "backward_ops_of_backward": {"backward": [ops.SiLU, ops.Bias], "backward_ops": slice(1)},
    "gradients_in_forward": {"forward": [ops.MatMul], "gradients": [Gradient(("input",), (), "dx")]},
    "dtypes_of_gradients_in_forward": {"forward": [ops.SiLU], "takes_gradients_in": (torch.float16,)},
}
OF_ANOTHER_TYPE: dict[str, Options] = {
    "dtypes": {"forward": None, "backward": [ops.SiLU], "takes_gradients_in": ("float16",)},
    "gradients": {"forward": None, "backward": [ops.GELU], "gradients": ["input"]},
    "one name": {"emits": "0.output"},
    "keyword": {"emit": ["0.output"]},
    "when": {"when": True},
    "cost": {"cost": Cost(seconds=1.0)},
    "choose": {"choose": 3, "takes": ["input"]},
    "details": {"details": {"registered": False}},
    "a kind": {"forward": ops.GELU},
    "name": {"name": 3},
    "nothing": {"body": None},
    "a class": {"body": dict},
}
RUN: dict[str, Options] = {
    "cost is a number": {"cost": lambda m: 3.0},
    "cost is a text": {"cost": lambda m: "1 us"},
    "cost fails": {"cost": lambda m: m.rows},
    "choice is a number": {"takes": ["input"], "choose": lambda m, method: 3},
    "choice is of nothing": {"takes": ["input"], "choose": lambda m, method: fusions.Body(None)},
    "choice fails": {"takes": ["input"], "choose": lambda m, method: {}[method]},
    "condition fails": {"when": lambda m: m[0].no_such_thing > 0},
    "another shape": {"forward": [ops.MatMul], "takes": ("input", "0.weight"), "body": lie},
    "no tensor": {"body": lambda m, x: None},
    "not emitted": {"forward": BIAS_GELU, "emits": ["0.output"], "body": lambda m, x: gelu(x + m[0].bias)},
    "no stream": {"forward": BIAS_GELU, "emits": ["0.output"], "body": lambda m, x: m.random(0)},
    "reads what is not there": backward_of([ops.Bias], lambda m, dy: dy, reads=["0.wieght"]),
    "reads what it does not say": backward_of([ops.GELU], lambda m, dy: dy * m["input"]),
    "too few gradients": backward_of(BIAS_GELU, lambda m, dy: dy),
    "gradients without names": backward_of(BIAS_GELU, lambda m, dy: (dy, dy.sum(0))),
    "three of them": backward_of(BIAS_GELU, lambda m, dy: (dy, {}, dy)),
}


# ------------------------------------------------------------------------------------------------- of opaque ops


def opaque(own: Options) -> None:
    """A call of such an op, and its backward."""
    given = {"op_forward": lambda self, call, x: x, "op_backward": lambda self, call, dy: dy, **own}
    sequential(type("Odd", (UnfusedOperation,), given)())(X).sum().backward()


def opaque_of_two_values(own: Options) -> None:
    two = {"op_forward": lambda self, call, x: {"output": 2 * x, "b": 3 * x}, "values": ("b",)}
    kind = type("Wrong", (UnfusedOperation,), {**two, "op_backward": lambda self, call, dy: 2 * dy, **own})
    sequential(ops.GELU(), op_table.exports.row(True)(kind)())(X).sum().backward()


OPAQUE: list[Options] = [
    {"emits": ("extra",), "reads": ("inptu",)},
    {"reads": ("extra",), "emits": ()},
    {"emits": ("extra",), "gradients": lambda self, names: (ops.base.Gradient(("wight",), (), "f"),)},
    {"emits": ("extra",), "reads": ("mask",)},
    {"emits": ("extra",), "gradients": lambda self, names: (ops.base.Gradient(("input",), (), "f"),) * 2},
    {"values": "two"},
    {"reads": "input"},
    {"non_differentiable": "output"},
    {"input_dtypes": torch.int8},
    {"takes_gradients_in": ("float32",)},
    {"gradients": lambda self, names: (ops.base.Gradient("input", (), "f"),)},
    {"op_backward": lambda self, call, dy: {"input": dy}},
    {"op_backward": lambda self, call, dy: (dy, dy.sum(0))},
]
OF_TWO_VALUES: list[Options] = [
    {"values": (), "named_outputs": lambda self: ("b",)},
    {"named_outputs": lambda self: ()},
    {"values": ("input",)},
    {"emits": ("b",)},
    {"non_differentiable": ("c",)},
    {"infer": lambda self, x: {"output": x, "c": x}},
    {"infer": lambda self, x: 3},
    {"infer": lambda self, x: {"output": x, "b": 3}},
    {"infer": lambda self, x: {"b": x}},
    {"op_forward": lambda self, call, x: x},
    {"op_forward": lambda self, call, x: {"b": x}},
    {"op_forward": lambda self, call, x: {"output": x, "b": 1}},
    {"op_backward": lambda self, call, dy: 2 * dy + 3 * call["d_b"]},
]


# --------------------------------------------------------------------------------------------------- of ranks

OF_RANKS: dict[str, Callable[[], object]] = {
    "a norm over cut features": lambda: planned(column(), ops.LayerNorm(2 * F), row()),
    "a softmax over cut features": lambda: planned(column(), ops.Softmax(), row()),
    "a residual of whole and cut rows": lambda: planned(te_fuser.Residual(column(), row(rows=0))),
    "a nonlinearity on a term of a sum": lambda: planned(column(), ops.MatMul(F, F), ops.GELU()),
    "a bias on a term of a sum": lambda: planned(column(), ops.Linear(F, F)),
    "a sum of what is no term": lambda: planned(column(), ops.AllReduce(TP)),
    "whole rows where they are to be cut": lambda: planned(column(), row(), column(rows=0), row(rows=0)),
    "columns behind columns": lambda: planned(column(F, F), column(F, F), x=(4, 6, F)),
    "attention on a part of the sequence": lambda: planned(
        cut(ops.LayerNorm(F), None, 0), ops.Linear(F, 3 * F), heads()
    ),
    "keys that are whole beside queries that are not": lambda: planned(
        ops.Fork("m"), column(2 * F, F), heads(packing=ops.Apart(key_value="m")), x=(4, 6, 2 * F)
    ),
    "heads that ranks cannot share": lambda: planned(
        column(outer=10 * 4),
        ops.DotProductAttention(8, 4, kv_heads=1, mask="none", layout="sequence_first"),
        row(8 * 4),
    ),
    "a sequence that ranks cannot share": lambda: planned(column(), row(rows=0), x=(5, 6, F)),
    "a product that does not say how it is shared": lambda: planned(
        column(rows=0), row(rows=0), ops.AllGather(TP), ops.MatMul(F, F)
    ),
    "an op that does not say what it makes": lambda: planned(column(), Opaque(), row()),
    "slopes of all heads": lambda: planned(column(outer=3 * F), heads(scores=ops.AttentionScores(alibi=True)), row(F)),
    "a gradient for what the call gives for all rows": lambda: planned(
        ops.AdaptiveLayerNorm(F, batch_dim=1),
        column(rows=0),
        row(rows=0),
        shift=torch.zeros(6, F, requires_grad=True),
        scale=torch.zeros(6, F),
    ),
}


# ------------------------------------------------------------------------------------------------------- of others


class Hidden(ops.RowOp):
    """A formula that reads a parameter of which it does not say the name."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.w, self.turned = torch.nn.Parameter(torch.ones(8)), turned

    def compute(self, x: Any) -> Any:
        return self.w * x if self.turned else x * self.w


class Nothing(te_fuser.FusableOperation):
    """Neither a row op nor an opaque one."""


EFFORTS: list[Options] = [
    *({"rounds": "3"}, {"rounds": 0}, {"seconds": "0.1"}, {"seconds": -1.0}, {"margin": "a"}, {"margin": 2}),
]
OTHERS: dict[str, Callable[[], object]] = {
    "samples that are nowhere": lambda: reader(Axes.BATCH)(tensor(3, 4, 8), factor=tensor(3)),
    "an op without a meaning": lambda: sequential(ops.GELU(), Nothing())(X),
    "gradients that list nothing": lambda: sequential(ops.GELU(), NoGradients())(tensor(5, 24)),
    "a fused operation of nothing": ops.FusedOperation,
    "a fused operation of what is no op": lambda: ops.FusedOperation(act=torch.nn.ReLU()),
    "features that do not fit its parts": lambda: sequential(GatedProjection())(tensor(3, 5)),
    "a policy that is none": lambda: autocast_policy("higher"),
    "a parameter without a name": lambda: sequential(Hidden(False))(X),
    "a parameter without a name, first": lambda: sequential(Hidden(True))(X),
    **{f"no module, {g}": lambda g=g: te_fuser.parallel.backward_dw(g) for g in (None, 3, [1])},
    "no module to cut": lambda: te_fuser.parallelize(None, None),
}
BLOCKED: Any = {"heads": 2, "kv_heads": 2, "packing": "blocked"}
MEMORY = ops.Apart(key_value="memory")
# Lists that two ranks share; the words are the parameters whose gradients are added up.
SUMS: dict[str, Callable[[], list[Any]]] = {
    "whole": lambda: [ops.LayerNorm(F), column(), ops.GELU(), row(), ops.Scale(F)],
    "rows": lambda: [ops.LayerNorm(F), column(rows=0), ops.GELU(), row(rows=0), ops.RMSNorm(F)],
    "the second dimension": lambda: [ops.RMSNorm(F), column(rows=1), row(rows=1, bias=False)],
    "norms of heads": lambda: [
        column(outer=3 * F),
        ops.HeadNorm(4, heads=2, kv_heads=2, packing="blocked"),
        heads(),
        row(F),
    ],
    "a whole product beside rows": lambda: [ops.Linear(F, F), column(rows=0), row(rows=0, bias=False)],
    "a norm alone": lambda: [cut(ops.LayerNorm(F), None, 0)],
    "residuals": lambda: [te_fuser.Residual(ops.LayerNorm(F), column(rows=0), row(rows=0)), ops.Dropout(0.5)],
    "blocks of a gate": lambda: [column(), ops.SwiGLU(glu_interleave_size=2), row(F), ops.LayerNorm(F)],
    "one number for all features": lambda: [column(), Temperature(), row()],
    "keys and values of the list's own": lambda: [
        column(),
        ops.Fork("memory"),
        ops.SwiGLU(),
        heads(packing=ops.Apart(key_value="memory")),
        row(F),
    ],
    "terms added up by hand": lambda: [column(), ops.MatMul(F, F), ops.AllReduce(TP), ops.GELU()],
}


def all_sums() -> str:
    return "\n".join(f"{name}: {', '.join(sums(planned(*parts())))}" for name, parts in SUMS.items())


REFUSED: Mapping[str, Callable[[], str]] = {
    "refused declarations of fusions": all_words(declare, DECLARED),
    "refused declarations of another type": all_words(lambda o: declare({"forward": [ops.GELU], **o}), OF_ANOTHER_TYPE),
    "refused calls of fusions": all_words(run_declared, RUN),
    "refused opaque ops": all_words(opaque, OPAQUE),
    "refused opaque ops of two values": all_words(opaque_of_two_values, OF_TWO_VALUES),
    "sums over ranks": all_sums,
    "refused efforts": all_words(lambda effort: te_fuser.Sequential(ops.GELU()).tune(X, **effort), EFFORTS),
    "refused others": all_words(lambda call: call(), OTHERS),
    "refused lists of ranks": all_words(lambda call: call(), OF_RANKS),
}
