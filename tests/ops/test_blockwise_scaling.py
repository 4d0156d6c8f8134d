"""Scales that numbers get from themselves, and the three products of factors that have such scales."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.ops.base import Spec
from te_fuser.ops.blockwise_scaling import dequantized, quantized, scales_of
from te_fuser.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    OwnScales,
    QParams,
    Recipe,
)
from tests.float8 import E4M3, E5M2
from tests.needs import needs_compiler
from tests.ops.check import normal

IN, OUT, ROWS = 128, 256, 33
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "current e4m3": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_bwd_grad=QParams(power_2_scale=True)),
    "blocks": Float8BlockScaling(),
    "blocks of any scale": Float8BlockScaling(fp8_quant_fwd_inp=QParams(), fp8_quant_fwd_weight=QParams()),
    "mx": MXFP8BlockScaling(),
}


def by_hand(amax: float, largest: float, scaling: OwnScales) -> float:
    """The scale of an amax, by Python's numbers rounded to float32 where the formula says so."""
    amax = max(amax, float(torch.tensor(float(scaling.by.amax_epsilon)))) if not math.isnan(amax) else amax
    if not 0.0 < amax < math.inf:
        return 1.0
    scale = torch.tensor(largest, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
    found = min(float(scale), torch.finfo(torch.float32).max)
    return 2.0 ** (math.frexp(found)[1] - 1) if scaling.by.power_2_scale else found


def blocks_of(t: torch.Tensor, block: tuple[int, int] | None) -> Any:
    """(place among blocks, the numbers) of each block."""
    height, width = t.shape if block is None else block
    down, across = range(0, t.shape[0], height), range(0, t.shape[1], width)
    for (i, top), (j, left) in itertools.product(enumerate(down), enumerate(across)):
        yield (i, j), (slice(top, top + height), slice(left, left + width))


@pytest.mark.parametrize("shape", [(5, 300), (130, 256), (1, 16), (256, 128)])
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("power", [False, True])
def test_each_block_has_the_scale_of_its_amax(
    shape: tuple[int, int], block: tuple[int, int] | None, power: bool
) -> None:
    scaling, spans = OwnScales(QParams(power, 1e-3), block), torch.exp2(torch.arange(shape[1]) / 16 - 12)
    t = (normal(*shape) * spans).float()
    for dtype in (E4M3, E5M2):
        largest, scales = torch.finfo(dtype).max, scales_of(t, dtype, scaling)
        data, inverse = quantized(t, dtype, scaling)
        assert data.dtype == dtype and data.shape == t.shape and scales.dtype == inverse.dtype == torch.float32
        for place, at in blocks_of(t, block):
            scale = scales if block is None else scales[place]
            assert scale.item() == by_hand(t[at].abs().max().item(), largest, scaling)
            wide = t[at].double() * scale.double()
            assert (data[at].double() - wide).abs().max() <= largest * torch.finfo(dtype).eps / 2
            number = inverse if block is None else inverse[place]
            assert number == scale.reciprocal()
        rtol, least = (0.125, 2.0**-16) if dtype == E4M3 else (0.25, 2.0**-30)
        torch.testing.assert_close(dequantized(t, dtype, scaling), t, rtol=rtol, atol=least * t.abs().max().item())


SPECIAL = {
    "zeros": ([0.0, 0.0], 0.0, False, 1.0),
    "negative zeros": ([-0.0, 0.0], 0.0, True, 1.0),
    "infinite": ([math.inf, 1.0], 0.0, False, 1.0),
    "nan": ([math.nan, 1.0], 0.0, False, 1.0),
    "nan with epsilon": ([math.nan, 1.0], 1.0, True, 1.0),
    "zeros with epsilon": ([0.0, 0.0], 0.5, False, 896.0),
    "least": ([0.25, 0.0], 0.5, False, 896.0),
    "power": ([1.0, -0.5], 0.0, True, 256.0),
    "whole power": ([7.0, 0.0], 0.0, True, 64.0),
    "just above": ([7.0000005, 0.0], 0.0, True, 32.0),
    "too small": ([1e-40, 0.0], 0.0, False, torch.finfo(torch.float32).max),
    "too small for a power": ([1e-40, 0.0], 0.0, True, 2.0**127),
    "largest": ([torch.finfo(torch.float32).max, 0.0], 0.0, True, 2.0**-120),
    "empty": ([], 0.0, False, 1.0),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)])
def test_special_numbers(case: str, block: tuple[int, int] | None) -> None:
    numbers, epsilon, power, wanted = SPECIAL[case]
    t = torch.tensor([numbers], dtype=torch.float32)
    scales = scales_of(t, E4M3, OwnScales(QParams(power, epsilon), block))
    assert scales.unique().tolist() == ([wanted] if scales.numel() else [])
    kept = dequantized(t, E4M3, OwnScales(QParams(power, epsilon), block))
    assert torch.equal(kept.isnan(), t.isnan()) and kept.shape == t.shape


def test_float64_has_scales_of_float64() -> None:
    t = normal(3, 7)
    scale = scales_of(t, E4M3, OwnScales(QParams()))
    assert scale.dtype == torch.float64 and scale == 448.0 / t.abs().max()
    assert dequantized(t, E4M3, OwnScales(QParams(True), (1, 4))).dtype == torch.float64


