"""CUDA graphs of models: what is refused without and before a device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.capture import GraphedModel


def graphed(model: torch.nn.Module, **samples: torch.Tensor) -> GraphedModel:
    """A model whose "graph" is the model itself, on the CPU."""
    names = list(samples)[1:]
    return GraphedModel(model, lambda x, *rest: model(x, **dict(zip(names, rest, strict=True))), samples)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device, and PyTorch sees none"):
        te_fuser.cuda_graph(Sequential(ops.GELU()), torch.randn(2, 4))


def test_what_is_on_the_cpu_is_named() -> None:
    with mock.patch("torch.cuda.is_available", lambda: True), pytest.raises(ValueError, match="x is on cpu"):
        te_fuser.cuda_graph(Sequential(ops.GELU()), torch.randn(2, 4))


def test_a_call_like_the_sample_runs() -> None:
    model = Sequential(ops.Linear(4, 3), ops.GELU())
    x = torch.randn(2, 4)
    torch.testing.assert_close(graphed(model, x=x)(x), model(x))


def test_other_tensors_modes_and_parameters_are_refused() -> None:
    model = Sequential(ops.Linear(4, 3), ops.Dropout(0.5))
    x = torch.randn(2, 4)
    call = graphed(model, x=x)
    with pytest.raises(
        ValueError, match=r"x is torch.float32 \[3, 4\] on cpu, and the graph was captured for .*\[2, 4\]"
    ):
        call(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 4\] on cpu with requires_grad"):
        call(torch.randn(2, 4, requires_grad=True))
    with pytest.raises(ValueError, match="captured for x, got x, mask"):
        call(x, mask=x)
    model.eval()
    with pytest.raises(ValueError, match=r"captured in train mode: call model.train\(\)"):
        call(x)
    model.train()
    model[0].weight.data = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"parameter 0.weight has other memory"):
        call(x)


def test_the_warm_up_leaves_main_grad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's capture does it: some calls with their backward, whose gradients nobody keeps."""

    def capture(module: torch.nn.Module, samples: tuple[torch.Tensor, ...], **options: object) -> torch.nn.Module:
        for _ in range(3):
            y = module(*samples)
            torch.autograd.grad(y.sum(), list(module.parameters()), allow_unused=True)
        return module

    monkeypatch.setattr(te_fuser.capture, "_check_devices", lambda model, samples: None)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    model = te_fuser.Sequential(ops.Linear(4, 3, accumulate_into_main_grad=True))
    weight = model[0].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(3, 4), False
    held, x = weight.main_grad, torch.randn(5, 4)
    replayed = te_fuser.cuda_graph(model, x)
    assert weight.main_grad is held and torch.equal(held, torch.ones(3, 4)) and not weight.grad_added_to_main_grad
    replayed(x).sum().backward()
    assert not torch.equal(held, torch.ones(3, 4)) and weight.grad_added_to_main_grad
    weight.main_grad = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"the main_grad of parameter 0.weight has other memory"):
        replayed(x)
