"""Float8MatMul: three products of 8 bits against float64, refused in words; in regions, which list it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import quantize
from te_fuser.recipe import DelayedScaling, Format
from tests.float8 import E4M3, E5M2
from tests.needs import needs_compiler
from tests.ops.check import normal

IN, OUT = 48, 32
KERNELS = ("reference", pytest.param("generated", marks=needs_compiler))
FORMS = {"hybrid": (Format.HYBRID, (0.25, 0.125)), "e4m3": (Format.E4M3, (0.125, 0.0675))}


def trained(model: te.Sequential, x: torch.Tensor, dy: torch.Tensor, recipe: DelayedScaling) -> Any:
    """(y, gradients) of a call whose scales are those of such data."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        with te.autocast(recipe=recipe):
            y = model(x)
        found = torch.autograd.grad(y, [x, *model.parameters()], dy)
    return y, found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_against_float64(form: str, dtype: torch.dtype, kernels: str) -> None:
    formats, of_gradients = FORMS[form]
    model = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT), kernels=kernels)
    exact = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT)).double()
    model.to(dtype)
    exact.load_state_dict(model.state_dict())
    x, dy = (normal(33, n).to(dtype) for n in (IN, OUT))
    y, found = trained(model, x, dy, DelayedScaling(fp8_format=formats, amax_history_len=1))
    exact_x = x.double().requires_grad_()
    wanted = exact(exact_x)
    gradients = torch.autograd.grad(wanted, [exact_x, *exact.parameters()], dy.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted, rtol=0.125, atol=0.0675)
    for a, b in zip(found, gradients, strict=True):
        assert a.dtype == dtype
        size = b.abs().max().item()
        torch.testing.assert_close(a.double() / size, b / size, rtol=of_gradients[0], atol=of_gradients[1])


def test_the_gradient_of_a_bias_is_of_what_was_not_quantized() -> None:
    model = te.Sequential(ops.Linear(IN, OUT))
    dy = normal(33, OUT).float()
    _, found = trained(model, normal(33, IN).float(), dy, DelayedScaling())
    torch.testing.assert_close(found[2], dy.sum(0))


def test_each_product_is_of_what_8_bits_stand_for_and_rounded_once() -> None:
    model = te.Sequential(ops.MatMul(IN, OUT)).bfloat16()
    x, dy = (normal(17, n).bfloat16() for n in (IN, OUT))
    y, (dx, dw) = trained(model, x, dy, DelayedScaling(amax_history_len=1))

    def dequantized(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        t = t.detach()
        q = quantize(t, dtype, (torch.finfo(dtype).max / t.abs().max().float()).float())
        return q.data.double() * q.scale_inverse.double()

    x8, w8, dy8 = dequantized(x, E4M3), dequantized(model[0].weight, E4M3), dequantized(dy, E5M2)
    for found, wanted in ((y, x8 @ w8.mT), (dx, dy8 @ w8), (dw, dy8.mT @ x8)):
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(found.double(), wanted, rtol=eps, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        ((False, False, False), torch.float32),
        ((False, False, True), torch.bfloat16),
        ((True, False, False), torch.bfloat16),
    ],
)
def test_verified(kept: tuple[bool, bool, bool], dtype: torch.dtype) -> None:
    """Each step against float64, as it runs."""
    recipe = DelayedScaling(override_linear_precision=kept)
    parts = (ops.LayerNorm(IN), ops.Linear(IN, 2 * OUT), ops.GELU(), ops.Linear(2 * OUT, OUT), ops.Dropout(0.1))
    model = te.Sequential(*parts, verify=True).to(dtype)
    for _ in range(2):
        x = normal(5, 7, IN).to(dtype).requires_grad_()
        with te.autocast(recipe=recipe):
            y = model(x)
        y.square().sum().backward()


def test_words() -> None:
    form = {"dtype": torch.float32, "weight_dtype": torch.float32, "formats": (E4M3, E4M3, E5M2)}
    with pytest.raises(ValueError, match="Float8MatMul takes out_features in multiples of 16, got 24"):
        ops.Float8MatMul(ops.MatMul(IN, 24), **form)
    product = ops.MatMul(IN, OUT)
    for changed, words in (
        ({"dtype": torch.float64}, "gives float32"),
        ({"weight_dtype": torch.int8}, "gives float32"),
        ({"formats": (E4M3, torch.bfloat16, E5M2)}, "float8_e4m3fn or"),
    ):
        with pytest.raises(TypeError, match=words):
            ops.Float8MatMul(product, **{**form, **changed})
    with pytest.raises(TypeError, match="quantize it"):
        ops.Float8MatMul(product, **form).infer(spec(torch.bfloat16))
    partly = ops.PartlyFloat8MatMul(product, kept=(True, False, False), **form)
    with pytest.raises(TypeError, match="takes x in float32"):
        partly.infer(spec(torch.bfloat16))
    assert "not in 8 bits: y" in repr(partly) and "48, 32, torch.float32" in repr(partly)


def spec(dtype: torch.dtype) -> Any:
    from te_fuser.ops.base import Spec

    return dataclasses.replace(Spec((5, IN), torch.float32, torch.device("cpu")), dtype=dtype)
