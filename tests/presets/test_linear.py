"""te_fuser.Linear: each argument, against plain PyTorch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from tests.twins import randomize, tensor

IN, OUT = 7, 12


def linear(*args: Any, **keywords: Any) -> Any:
    sizes = args or (IN, OUT)
    return randomize(te_fuser.Linear(*sizes, **{"device": "cpu", "params_dtype": torch.float64, **keywords}))


def test_values_and_gradients() -> None:
    layer, x = linear(), tensor(3, 5, IN)
    y = layer(x)
    want = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, want)
    leaves, dy = [x, layer.weight, layer.bias], torch.randn_like(y)
    for ours, theirs in zip(*[torch.autograd.grad(t, leaves, dy) for t in (y, want)], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_its_list_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x = linear(params_dtype=dtype), tensor(3, 5, IN, dtype=dtype)
    bare = te_fuser.Sequential(ops.MatMul(IN, OUT, dtype=dtype), ops.Bias(OUT, dtype=dtype))
    bare[0].weight, bare[1].bias = layer.weight, layer.bias
    y, want = layer(x), bare(x)
    assert torch.equal(y, want)
    leaves, dy = [x, layer.weight, layer.bias], torch.randn_like(y)
    for ours, theirs in zip(*[torch.autograd.grad(t, leaves, dy) for t in (y, want)], strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_split() -> None:
    layer, x = linear(parameters_split=("query_", "key", "value")), tensor(3, IN)
    assert list(layer.state_dict()) == [f"{n}_{kind}" for kind in ("weight", "bias") for n in ("query", "key", "value")]
    weight, bias = (torch.cat([getattr(layer, n) for n in layer.parts[kind]]) for kind in ("weight", "bias"))
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias))
    fused = torch.nn.Parameter(torch.randn(OUT, IN, dtype=torch.float64))
    layer.weight = fused
    assert layer.weight is fused and "query_weight" not in layer.state_dict()
    torch.testing.assert_close(layer(x), F.linear(x, fused, bias))


def test_return_bias_and_tensors_of_the_call() -> None:
    layer, x = linear(return_bias=True), tensor(3, IN)
    y, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y, F.linear(x, layer.weight))
    with pytest.raises(TypeError, match="return_bias"):
        te_fuser.Sequential(layer, ops.GELU())(x)
    layer = linear(skip_weight_param_allocation=True)
    w, b = tensor(OUT, IN), tensor(OUT)
    torch.testing.assert_close(layer(x, w, bias=b), F.linear(x, w, b))
    with pytest.raises(TypeError, match="give bias in the call"):
        layer(x, w)
    assert not list(layer.parameters())


def test_main_grad() -> None:
    layer, x = linear(fuse_wgrad_accumulation=True, params_dtype=torch.float32), tensor(3, IN, dtype=torch.float32)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    want = torch.ones(3, OUT).T @ x.detach()
    for first, expected in ((None, want + 1), (True, want), (False, 2 * want)):
        layer(x, is_first_microbatch=first).sum().backward()
        torch.testing.assert_close(layer.weight.main_grad, expected)
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_marks_and_copies() -> None:
    layer, x = linear(parallel_mode="Column", sequence_parallel=True), tensor(3, IN)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.float64)):
        assert (twin.weight.tensor_model_parallel, twin.weight.partition_dim, twin.weight.partition_stride) == (
            True,
            0,
            1,
        )
        torch.testing.assert_close(twin(x), layer(x))


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="did you mean 'return_bias'"):
        te_fuser.Linear(IN, OUT, retrun_bias=True)
    with pytest.warns(DeprecationWarning, match="ub_overlap_ag does nothing"):
        te_fuser.Linear(IN, OUT, ub_overlap_ag=False)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag=True"):
        te_fuser.Linear(IN, OUT, ub_overlap_ag=True)
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        te_fuser.Linear(IN, OUT, tp_size=2)(tensor(3, IN).float())


def test_a_checkpoint_with_extra_state() -> None:
    layer = linear()
    state = {**layer.state_dict(), "_extra_state": torch.zeros(3)}
    with pytest.warns(UserWarning, match="_extra_state"):
        linear().load_state_dict(state)
