"""Kernels that store outputs over what dies, on a GPU: the same results in less memory, and nobody sees a change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import overwriting
from te_fuser.fuser.steps.kernel_task import KernelTask
from tests.gpu.captures import captured
from tests.twins import randomize

GPU = torch.device("cuda")
WIDTH, HIDDEN, ROWS = 256, 1024, 4096  # 8 MiB in front of GELU, in 16 bits
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def mlp(*parts: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Sequential:
    """A norm, a product, GELU, a product, and more if asked for, with weights that keep values of about one."""
    model = randomize(
        Sequential(
            ops.LayerNorm(WIDTH), ops.Linear(WIDTH, HIDDEN), ops.GELU("tanh"), ops.Linear(HIDDEN, WIDTH), *parts,
            **options,
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(p.shape[-1] ** -0.5)
    return model.to(GPU, dtype)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def x_of(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return normal(4, ROWS // 4, WIDTH, dtype=dtype).requires_grad_()


def run(model: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    torch.manual_seed(11)
    x = x_of(next(module.parameters()).dtype)
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy_of(y), **options)]


def dy_of(y: torch.Tensor) -> torch.Tensor:
    return normal(*y.shape, dtype=y.dtype, seed=5)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def pairs(model: Sequential) -> int:
    """Number of inputs that the plan may overwrite in backward."""
    found = [s.task for s in model.plan(x_of(next(model.parameters()).dtype)).backward]
    return sum(len(t.description.overwrites) for t in found if isinstance(t, KernelTask))


def copied(model: Sequential, *parts: Any, **options: Any) -> Sequential:
    """Copy of the model, planned anew."""
    other = mlp(*parts, dtype=next(model.parameters()).dtype, **options)
    other.load_state_dict(model.state_dict())
    return other


MODELS: dict[str, Callable[[], list[Any]]] = {
    "norm": lambda: [ops.LayerNorm(WIDTH)],
    "residual": lambda: [
        Residual(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 2 * HIDDEN), ops.SwiGLU(), ops.Linear(HIDDEN, WIDTH)),
        ops.RMSNorm(WIDTH),
    ],
    "dropout": lambda: [ops.Dropout(0.25), ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU()],
    "twice": lambda: [ops.Fork("a"), ops.GELU(), ops.Add("a"), ops.Linear(WIDTH, WIDTH), ops.Fork("b"), ops.Add("b")],
}


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_and_right_ones(
    name: str, dtype: torch.dtype, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without overwriting, bit for bit; against float64 at most twice what PyTorch errs in that dtype."""
    model = mlp(*MODELS[name](), dtype=dtype, memory=memory)
    assert pairs(model) >= 2
    got = run(model, model)
    assert same(got, run(model, model))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "PLAN_PASSES", {n: p for n, p in pipeline.PLAN_PASSES.items() if n != "overwrite"})
        plain = copied(model, *MODELS[name](), memory=memory)
        assert pairs(plain) == 0
        assert same(run(plain, plain), got)
    if name == "dropout":
        return  # the reference in float64 draws the same mask from the same seed only where it draws once
    exact = copied(model, *MODELS[name](), kernels="reference").double()
    for a, usual, right in zip(got, run(model.reference, model), run(exact.reference, exact), strict=True):
        scale = right.abs().max()
        # A gradient that comes through the last norm is what is left of much larger terms: in float32 the order of sums
        # shows, with kernels that overwrite and, to the same bits, with those that do not.
        least = (64 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps * scale
        assert (a.double() - right).abs().max() <= 2 * (usual.double() - right).abs().max() + least


def test_less_memory_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward GELU's kernel had four tensors of this size at once."""
    size = ROWS * HIDDEN * 2

    def peak() -> int:
        model = mlp(memory="lean")  # GELU's output is made again in backward
        run(model, model)
        x = x_of()
        y = model(x)
        dy = dy_of(y)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y, [x, *model.parameters()], dy)
        return torch.cuda.max_memory_allocated() - before

    less = peak()
    monkeypatch.setattr(pipeline, "PLAN_PASSES", {n: p for n, p in pipeline.PLAN_PASSES.items() if n != "overwrite"})
    assert less <= peak() - 1.5 * size


