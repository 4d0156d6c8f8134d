"""Parameters have torch.nn's names, shapes and starting values; MatMul and Linear beside torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.ops.base import FusableOperation, OpCall
from te_fuser.params.binding import Binding
from te_fuser.params.scales import HoldsScales
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal, spec

TWINS: dict[str, tuple[Callable[..., FusableOperation], Callable[..., torch.nn.Module]]] = {
    "linear": (lambda **k: ops.Linear(6, 4, **k), lambda **k: torch.nn.Linear(6, 4, **k)),
    "linear_no_bias": (lambda **k: ops.Linear(6, 4, False, **k), lambda **k: torch.nn.Linear(6, 4, False, **k)),
    "matmul": (lambda **k: ops.MatMul(6, 4, **k), lambda **k: torch.nn.Linear(6, 4, False, **k)),
    "layer_norm": (lambda **k: ops.LayerNorm(6, **k), lambda **k: torch.nn.LayerNorm(6, **k)),
    "layer_norm_tuple": (lambda **k: ops.LayerNorm((6,), **k), lambda **k: torch.nn.LayerNorm((6,), **k)),
    "layer_norm_no_bias": (lambda **k: ops.LayerNorm(6, bias=False, **k),
     lambda **k: torch.nn.LayerNorm(6, bias=False, **k)),
    "rms_norm": (lambda **k: ops.RMSNorm([6], **k), lambda **k: torch.nn.RMSNorm([6], **k)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_starting_values_are_torchs_and_state_dicts_are_exchangeable(name: str) -> None:
    """With one seed, and the generator is left in the same state."""
    made, behind = [], []
    for make in TWINS[name]:
        torch.manual_seed(3)
        made.append(make(dtype=torch.float64))
        behind.append(torch.rand(1))
    assert torch.equal(*behind)
    for ours, torchs in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert ours.dtype == torch.float64 and torch.equal(ours, torchs)
    ours, torchs = (make() for make in TWINS[name])
    torch.nn.init.normal_(next(torchs.parameters()))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict(), strict=True)
    for key, tensor in torchs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in torchs.named_parameters()]


MAKERS: dict[str, Callable[..., FusableOperation]] = {
    **{name: ours for name, (ours, _) in TWINS.items()},
    "bias": lambda **k: ops.Bias(6, **k),
    "scale": lambda **k: ops.Scale(6, 0.5, **k),
    "scale_scalar": lambda **k: ops.Scale((), 0.5, **k),
    "layer_norm_zero_centered": lambda **k: ops.LayerNorm(6, zero_centered_gamma=True, **k),
    "rms_norm_zero_centered": lambda **k: ops.RMSNorm(6, zero_centered_gamma=True, **k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_meta_device_then_reset_is_making_it_here(name: str) -> None:
    op = MAKERS[name](device="meta", dtype=torch.float32)
    assert all(p.is_meta for p in op.parameters())
    with torch.device("meta"):
        assert all(p.is_meta for p in MAKERS[name]().parameters())
    op.to_empty(device="cpu")
    torch.manual_seed(4)
    op.reset_parameters()  # type: ignore[operator]
    torch.manual_seed(4)
    for p, q in zip(op.parameters(), MAKERS[name]().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", MAKERS)
def test_default_dtype_is_torchs_and_others_are_of_floating_point(name: str) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert all(p.dtype == torch.bfloat16 for p in MAKERS[name]().parameters())
    finally:
        torch.set_default_dtype(before)
    for dtype, use in (("float32", r"torch\.float32$"), ("int64", "torch.bfloat16, say"), (torch.int64, ""), (3, "")):
        with pytest.raises(TypeError, match=f"dtype is a floating-point dtype of torch's, got {dtype!r}: use {use}"):
            MAKERS[name](dtype=dtype)


def test_an_op_that_cannot_be_made_like_itself() -> None:
    class Own(ops.RMSNorm):
        def __init__(self, features: tuple[int, ...], own: int) -> None:
            super().__init__(features)

    with pytest.raises(NotImplementedError, match="Own keeps no attribute 'own' of its constructor's argument"):
        Own((2, 3), 1)(torch.zeros(5, 2, 3))


def test_arguments_fill_parameters_and_stand_in_repr() -> None:
    assert repr(ops.LayerNorm(6, eps=1e-3)) == "LayerNorm(features=6, eps=0.001, zero_centered_gamma=False)"
    assert repr(ops.Linear(6, 4)) == "Linear(in_features=6, out_features=4)"
    assert repr(ops.Fork("skip")) == "Fork(name=skip)" and repr(ops.Reshape(-1, 4)) == "Reshape(-1, 4)"
    for kind in (ops.LayerNorm, ops.RMSNorm):
        assert (kind(4, zero_centered_gamma=True).weight == 0).all()  # type: ignore[union-attr]
    fill = partial(torch.nn.init.constant_, val=0.25)
    linear, matmul = ops.Linear(IN, OUT, init_method=fill), ops.MatMul(IN, OUT, init_method=fill)
    assert (linear.weight == 0.25).all() and (matmul.weight == 0.25).all()
    assert linear.bias is not None and (linear.bias == 0).all()
    assert ops.MatMul(IN, OUT, init_method=torch.Tensor.zero_).weight.requires_grad  # type: ignore[union-attr]


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


def test_flops_shape_and_dtype_of_products() -> None:
    x = spec(2, 3, IN, dtype=torch.bfloat16)
    for op in (ops.MatMul(IN, OUT), ops.Linear(IN, OUT)):
        assert op.flops(x, {}) == 2 * 6 * IN * OUT
        assert op.infer(x) == spec(2, 3, OUT, dtype=torch.bfloat16)
    op = ops.MatMul(IN, OUT)
    with pytest.raises(TypeError, match=r"one dtype, got torch.float64 and torch.float32.*\.to\(\)"):
        op.reference(OpCall({"weight": op.weight}), normal(2, IN))


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
