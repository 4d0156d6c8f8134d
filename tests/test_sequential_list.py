"""Sequential as a list: edits, slices, options, an op that stands in it twice."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from tests.looking import hooked
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(5, 8)


OPTIONS = {"memory": "lean", "kernels": "reference", "verify": False}


def scales(*values, **options):
    """Factors that tell ops apart: the product of those that ran is the result for an input of ones."""
    return sequential(*(ops.Scale(value=v) for v in values), **{**OPTIONS, **options})


def factor(model):
    """Product of a list's scales, run in full."""
    return model(torch.ones(2, 3)).unique().item()


def values(model):
    return [op.value for op in model]


def changed(model, change):
    change(model)
    return model


EDITS = {
    "append": (lambda m: m.append(ops.Scale(value=11.0)), [2, 3, 5, 7, 11]),
    "extend": (lambda m: m.extend([ops.Scale(value=11.0), ops.Scale(value=13.0)]), [2, 3, 5, 7, 11, 13]),
    "insert": (lambda m: m.insert(1, ops.Scale(value=11.0)), [2, 11, 3, 5, 7]),
    "insert_first": (lambda m: m.insert(0, ops.Scale(value=11.0)), [11, 2, 3, 5, 7]),
    "pop": (lambda m: m.pop(1), [2, 5, 7]),
    "pop_last": (lambda m: m.pop(-1), [2, 3, 5]),
    "delete": (lambda m: m.__delitem__(0), [3, 5, 7]),
    "delete_slice": (lambda m: m.__delitem__(slice(1, 3)), [2, 7]),
    "set": (lambda m: m.__setitem__(2, ops.Scale(value=11.0)), [2, 3, 11, 7]),
    "set_negative": (lambda m: m.__setitem__(-1, ops.Scale(value=11.0)), [2, 3, 5, 11]),
    "extend_in_place": (lambda m: m.__iadd__(scales(11.0)), [2, 3, 5, 7, 11]),
    "repeat_in_place": (lambda m: m.__imul__(2), [2, 3, 5, 7, 2, 3, 5, 7]),
    "add_module": (lambda m: m.add_module("4", ops.Scale(value=11.0)), [2, 3, 5, 7, 11]),
    "set_attribute": (lambda m: setattr(m, "0", ops.Scale(value=11.0)), [11, 3, 5, 7]),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_after_the_first_call_take_effect(name):
    change, want = EDITS[name]
    model = scales(2.0, 3.0, 5.0, 7.0)
    assert factor(model) == 210
    change(model)
    assert values(model) == want
    assert len(model) == len(want)
    assert factor(model) == torch.tensor(want).prod()
    assert [int(name) for name in model._modules] == list(range(len(want)))


def test_insert_before_names():
    model = te_fuser.Sequential(OrderedDict(a=ops.Scale(value=2.0), b=ops.Scale(value=3.0)))
    words = r"in this Sequential that has names \(a, b\): make a list around it, te_fuser.Sequential\(op, ...\)"
    for index in (0, -2):
        with pytest.raises(ValueError, match=words):
            model.insert(index, ops.GELU())
    assert list(model._modules) == ["a", "b"] and factor(model) == 6
    assert list(model.insert(2, ops.Scale(value=5.0))._modules) == ["a", "b", "2"] and factor(model) == 30
    with pytest.raises(IndexError):
        model.insert(7, ops.GELU())
    layer = te_fuser.TransformerLayer(8, 8, 1, device="cpu")
    with pytest.raises(ValueError, match="in this TransformerLayer that has names .mlp_fork, layernorm_mlp, mlp_end."):
        layer.insert(3, ops.GELU())


MADE = {
    "slice": (lambda m: m[1:], [3, 5, 7]),
    "slice_from_end": (lambda m: m[:-2], [2, 3]),
    "slice_step": (lambda m: m[::2], [2, 5]),
    "slice_empty": (lambda m: m[4:], []),
    "sum": (lambda m: m + scales(11.0, memory="fast"), [2, 3, 5, 7, 11]),
    "sum_torch": (lambda m: m + nn.Sequential(ops.Scale(value=11.0)), [2, 3, 5, 7, 11]),
    "times": (lambda m: m * 2, [2, 3, 5, 7, 2, 3, 5, 7]),
    "times_from_left": (lambda m: 2 * m, [2, 3, 5, 7, 2, 3, 5, 7]),
}


@pytest.mark.parametrize("name", MADE)
def test_new_lists_carry_the_options(name):
    make, want = MADE[name]
    model = scales(2.0, 3.0, 5.0, 7.0)
    made = make(model)
    assert type(made) is te_fuser.Sequential and made is not model
    assert values(made) == want
    assert (made.memory, made.kernels, made.verify) == ("lean", "reference", False)
    assert factor(made) == torch.tensor(want or [1]).prod()
    assert values(model) == [2, 3, 5, 7]


def test_index_and_iteration():
    model = scales(2.0, 3.0, 5.0)
    assert [model[k].value for k in (0, 1, 2, -1, -3)] == [2, 3, 5, 5, 2]
    assert list(model) == [model[0], model[1], model[2]]
    assert bool(model) and model[2] in list(model)
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="out of range"):
            model[wrong]