def test_poisoned_outputs() -> None:
    """New memory is full of NaN: whatever is read is what a kernel wrote."""
    model = mlp(ops.LayerNorm(WIDTH))
    want = run(model, model)
    blocks = [torch.full((2**22,), float("nan"), device=GPU) for _ in range(24)]
    del blocks
    assert same(run(model, model), want)


def test_without_gradients() -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    before = x.detach().clone()
    want = run(model, model)[0]
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert torch.equal(x, before)


def test_a_kept_graph_is_run_again() -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    want = run(model, model)
    y = model(x)
    for keep in (True, True, False):
        grads = torch.autograd.grad(y, [x, *model.parameters()], dy_of(y), retain_graph=keep)
        assert same([y.detach(), *grads], want)


@pytest.mark.parametrize("name", ["kept", "taken", "offloaded"])
def test_saved_tensors_that_somebody_holds(name: str) -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    want = run(model, model)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        seen.append((t, t.clone()))
        return t

    graph = torch.autograd.graph
    hooks: dict[str, contextlib.AbstractContextManager[Any]] = {
        "kept": graph.saved_tensors_hooks(note, lambda t: t),
        "taken": contextlib.nullcontext(),
        "offloaded": graph.save_on_cpu(pin_memory=True),
    }
    with hooks[name]:
        y = model(x)
    if name == "taken":
        for t in y.grad_fn.saved_tensors:
            note(t)
    grads = torch.autograd.grad(y, [x, *model.parameters()], dy_of(y))
    assert same([y.detach(), *grads], want)
    assert (len(seen) > 3) == (name != "offloaded")
    assert all(torch.equal(t, before) for t, before in seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    model, x = mlp(ops.LayerNorm(WIDTH)), x_of()
    want = run(model, model)
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.backward(dy_of(y))
    assert same([y.detach(), x.grad, *(p.grad for p in model.parameters())], want)  # type: ignore[list-item]


def test_what_comes_from_outside_is_left_as_it_was() -> None:
    model, x = mlp(ops.GELU("tanh")), x_of()
    y = model(x)
    dy = dy_of(y)
    tensors = [x, y, dy, *model.parameters()]
    before = [t.detach().clone() for t in tensors]
    y.backward(dy)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_autocast() -> None:
    model, x = mlp(ops.LayerNorm(WIDTH), dtype=torch.float32), x_of(torch.float32)
    leaves = [x, *model.parameters()]
    found = []
    for keep in (True, False):
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy_of(y), retain_graph=keep)])
    assert same(*found)


def test_captured() -> None:
    """Replays give what calls give, time and again: each fills anew what its backward overwrites."""
    model = mlp(ops.LayerNorm(WIDTH))
    assert pairs(model) >= 2
    replayed = te_fuser.cuda_graph(model, x_of())
    for seed in range(3):
        x = normal(4, ROWS // 4, WIDTH, seed=seed).requires_grad_()
        y = model(x)
        dy = dy_of(y)
        want = [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]
        made = replayed(x)
        got = [made.detach().clone(), *(g.clone() for g in torch.autograd.grad(made, [x, *model.parameters()], dy))]
        assert same(got, want)


def test_a_whole_step_captured() -> None:
    model = mlp(ops.LayerNorm(WIDTH))
    want = run(model, model)
    x, dy = x_of(), dy_of(want[0])

    def step() -> tuple[torch.Tensor, ...]:
        y = model(x)
        return y, *torch.autograd.grad(y, [x, *model.parameters()], dy)

    graph, (y, *grads) = captured(step)
    for _ in range(3):
        graph.replay()
        assert same([y.detach(), *grads], want)


def test_small_tensors_are_not_overwritten() -> None:
    model, x = mlp(), normal(64, WIDTH).requires_grad_()
    tasks = [s.task for s in model.plan(x).backward if isinstance(s.task, KernelTask)]
    assert 64 * HIDDEN * 2 < overwriting.LEAST_BYTES and not any(t.description.overwrites for t in tasks)
