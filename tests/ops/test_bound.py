"""Bound: whose parameters an op reads, also of copies, pickles and modules that changed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bound import WeakBinding
from tests.refused import raises
from tests.twins import assert_as_meant, assert_same, randomize, sequential, tensor

X = tensor(5, 8)


class Mlp(te_fuser.Sequential):
    """Owns what its ops read, under names of its own."""

    def __init__(self) -> None:
        super().__init__(
            ops.Bound(ops.LayerNorm(8, device="meta"), self, bias="norm_bias", weight="norm_weight"),
            ops.Bound(ops.MatMul(8, 8, device="meta"), self, weight="fc_weight"),
            ops.Bound(ops.Bias(8, device="meta"), self, bias="fc_bias"),
            ops.GELU(),
            kernels="reference",
        )
        for name, shape in {"norm_weight": 8, "norm_bias": 8, "fc_weight": (8, 8), "fc_bias": 8}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        randomize(self)


NAMES = ["norm_weight", "norm_bias", "fc_weight", "fc_bias"]


def bare(model: Mlp) -> te_fuser.Sequential:
    """List of ops that own the model's parameters."""
    made = sequential(ops.LayerNorm(8), ops.MatMul(8, 8), ops.Bias(8), ops.GELU())
    made.load_state_dict(dict(zip(made.state_dict(), [model.state_dict()[name] for name in NAMES], strict=True)))
    return made


def test_it_reads_the_owners_parameters_and_its_op_is_no_module_of_the_model() -> None:
    model = Mlp()
    assert list(model.state_dict()) == NAMES == [name for name, _ in model.named_parameters()]
    assert_as_meant(model, X)
    torch.testing.assert_close(model(X), bare(model)(X))
    (mine, theirs) = (m.plan(X) for m in (model, bare(model)))
    mine_has, theirs_has = ([(n.traits.role, n.label) for n in plan.graph.nodes] for plan in (mine, theirs))
    assert mine_has == theirs_has
    assert [b.name for b in mine.graph.parameters] == NAMES
    assert repr(Mlp()[0]).startswith("Bound(LayerNorm(features=8, eps=1e-05, ")
    assert repr(Mlp()[0]).endswith("), weight=norm_weight, bias=norm_bias)")
    assert not [m for m in model.modules() if isinstance(m, (ops.MatMul, ops.Bias, ops.LayerNorm))]
    model.eval()
    assert not any(bound.op.training for bound in model if isinstance(bound, ops.Bound))


def test_an_op_of_it_runs_alone() -> None:
    model = Mlp()
    torch.testing.assert_close(model[1](X), X @ model.fc_weight.t())
    model[1].register_forward_hook(lambda m, args, y: 2.0 * y)
    torch.testing.assert_close(model[1](X), 2.0 * X @ model.fc_weight.t())
    assert_as_meant(model, X)


# --------------------------------------------------------------------------------------------------- copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy_of_a_list": lambda m: copy.deepcopy(te_fuser.Sequential(m))[0],
    "op_before_its_owner": lambda m: copy.deepcopy([m[1], m])[1],
}
OWNERS: dict[str, Callable[[], Any]] = {
    "sequential": Mlp,
    "linear": lambda: randomize(ops.Linear(8, 8, dtype=torch.float64)),
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [*(("sequential", n) for n in COPIES), ("linear", "deepcopy"), ("linear", "pickle")]
)
def test_a_copy_is_trained_by_itself(owner: str, name: str, ran: bool) -> None:
    model = OWNERS[owner]()
    if ran:
        model(X).sum().backward()
        model.zero_grad()
    twin, before = COPIES[name](model), model(X).detach()
    torch.testing.assert_close(twin(X), before)
    for trained, other in ((twin, model), (model, twin)):
        held, old = other(X).detach(), trained(X).detach()
        for p in trained.parameters():
            p.grad = None
        trained(X).square().sum().backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        torch.testing.assert_close(other(X), held, rtol=0, atol=0)
        assert (trained(X) - old).abs().max() > 1e-3
    assert torch.equal(twin.state_dict()["weight" if owner == "linear" else "fc_weight"], list(twin.parameters())[-2])


@pytest.mark.parametrize("make", [copy.deepcopy, COPIES["pickle"]])
def test_an_op_without_its_owner_is_of_no_use(make: Callable[[Any], Any]) -> None:
    model = Mlp()
    alone = make(model[1])
    for _ in range(2):
        raises(ReferenceError, r"Bound\(MatMul\) reads fc_weight of a module that is gone: keep, copy", alone, X)
        alone = make(alone)
    assert model[1].owner is model
    op = Mlp()[1]
    raises(ReferenceError, "reads fc_weight of a module that is gone", op, X)
    binding = WeakBinding(nn.Linear(2, 2), "weight")
    raises(ReferenceError, "whose 'weight' is to be read is gone", binding.get)


