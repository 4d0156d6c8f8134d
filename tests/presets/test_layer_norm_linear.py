"""te_fuser.LayerNormLinear: each argument, against plain PyTorch in float64 and against its list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.cases import assert_same, bare_list, leaves_of, linear, normalized
from tests.twins import randomize, tensor

IN, OUT = 7, 12


def made(*args: Any, **keywords: Any) -> Any:
    sizes = args or (IN, OUT)
    return randomize(te_fuser.LayerNormLinear(*sizes, **{"device": "cpu", "params_dtype": torch.float64, **keywords}))


def meaning(layer: Any, x: torch.Tensor, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
    held = dict(layer.named_parameters())
    norm = normalized(x, held["layer_norm_weight"], held.get("layer_norm_bias"), eps)
    return linear(norm, held["weight"], held.get("bias")), norm


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(normalization: str, bias: bool) -> None:
    layer, x = made(normalization=normalization, bias=bias), tensor(3, 5, IN)
    assert_same(layer(x), meaning(layer, x)[0], leaves_of(layer, x))
    want = ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    if normalization == "RMSNorm":
        want.remove("layer_norm_bias")
    assert list(layer.state_dict()) == (want if bias else want[:-1])


def test_positions() -> None:
    layer, x = made(IN, OUT, 0.1, False), tensor(3, IN)
    assert layer.eps == 0.1 and "bias" not in layer.state_dict()
    assert_same(layer(x), meaning(layer, x, eps=0.1)[0], leaves_of(layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_its_list_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x = made(params_dtype=dtype), tensor(3, 5, IN, dtype=dtype)
    bare = bare_list(layer, ops.LayerNorm(IN), ops.MatMul(IN, OUT), ops.Bias(OUT))
    assert_same(layer(x), bare(x), leaves_of(layer, x), tolerance=0)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_gamma(normalization: str) -> None:
    layer, x = made(zero_centered_gamma=True, normalization=normalization), tensor(3, IN)
    y = layer(x)
    with torch.no_grad():
        layer.layer_norm_weight += 1
    torch.testing.assert_close(y, meaning(layer, x)[0])
    fresh = te_fuser.LayerNormLinear(IN, OUT, zero_centered_gamma=True, device="cpu")
    assert (fresh.layer_norm_weight == 0).all()


def test_what_is_returned() -> None:
    x = tensor(3, IN)
    layer = made(return_bias=True, return_layernorm_output=True, return_layernorm_output_gathered=True)
    y, bias, norm = layer(x)
    assert bias is layer.bias
    assert_same((y + bias, norm), meaning(layer, x), leaves_of(layer, x))
    layer = made(return_layernorm_output=True)
    assert_same(layer(x), meaning(layer, x), leaves_of(layer, x))
    assert isinstance(made(return_layernorm_output_gathered=True)(x), torch.Tensor)
    with pytest.raises(TypeError, match="by return_layernorm_output, where one is taken"):
        te_fuser.Sequential(layer)(x)
    with pytest.raises(TypeError, match="return_layernorm_output"):
        layer.to_torch()


def test_parameters_split() -> None:
    layer, x = made(parameters_split={"query": 6, "key": 2, "value": 4}), tensor(3, IN)
    names = [f"{n}_{kind}" for kind in ("weight", "bias") for n in ("query", "key", "value")]
    assert list(layer.state_dict()) == ["layer_norm_weight", "layer_norm_bias", *names]
    norm = normalized(x, layer.layer_norm_weight, layer.layer_norm_bias)
    weight, bias = (torch.cat([getattr(layer, n) for n in layer.parts[kind]]) for kind in ("weight", "bias"))
    assert_same(layer(x), linear(norm, weight, bias), leaves_of(layer, x))
    layer.weight, layer.bias = (torch.nn.Parameter(t.detach().clone()) for t in (weight, bias))
    assert_same(layer(x), meaning(layer, x)[0], leaves_of(layer, x))


def test_weights_of_the_call() -> None:
    layer, x = made(skip_weight_param_allocation=True, return_layernorm_output=True), tensor(3, IN)
    assert list(layer.state_dict()) == ["layer_norm_weight", "layer_norm_bias"]
    w, b = tensor(OUT, IN), tensor(OUT)
    norm = normalized(x, layer.layer_norm_weight, layer.layer_norm_bias)
    assert_same(layer(x, w, b), (linear(norm, w, b), norm), {**leaves_of(layer, x), "w": w, "b": b})


def test_main_grad() -> None:
    layer, x = made(fuse_wgrad_accumulation=True, params_dtype=torch.float32), tensor(3, IN, dtype=torch.float32)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    norm = normalized(x, layer.layer_norm_weight, layer.layer_norm_bias).detach()
    want = torch.ones(3, OUT).T @ norm
    for first, expected in ((None, want + 1), (True, want), (False, 2 * want)):
        layer(x, is_first_microbatch=first).sum().backward()
        torch.testing.assert_close(layer.weight.main_grad, expected)
    assert layer.weight.grad is None and layer.layer_norm_weight.grad is not None


def test_marks() -> None:
    layer = made(parallel_mode="column", sequence_parallel=True)
    assert layer.layer_norm_weight.sequence_parallel is layer.layer_norm_bias.sequence_parallel is False
    assert layer.weight.partition_dim == 0 and layer.bias.tensor_model_parallel


@pytest.mark.parametrize("extra", [{}, {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False}])
def test_to_torch_and_back(extra: dict[str, Any]) -> None:
    layer, x = made(**extra), tensor(3, IN)
    plain = layer.to_torch()
    torch.testing.assert_close(plain(x), layer(x))
    torch.testing.assert_close(te_fuser.from_torch(plain)(x), layer(x))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="did you mean 'return_layernorm_output'"):
        made(return_layer_norm_output=True)
    with pytest.raises(ValueError, match=r"LayerNorm was made for 7 features, got 8"):
        made()(tensor(3, 8))


def test_verify() -> None:
    assert te_fuser.verify(made(params_dtype=torch.float32), torch.randn(4, IN)).passed
