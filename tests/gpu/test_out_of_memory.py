"""Memory of the GPU that runs out in the middle of a call: nothing stays behind, and the model gives what it gave."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.compare import same_bits

GPU = torch.device("cuda")
WIDTH, INNER = 1024, 4096
ROOM = 8192 * WIDTH * 2  # bytes of the large input
MOST = 64  # times that is more than a call needs

Call = tuple[torch.Tensor, torch.Tensor]  # an input that requires a gradient, and the gradient of its output
Fits = Callable[[Sequential, torch.Tensor, torch.Tensor, int], bool]


def mlp() -> Sequential:
    torch.manual_seed(0)
    layers = ops.LayerNorm(WIDTH), ops.Linear(WIDTH, INNER), ops.GELU(), ops.Linear(INNER, WIDTH), ops.Dropout(0.1)
    return Sequential(*layers, kernels="generated").to(GPU, torch.bfloat16)


def call(rows: int) -> Call:
    x, dy = (torch.randn(rows, WIDTH, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), dy


def results(model: Sequential, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients."""
    torch.manual_seed(1)
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(one, other) for one, other in zip(a, b, strict=True))


def held() -> int:
    """Bytes of all tensors; those of an error's frames may wait for the garbage collector."""
    gc.collect()
    return torch.cuda.memory_allocated()


@contextlib.contextmanager
def limited(room: int) -> Iterator[None]:
    """In here PyTorch takes at most so many bytes more from the GPU than it uses now."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def forward_fits(model: Sequential, x: torch.Tensor, dy: torch.Tensor, room: int) -> bool:
    try:
        with limited(room):
            model(x)
    except torch.OutOfMemoryError:
        return False
    return True


def backward_fits(model: Sequential, x: torch.Tensor, dy: torch.Tensor, room: int) -> bool:
    """Forward has what it needs."""
    y = model(x)
    try:
        with limited(room):
            torch.autograd.grad(y, [x, *model.parameters()], dy)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("fits", [forward_fits, backward_fits])
def test_the_model_is_what_it_was(fits: Fits) -> None:
    """However far a larger call comes: with a little more room each time it fails at a later step, at last at none."""
    model, small, large = mlp(), call(64), call(8192)
    right, right_large = results(model, *small), results(model, *large)
    before, failed = held(), 0
    while not fits(model, *large, failed * ROOM):
        failed += 1
        assert held() == before
        assert same(results(model, *small), right)
        assert failed < MOST
    assert failed > 1
    assert same(results(model, *large), right_large)
    assert held() == before


@pytest.mark.parametrize("fits", [forward_fits, backward_fits])
def test_a_first_call_of_its_size_may_fail(fits: Fits) -> None:
    """Its plan, made when memory was short, is that of an untouched model."""
    model, small, large = mlp(), call(64), call(8192)
    untouched = copy.deepcopy(model)
    right = results(model, *small)
    before = held()
    assert not fits(model, *large, 0)
    assert held() == before
    assert same(results(model, *small), right)
    assert same(results(model, *large), results(untouched, *large))
