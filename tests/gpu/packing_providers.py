"""Checks on a GPU of providers whose backward stores its gradient packed."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from te_fuser.kernels.attention import PROVIDERS, Provider, Speed
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4
from tests.threads import in_threads

# The fusions of PyTorch's own operators for attention on a GPU.
OTHERS = ("attention_cuda_cudnn", "attention_cuda_flash", "attention_cuda_efficient")


def installed_version(package: str) -> str | None:
    """Version of a package, whatever other tests are told."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


FLASH_4, FRONT_END = (installed_version(module.PACKAGE.name) for module in (flash_attn_4, cudnn_frontend))
NEEDS_PACKAGE = pytest.mark.skipif(FLASH_4 is None, reason=f"needs {flash_attn_4.PACKAGE}")
NEEDS_FRONT_END = pytest.mark.skipif(FRONT_END is None, reason=f"needs {cudnn_frontend.PACKAGE}")


@pytest.fixture
def in_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages take part in plans, and also of small attention."""
    for module, version in ((flash_attn_4, FLASH_4), (cudnn_frontend, FRONT_END)):
        monkeypatch.setattr(module.PACKAGE, "version", lambda version=version: version)
    for provider in PROVIDERS:
        monkeypatch.setattr(type(provider), "calls", (0.0, 0.0))
        monkeypatch.setattr(type(provider), "speed", Speed.constant(100.0, 100.0))


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Raise where code in here waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """None of PyTorch's own operators takes part in plans."""
    with fusions.disabled(*OTHERS):
        yield


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Up to the order in which gradients are added up, which is another one in each call."""
    return bool((one.double() - other.double()).abs().max() <= 2.0**-6 * other.double().abs().max())


def ran_forward(
    provider: Provider, op: ops.DotProductAttention, x: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output, and the tensors that backward may read."""
    with torch.no_grad():
        y, saved = provider.forward(op.settings(), {"input": x})
    return y, {"input": x, "output": y, **saved}


def one_backward(
    provider: Provider, dim: int, positions: int
) -> tuple[dict[str, torch.Tensor], ops.DotProductAttention, torch.Tensor]:
    """The tensors, the op and dy of a backward of causal attention, [positions, 2, 4 * dim]."""
    op = ops.DotProductAttention(4, dim, mask="causal", layout="sequence_first")
    x = torch.randn(positions, 2, op.packed.features, device="cuda", dtype=torch.bfloat16)
    y, tensors = ran_forward(provider, op, x)
    return tensors, op, torch.randn_like(y)


def check_refused_in_a_capture(provider: Provider, dim: int) -> None:
    """A backward of a size that did not run before."""
    tensors, op, dy = one_backward(provider, dim, 152)
    with pytest.raises(RuntimeError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        provider.backward(op.settings(), tensors, dy)["input"]


def in_a_thread_of_its_own(
    provider: Provider, op: ops.DotProductAttention, tensors: dict[str, torch.Tensor], dy: torch.Tensor
) -> torch.Tensor:
    """The gradient that a backward in a new thread makes."""
    (found,) = in_threads(lambda: provider.backward(op.settings(), tensors, dy)["input"])
    return found  # type: ignore[no-any-return]


def check_a_thread_of_its_own(provider: Provider, dim: int) -> None:
    """A backward that ran here runs in a new thread too."""
    tensors, op, dy = one_backward(provider, dim, 168)
    want = provider.backward(op.settings(), tensors, dy)["input"]
    assert close(in_a_thread_of_its_own(provider, op, tensors, dy), want)


def replays(
    replayed: Any, model: Sequential, x: torch.Tensor, dy: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The output and the gradient of x in two replays; a graph writes them to the same memory again."""
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = replayed(leaf)
        dx, *_ = torch.autograd.grad(y, [leaf, *model.parameters()], dy)
        found.append((y.detach().clone(), dx.clone()))
    return found
