"""MatMul and Linear beside torch.nn.Linear, and the gradients MatMul computes itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.ops.base import FusableOperation, OpCall, Spec
from te_fuser.params.binding import Binding
from te_fuser.params.scales import HoldsScales
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal

IN, OUT = 12, 20


PRODUCTS: dict[str, tuple[FusableOperation, Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "linear": (ops.Linear(IN, OUT), lambda x, weight, bias: F.linear(x, weight) + bias, ("x", "weight", "bias")),
    "matmul": (ops.MatMul(IN, OUT), lambda x, weight: F.linear(x, weight), ("x", "weight")),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    op, torch_form, names = PRODUCTS[name]
    given = {"x": normal(3, 5, IN), "weight": normal(OUT, IN, seed=1), "bias": normal(OUT, seed=2)}
    assert_as_good_as_torch(op, torch_form, {n: given[n] for n in names}, dtype)


INPUTS = {
    "rows": lambda: normal(6, IN),
    "one_row": lambda: normal(IN),
    "batched": lambda: normal(2, 3, IN),
    "strided": lambda: normal(IN, 6).t(),
    "every_other_row": lambda: normal(2, 6, IN)[:, ::2],
    "no_rows": lambda: normal(0, IN),
    "no_samples": lambda: normal(0, 3, IN),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("constant", [False, True], ids=["full", "stride_0"])
def test_matmul_gradients_are_autograds(name: str, constant: bool) -> None:
    op = ops.MatMul(IN, OUT, dtype=torch.float64)
    assert op.weight is not None
    x = INPUTS[name]().requires_grad_()
    call = OpCall({"input": x, "weight": op.weight}, frozenset({"input", "weight"}))
    y = op.op_forward(call, x)
    torch.testing.assert_close(y, F.linear(x, op.weight))
    dy = torch.ones((), dtype=torch.float64).expand(y.shape) if constant else normal(*y.shape, seed=5)
    dx, dw = torch.autograd.grad(y, (x, op.weight), dy)
    found = {}
    for node in op.gradients(("weight",)):
        read = OpCall({n: call.tensors[n] for n in node.reads}, call.needed)  # nothing but what it declares
        found |= getattr(op, node.method)(read, dy)
    torch.testing.assert_close(found["input"], dx)
    torch.testing.assert_close(found["weight"], dw)


def test_flops_and_shape() -> None:
    x = Spec((2, 3, IN), torch.bfloat16, torch.device("cpu"))
    for op in (ops.MatMul(IN, OUT), ops.Linear(IN, OUT)):
        assert op.flops(x, {}) == 2 * 6 * IN * OUT
        assert op.infer(x) == Spec((2, 3, OUT), torch.bfloat16, torch.device("cpu"))


def test_matmul_refuses_two_dtypes() -> None:
    op = ops.MatMul(IN, OUT)
    with pytest.raises(TypeError, match=r"one dtype, got torch.float64 and torch.float32.*\.to\(\)"):
        op.reference(OpCall({"weight": op.weight}), normal(2, IN))


def test_init_method() -> None:
    fill = partial(torch.nn.init.constant_, val=0.25)
    linear, matmul = ops.Linear(IN, OUT, init_method=fill), ops.MatMul(IN, OUT, init_method=fill)
    assert (linear.weight == 0.25).all() and (matmul.weight == 0.25).all()
    assert linear.bias is not None and (linear.bias == 0).all()
    assert ops.MatMul(IN, OUT, init_method=torch.Tensor.zero_).weight.requires_grad  # type: ignore[union-attr]


def test_linear_lowers_to_ops_that_read_its_parameters() -> None:
    linear = ops.Linear(IN, OUT)
    matmul, bias = linear.lower()
    assert isinstance(matmul.op, ops.MatMul) and isinstance(bias.op, ops.Bias)
    assert matmul.bindings == {"weight": Binding(linear, "weight")} and bias.bindings == {
        "bias": Binding(linear, "bias")
    }
    assert list(linear.children()) == [] and not list(matmul.op.parameters()) and not list(bias.op.parameters())
    assert dict(bias.op.named_inputs()) == {}
    linear.weight = torch.nn.Parameter(torch.zeros(OUT, IN))
    assert matmul.bindings["weight"].get() is linear.weight
    assert [low.op for low in ops.Linear(IN, OUT, bias=False).lower()][1:] == []


def test_scales_of_8_bits_are_known_to_ops_with_the_weight_of_a_product_alone() -> None:
    kinds = {name: kind for name in ops.__all__ if isinstance(kind := getattr(ops, name), type)}
    assert [name for name in kinds if issubclass(kinds[name], HoldsScales)] == ["Linear", "MatMul", "Together"]
