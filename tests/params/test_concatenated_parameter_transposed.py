"""Ops that read a parameter which lies transposed: values, its gradient, and no copy of it."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.params.concatenated_parameter import TransposedBinding
from tests.ops.check import normal

WIDTH, OUT = 8, 12


class Projection(te_fuser.Sequential):
    """y = gelu(norm(x) W + b) with W [in, out]."""

    def __init__(self) -> None:
        super().__init__(
            ops.LayerNorm(WIDTH),
            ops.Bound(ops.MatMul(WIDTH, OUT, device="meta"), self, weight=ops.Transposed("weight")),
            ops.Bound(ops.Bias(OUT, device="meta"), self, bias="bias"),
            ops.GELU(),
        )
        self.weight = torch.nn.Parameter(normal(WIDTH, OUT).float())
        self.bias = torch.nn.Parameter(normal(OUT).float())

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.layer_norm(x, (WIDTH,), self[0].weight, self[0].bias)
        return torch.nn.functional.gelu(x @ self.weight + self.bias, approximate="tanh")


def assert_as_meant(model: Projection, x: torch.Tensor) -> None:
    want = model.meaning(x)
    for y in (model(x), model.reference(x)):
        torch.testing.assert_close(y, want)
        dy = normal(*y.shape, seed=3).to(y.dtype)
        leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
        gradients = [torch.autograd.grad(t, leaves, dy, retain_graph=True) for t in (y, want)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5), (1,), (0,)])
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    model = Projection()
    x = normal(*shape, WIDTH).float().requires_grad_()
    assert_as_meant(model, x)
    assert_as_meant(copy.deepcopy(model).double(), x.detach().double())
    model.weight.requires_grad_(False)
    assert_as_meant(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.meaning(x))


def test_it_is_read_in_place_and_looked_at() -> None:
    model, x = Projection(), normal(5, WIDTH).float()
    binding = TransposedBinding(model, "weight")
    assert binding.taken().data_ptr() == model.weight.data_ptr()
    assert [p.key for p in model.plan(x).graph.parameters].count(binding.key) == 1
    model.plan(x, device="h200")
    assert te_fuser.verify(model, x).passed
    assert "weight=weight.T" in repr(model[1])


def test_what_is_no_matrix() -> None:
    model = Projection()
    model.weight = torch.nn.Parameter(torch.zeros(WIDTH))
    with pytest.raises(ValueError, match=r"weight.T of Projection is read of a matrix, got \[8\]"):
        model(torch.zeros(3, WIDTH))
    del model.weight
    with pytest.raises(AttributeError, match="reads 'weight' of Projection, which has no parameter"):
        model(torch.zeros(3, WIDTH))
