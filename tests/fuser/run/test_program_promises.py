"""Ops that give another shape or dtype than they declare: an error by their name, and no kernel beyond a tensor."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.twins import tensor

X = tensor(5, 8)


class Lying(ops.UnfusedOperation):
    """Says that it keeps the shape and the dtype, and does not: in one direction, from a call on."""

    reads = ()

    def __init__(self, forward, dtype=None, honest=0):
        super().__init__()
        self.is_forward, self.dtype, self.honest = forward, dtype, [honest]

    def lie(self, x):
        if self.honest[0]:
            self.honest[0] -= 1
            return x.clone()
        return x[:, :4] if self.dtype is None else x.to(self.dtype)

    def op_forward(self, call, x):
        return self.lie(x) if self.is_forward else x.clone()

    def op_backward(self, call, dy):
        return dy if self.is_forward else self.lie(dy)


def called(model, x):
    return lambda: model(x.detach().float().requires_grad_()).sum().backward()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_an_op_that_gives_another_shape_than_it_declares(forward, last, kernels):
    """In a plan's first call its name is known, also where nothing of ours reads what it gives."""
    lying = Lying(forward)
    model = te_fuser.Sequential(*((ops.GELU(), lying) if last else (lying, ops.GELU())), kernels=kernels)
    made = "lying.output" if forward else "gradient of .*"
    words = (
        rf"^op {int(last)} \(Lying '{int(last)}'\): {made} is float32 \[5, 4\] cpu, the plan says float32 \[5, 8\] cpu"
    )
    with pytest.raises(ValueError, match=words):
        called(model, X)()
    assert_other_steps_are_not_looked_at(model)


def assert_other_steps_are_not_looked_at(model):
    """What runs later has nothing around it: an honest op runs by the plan that the lie was found in."""
    lying = next(op for op in model if isinstance(op, Lying))
    lying.honest[0] = 2
    called(model, X)()
    assert len(model.plans_kept()) == 1


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_gives_another_dtype_than_it_declares(forward):
    model = te_fuser.Sequential(Lying(forward, torch.float64), ops.GELU())
    words = r"^op 0 \(Lying '0'\): .* is float64 \[5, 8\] cpu, the plan says float32 \[5, 8\] cpu; that is what infer"
    with pytest.raises(TypeError, match=words):
        called(model, X)()


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_lies_in_later_calls(forward):
    """Generated kernels go by the shapes that ops declare: they would read and write beyond the tensor."""
    model = te_fuser.Sequential(ops.GELU(), Lying(forward, honest=1), ops.GELU())
    called(model, X)()
    with pytest.raises(ValueError, match=r"has 20 elements, planned were 40 \(5 x 8\).*another shape than it declares"):
        called(model, X)()