def test_slices_share_their_ops_and_keep_their_names():
    model = sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU("none"), ops.Linear(16, 8))
    part = model[1:3]
    assert part[0] is model[1]
    assert list(part.state_dict()) == ["1.weight", "1.bias"]
    torch.testing.assert_close(model[3](model[1:3](model[0](X))), model(X))


def test_ordered_dict():
    model = sequential(OrderedDict(norm=ops.LayerNorm(8), up=ops.Linear(8, 16), act=ops.GELU()))
    assert model.up is model[1]
    assert list(model.state_dict()) == ["norm.weight", "norm.bias", "up.weight", "up.bias"]
    assert list(model[:2].state_dict()) == list(model.state_dict())
    assert_as_meant(model, X)


def test_wrong_list_operations():
    model = scales(2.0)
    with pytest.raises(TypeError, match="adds another Sequential, got list"):
        model + [ops.GELU()]
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"repeated 1 or more times, got {wrong}"):
            model * wrong


@pytest.mark.parametrize(
    ("options", "words"),
    [({"memory": "tiny"}, "memory is one of fast, balanced, lean or a budget in bytes, .* got 'tiny'"),
     ({"memory": "1GB"}, r"a budget in bytes, a whole number such as 2\*\*30 for 1 GiB, got '1GB'"),
     ({"memory": 1e9}, r"a whole number such as .* got 1000000000\.0"), ({"memory": -1}, "got -1"),
     ({"memory": True}, "got True"), ({"kernels": "cuda"}, "kernels is one of auto, generated, reference, got 'cuda'")],
)  # fmt: skip
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        te_fuser.Sequential(ops.GELU(), **options)


def test_the_empty_list_hands_its_input_through():
    model = sequential()
    torch.testing.assert_close(model(X), X)
    assert_as_meant(model, X)


def test_a_shared_op_runs_twice_and_its_gradients_add_up():
    shared = ops.Linear(8, 8)
    model = sequential(shared, ops.GELU(), shared, ops.LayerNorm(8))
    assert len(list(model.parameters())) == 4
    assert_as_meant(model, X)


def test_residual():
    branch = [ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU()]
    model = sequential(te_fuser.Residual(*branch))
    torch.testing.assert_close(model(X), X + sequential(*branch)(X))
    assert_as_meant(model, X)


@pytest.fixture
def unsaid(monkeypatch):
    """No class was warned of yet."""
    monkeypatch.setattr("te_fuser.sequential._said", set())


@pytest.mark.usefixtures("unsaid")
def test_modules_that_ops_could_stand_for_are_warned_of_once_for_each_class():
    with pytest.warns(
        UserWarning, match=r"runs 1 \(Linear\), 2 \(GELU\) of this list .*te_fuser\.from_torch"
    ) as caught:
        te_fuser.Sequential(ops.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8))
    assert [w.filename for w in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"runs first \(Sequential\), last \(SiLU\) of this list") as caught:
        te_fuser.Sequential(OrderedDict(first=nn.Sequential(nn.Conv1d(1, 1, 1), ops.ReLU()), last=nn.SiLU()))
        te_fuser.Residual(nn.Linear(8, 8), nn.SiLU())
    assert len(caught) == 1


NO_OPS = {
    "no class of the table": lambda: nn.BatchNorm1d(8),
    "another dimension": lambda: nn.Softmax(dim=0),
    "hooks": lambda: hooked(nn.Linear(8, 8)),
    "a list of others": lambda: nn.Sequential(nn.Sequential(nn.Conv1d(1, 1, 1)), nn.BatchNorm1d(8)),
    "an empty list": nn.Sequential,
    "a decoder": lambda: nn.TransformerDecoderLayer(8, 2),
    "an eps that follows the dtype": lambda: nn.RMSNorm(8, elementwise_affine=False),
    "a class of its own": lambda: type("Mine", (nn.Linear,), {"forward": lambda self, x: x})(8, 8),
}


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("name", NO_OPS)
def test_modules_that_no_op_stands_for_are_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = NO_OPS[name]()
        te_fuser.Sequential(ops.Linear(8, 8), module, ops.GELU())


@pytest.mark.usefixtures("unsaid")
def test_what_the_warning_advises_fuses():
    modules = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = te_fuser.from_torch(nn.Sequential(*modules))
        each = te_fuser.Sequential(*map(te_fuser.from_torch, modules))
    for model in (whole, each):
        assert len(model.plans(torch.randn(4, 8))) == 1 and model[1].weight is modules[1].weight