# --------------------------------------------------------------------------------------------------- products


def expected(t: torch.Tensor, role: str, recipe: Recipe, product: str) -> torch.Tensor:
    """What a factor stands for in a product, float64: blocks along what that sums."""
    hybrid = getattr(recipe, "fp8_format", Format.E4M3) is Format.HYBRID
    dtype = E5M2 if role == "gradient" and hybrid else E4M3
    turn = product == "dW" or (product, role) == ("dx", "weight")
    t = t.detach().float()
    t = t.mT if turn else t
    by = {"input": "fwd_inp", "weight": "fwd_weight", "gradient": "bwd_grad"}[role]
    given = getattr(recipe, f"fp8_quant_{by}", QParams(power_2_scale=True))
    scaling = OwnScales(given)
    side = {Float8BlockScaling: 128, MXFP8BlockScaling: 32}.get(type(recipe))
    block = None if side is None else (side if side == 128 and role == "weight" else 1, side)
    found = torch.empty_like(t, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    for _, at in blocks_of(t, block):
        scale = by_hand(t[at].abs().max().item(), largest, scaling)
        scaled = t[at] * torch.tensor(scale, dtype=torch.float32)
        inverse = torch.tensor(scale, dtype=torch.float32).reciprocal()
        found[at] = (scaled.clamp(-largest, largest).to(dtype).float() * inverse).double()
    return found.mT if turn else found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_product_is_of_what_8_bits_stand_for_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    recipe, model = RECIPES[name], te.Sequential(ops.MatMul(IN, OUT)).to(dtype)
    spans = torch.exp2(torch.arange(ROWS)[:, None] % 7.0 - 3.0)
    x, dy = ((normal(ROWS, n) * spans).to(dtype) for n in (IN, OUT))
    x.requires_grad_()
    with te.autocast(recipe=recipe):
        y = model(x)
    w = model[0].weight
    dx, dw = torch.autograd.grad(y, [x, w], dy)

    def factor(t: torch.Tensor, role: str, product: str) -> torch.Tensor:
        return expected(t, role, recipe, product)

    wanted = {
        "y": (y, factor(x, "input", "y") @ factor(w, "weight", "y").mT),
        "dx": (dx, factor(dy, "gradient", "dx") @ factor(w, "weight", "dx")),
        "dW": (dw, factor(dy, "gradient", "dW").mT @ factor(x, "input", "dW")),
    }
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for product, (found, right) in wanted.items():
        assert found.dtype == dtype
        size = right.abs().max().item()
        torch.testing.assert_close(found.double(), right, rtol=eps, atol=2e-6 * size, msg=product)


@pytest.mark.parametrize("kernels", ["reference", pytest.param("generated", marks=needs_compiler)])
@pytest.mark.parametrize("name", RECIPES)
def test_against_float64(name: str, kernels: str) -> None:
    recipe = RECIPES[name]
    hybrid = getattr(recipe, "fp8_format", Format.E4M3) is Format.HYBRID
    model = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT), kernels=kernels)
    exact = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT)).double()
    exact.load_state_dict(model.state_dict())
    x, dy = (normal(ROWS, n).float() for n in (IN, OUT))
    x.requires_grad_()
    with te.autocast(recipe=recipe):
        y = model(x)
    found = torch.autograd.grad(y, [x, *model.parameters()], dy)
    exact_x = x.detach().double().requires_grad_()
    wanted = exact(exact_x)
    gradients = torch.autograd.grad(wanted, [exact_x, *exact.parameters()], dy.double())
    for a, b in zip((y, *found), (wanted, *gradients), strict=True):
        size, (rtol, atol) = b.abs().max().item(), (0.25, 0.125) if hybrid and a is not y else (0.125, 0.0675)
        torch.testing.assert_close(a.double() / size, b / size, rtol=rtol, atol=atol)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("blocks", torch.float32), *((name, torch.bfloat16) for name in RECIPES if name != "current e4m3")],
)
def test_verified(name: str, dtype: torch.dtype) -> None:
    """Each step against float64, as it runs."""
    parts = (ops.LayerNorm(IN), ops.Linear(IN, OUT), ops.GELU(), ops.Linear(OUT, IN), ops.Dropout(0.1))
    model = te.Sequential(*parts, verify=True).to(dtype)
    for step in range(2):
        x = normal(5, 7, IN, seed=step).to(dtype).requires_grad_()
        with te.autocast(recipe=RECIPES[name]):
            y = model(x)
        y.square().sum().backward()


def test_words() -> None:
    form: dict[str, Any] = {"dtype": torch.float32, "weight_dtype": torch.float32, "formats": (E4M3, E4M3, E5M2)}
    op = ops.OwnScalesMatMul(ops.MatMul(IN, OUT), scalings=(OwnScales(QParams()),) * 3, **form)
    assert repr(op) == "OwnScalesMatMul(128, 256, torch.float32)"
    with pytest.raises(TypeError, match="takes x in float32"):
        op.infer(Spec((2, IN), torch.bfloat16, torch.device("cpu")))