def test_a_shallow_copy_and_a_slice_read_what_the_original_reads() -> None:
    model = Mlp()
    for made in (copy.copy(model), model[:], te_fuser.Sequential(*[copy.copy(op) for op in model])):
        torch.testing.assert_close(made(X), model(X))


# --------------------------------------------------------------------------------------------------- the owner


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize(
    "make", [Mlp, lambda: Mlp()[:1], lambda: sequential(ops.Linear(8, 8), Mlp()), lambda: Affine()]
)
def test_the_owner_is_freed_when_it_is_dropped(make: Callable[[], Any], run: bool, uncollected: None) -> None:
    model = make()
    if run and len(model) > 1:
        model(X).sum().backward()
        model.reference(X)
    watched = [weakref.ref(m) for m in model.modules()] + [weakref.ref(p) for p in model.parameters()]
    assert watched
    del model
    assert [w() for w in watched if w() is not None] == []


def test_the_owner_may_change() -> None:
    model = Mlp()
    model(X)
    new = nn.Parameter(tensor(8, 8, seed=3).detach())
    model.fc_weight = new
    assert_as_meant(model, X)
    assert torch.autograd.grad(model(X).sum(), new)[0].abs().sum() > 0
    nn.utils.parametrizations.weight_norm(model, "fc_weight")
    assert_as_meant(model, X)
    nn.utils.parametrize.remove_parametrizations(model, "fc_weight")
    torch.testing.assert_close(model(X), bare(model)(X))
    model.__class__ = type("Wrapped", (Mlp,), {})  # as fully_shard does
    assert_as_meant(model, X)
    model.fc_weight = nn.Parameter(torch.ones(16, 8, dtype=torch.float64))
    raises(ValueError, r"parameter weight has shape \[16, 8\], the op was made for \[8, 8\]", model, X)
    model.fc_bias = None
    raises(AttributeError, r"Bound\(Bias\) reads 'fc_bias' of Wrapped, which has no parameter", model, X)


def test_an_attribute_of_the_op_may_change() -> None:
    model = Mlp()
    before = model(X)
    model[0].op.eps = 1.0
    assert (model(X) - before).abs().max() > 1e-3
    assert_as_meant(model, X)
    model[0].op.register_forward_hook(lambda *_: None)
    raises(TypeError, "Bound: part 'op' has a hook, which would not run", model, X)


def test_buffers() -> None:
    op = ops.Bias(8)
    op.register_buffer("mean", torch.zeros(8))
    with pytest.raises(TypeError, match="Bound keeps nothing of its op, and Bias has 'mean': put it into a list"):
        ops.Bound(op, nn.Module(), bias="b")


@pytest.mark.parametrize("path", ["weight", "part.weight"])
def test_a_module_beside_it_or_in_it_may_own_the_parameters(path: str) -> None:
    owner = nn.Linear(8, 8, dtype=torch.float64)
    owner.part = nn.Linear(8, 8, dtype=torch.float64)
    model = te_fuser.Sequential(ops.Bound(ops.MatMul(8, 8, device="meta"), owner, weight=path), kernels="reference")
    torch.testing.assert_close(model(X), X @ owner.get_parameter(path).t())
    assert list(model.parameters()) == []
    owner.part = nn.Linear(8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(X), X @ owner.get_parameter(path).t())


# --------------------------------------------------------------------------------------------------- a Linear


class Affine(te_fuser.Sequential):
    """Owns what its Linears read: one with a bias, one without, and one with several joined, behind a transpose."""

    def __init__(self) -> None:
        super().__init__(
            ops.Bound(ops.Linear(8, 16, device="meta"), self, weight="up", bias="shift"),
            ops.GELU(),
            ops.Bound(ops.Linear(16, 8, bias=False, device="meta"), self, weight=ops.Transposed("down")),
            ops.Bound(ops.Linear(8, 8, device="meta"), self, weight=("a", "b"), bias="last"),
            kernels="reference",
        )
        shapes = {"up": (16, 8), "shift": 16, "down": (16, 8), "a": (3, 8), "b": (5, 8), "last": 8}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        randomize(self)

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x @ self.up.t() + self.shift, approximate="tanh") @ self.down
        return y @ torch.cat([self.a, self.b]).t() + self.last


