"""Tensors of 8 bits with their scale."""

from __future__ import annotations

import math

import pytest
import torch

from te_fuser import ops
from te_fuser.quantization import quantize
from tests.float8 import E4M3, E5M2, FORMATS, codes, nearest_codes, telling_numbers
from tests.needs import needs_compiler
from tests.refused import refusals

formats = pytest.mark.parametrize("dtype", FORMATS)
SCALE = torch.tensor(0.7)


@needs_compiler
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@formats
def test_bytes_are_those_of_the_op(dtype: torch.dtype, given: torch.dtype) -> None:
    x = telling_numbers(dtype)[: 2**14].reshape(4, -1, 32).to(given)
    found = quantize(x, dtype, SCALE)
    assert found.data.dtype == dtype and found.data.shape == x.shape
    assert torch.equal(codes(found.data), nearest_codes(x.float() * SCALE, dtype))
    assert torch.equal(codes(found.data), codes(ops.Quantize(dtype)(x, scale=SCALE)))


@pytest.mark.parametrize(("dtype", "relative", "absolute"), [(E4M3, 0.125, 0.0675), (E5M2, 0.25, 0.125)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_accuracy_against_float64(dtype: torch.dtype, given: torch.dtype, relative: float, absolute: float) -> None:
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).to(given)
    found = quantize(x, dtype, torch.finfo(dtype).max / x.abs().max().item())
    assert found.amax == x.float().abs().max() and found.dequantize().dtype == given
    torch.testing.assert_close(found.dequantize().double(), x.double(), rtol=relative, atol=absolute)
    assert found.scale_inverse * torch.finfo(dtype).max == pytest.approx(found.amax.item(), rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 3), (16, 8), (17, 8), (2, 5, 8), (0, 8), (8,)])
@formats
def test_transposed_with_whole_sixteens_of_tokens(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = quantize(x, dtype, 2.0)
    features, tokens = shape[-1], math.prod(shape[:-1])
    assert found.transposed.shape == (features, -(-tokens // 16) * 16) and found.transposed.is_contiguous()
    wanted = codes(found.data.reshape(tokens, features)).mT
    assert torch.equal(codes(found.transposed)[:, :tokens], wanted) and not codes(found.transposed)[:, tokens:].any()


@formats
def test_strides_what_is_no_number_and_nothing_is_recorded(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -math.inf], [math.inf, 0.5]]).mT
    found = quantize(x, dtype, SCALE.reshape(1))
    assert found.amax == math.inf and found.data.float().abs().max() == torch.finfo(dtype).max
    x[0, 0] = math.nan
    assert quantize(x, dtype, SCALE).amax.isnan() and quantize(x[:0], dtype, SCALE).amax == 0.0
    x = torch.ones(2, 4, requires_grad=True)
    found = quantize(x, E4M3, SCALE.clone().requires_grad_())
    assert not any(t.requires_grad for t in (found.data, found.scale_inverse, found.amax, found.dequantize()))


X = torch.ones(2, 4)
REFUSED = {
    "dtype": (
        lambda: quantize(X, torch.int8, 1.0),
        TypeError,
        "torch.float8_e4m3fn or torch.float8_e5m2, got torch.int8",
    ),
    "float64": (lambda: quantize(X.double(), E4M3, 1.0), TypeError, r"got torch.float64: convert with .float\(\)"),
    "a scalar": (lambda: quantize(X[0, 0], E4M3, 1.0), ValueError, r"\[..., features\], got a scalar"),
    "several": (
        lambda: quantize(X, E4M3, torch.ones(2)),
        ValueError,
        r"one number in float32, got torch.float32 \[2\]",
    ),
    "zero": (lambda: quantize(X, E4M3, 0.0), ValueError, "finite and positive, in float32, got 0.0"),
    "infinite": (lambda: quantize(X, E4M3, math.inf), ValueError, "finite and positive, in float32, got inf"),
    "too large": (lambda: quantize(X, E4M3, 1e39), ValueError, "finite and positive, in float32, got 1e[+]39"),
    "too small": (lambda: quantize(X, E4M3, 1e-46), ValueError, "finite and positive, in float32, got 1e-46"),
    "too large a whole number": (lambda: quantize(X, E4M3, 10**40), ValueError, "quantize: .* finite and positive"),
    "no scale": (lambda: quantize(X, E4M3, None), TypeError, "quantize: a scale is a number.*got None"),  # type: ignore
    "a text": (lambda: quantize(X, E4M3, "1"), TypeError, "quantize: a scale is a number.*got '1'"),  # type: ignore
    "a flag": (lambda: quantize(X, E4M3, True), TypeError, "quantize: a scale is a number.*got True"),
    "some scales": (lambda: quantize(X, E4M3, [1.0]), TypeError, r"a scale is a number.*got \[1.0\]"),  # type: ignore
    "a list": (lambda: quantize([1.0], E4M3, 1.0), TypeError, "takes a torch.Tensor, got list"),  # type: ignore
}


test_refused_in_words = refusals(REFUSED)
