"""The fusions of matrix products on a GPU: each against float64 in every case, and models that they are part of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from tests.gpu.captures import captured

GPU = torch.device("cuda", 0)
HALF = (torch.bfloat16, torch.float16)
# Fusion -> the dtypes in which it takes part.
NAMES = {
    "matmul": (*HALF, torch.float32),
    "matmul_backward": (*HALF, torch.float32),
    "matmul_bias": (*HALF, torch.float32),
    "matmul_bias_backward": HALF,
    "matmul_bias_relu": (*HALF, torch.float32),
    "matmul_bias_gelu": HALF,
    "matmul_bias_gelu_aux": HALF,
    "gelu_matmul_backward": HALF,
    "gelu_matmul_bias_backward": HALF,
    "bias_gelu_matmul_backward": HALF,
    "relu_matmul_by_mask": HALF,
    "bias_relu_matmul_by_mask": HALF,
    **{f"matmul_add{bias}": (*HALF, torch.float32) for bias in ("", "_bias")},
}


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, dtypes in NAMES.items() for d in dtypes], ids=str)
def test_verified(name: str, dtype: torch.dtype) -> None:
    report = te_fuser.verify(name, dtypes=(dtype,), device=GPU)
    # One gives what only plans without a backward can do with.
    assert report.passed and len(report.rows) > (2 if name == "matmul_bias_gelu" else 20)


def layer(dropout: float, gelu: str = "tanh") -> te_fuser.Sequential:
    attention = te_fuser.Residual(
        ops.LayerNorm(64),
        ops.Linear(64, 192),
        ops.DotProductAttention(4, 16, mask="causal", layout="sequence_first"),
        ops.Linear(64, 64),
        ops.Dropout(dropout),
    )
    feed_forward = te_fuser.Residual(
        ops.LayerNorm(64), ops.Linear(64, 256), ops.GELU(gelu), ops.Linear(256, 64), ops.Dropout(dropout)
    )
    return te_fuser.Sequential(attention, feed_forward)


@pytest.fixture
def cheap() -> Iterator[None]:
    """Epilogues at no cost, so that plans are made of them."""
    from te_fuser.fusions import cublaslt

    before = dict(cublaslt._EFFICIENCY)
    cublaslt._EFFICIENCY.update(dict.fromkeys(before, 1.0))
    yield
    cublaslt._EFFICIENCY.update(before)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_layer_of_epilogues(cheap: None, dropout: float, memory: str) -> None:
    model = layer(dropout)
    model.memory = memory
    model = model.to(GPU, torch.bfloat16)
    x = torch.randn(512, 4, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    plan = model.plan(x)
    names = {s.name for s in (*plan.forward, *plan.backward)}
    assert {"matmul_bias", "matmul_bias_gelu_aux"} <= names
    assert ("matmul_add_bias_dropout" in names) == (dropout == 0.0)
    te_fuser.verify(model, x)


@pytest.mark.parametrize("name", ["relu_matmul_by_mask", "bias_relu_matmul_by_mask"])
def test_a_layer_by_masks(name: str) -> None:
    parts = [ops.LayerNorm(64), ops.Linear(64, 200), ops.ReLU(), ops.Linear(200, 136), ops.ReLU(), ops.Linear(136, 64)]
    model = te_fuser.Sequential(te_fuser.Residual(*parts), memory="fast").to(GPU, torch.bfloat16)
    x = torch.randn(33, 4, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    free = dataclasses.replace(fusions.get(name), cost=lambda m: fusions.Cost(seconds=0.0))
    with fusions.only(free, *(n for n in fusions.names() if "by_mask" not in n)):
        plan = model.plan(x)
        assert [s.name for s in plan.forward].count(name) == 2
        assert [s.name for s in plan.backward].count(name) == 4
        assert len([k for k in plan.kept if k.name == f"{name}: mask"]) == 2
        te_fuser.verify(model, x)


def test_autocast() -> None:
    model = layer(0.0).to(GPU)
    x = torch.randn(32, 2, 64, device=GPU, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        plan = model.plan(x)
        assert {"matmul_bias_gelu_aux", "matmul_backward"} <= {s.name for s in (*plan.forward, *plan.backward)}
        y, want = model(x), model.reference(x)
    got, exact = (torch.autograd.grad(t.float().sum(), [x, *model.parameters()], retain_graph=True) for t in (y, want))
    for a, b in zip((y, *got), (want, *exact), strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 0.05 * b.abs().max() + 1e-3


def test_forward_and_backward_in_a_graph() -> None:
    model = layer(0.0).to(GPU, torch.bfloat16)
    x = torch.randn(64, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    parameters = [x, *model.parameters()]
    dy = torch.randn_like(x)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(x), parameters, dy)

    graph, made = captured(run)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(made, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


def test_runs_repeat_bit_for_bit() -> None:
    model = te_fuser.Sequential(ops.LayerNorm(256), ops.Linear(256, 1024), ops.GELU(), ops.Linear(1024, 256))
    model = model.to(GPU, torch.bfloat16)
    x = torch.randn(2048, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    parameters = [x, *model.parameters()]
    dy = torch.randn_like(x)
    first, *others = ((y := model(x), *torch.autograd.grad(y, parameters, dy)) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_every_combination_of_fusions_gives_one_result() -> None:
    model = layer(0.0).to(GPU, torch.bfloat16)
    x = torch.randn(128, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    parameters, dy = [x, *model.parameters()], torch.randn_like(x)
    with fusions.only():
        want = [*torch.autograd.grad(model(x), parameters, dy)]
    for off in itertools.combinations(("matmul", "matmul_backward", "matmul_bias", "matmul_add_bias_dropout"), 2):
        with fusions.disabled(*off):
            got = torch.autograd.grad(model(x), parameters, dy)
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("held_dtype", [torch.float32, torch.bfloat16])
def test_main_grad(over: bool, held_dtype: torch.dtype) -> None:
    model = te_fuser.Sequential(ops.LayerNorm(64), ops.Linear(64, 40, accumulate_into_main_grad=True))
    model = model.to(GPU, torch.bfloat16)
    x = torch.randn(3, 65, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight, dy = model[1].weight, torch.randn(3, 65, 40, device=GPU, dtype=torch.bfloat16)
    assert "matmul_main_grad" in {s.name for s in model.plan(x).backward}
    (dw,) = torch.autograd.grad(model.reference(x), weight, dy)
    weight.main_grad = torch.ones(40, 64, device=GPU, dtype=held_dtype)
    weight.overwrite_main_grad, weight.grad_added_to_main_grad = over, False
    model(x).backward(dy)
    want = dw.float() + (0 if over else 1)
    assert (weight.main_grad.float() - want).abs().max() <= 0.02 * dw.abs().max()
    assert weight.grad_added_to_main_grad and not weight.grad.any()


@pytest.mark.parametrize("over", [True, False])
def test_main_grad_of_a_tied_weight(over: bool) -> None:
    shared = ops.Linear(64, 64, accumulate_into_main_grad=True)
    model = te_fuser.Sequential(shared, ops.GELU(), shared).to(GPU, torch.bfloat16)
    x = torch.randn(195, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight, dy = shared.weight, torch.randn(195, 64, device=GPU, dtype=torch.bfloat16)
    assert [s.name for s in model.plan(x).backward].count("matmul_main_grad") >= 2
    (dw,) = torch.autograd.grad(model.reference(x), weight, dy)
    weight.main_grad = torch.ones(64, 64, device=GPU)
    weight.overwrite_main_grad = over
    for times in (1, 2):
        model(x).backward(dy)
        want = dw.float() if over else 1 + times * dw.float()
        assert (weight.main_grad - want).abs().max() <= 0.02 * times * dw.abs().max()
