"""Parameters that are replaced, computed, loaded or trained: models stay right whatever changes around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from te_fuser.fusions import Details, fusion
from tests.fuser.models import our_mlp, torch_mlp
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(6, 8)


def test_a_parameter_that_is_taken_away_is_seen():
    model = our_mlp()
    model(X)
    model[1].register_parameter("bias", None)
    assert_as_meant(model, X)
    model[1].register_parameter("bias", nn.Parameter(torch.ones(16, dtype=torch.float64)))
    assert_as_meant(model, X)
    model(X).sum().backward()
    assert model[1].bias.grad is not None
    X.grad = None
    kept = model[1].bias.detach()
    del model[1].bias
    model[1].register_buffer("bias", kept + 1.0)
    assert_as_meant(model, X)
    del model[1].weight
    with pytest.raises(AttributeError, match="reads 'weight' of Linear, which has no parameter of that name"):
        model(X)


@pytest.mark.parametrize("wrap", [lambda op: op, sequential], ids=["alone", "in_a_list"])
@pytest.mark.parametrize("name", ["forward", "compute"])
def test_a_method_of_an_op_that_is_taken_away_is_seen(name, wrap):
    op = ops.GELU()
    model = wrap(op)
    want = model(X)
    setattr(op, name, lambda x, **inputs: 2.0 * x)
    torch.testing.assert_close(model(X), 2.0 * X)
    delattr(op, name)
    assert torch.equal(model(X), want)


def test_a_parameter_of_another_shape_in_the_same_tensor_is_seen():
    """No attribute of an op changes: the shape itself must be looked at."""
    model = our_mlp()
    model(X)
    model[1].weight.data = torch.ones(24, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"parameter weight has shape \[24, 8\], the op was made for \[16, 8\]"):
        model(X)
    model = our_mlp()
    model(X)
    model[0].weight.data = torch.ones(16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"op 0 \(LayerNorm '0'\): .* widths 8 and 16"):
        model(X)
    model = sequential(ops.Scale(8), ops.GELU())
    model(X)
    model[0].weight.data = torch.tensor(3.0, dtype=torch.float64)
    torch.testing.assert_close(model(X), ops.GELU()(3.0 * X))
    assert_as_meant(model, X)


def as_a_tensor(op):
    """The weight is no parameter any more."""
    weight = op.weight.detach() * 2.0
    del op.weight
    op.weight = weight


# what makes a weight something that is computed from a parameter
COMPUTED = {
    "pruned": lambda op: nn.utils.prune.l1_unstructured(op, "weight", 0.5),
    "no_parameter": as_a_tensor,
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_parameters(name, place):
    model, twin = our_mlp(), torch_mlp()
    model(X)
    for m in (model, twin):
        COMPUTED[name](m[place])
    for alone in (model, model[:2]):
        torch.testing.assert_close(alone(X), twin[: len(alone)](X))
    got, want = (
        torch.autograd.grad(m(X).square().sum(), [p for p in m.parameters() if p.requires_grad]) for m in (model, twin)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_parameter_that_the_formula_does_not_read_gets_no_gradient():
    class Odd(ops.Scale):
        def __init__(self):
            super().__init__(8)
            self.unused = nn.Parameter(torch.ones(3))

    model = sequential(Odd(), ops.GELU())
    assert_as_meant(model, X)
    model(X).sum().backward()
    assert model[0].unused.grad is None and model[0].weight.grad is not None
    X.grad = None


def test_buffers_are_arguments_of_a_formula():
    class Shift(ops.RowOp):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.arange(8.0))

        def compute(self, x, by):
            return x + by

    model = sequential(ops.Linear(8, 8), Shift(), ops.GELU())
    torch.testing.assert_close(model(X), ops.GELU()(model[0](X) + torch.arange(8.0)))
    assert_as_meant(model, X)
    model[1].by += 1.0
    assert_as_meant(model, X)
    assert "1.by" in model.state_dict()


def test_functional_call():
    model = our_mlp()
    model(X)
    others = {name: (2.0 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, others, (X,))
    twin = torch_mlp()
    twin.load_state_dict(others)
    torch.testing.assert_close(y, twin(X))
    got = torch.autograd.grad(y.sum(), list(others.values()))
    torch.testing.assert_close(got, torch.autograd.grad(twin(X).sum(), list(twin.parameters())), rtol=1e-10, atol=1e-10)


def test_meta_device_first():
    model = te_fuser.Sequential(
        ops.LayerNorm(8, device="meta"),
        ops.Linear(8, 16, device="meta"),
        ops.GELU(),
        ops.Linear(16, 8, device="meta"),
        kernels="reference",
    )
    x = tensor(6, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="op 0 .*parameter weight is on meta, its input on cpu; move one with"):
        model(x)
    model.to_empty(device="cpu")
    for op in model.operations():
        if hasattr(op, "reset_parameters"):
            op.reset_parameters()
    twin = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8))
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), twin(x))
    assert_as_meant(model.double(), X)


parametrize = nn.utils.parametrize
parametrizations = nn.utils.parametrizations


class LowRank(nn.Module):
    """weight + up down, with a frozen weight (LoRA)."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * in_features).reshape(2, in_features).double())
        self.up = nn.Parameter(torch.linspace(-1, 2, 2 * out_features).reshape(out_features, 2).double())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


