"""CUDA graphs of models: replays give what calls give, draw anew, and see the optimizer's steps."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import Residual, Sequential, ops

GPU = torch.device("cuda")


def block(dropout: float) -> Sequential:
    torch.manual_seed(0)
    attention = [
        ops.LayerNorm(64),
        ops.Linear(64, 192),
        ops.DotProductAttention(4, 16, mask="causal", layout="batch_first"),
        ops.Linear(64, 64),
        ops.Dropout(dropout),
    ]
    mlp = [ops.LayerNorm(64), ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64), ops.Dropout(dropout)]
    return Sequential(Residual(*attention), Residual(*mlp)).to(GPU, torch.bfloat16)


def sample() -> torch.Tensor:
    return torch.randn(2, 32, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)


def test_replays_equal_calls_bit_for_bit_and_see_the_optimizer() -> None:
    model = block(0.0)
    replayed = te_fuser.cuda_graph(model, sample())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, dy = sample(), torch.randn(2, 32, 64, device=GPU, dtype=torch.bfloat16)
        wanted = [x, *model.parameters()]
        exact = torch.autograd.grad(model(x), wanted, dy)
        y = model(x).detach()
        optimizer.zero_grad()
        out = replayed(x)
        torch.testing.assert_close(out, y, rtol=0, atol=0)
        out.backward(dy)
        for p, gradient in zip(wanted, exact, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0)
        x.grad = None
        optimizer.step()


def test_an_output_that_holds_its_graph_is_told() -> None:
    model, x = block(0.0), sample()
    y = model(x)
    with pytest.raises(RuntimeError, match=r"held with its autograd graph, .* delete it \(del y\)"):
        te_fuser.cuda_graph(model, sample())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    wanted = y.detach()
    del y
    torch.testing.assert_close(te_fuser.cuda_graph(model, sample())(x), wanted, rtol=0, atol=0)


def test_every_replay_draws_new_masks() -> None:
    model = Sequential(ops.Dropout(0.5)).to(GPU)
    x = torch.ones(64, 256, device=GPU)
    replayed = te_fuser.cuda_graph(model, x)
    masks = [replayed(x).clone() for _ in range(4)]
    assert all(0.45 < (m == 0).float().mean().item() < 0.55 for m in masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_backward_of_a_replay_draws_the_same_mask() -> None:
    model = Sequential(ops.Dropout(0.5)).to(GPU)
    x = torch.ones(64, 256, device=GPU, requires_grad=True)
    replayed = te_fuser.cuda_graph(model, x)
    for _ in range(3):
        x.grad = None
        y = replayed(x)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(x.grad, y.detach())


def test_named_inputs_are_copied_in() -> None:
    model = Sequential(ops.Add("other"), ops.GELU()).to(GPU)
    x, other = torch.randn(8, 16, device=GPU), torch.randn(8, 16, device=GPU)
    replayed = te_fuser.cuda_graph(model, (x, {"other": other}))
    for _ in range(2):
        x, other = torch.randn(8, 16, device=GPU), torch.randn(8, 16, device=GPU)
        torch.testing.assert_close(replayed(x, other=other), model(x, other=other), rtol=0, atol=0)


def test_buffers_are_written_in_place_and_what_is_replaced_is_refused() -> None:
    model = Sequential(ops.Linear(16, 8), torch.nn.BatchNorm1d(8, momentum=0.5), ops.GELU()).to(GPU)
    x = torch.randn(32, 16, device=GPU)
    replayed = te_fuser.cuda_graph(model, x)
    for _ in range(2):
        before = model[1].running_mean.clone()
        replayed(x)
        mean = model[0](x).mean(0)
        torch.testing.assert_close(model[1].running_mean, 0.5 * before + 0.5 * mean, rtol=1e-4, atol=1e-5)
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 16, device=GPU))
    with pytest.raises(ValueError, match=r"parameter 0.weight was replaced since the capture"):
        replayed(x)
    again = te_fuser.cuda_graph(model, x)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_each_replay_adds_to_main_grad() -> None:
    model = Sequential(ops.LayerNorm(64), ops.Linear(64, 40, accumulate_into_main_grad=True)).to(GPU, torch.bfloat16)
    weight, x, dy = model[1].weight, sample(), torch.randn(2, 32, 40, device=GPU, dtype=torch.bfloat16)
    weight.main_grad = torch.ones(40, 64, device=GPU)
    (dw,) = torch.autograd.grad(model.reference(x), weight, dy)
    replayed = te_fuser.cuda_graph(model, x)
    assert torch.equal(weight.main_grad, torch.ones(40, 64, device=GPU))  # the warm-up is no gradient
    for times in (1, 2):
        replayed(x).backward(dy)
        error = weight.main_grad - (1 + times * dw.float())
        assert error.abs().max() <= 0.02 * times * dw.abs().max()
