"""Ops that name, add, cast, scale, drop, reshape or take: parallel blocks, other inputs; rows by class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import te_fuser
from te_fuser import ops
from te_fuser.formula import Axes
from te_fuser.formula.random import RandomStream
from te_fuser.ops import op_table
from te_fuser.ops.base import NamedInput, OpCall
from te_fuser.ops.op_table import OpTable
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal, spec
from tests.refused import raises
from tests.twins import assert_same


class Base(ops.RowOp):
    """An op with a row."""


class Heir(Base):
    """One that has its base's."""


class Other(ops.RowOp):
    """One without."""


def test_rows_by_class() -> None:
    table: OpTable[float | None] = OpTable("test_rows_by_class", 1.0)
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [1.0] * 3
    assert table.row(2.0)(Base) is Base
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [2.0, 2.0, 1.0]
    table.add(None, Heir, Other)
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [2.0, None, None]
    assert OpTable("another", 0.0).of(Base) == 0.0
    alone = OpTable("test_rows_of_one_class_alone", 1.0, inherited=False)
    alone.add(2.0, Base, ops.MatMul)
    assert [alone.of(kind) for kind in (Base, Heir, Other)] == [2.0, 1.0, 1.0]
    op = ops.MatMul(3, 5)
    parametrize.register_parametrization(op, "weight", torch.nn.Identity())
    table.add(2.0, ops.MatMul)
    assert type(op) is not ops.MatMul and table.of(type(op)) == alone.of(ops.MatMul) == 2.0


@pytest.mark.parametrize("other", [torch.nn.Linear, Base(), lambda: None])
def test_rows_of_other_classes_are_refused(other: Any) -> None:
    raises(TypeError, "a row of refused is of a class of ops, got", lambda: OpTable("refused", 1.0).row(2.0)(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_scale_add(dtype: torch.dtype) -> None:
    x, row = normal(4, 3, 8), normal(8, seed=1)
    assert_as_good_as_torch(ops.Bias(8), lambda x, bias: x + bias, {"x": x, "bias": row}, dtype)
    assert_as_good_as_torch(ops.Scale(8), lambda x, weight: x * weight, {"x": x, "weight": row}, dtype)
    assert_as_good_as_torch(ops.Scale(()), lambda x, weight: x * weight, {"x": x, "weight": row[0]}, dtype)
    assert_as_good_as_torch(ops.Scale(value=-0.7), lambda x: x * -0.7, {"x": x}, dtype)
    assert_as_good_as_torch(
        ops.Add("skip"), lambda x, other: x + other, {"x": x, "other": normal(4, 3, 8, seed=2)}, dtype
    )


def test_names_and_values_that_ops_start_at() -> None:
    assert ops.Fork("skip").named_outputs() == ("skip",) == ops.Output("skip").named_outputs()
    assert op_table.exports.of(ops.Output) and not op_table.exports.of(ops.Fork)
    assert dict(ops.Add("skip").named_inputs()) == {"other": NamedInput("skip", Axes.FULL)}
    x = normal(3, 4)
    for op in (ops.Fork("a"), ops.Output("a"), ops.Identity()):
        assert torch.equal(op.reference(OpCall(), x), x)
    assert torch.equal(ops.Scale(4, value=1e-5).weight, torch.full((4,), 1e-5))  # type: ignore[arg-type]
    assert ops.Scale((), value=0.0).weight.shape == ()  # type: ignore[union-attr]
    assert ops.Scale(value=2.0).weight is None and not list(ops.Scale(value=2.0).parameters())


ROLES = {
    ops.ClampedSwiGLU: "clamped_swiglu",
    ops.GEGLU: "geglu",
    ops.ReGLU: "reglu",
    ops.SReGLU: "sreglu",
    ops.SReLU: "srelu",
    ops.QGELU: "qgelu",
    ops.L2Norm: "l2_norm",
    type("MyHTTPNorm", (ops.RowOp,), {}): "my_http_norm",
    type("Named", (ops.SwiGLU,), {"role": "said"}): "said",
}


@pytest.mark.parametrize("kind", ROLES, ids=lambda kind: kind.__name__)
def test_roles(kind: type[ops.FusableOperation]) -> None:
    """Kernels are made of these names: another one is another kernel."""
    assert kind.role == ROLES[kind]


@pytest.mark.parametrize("kind", [ops.Fork, ops.Output, ops.Add])
@pytest.mark.parametrize("name", ["", "a/b", "1st", "two words", 3])
def test_a_name_must_be_a_keyword(kind: type, name: str) -> None:
    raises(ValueError, "usable as a keyword argument", kind, name)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_and_the_way_back(target: torch.dtype) -> None:
    op = ops.Cast(target)
    x = normal(3, 4).float().requires_grad_()
    y = op.reference(OpCall(), x)
    assert y.dtype == target and torch.equal(y, x.to(target))
    assert op.infer(spec(3, 4)) == spec(3, 4, dtype=target)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.1))
    assert dx.dtype == torch.float32 and torch.equal(dx, torch.full_like(y, 0.1).float())
    assert str(target) in repr(op)