class DropConnect(nn.Module):
    """Weights dropped anew in each call."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weight, 0.5, self.training)


class Counted(nn.Module):
    """Twice the weight; each time it is computed is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2.0 * weight


def lora(op: nn.Module, name: str) -> None:
    op.weight.requires_grad_(False)
    parametrize.register_parametrization(op, name, LowRank(*op.weight.shape))


def drop_connect(op: nn.Module, name: str) -> None:
    parametrize.register_parametrization(op, name, DropConnect())


def spectral_norm(op: nn.Module, name: str) -> None:
    torch.manual_seed(3)  # it starts with random vectors
    parametrizations.spectral_norm(op, name)


PARAMETRIZED: dict[str, Callable[[nn.Module, str], Any]] = {
    "lora": lora,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": spectral_norm,
    "drop_connect": drop_connect,
}
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
}


def steps(model: nn.Module, call: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything that three training steps of two shapes leave: outputs, gradients, buffers, the generator."""
    torch.manual_seed(1)
    found = {}
    for number, rows in enumerate((6, 7, 6)):
        x = tensor(rows, 8, seed=number)
        y = call(model, x)
        y.square().sum().backward()
        found |= {f"{number} output": y.detach(), f"{number} gradient of x": x.grad}
        found |= {f"{number} {name}": p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        found |= {f"{number} {name}": b.clone() for name, b in model.named_buffers()}
    return {**found, "generator": torch.get_rng_state()}


WEIGHTS = ((1, "weight"), (3, "weight"))
PLACES = {**dict.fromkeys(PARAMETRIZED, WEIGHTS), "drop_connect of others": ((0, "weight"), (0, "bias"), (1, "bias"))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", PLACES)
def test_training_leaves_what_eager_leaves(name: str, call: str) -> None:
    model, twin = our_mlp(), torch_mlp()
    for m in (model, twin):
        for place, parameter in PLACES[name]:
            PARAMETRIZED[name.partition(" ")[0]](m[place], parameter)
    got, want = steps(model, CALLS[call]), steps(twin, CALLS[call])
    assert got.keys() == want.keys()
    for what, t in want.items():
        torch.testing.assert_close(got[what], t, rtol=1e-9, atol=1e-9, msg=lambda m, what=what: f"{what}: {m}")


def counted(op: nn.Module, name: str = "weight") -> Counted:
    found = Counted()
    parametrize.register_parametrization(op, name, found)
    found.calls = 0  # registering computes it, too
    return found


def test_each_is_computed_once_a_call() -> None:
    model = our_mlp()
    found = [counted(model[0]), counted(model[0], "bias"), counted(model[1]), counted(model[1], "bias")]
    for number, rows in enumerate((6, 7, 7, 1, 6)):  # the first call makes the list, a new shape a plan
        model(tensor(rows, 8)).sum().backward()
        assert {c.calls for c in found} == {number + 1}
    with torch.no_grad():
        model(tensor(6, 8))
    model.eval()
    model(tensor(6, 8))
    assert {c.calls for c in found} == {7}
    model.verify = True
    model(tensor(6, 8)).sum().backward()
    assert {c.calls for c in found} == {8}
    model.reference(tensor(6, 8)).sum().backward()
    assert {c.calls for c in found} == {9}


def test_a_tied_one_is_computed_once() -> None:
    linear = ops.Linear(8, 8)
    model = sequential(linear, ops.GELU(), linear)
    found = counted(linear)
    model(tensor(6, 8)).sum().backward()
    assert found.calls == 1
    model.reference(tensor(6, 8))
    assert found.calls == 2


def test_an_op_alone() -> None:
    for op in (ops.Linear(8, 4), ops.LayerNorm(8), ops.MatMul(8, 4)):
        found = counted(op)
        for number, rows in enumerate((6, 7)):
            op(tensor(rows, 8, dtype=torch.float32)).sum().backward()
            assert found.calls == number + 1


def test_planning_never_computes_one() -> None:
    """Neither the planner, nor what it asks of ops and fusions."""

    class Product(ops.UnfusedOperation):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8, 4, dtype=torch.float64))

        def infer(self, x: Any) -> Any:
            return x.with_features(self.weight.shape[1])

        def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ call["weight"]

        def op_backward(self, call: Any, dy: torch.Tensor) -> Any:
            return dy @ call["weight"].T, {"weight": call["input"].T @ dy}

        reads = ("input", "weight")

    seen = []

    def when(m: Any) -> str:
        weight = m[0].weight
        seen.append((weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.dim(), weight.numel()))
        return "only looks"

    @fusion(forward=[Product], when=when, details=Details(registered=False))
    def looks(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    model = te_fuser.Sequential(Product(), ops.Scale(4).double(), kernels="reference")
    found = [counted(model[0]), counted(model[1])]
    with te_fuser.fusions.only(looks, te_fuser.fusions.STRETCH):
        model.plan(tensor(5, 8))
        model.explain(tensor(5, 8), details=True)
        assert [c.calls for c in found] == [0, 0]
        assert_as_meant(model, tensor(5, 8))
    assert [c.calls for c in found] == [2, 2]  # the call, and its reference
    assert set(seen) == {((8, 4), torch.float64, torch.device("cpu"), True, 2, 32)}


def test_looking_after_a_call_computes_nothing_at_all() -> None:
    runs = []

    class Noted(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            runs.append(weight)
            return 2.0 * weight

    model = our_mlp()
    parametrize.register_parametrization(model[1], "weight", Noted())
    model(tensor(6, 8))
    runs.clear()
    assert model.plan(tensor(7, 8)).backward and runs == []
    model.requires_grad_(False)
    assert not model.plan(tensor(7, 8, grad=False)).backward and len(runs) == 1  # seen on a copy, without values


def test_a_fusion_cannot_read_values_while_planning() -> None:
    @fusion(forward=[ops.Scale], when=lambda m: bool(m[0].weight.sum() > 0), details=Details(registered=False))
    def peeps(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    model = sequential(ops.Scale(8))
    counted(model[0])
    with te_fuser.fusions.only(peeps, te_fuser.fusions.STRETCH), pytest.raises(Exception, match="peeps|data-dep|value"):
        model(tensor(5, 8))


def test_parametrizations_that_are_cached() -> None:
    """In `cached()` a weight is computed once for all calls; looking at the model caches nothing of its own."""
    model = our_mlp()
    found = counted(model[1])
    with parametrize.cached():
        model.plan(tensor(6, 8))
        assert found.calls == 0
        with torch.no_grad():
            for rows in (6, 7):
                x = tensor(rows, 8)
                torch.testing.assert_close(model(x), model.reference(x))
        assert found.calls == 1


def test_a_computed_parameter_that_changes_its_shape_is_refused() -> None:
    class Wider(nn.Module):
        wide = False

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.cat([weight, weight]) if self.wide else weight

    model, wider = our_mlp(), Wider()
    parametrize.register_parametrization(model[1], "weight", wider)
    model(tensor(6, 8))
    wider.wide = True
    with pytest.raises(ValueError, match=r"parameter weight has shape \[32, 8\], the op was made for \[16, 8\]"):
        model(tensor(6, 8))


def test_under_autocast() -> None:
    model, twin = our_mlp().float(), torch_mlp().float()
    for m in (model, twin):
        counted(m[1])
        counted(m[1], "bias")
    x = tensor(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(x), twin(x)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert model[1].parametrizations.weight[0].calls == 1


def test_copies_compute_their_own() -> None:
    model = our_mlp()
    counted(model[1])
    model(tensor(6, 8))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[1].parametrizations.weight.original.mul_(0.0)
    assert_as_meant(twin, tensor(6, 8))
    assert not torch.equal(twin(tensor(6, 8)), model(tensor(6, 8)))
