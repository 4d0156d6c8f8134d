"""Sequential as a module with names and hooks, and as something that is saved, copied and compiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from tests.twins import assert_as_meant, randomize, sequential, tensor

X = tensor(5, 8)


def mlp(**options):
    return sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU("none"), ops.Linear(16, 8), **options)


def torch_mlp():
    return randomize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double())


# --------------------------------------------------------------------------------------------------- nesting


def nested():
    return sequential(
        ops.LayerNorm(8),
        te_fuser.Sequential(ops.Linear(8, 16), te_fuser.Sequential(ops.GELU(), ops.Linear(16, 8))),
        te_fuser.Residual(ops.Linear(8, 8)),
    )


def test_nested_lists_are_one_plan_with_their_own_names():
    model = nested()
    plan = model.plan(X)  # an error if there were several
    assert [n.op.kind.__name__ for n in plan.graph.nodes] == (
        ["LayerNorm", "MatMul", "Bias", "GELU", "MatMul", "Bias", "Fork", "MatMul", "Bias", "Add"]
    )
    for made in (model, many_outputs()):
        assert list(made.state_dict()) == [name for name, _ in made.named_parameters()]
    assert {"1.0.weight", "1.1.1.bias", "2.0.weight"} <= set(model.state_dict())
    assert_as_meant(model, X)


def test_a_change_deep_inside_takes_effect():
    model = nested()
    model(X)
    model[1][1][0] = ops.ReLU()
    assert "ReLU" in [n.op.kind.__name__ for n in model.plan(X).graph.nodes]
    assert_as_meant(model, X)
    model[1][1].append(ops.SiLU())
    assert_as_meant(model, X)
    assert model.plan(X).graph.nodes[6].op.kind is ops.SiLU


class Doubled(te_fuser.Sequential):
    def forward(self, x):
        return 2.0 * super().forward(x)


class DoubledGELU(ops.GELU):
    def forward(self, x):
        return 2.0 * super().forward(x)


class DoublyCalled(te_fuser.Sequential):
    def __call__(self, x):
        return 2.0 * super().__call__(x)


@pytest.mark.parametrize("make", [lambda: Doubled(ops.GELU()), lambda: DoublyCalled(ops.GELU()), DoubledGELU])
def test_a_forward_of_ones_own_is_run(make):
    model = sequential(ops.Bias(8), make(), ops.Bias(8))
    bias = model[0].bias + model[2].bias
    torch.testing.assert_close(model(X), 2.0 * ops.GELU()(X + model[0].bias) + bias - model[0].bias)


@pytest.mark.parametrize("make", [ops.GELU, lambda: te_fuser.Sequential(ops.GELU())])
def test_forward_put_on_a_member_is_run_until_it_goes(make):
    model = sequential(make(), ops.ReLU())
    before = model(X)
    model[0].forward = lambda x: -x
    torch.testing.assert_close(model(X), (-X).relu())
    del model[0].forward
    torch.testing.assert_close(model(X), before)


def test_plain_modules_in_between():
    model = sequential(
        ops.Linear(8, 8), nn.Tanh(), ops.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ops.GELU()
    )
    want = model[4](model[3](model[2](torch.tanh(model[0](X)))))
    torch.testing.assert_close(model(X), want)
    assert_as_meant(model, X)
    assert len(model.plans(X)) == 3
    with pytest.raises(ValueError, match=r"split this list into 3 plans; use plans\(x\)"):
        model.plan(X)


def test_names_cross_plain_modules():
    model = sequential(
        ops.Fork("skip"),
        ops.Linear(8, 8),
        nn.Tanh(),
        ops.Output("inner"),
        nn.Sigmoid(),
        ops.Add("skip"),
        ops.Add("extra"),
    )
    extra = tensor(5, 8, seed=3)
    y, inner = assert_as_meant(model, X, ("inner",), extra=extra)
    torch.testing.assert_close(inner, torch.tanh(model[1](X)))
    torch.testing.assert_close(y, torch.sigmoid(inner) + X + extra)


# --------------------------------------------------------------------------------------------------- names


def test_inner_names_are_local():
    """Both scopes say "skip"; each Add takes the one of its own, and outer names are seen inside."""
    inner = te_fuser.Sequential(ops.Fork("skip"), ops.GELU(), ops.Add("skip"), ops.Add("outer"))
    model = sequential(ops.Fork("skip"), ops.Fork("outer"), ops.Linear(8, 8), inner, ops.Add("skip"))
    middle = model[2](X)
    torch.testing.assert_close(model(X), ops.GELU()(middle) + middle + X + X)
    assert_as_meant(model, X)


def test_names_bound_in_a_scope_are_not_seen_outside():
    model = sequential(te_fuser.Sequential(ops.Fork("a"), ops.GELU(), ops.Add("a")), ops.Add("a"))
    words = (
        r"'a', which no Fork before it binds .*\('0\.0' binds it for its own list, '0', alone: put both into one list"
    )
    with pytest.raises(ValueError, match=words + r", or pass it: model\(x, a=\.\.\.\); given: none\)"):
        model(X)
    assert_as_meant(model, X, a=tensor(5, 8, seed=4))


def test_unbound_names_are_arguments_of_the_call():
    model = sequential(te_fuser.Sequential(te_fuser.Sequential(ops.Add("deep"))), ops.Add("flat"))
    deep, flat = tensor(5, 8, seed=1), tensor(5, 8, seed=2)
    (y,) = assert_as_meant(model, X, deep=deep, flat=flat)
    torch.testing.assert_close(y, X + deep + flat)


def test_an_input_read_by_several_ops_gets_the_sum_of_its_gradients():
    model = sequential(
        ops.Add("c"),
        ops.Linear(8, 8),
        ops.AdaptiveLayerNorm(8, scale="c", shift="c", per="row"),
        ops.Linear(8, 8),
        ops.Add("c"),
    )
    assert_as_meant(model, X, c=tensor(5, 8, seed=7))


def test_the_name_of_a_residual_is_not_taken_from_the_ops_inside():
    model = sequential(te_fuser.Residual(ops.Linear(8, 8), ops.Add("residual"), te_fuser.Residual(ops.GELU())))
    assert_as_meant(model, X, residual=tensor(5, 8, seed=5))
    with pytest.raises(ValueError, match=r"no Output\('residual'\) in this list \(outputs: none\)"):
        model(X, residual=X, outputs=("residual",))


def test_none_is_not_given():
    model = sequential(ops.GELU())
    torch.testing.assert_close(model(X, mask=None), model(X))


def many_outputs():
    return sequential(
        ops.Output("first"),
        te_fuser.Sequential(ops.Linear(8, 8), ops.Output("same"), ops.GELU(), ops.Output("deep")),
        te_fuser.Residual(ops.Linear(8, 8), ops.Output("same")),
        ops.Fork("fork"),
        ops.Add("fork"),
    )


def test_outputs():
    model = many_outputs()
    same1 = model[1][0](X)
    deep = ops.GELU()(same1)
    same2 = model[2][0](deep)
    want = {"first": X, "1.same": same1, "deep": deep, "1.deep": deep, "2.same": same2, "fork": deep + same2}
    y = model(X)
    for names in (("first",), ("deep", "1.same"), ("1.same", "deep"), ("1.deep", "2.same", "first", "fork")):
        got, *extra = assert_as_meant(model, X, names)
        torch.testing.assert_close(got, y.detach())
        torch.testing.assert_close(tuple(extra), tuple(want[n].detach() for n in names))


def test_an_output_that_nobody_asks_for_costs_nothing():
    with_outputs, without = (
        sequential(ops.Linear(8, 8), ops.Output("a"), ops.GELU()),
        sequential(ops.Linear(8, 8), ops.GELU()),
    )
    assert [s.name for s in with_outputs.plan(X).forward] == [s.name for s in without.plan(X).forward]


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        (("same",), ValueError, "several ops give 'same'; name one by its path: 1.same, 2.same"),
        (("none",), ValueError, r"no Output\('none'\) in this list \(outputs: 1.deep, 1.same, 2.same, first, fork\)"),
        ("first", TypeError, r"outputs is a sequence of names, got 'first'; write outputs=\('first',\)"),
    ],
)
def test_wrong_outputs(outputs, error, words):
    with pytest.raises(error, match=words):
        many_outputs()(X, outputs=outputs)


def test_named_outputs_follow_the_call_and_the_list() -> None:
    model = te_fuser.Sequential(ops.GELU(), ops.Output("a"), ops.SiLU(), ops.Output("b"), ops.ReLU())
    names = ["a"]
    for asked in ((), ("a",), ("a",), ("b", "a"), names, names, ("a",), ()):
        found, wanted = model(X, outputs=asked), model.reference(X, outputs=asked)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        names[0] = "b"
    model[0], model[1] = ops.SiLU(), ops.Output("c")
    with pytest.raises(ValueError, match="'a'"):
        model(X, outputs=("a",))
    torch.testing.assert_close(model(X, outputs=("c",))[1], torch.nn.functional.silu(X))


def test_two_outputs_of_one_name_in_one_list():
    model = sequential(ops.Output("a"), ops.GELU(), ops.Output("a"))
    model(X)
    with pytest.raises(ValueError, match=r"op 0 \(Output '0'\) and op 2 \(Output '2'\) both give 'a'; rename one"):
        model(X, outputs=("a",))


# --------------------------------------------------------------------------------------------------- hooks


def hooked(model, module, events):
    """Every kind of hook on a module, noting when it fires."""
    module.register_forward_pre_hook(lambda m, args: events.append("before"))
    module.register_forward_hook(lambda m, args, y: events.append("after"))
    module.register_full_backward_pre_hook(lambda m, dy: events.append("before backward"))
    module.register_full_backward_hook(lambda m, dx, dy: events.append("after backward"))
    return model


@pytest.mark.parametrize("where", [(1,), (2,), (2, 1), (3,), ()])
def test_hooks_fire_in_order_and_change_nothing(where):
    def make():
        inner = te_fuser.Sequential(ops.Bias(8), ops.GELU())
        return sequential(ops.Linear(8, 8), ops.LayerNorm(8), inner, te_fuser.Residual(ops.Linear(8, 8)), ops.ReLU())

    model, plain, events = make(), make(), []
    model(X)  # planned before the hooks come
    module = model
    for k in where:
        module = module[k]
    hooked(model, module, events)
    model(X).sum().backward()
    assert events == ["before", "after", "before backward", "after backward"]
    torch.testing.assert_close(model(X), plain(X))
    assert_as_meant(model, X)


def test_hooks_are_heard_while_they_are_there():
    model = sequential(ops.Bias(8), ops.GELU(), ops.Bias(8))
    y, heard = model(X), []
    first = model[1].register_forward_hook(lambda m, args, y: heard.append(1) or 3.0 * y)
    changed = 3.0 * (y - model[2].bias) + model[2].bias
    torch.testing.assert_close(model(X), changed)
    second = model[1].register_forward_hook(lambda *_: heard.append(2))
    torch.testing.assert_close(model(X), changed)
    assert heard == [1, 1, 2] and len(model.plans(X)) == 2
    first.remove()
    torch.testing.assert_close(model(X), y)
    assert heard[3:] == [2] and len(model.plans(X)) == 2
    second.remove()
    torch.testing.assert_close(model(X), y)
    assert heard[4:] == [] and len(model.plans(X)) == 1


def test_names_and_outputs_cross_hooks():
    inner = te_fuser.Sequential(ops.Output("o"), ops.Add("outer"), ops.Add("call"), te_fuser.Residual(ops.Output("p")))
    model = sequential(ops.Fork("outer"), ops.Linear(8, 8), inner, ops.Fork("after"), ops.Add("after"))
    call = tensor(5, 8, seed=6)
    asked = ("2.3.p", "o", "after")
    want = assert_as_meant(model, X, asked, call=call)
    for module in (inner, model[0], inner[3], model[3]):
        module.register_forward_hook(lambda *_: None)
        got = assert_as_meant(model, X, asked, call=call)
        torch.testing.assert_close(got, want)


# --------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_of_torch_load_and_ours_load_there():
    ours, theirs = mlp(), torch_mlp()
    randomize(ours, seed=1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(X), theirs(X))
    randomize(ours, seed=2)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours(X), theirs(X))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "copy": copy.copy}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_copies(name, ran):
    model = nested()
    if ran:
        model(X).sum().backward()
        model[0](X)  # an op that has plans of its own
    other = COPIES[name](model)
    assert (other.memory, other.kernels) == (model.memory, model.kernels)
    assert_as_meant(other, X)
    torch.testing.assert_close(other(X), model(X))
    if name != "copy":
        with torch.no_grad():
            other[0].weight.zero_()
        assert model[0].weight.abs().sum() > 0
        assert not torch.equal(other(X), model(X))


def test_a_fuser_is_copied_without_its_plans():
    fuser = te_fuser.Fuser([ops.LayerNorm(8), ops.GELU()], kernels="reference")
    x = X.detach().float()
    for make in (copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))):
        y = fuser(x)
        torch.testing.assert_close(make(fuser)(x), y)


# --------------------------------------------------------------------------------------------------- torch.compile


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_full_graph_is_refused_with_the_reason(dynamo):
    for whole in (mlp(), ops.GELU()):
        compiled = torch.compile(whole, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="reason: te_fuser plans and fuses by itself"):
            compiled(X)