@pytest.mark.parametrize("make", [lambda m: m, *COPIES.values()])
def test_a_linear_reads_the_owners_parameters(make: Callable[[Any], Any]) -> None:
    model = Affine()
    if (made := make(model)) is not model and not isinstance(made, Affine):  # one op of a copy
        model, made = made.owner, made.owner
    assert list(made.state_dict()) == ["up", "shift", "down", "a", "b", "last"]
    assert not [m for m in made.modules() if isinstance(m, ops.Linear)]
    made.load_state_dict({name: 2.0 * p for name, p in model.state_dict().items()})
    x = X.clone().requires_grad_()
    assert_as_meant(made, x)
    assert_same(made(x), made.by_hand(x), [x, *made.parameters()])
    roles = [n.traits.role for n in made.plan(x).graph.nodes]
    assert roles == ["mat_mul", "bias", "gelu", "mat_mul", "mat_mul", "bias"]
    torch.testing.assert_close(made[0](X), X @ made.up.t() + made.shift)
    assert repr(made[0]).endswith("weight=up, bias=shift)")


def test_a_bias_that_the_owner_has_not_is_none() -> None:
    """Also where it gets one, or loses it; a name that it does not have at all is an error."""
    owner = nn.Linear(8, 8, bias=False, dtype=torch.float64)
    op = ops.Bound(ops.Linear(8, 8, device="meta"), owner, weight="weight", bias="bias")
    model = te_fuser.Sequential(op, kernels="reference")
    for run in (model, op):
        torch.testing.assert_close(run(X), owner(X))
        owner.bias = nn.Parameter(tensor(8))
        torch.testing.assert_close(run(X), owner(X))
        owner.bias = None
        torch.testing.assert_close(run(X), owner(X))
    other = ops.Bound(ops.Linear(8, 8, device="meta"), owner, weight="weight", bias="shift")
    raises(AttributeError, r"Bound\(Bias\) reads 'shift' of Linear, which has no parameter of that", other, X)


class Pair(ops.FusedOperation):
    """Stands for two ops."""

    def __init__(self) -> None:
        super().__init__(up=ops.MatMul(8, 8), act=ops.GELU())


bound: Any = ops.Bound  # of which these tests ask what no annotation allows
BIG = nn.Parameter(torch.zeros(64, 64))
FORM = r"write Bound\(ops.MatMul\(8, 16, device=\"meta\"\), module, weight=\"name of a parameter of the module\"\)$"


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: ops.Bound(ops.Linear(8, 8), nn.Module(), weight="w"), r"of Linear \(weight, bias\), got weight"),
     (lambda: bound(Pair(), nn.Module(), weight="w"), r"or an ops.Linear, got a \S+\.Pair: bind the ops it stands for"),
     (lambda: bound(nn.Linear(8, 8), nn.Module(), weight="w"), r"got a torch\.nn\.\S+\.Linear: " + FORM),
     (lambda: bound(ops.MatMul, nn.Module(), weight="w"), r"got the class MatMul: " + FORM),
     (lambda: bound(BIG, nn.Module(), weight="w"), r"Linear, got a Parameter of shape \[64, 64\]: " + FORM),
     (lambda: ops.Bound(ops.LayerNorm(8), nn.Module(), weight="w"), r"of LayerNorm \(weight, bias\), got weight"),
     (lambda: ops.Bound(ops.GELU(), nn.Module(), weight="w"), r"of GELU \(none\), got weight"),
     (lambda: ops.Bound(ops.Bias(8), nn.Module()), r"of Bias \(bias\), got none"),
     (lambda: bound(ops.Bias(8), "owner", bias="b"), r"takes the module that has the parameters, got 'owner': " + FORM),
     (lambda: bound(ops.Bias(8), nn.Linear, bias="b"), r"has the parameters, got the class Linear: " + FORM),
     (lambda: bound(ops.Bias(8), BIG, bias="b"), r"got a Parameter of shape \[64, 64\]: " + FORM),
     (lambda: bound(ops.Bias(8), bias="b"), r"missing a required argument: 'owner'\n  Bound\(op, owner, /, "),
     (lambda: bound(ops.Bias(8), nn.Module(), "b"), r"takes 2 arguments by position, got 3"),
     (lambda: bound(ops.Bias(8), nn.Module(), bias=3), r"takes a parameter's name as bias, got 3: " + FORM),
     (lambda: bound(ops.Bias(8), nn.Module(), bias=BIG), r"as bias, got a Parameter of shape \[64, 64\]: " + FORM),
     (lambda: bound(ops.Bias(8), nn.Module(), bias=(BIG,)), r"name as bias, got a tuple: " + FORM)],
)  # fmt: skip
def test_wrong_names(make: Callable[[], FusableOperation], words: str) -> None:
    raises(TypeError, words, make)
