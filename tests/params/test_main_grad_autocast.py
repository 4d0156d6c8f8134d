"""accumulate_into_main_grad under torch.autocast: products read casts of weights, and main_grad is the weights' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from tests.fusions.products import autocast_on_cuda
from tests.twins import randomize, tensor

OWN = {"device": "cpu", "fuse_wgrad_accumulation": True}
MODELS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te_fuser.Linear(8, 8, **OWN),
    "LayerNormLinear, split": lambda: te_fuser.LayerNormLinear(8, 12, parameters_split=("q", "k", "v"), **OWN),
    "LayerNormMLP": lambda: te_fuser.LayerNormMLP(8, 20, activation="swiglu", **OWN),
    "LayerNormMLP, checkpoint": lambda: te_fuser.LayerNormMLP(8, 20, checkpoint=True, **OWN),
    "TransformerLayer": lambda: te_fuser.TransformerLayer(
        8, 20, 2, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, **OWN
    ),
    "verified": lambda: te_fuser.Sequential(
        ops.LayerNorm(8), ops.Linear(8, 8, accumulate_into_main_grad=True), ops.GELU(), verify=True
    ),
}
WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "call": lambda model, x: model(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "copies kept": lambda model, x: _with_copies(model, x),
}


def _with_copies(model: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return model(x)


def weights(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("own", [torch.float32, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_go_to_the_weights_main_grad(name: str, way: str, own: torch.dtype) -> None:
    if own == torch.float16 and name not in ("Linear", "LayerNormLinear, split"):
        own = torch.bfloat16  # which norms on a CPU take of what autocast leaves
    model, x = randomize(MODELS[name]()).to(own), tensor(5, 3, 8, dtype=torch.float32)
    x = x if own == torch.float32 or name == "Linear" else x.detach().to(own).requires_grad_()
    exact = copy.deepcopy(model).double()
    exact.verify = False
    given = x.detach().double().requires_grad_()
    y = exact.reference(given)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = dict(zip(weights(exact), torch.autograd.grad(y, [*weights(exact).values()], dy), strict=True))
    for weight in weights(model).values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    for times in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            y = WAYS[way](model, x)
        y.backward(dy.to(y.dtype))
        for path, weight in weights(model).items():
            want = wanted[path].float()
            error = (weight.main_grad - 1 - times * want).abs().max()
            assert error <= times * 0.04 * want.abs().max(), path
            assert weight.grad_added_to_main_grad is True
            assert not weight.grad.any() and weight.grad.dtype == own


def test_the_first_micro_batch_writes_over_it_and_autograd_gets_none() -> None:
    model, x = randomize(MODELS["LayerNormMLP"]()), tensor(5, 8, dtype=torch.float32)
    for weight in weights(model).values():
        weight.main_grad = torch.full(weight.shape, torch.nan)
    held = []
    for first in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            model(x, is_first_microbatch=first).sum().backward()
        held.append([weight.main_grad.clone() for weight in weights(model).values()])
    assert all(torch.allclose(twice, 2 * once, rtol=1e-2) for once, twice in zip(*held, strict=True))
    assert all(weight.grad is None for weight in weights(model).values())


def test_a_weight_without_one_is_told_what_it_lacks() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = MODELS["Linear"]()(tensor(5, 8, dtype=torch.float32))
    with pytest.raises(
        RuntimeError, match=r"the weight \[8, 8\] on cpu has no main_grad; set weight.main_grad .* before backward"
    ):
        y.sum().backward()


@pytest.mark.parametrize("over", [True, False])
def test_on_a_gpu_the_product_is_given_the_weight_itself(over: bool) -> None:
    model = te_fuser.Sequential(ops.MatMul(64, 64, accumulate_into_main_grad=True, overwrite_main_grad=over)).to("meta")
    with autocast_on_cuda():
        plan = model.plan(torch.empty(64, 64, device="meta", requires_grad=True), device="h200")
    of_weight = [s for s in plan.backward if any(arg == "0.weight" for arg, _ in s.outputs)]
    assert [s.name for s in of_weight] == ["matmul_main_grad"]
    assert [ref.form.dtype for arg, ref in of_weight[0].inputs if arg == "0.weight"] == [None]
    of_input = [s for s in plan.backward if any(arg == "input" for arg, _ in s.outputs)]
    assert [ref.form.dtype for arg, ref in of_input[0].inputs if arg == "0.weight"] == [torch.bfloat16]