# ---------------------------------------------------------------------------------------------- dropping

STREAM = RandomStream(3, 0, 1)


def test_dropout_scales_what_it_keeps_in_both_directions() -> None:
    op, x = ops.Dropout(0.25), normal(64, 100)
    y = op.reference(OpCall(random=STREAM), x)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.75, rtol=1e-15, atol=0)
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    assert torch.equal(y, op.reference(OpCall(random=STREAM), x))
    assert not torch.equal(y, op.reference(OpCall(random=RandomStream(4, 0, 1)), x))
    x = normal(8, 16).requires_grad_()
    y = ops.Dropout(0.5).reference(OpCall(random=STREAM), x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.where(y != 0, 2.0, 0.0).double())


def test_dropout_at_its_ends_and_in_eval() -> None:
    x = normal(8, 16)
    assert torch.equal(ops.Dropout(1.0).reference(OpCall(random=STREAM), x), torch.zeros_like(x))
    for op in (ops.Dropout(0.0), ops.Dropout(0.9).eval(), ops.DropPath(0.9, batch_dim=0).eval()):
        assert not op.draws() and torch.equal(op.reference(OpCall(), x), x)
    assert ops.Dropout().p == torch.nn.Dropout().p and ops.Dropout().draws()


@pytest.mark.parametrize("batch_dim", [0, 1, -2])
def test_drop_path_drops_whole_samples(batch_dim: int) -> None:
    op, x = ops.DropPath(0.5, batch_dim=batch_dim), torch.ones(64, 48, 3, dtype=torch.float64)
    y = op.reference(OpCall(), x)
    by_sample = y.movedim(batch_dim, 0).flatten(1)
    assert torch.equal(by_sample, by_sample[:, :1].expand_as(by_sample))
    assert set(by_sample[:, 0].tolist()) == {0.0, 2.0}
    assert op.batch_dim() == batch_dim and op.eval().batch_dim() is None


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_probabilities(p: float) -> None:
    for make in (lambda: ops.Dropout(p), lambda: ops.DropPath(p, batch_dim=0)):
        raises(ValueError, r"lies in \[0, 1\], got", make)


# --------------------------------------------------------------------------------------------- reshaping


