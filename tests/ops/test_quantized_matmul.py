"""QuantizedMatMul: right in values and gradients against float64, in lists with Quantize, refused in words."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.quantization import quantize
from tests.float8 import E4M3, E5M2
from tests.needs import needs_compiler
from tests.ops.check import normal
from tests.refused import refusals

IN, OUT = 48, 32
KERNELS = ("reference", pytest.param("generated", marks=needs_compiler))
TOLERANCES = [(E4M3, 0.125, 0.0675), (E5M2, 0.25, 0.125)]


def model(given: torch.dtype = torch.float32, dtype: torch.dtype = E4M3, **options: object) -> te_fuser.Sequential:
    """A norm that gives 8 bits, a product of them, its bias and an activation."""
    parts = (ops.LayerNorm(IN), ops.Quantize(dtype), ops.QuantizedMatMul(IN, OUT, dtype=given), ops.Bias(OUT))
    return te_fuser.Sequential(*parts, ops.GELU(), **options).to(given)  # type: ignore[arg-type]


def tensors(exact: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The named inputs of such a list, for what it quantizes and its weight."""
    scale = (torch.finfo(dtype).max / exact.abs().max()).float()
    held = quantize(weight, E4M3, 448 / weight.abs().max().item())
    scales = {"scale": scale, "input_scale": scale.reciprocal(), "weight_scale": held.scale_inverse}
    return {"weight": held.data, **scales}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "relative", "absolute"), TOLERANCES)
def test_against_float64(
    dtype: torch.dtype, relative: float, absolute: float, given: torch.dtype, kernels: str
) -> None:
    """Also with the gradients of all that is before and behind; the gradient passes by what was quantized."""
    ours, weight = model(given, dtype, kernels=kernels), normal(OUT, IN).float() * IN**-0.5
    x, dy = (normal(33, n).to(given) for n in (IN, OUT))
    norm, bias = ours[0].double(), ours[3].double()
    exact_x = x.double().requires_grad_()
    h = torch.nn.functional.layer_norm(exact_x, (IN,), norm.weight, norm.bias)
    y = torch.nn.functional.gelu(h @ weight.double().mT + bias.bias, approximate="tanh")
    leaves = [norm.weight, norm.bias, bias.bias]
    wanted = torch.autograd.grad(y, [exact_x, *leaves], dy.double())
    named = tensors(h.detach(), weight, dtype)
    ours.to(given)
    x.requires_grad_()
    found = ours(x, **named)
    assert found.dtype == given
    torch.testing.assert_close(found.double(), y, rtol=relative, atol=absolute)
    for a, b in zip(torch.autograd.grad(found, [x, *ours.parameters()], dy), wanted, strict=True):
        size = b.abs().max().item()
        torch.testing.assert_close(a.double() / size, b / size, rtol=relative, atol=absolute)


def exactly(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x.double() * by.double()


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_what_8_bits_stand_for_is_multiplied_and_rounded_once(
    pair: tuple[torch.dtype, torch.dtype], given: torch.dtype
) -> None:
    a, b = (quantize(normal(*shape).float(), d, 3.7) for shape, d in zip(((2, 5, IN), (OUT, IN)), pair, strict=True))
    op = te_fuser.Sequential(ops.QuantizedMatMul(IN, OUT, dtype=given))
    named = {"weight": b.data, "input_scale": a.scale_inverse, "weight_scale": b.scale_inverse}
    wanted = exactly(a.data, a.scale_inverse) @ exactly(b.data, b.scale_inverse).mT
    eps = torch.finfo(given).eps
    for y in (op(a.data, **named), op.reference(a.data, **named)):
        assert y.dtype == given and y.shape == (2, 5, OUT)
        torch.testing.assert_close(y.double(), wanted, rtol=4 * eps, atol=4 * eps * wanted.abs().max().item())


@needs_compiler
def test_verified() -> None:
    ours, x = model(verify=True), normal(9, IN).float().requires_grad_()
    ours(x, **tensors(torch.full((), 3.0), normal(OUT, IN).float(), E4M3)).sum().backward()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    x = torch.ones(rows, IN, requires_grad=True)
    y = model()(x, **tensors(torch.full((), 3.0), normal(OUT, IN).float(), E4M3))
    y.sum().backward()
    assert y.shape == (rows, OUT) and x.grad is not None and x.grad.shape == (rows, IN)


def run(x: torch.Tensor, **changed: torch.Tensor) -> torch.Tensor:
    named = tensors(torch.ones(()), torch.ones(OUT, IN), E4M3)
    named.pop("scale")
    return te_fuser.Sequential(ops.QuantizedMatMul(IN, OUT, dtype=torch.float32))(x, **{**named, **changed})


NARROW = torch.ones(2, IN).to(E4M3)
REFUSED = {
    "in": (lambda: ops.QuantizedMatMul(40, 32, dtype=torch.float32), ValueError,
     "in_features in multiples of 16, got 40"),
    "out": (lambda: ops.QuantizedMatMul(32, 8, dtype=torch.float32), ValueError,
     "out_features in multiples of 16, got 8"),
    "dtype": (lambda: ops.QuantizedMatMul(32, 32, dtype=E4M3), TypeError, "gives float32, bfloat16, float16, got"),
    "wide": (lambda: run(torch.ones(2, IN)), TypeError, "takes float8_e4m3fn or float8_e5m2, got float32: quantize it"),
    "features": (lambda: run(torch.ones(2, 32).to(E4M3)), ValueError, "made for 48 features, got 32"),
    "weight": (lambda: run(NARROW, weight=torch.ones(OUT, IN)), TypeError, "'weight' is float32, it takes float8"),
    "its shape": (lambda: run(NARROW, weight=torch.ones(IN, IN).to(E4M3)), ValueError,
     r"\[48, 48\], it needs \[32, 48"),
    "e5m2 twice": (lambda: run(torch.ones(2, IN).to(E5M2), weight=torch.ones(OUT, IN).to(E5M2)), TypeError,
     "both float8_e5m2: quantize one to float8_e4m3fn"),
    "scale": (lambda: run(NARROW, input_scale=torch.ones(3)), ValueError,
     r"'input_scale' is one number.*got float32 \[3"),
    "missing": (lambda: te_fuser.Sequential(ops.QuantizedMatMul(IN, OUT, dtype=torch.float32))(NARROW), ValueError,
     r"op 0 \(QuantizedMatMul.*pass it: model\(x, weight="),
}  # fmt: skip


test_refused_in_words = refusals(REFUSED)
