"""Parameters that are replaced, computed, loaded or trained: models stay right whatever changes around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import te_fuser
from te_fuser import ops
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
