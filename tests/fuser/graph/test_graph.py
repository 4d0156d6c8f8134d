"""The graph of a list: what reads what, shares storage and needs a gradient, and which casts autocast puts in."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.formula import Axes
from te_fuser.ops import op_table
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(5, 8)


def graph_of(model, x=X, **arguments):
    return model.plan(x, **arguments).graph


def test_views_are_in_the_memory_of_what_they_view():
    model = sequential(ops.Reshape(4, 10), ops.Identity(), ops.Reshape(10, 4), ops.GELU(), ops.Reshape(5, 8))
    graph = graph_of(model)
    values = [graph.stored(graph.ref(n.output)).index for n in graph.nodes]
    gelu = graph.nodes[3].output
    assert values == [0, 0, 0, gelu, gelu]
    assert len({graph.roots[n.output] for n in graph.nodes}) == 4  # Identity alone is a name


def test_what_shares_storage():
    model = sequential(
        ops.Fork("a"), ops.Identity(), ops.Dropout(0.5), ops.GELU(), ops.Output("o"), ops.Add("a")
    ).eval()
    graph = graph_of(model, outputs=("o",))
    fork, identity, dropout, gelu, output, add = graph.nodes
    assert {graph.roots[v] for v in (fork.output, *fork.named_out, identity.output, dropout.output)} == {0}
    assert {graph.roots[v] for v in (gelu.output, output.output, *output.named_out)} == {gelu.output}
    assert graph.roots[add.output] == add.output
    assert graph_of(model.train(), outputs=("o",)).roots[dropout.output] == dropout.output


def needs(model, x, **inputs):
    graph = graph_of(model, x, **inputs)
    return [graph.needs_grad(n.output) for n in graph.nodes]


def test_needs_a_gradient_exactly_where_somebody_upstream_does():
    model = sequential(ops.Bias(8), ops.GELU(), ops.Linear(8, 8), ops.Add("c"), ops.Bias(8))
    frozen, fixed = X.detach(), tensor(5, 8, grad=False)
    assert needs(model, X, c=fixed) == [True] * 6
    with torch.no_grad():
        assert needs(model, X, c=fixed) == [False] * 6
    model.requires_grad_(False)
    assert needs(model, frozen, c=fixed) == [False] * 6
    model[4].bias.requires_grad_(True)
    assert needs(model, frozen, c=fixed) == [False] * 5 + [True]
    assert needs(model, frozen, c=tensor(5, 8)) == [False] * 4 + [True] * 2
    model[2].weight.requires_grad_(True)
    assert needs(model, frozen, c=fixed) == [False, False, True, True, True, True]
    assert graph_of(model, frozen, c=fixed).parameter_needs == (False, True, False, True)


def test_a_mask_takes_no_gradient():
    model = sequential(ops.DotProductAttention(1, 8, mask="given", layout="batch_first"))
    mask = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    graph = graph_of(model, tensor(2, 3, 24, grad=False), attention_mask=mask)
    assert not graph.needs_grad(graph.output)


class NamedBias(ops.Bias):
    """A row op that computes something and names it."""

    def __init__(self, features, name):
        super().__init__(features)
        self.name = name

    def named_outputs(self):
        return (self.name,)


@op_table.exports.row(True)
class ExportedBias(NamedBias):
    """The same for the caller."""


def test_an_op_that_computes_and_names_its_output():
    model = sequential(ops.GELU(), NamedBias(8, "a"), ops.Linear(8, 8), ExportedBias(8, "o"), ops.SiLU(), ops.Add("a"))
    _, o = assert_as_meant(model, X, ("o",))
    torch.testing.assert_close(o, (model[2](ops.GELU()(X) + model[1].bias) + model[3].bias).detach())
    assert_as_meant(model, X)


def test_an_opaque_op_names_nothing():
    class Named(ops.MatMul):
        def named_outputs(self):
            return ("a",)

    with pytest.raises(
        TypeError, match=r"op 0 \(Named '0'\): only a RowOp names its output; put Fork or Output behind"
    ):
        sequential(Named(8, 8), ops.Add("a"))(X)


# ---------------------------------------------------------------------------------------- axes of named inputs


def reader(axes, batch_dim=None):
    class Times(ops.RowOp):
        inputs = {"g": ops.NamedInput("factor", axes)}

        def batch_dim(self):
            return batch_dim

        def compute(self, x, g):
            return x * g

    return sequential(ops.GELU(), Times(), ops.SiLU())


# axes -> (the dimension that counts samples, a shape that fits [3, 4, 8], one that does not, the wanted one in words)
EXTENTS = {
    "full": (Axes.FULL, None, (3, 4, 8), (3, 1, 8), r"the main input \[3, 4, 8\]; they must be equal"),
    "rows": (Axes.ROWS, None, (3, 4, 1), (3, 4), r"needs \[3, 4, 1\]"),
    "samples_0": (Axes.SAMPLE_FEATURES, 0, (3, 8), (4, 8), r"needs \[3, 8\]"),
    "samples_1": (Axes.SAMPLE_FEATURES, 1, (4, 8), (3, 8), r"needs \[4, 8\]"),
    "batch": (Axes.BATCH, 1, (4,), (4, 1), r"needs \[4\]"),
    "feature": (Axes.FEATURE, None, (8,), (1, 8), r"needs \[8\]"),
    "none": (Axes.NONE, None, (1, 1), (2,), r"needs \[\]"),
}


@pytest.mark.parametrize("name", EXTENTS)
def test_named_inputs_of_every_extent(name):
    axes, batch_dim, fits, wrong, words = EXTENTS[name]
    model, x = reader(axes, batch_dim), tensor(3, 4, 8)
    assert_as_meant(model, x, factor=tensor(*fits, seed=1))
    with pytest.raises(ValueError, match=rf"op 1 \(Times '1'\): 'factor' has shape .*{words}"):
        model(x, factor=tensor(*wrong))


def test_an_op_per_sample_must_say_where_samples_are():
    with pytest.raises(
        ValueError, match=r"op 1 \(Times '1'\): 'factor' is given per sample; the op must say batch_dim"
    ):
        reader(Axes.BATCH)(tensor(3, 4, 8), factor=tensor(3))


# ---------------------------------------------------------------------------------------- autocast


def kinds_under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        graph = graph_of(model, x)
    return [(n.op.kind.__name__, graph.values[n.output].spec.dtype) for n in graph.nodes], graph


def test_autocast_leaves_float64_and_bfloat16_alone():
    for dtype in (torch.float64, torch.bfloat16):
        model = sequential(ops.LayerNorm(8), ops.Linear(8, 8), dtype=dtype)
        found, graph = kinds_under_autocast(model, tensor(5, 8, dtype=dtype))
        assert found == [("LayerNorm", dtype), ("MatMul", dtype), ("Bias", dtype)]
        assert not any(n.casts for n in graph.nodes)


# ---------------------------------------------------------------------------------------- ops that are no ops


def test_an_op_without_a_meaning():
    class Nothing(te_fuser.FusableOperation):
        pass

    with pytest.raises(TypeError, match=r"op 1 \(Nothing '1'\): an op is a RowOp .* this one is neither"):
        sequential(ops.GELU(), Nothing())(X)


@pytest.mark.parametrize(
    ("what", "declared", "words"),
    [
        ("reads", {"reads": ("inptu",)}, "its backward reads 'inptu', which is none of extra, input, output"),
        ("emits", {"reads": ("extra",), "emits": ()}, "its backward reads 'extra', which is none of input, output"),
        (
            "produces",
            {"gradients": lambda self, names: (ops.base.Gradient(("wight",), (), "f"),)},
            "its backward produces 'wight'",
        ),
        ("not emitted", {"reads": ("mask",)}, ".* what its forward gives by call.emit it lists in `emits`"),
        (
            "produced twice",
            {"gradients": lambda self, names: (ops.base.Gradient(("input",), (), "f"),) * 2},
            "two nodes of its backward produce 'input'; let one of them give it",
        ),
    ],
)
def test_an_opaque_op_that_misspells_a_name(what, declared, words):
    body = {
        "op_forward": lambda self, call, x: x,
        "op_backward": lambda self, call, dy: dy,
        "emits": ("extra",),
        **declared,
    }
    kind = type("Odd", (ops.UnfusedOperation,), body)
    with pytest.raises(ValueError, match=rf"op 0 \(Odd '0'\): {words}"):
        sequential(kind())(X)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"values": "two"}, r"`values` is a sequence, got 'two'; write \('two',\)"),
        ({"reads": "input"}, r"`reads` is a sequence, got 'input'; write \('input',\)"),
        ({"non_differentiable": "output"}, "`non_differentiable` is a sequence, got 'output'"),
        ({"input_dtypes": torch.int8}, r"`input_dtypes` is a sequence, got torch.int8; write \(torch.int8,\)"),
        ({"takes_gradients_in": ("float32",)}, "`takes_gradients_in` holds 'float32', which is no dtype"),
        ({"gradients": lambda self, names: (ops.base.Gradient("input", (), "f"),)}, "`produces` of its Gradient is"),
    ],
)
def test_an_opaque_op_that_lists_no_list(declared, words):
    body = {"op_forward": lambda self, call, x: x, "op_backward": lambda self, call, dy: dy, **declared}
    with pytest.raises(TypeError, match=rf"op 0 \(Odd '0'\): {words}"):
        sequential(type("Odd", (ops.UnfusedOperation,), body)())(X)
