"""Take and forks with several readers: parallel blocks, and a second input of a list in place of the first."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.ops.check import normal

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


@pytest.mark.parametrize("shape", [(2, 7, OTHER), (0, OTHER), (1, OTHER)])
def test_another_input_of_another_shape(shape: tuple[int, ...]) -> None:
    """What was the main value before gets no gradient."""
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


def test_verified() -> None:
    assert te_fuser.verify(parallel(), torch.randn(5, WIDTH)).passed


def test_what_is_not_there() -> None:
    x = normal(2, WIDTH).float()
    with pytest.raises(ValueError, match=r"op 0 \(Take '0'\) reads 'memory', which no Fork before it binds .*pass it"):
        te_fuser.Sequential(ops.Take("memory"), ops.GELU())(x)
    with pytest.raises(ValueError, match="a name must be usable as a keyword"):
        ops.Take("a b")
