"""Rounding to 8 bits in PyTorch, against the definition of the formats."""

from __future__ import annotations

import math

import pytest
import torch

from te_fuser import formula
from te_fuser.formula import expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import Axes
from te_fuser.formula.float8 import rounded, ties_turned
from tests.float8 import E4M3, E5M2, FORMATS, codes, every_number, nearest_codes, numbers, telling_numbers

formats = pytest.mark.parametrize("dtype", FORMATS)


@formats
@pytest.mark.parametrize("read", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype, read: torch.dtype) -> None:
    """Every number of 16 bits, and of wider ones those that tell."""
    x = every_number(read) if read.itemsize == 2 else telling_numbers(dtype).to(read)
    assert torch.equal(codes(rounded(x, dtype)), nearest_codes(x, dtype))


def test_float64_is_rounded_once() -> None:
    """In float32 this is the tie between 1 and 1.125, which goes to 1."""
    x = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert rounded(x, E4M3).double() == 1.125


@formats
def test_codes_are_torchs(dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        torch.arange(256, dtype=torch.uint8).view(dtype).double(), numbers(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_what_lies_beyond_is_the_largest_and_nan_stays() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e30, -449.0, math.nan, -math.nan])
    assert rounded(x, E4M3).float()[:4].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert rounded(x, E5M2).float()[:4].tolist() == [57344.0, -57344.0, 57344.0, -448.0]
    assert codes(rounded(x, E4M3))[4:].tolist() == codes(rounded(x, E5M2))[4:].tolist() == [0x7F, 0x7F]


@formats
def test_quantize_is_a_product_rounded_and_its_gradient_that_of_x(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.tensor(0.3, requires_grad=True)
    y = formula.quantize(x, scale, dtype)
    assert torch.equal(y.detach(), rounded(x.detach() * scale.detach(), dtype).float())
    dy = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    dx, dscale = torch.autograd.grad(y, [x, scale], dy, allow_unused=True)
    assert torch.equal(dx, dy) and dscale is None


@formats
def test_quantize_on_symbols(dtype: torch.dtype) -> None:
    x, scale, dy = expr.leaf("x", Axes.FULL, 7), expr.leaf("scale", Axes.NONE), expr.leaf("dy", Axes.FULL, 7)
    y = formula.quantize(x, scale, dtype)
    adjoints = differentiate({y: dy}, [x, scale])
    tensors = {n: torch.randn(5, 7, generator=torch.Generator().manual_seed(k)) for k, n in enumerate(("x", "dy"))}
    tensors["scale"] = torch.tensor(0.3)
    value, gradient = Interpreter(tensors, {}, 5, tensors["x"]).run([y, adjoints[x]])
    assert torch.equal(value, rounded(tensors["x"] * 0.3, dtype).float())
    assert torch.equal(gradient, tensors["dy"]) and adjoints[scale] is expr.ZERO


@formats
def test_its_gradient_in_a_transformed_call(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    slopes = torch.func.vmap(torch.func.grad(lambda row: formula.quantize(row, 2.0, dtype).sum()))(x)
    assert torch.equal(slopes, torch.ones_like(x))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"quantized to torch.float8_e4m3fn or torch.float8_e5m2, got torch.bfloat16"):
        formula.quantize(torch.ones(2), 1.0, torch.bfloat16)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@formats
def test_ties_turned(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Numbers next to a tie are rounded to the other side, and no other numbers."""
    ties = torch.tensor([1.0 + torch.finfo(dtype).eps / 2]).to(wide)
    x = torch.cat([ties * (1 + by) for by in (-1e-6, 1e-6, -1e-4, 1e-4)]).outer(
        torch.tensor([1.0, -1.0, 0.25]).to(wide)
    )
    plain = rounded(x, dtype).float()
    with ties_turned():
        turned = rounded(x, dtype).float()
        ends = rounded(torch.tensor([math.inf, -math.inf, 0.0, math.nan]), dtype)
    assert torch.equal(turned[0], plain[1]) and torch.equal(turned[1], plain[0])
    assert torch.equal(turned[2:], plain[2:]) and (plain[0] != plain[1]).all()
    largest = torch.finfo(dtype).max
    assert ends.float()[:3].tolist() == [largest, -largest, 0.0] and ends.float()[3].isnan()