@pytest.mark.parametrize("shape", [(6, 8), (-1, 4), (2, -1, 2), (48,), (-1,), (2, 3, 4, 2)])
def test_reshape_and_back(shape: tuple[int, ...]) -> None:
    x = normal(2, 3, 8).requires_grad_()
    op = ops.Reshape(*shape)
    call = OpCall()
    y = op.op_forward(call, x)
    assert torch.equal(y, x.reshape(shape)) and y.data_ptr() == x.data_ptr()
    assert op.infer(spec(2, 3, 8)).shape == tuple(y.shape)
    dy = normal(*y.shape, seed=1)
    (want,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(op.op_backward(OpCall(notes=call.notes), dy), want)  # reads no tensor
    assert op.gradients(())[0].reads == ()


def test_reshape_takes_a_sequence_and_strides_and_nothing() -> None:
    assert ops.Reshape((2, -1)).shape == ops.Reshape(2, -1).shape == ops.Reshape(torch.Size([2, -1])).shape
    x = normal(4, 6).t()
    assert torch.equal(ops.Reshape(-1, 8).op_forward(OpCall(), x), x.reshape(-1, 8))
    assert ops.Reshape(-1, 8).op_forward(OpCall(), normal(0, 4)).shape == (0, 8)


@pytest.mark.parametrize("dims", [(1, -1), (0, -1), (-2, -1), (1, 1), (0, 1), (2, 3)])
def test_flatten_is_torchs(dims: tuple[int, int]) -> None:
    x = normal(2, 3, 4, 5)
    want = x.flatten(*dims)
    assert torch.equal(ops.Flatten(*dims)(x), want)
    assert ops.Flatten(*dims).infer(spec(*x.shape)).shape == want.shape


@pytest.mark.parametrize(("dim", "sizes"), [(-1, (3, 4)), (0, (2, -1)), (1, (1, 1, 5))])
def test_unflatten_is_torchs(dim: int, sizes: tuple[int, ...]) -> None:
    x = normal(6, 5, 12).requires_grad_()
    op = ops.Unflatten(dim, sizes)
    assert_same(op(x), x.unflatten(dim, sizes), [x], tolerance=0)
    assert op.infer(spec(0, 5, 12)).shape[-3:] if dim else True


def test_dimensions_and_names_that_are_not_there() -> None:
    x = spec(2, 3)
    for op, words in (
        (ops.Flatten(2), "no dimension 2"),
        (ops.Flatten(1, 0), "start_dim 1 lies behind end_dim 0"),
        (ops.Unflatten(-3, (1, 2)), "no dimension -3"),
        (ops.Unflatten(-1, (2, 2)), r"shape \[2, 2\] holds 4 elements, got 3"),
    ):
        raises(ValueError, rf"{type(op).__name__} cannot take .*\[2, 3\].*{words}", op.infer, x)
    x = normal(2, WIDTH).float()
    with pytest.raises(ValueError, match=r"op 0 \(Take '0'\) reads 'memory', which no Fork before it binds .*pass it"):
        te_fuser.Sequential(ops.Take("memory"), ops.GELU())(x)
    raises(ValueError, "a name must be usable as a keyword", ops.Take, "a b")


WIDTH, OTHER = 8, 6


def compared(model: te_fuser.Sequential, *tensors: torch.Tensor, **named: torch.Tensor) -> None:
    """Values and all gradients against autograd over the reference."""
    leaves = [t for t in (*tensors, *named.values(), *model.parameters()) if t.requires_grad]
    ys = [run(*tensors, **named) for run in (model, model.reference)]
    torch.testing.assert_close(*ys)
    dy = torch.randn_like(ys[0])
    gradients = [torch.autograd.grad(y, leaves, dy, allow_unused=True) for y in ys]
    for ours, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours is None or not ours.any()


def parallel() -> te_fuser.Sequential:
    """x + attention-like branch + MLP, both of one norm."""
    return te_fuser.Sequential(
        ops.Fork("skip"),
        ops.LayerNorm(WIDTH),
        ops.Fork("h"),
        ops.Linear(WIDTH, WIDTH),
        ops.Add("skip"),
        ops.Fork("a"),
        ops.Take("h"),
        ops.Linear(WIDTH, 2 * WIDTH),
        ops.GELU(),
        ops.Linear(2 * WIDTH, WIDTH),
        ops.Add("a"),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parallel_blocks(dtype: torch.dtype) -> None:
    model = parallel().to(dtype)
    x = normal(3, 5, WIDTH).to(dtype).requires_grad_()
    compared(model, x)
    h = torch.nn.functional.layer_norm(x, (WIDTH,), model[1].weight, model[1].bias)
    gelu = torch.nn.functional.gelu(model[7](h), approximate="tanh")
    torch.testing.assert_close(model(x), x + model[3](h) + model[9](gelu))
    nested = te_fuser.Sequential(ops.Bias(WIDTH), parallel(), ops.SiLU()).to(dtype)
    compared(nested, x)
    assert len(nested.plans(x)) == 1
    assert dtype == torch.float64 or te_fuser.verify(model, torch.randn(5, WIDTH)).passed


@pytest.mark.parametrize("shape", [(2, 7, OTHER), (0, OTHER), (1, OTHER)])
def test_another_input_of_another_shape(shape: tuple[int, ...]) -> None:
    """The main value before `Take` gets no gradient."""
    model = te_fuser.Sequential(ops.Linear(WIDTH, WIDTH), ops.Take("memory"), ops.Linear(OTHER, 4), ops.GELU())
    x, memory = normal(3, WIDTH).float().requires_grad_(), normal(*shape).float().requires_grad_()
    compared(model, x, memory=memory)
    model(x, memory=memory).sum().backward()
    assert x.grad is None and model[0].weight.grad is None and memory.grad is not None
    with torch.no_grad():
        assert torch.equal(model(x.detach(), memory=memory[..., :].clone()), model(x, memory=memory))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x, memory=memory), model.reference(x, memory=memory), rtol=0.02, atol=0.02)


def test_what_is_taken_is_not_overwritten() -> None:
    model = te_fuser.Sequential(ops.Take("memory"), ops.ReLU())
    memory = normal(3, WIDTH).float().requires_grad_()
    before = memory.detach().clone()
    y = te_fuser.Sequential(ops.Take("memory"))(normal(2, 2).float(), memory=memory)
    assert y.requires_grad and torch.equal(y, memory)
    model(normal(2, 2).float(), memory=memory).sum().backward()
    assert torch.equal(memory, before) and torch.equal(memory.grad, (before > 0).float())


def test_several_readers_of_a_fork() -> None:
    for middle in ((ops.GELU(),), (ops.Linear(WIDTH, WIDTH), ops.GELU()), (torch.nn.Identity(),)):
        model = te_fuser.Sequential(
            ops.Bias(WIDTH), ops.Fork("a"), *middle, ops.Add("a"), ops.SiLU(), *middle, ops.Add("a"), ops.Add("a")
        ).double()
        x = normal(3, WIDTH).requires_grad_()
        compared(model, x)
