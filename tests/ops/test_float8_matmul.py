"""Products of 8 bits by every recipe: against float64, of what 8 bits stand for, verified; refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.ops.base import Spec
from te_fuser.recipe import (
    DelayedScaling,
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
from tests.ops.test_blockwise_scaling import blocks_of, by_hand
from tests.refused import raises

IN, OUT, ROWS = 128, 256, 33


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=1),
    "delayed e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=1),
    "current": Float8CurrentScaling(),
    "current e4m3": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_bwd_grad=QParams(power_2_scale=True)),
    "blocks": Float8BlockScaling(),
    "blocks of any scale": Float8BlockScaling(fp8_quant_fwd_inp=QParams(), fp8_quant_fwd_weight=QParams()),
    "mx": MXFP8BlockScaling(),
}
PARTLY: dict[str, Recipe] = {
    name: DelayedScaling(override_linear_precision=kept)
    for name, kept in (("but dW", (False, False, True)), ("but y", (True, False, False)))
}


def hybrid(recipe: Recipe) -> bool:
    """True where gradients are in E5M2."""
    return getattr(recipe, "fp8_format", Format.E4M3) is Format.HYBRID


def trained(model: te.Sequential, x: torch.Tensor, dy: torch.Tensor, recipe: Recipe) -> Any:
    """(y, gradients) of a call whose scales are those of such data, also where they come from the call before."""
    for _ in range(2 if isinstance(recipe, DelayedScaling) else 1):
        x = x.detach().requires_grad_()
        with te.autocast(recipe=recipe):
            y = model(x)
        found = torch.autograd.grad(y, [x, *model.parameters()], dy)
    return y, found


def expected(t: torch.Tensor, role: str, recipe: Recipe, product: str) -> torch.Tensor:
    """Values of a quantized factor in a product, float64: blocks along the summed dimension."""
    dtype = E5M2 if role == "gradient" and hybrid(recipe) else E4M3
    turn = product == "dW" or (product, role) == ("dx", "weight")
    t = t.detach().float()
    t = t.mT if turn else t
    by = {"input": "fwd_inp", "weight": "fwd_weight", "gradient": "bwd_grad"}[role]
    given = getattr(recipe, f"fp8_quant_{by}", QParams(power_2_scale=isinstance(recipe, MXFP8BlockScaling)))
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
    w = model[0].weight
    y, (dx, dw) = trained(model, x, dy, recipe)

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
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in RECIPES),
        *((name, dtype) for name in ("delayed", "delayed e4m3") for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_against_float64(name: str, dtype: torch.dtype, kernels: str) -> None:
    recipe = RECIPES[name]
    model = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT), kernels=kernels).to(dtype)
    exact = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, OUT)).double()
    exact.load_state_dict(model.state_dict())
    x, dy = (normal(ROWS, n).to(dtype) for n in (IN, OUT))
    y, found = trained(model, x, dy, recipe)
    exact_x = x.detach().double().requires_grad_()
    wanted = exact(exact_x)
    gradients = torch.autograd.grad(wanted, [exact_x, *exact.parameters()], dy.double())
    for a, b in zip((y, *found), (wanted, *gradients), strict=True):
        assert a.dtype == dtype
        size = b.abs().max().item()
        of_gradients = (0.25, 0.125) if hybrid(recipe) else (0.125, 0.0675)
        rtol, atol = (0.125, 0.03) if a is y else of_gradients
        torch.testing.assert_close(a.double() / size, b / size, rtol=rtol, atol=atol)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("delayed", "blocks")),
        *((name, torch.bfloat16) for name in [*RECIPES, *PARTLY] if "e4m3" not in name),
    ],
)
def test_verified(name: str, dtype: torch.dtype) -> None:
    """Each step against float64, as it runs."""
    parts = (ops.LayerNorm(IN), ops.Linear(IN, OUT), ops.GELU(), ops.Linear(OUT, IN), ops.Dropout(0.1))
    model = te.Sequential(*parts, verify=True).to(dtype)
    for step in range(2):
        x = normal(5, 7, IN, seed=step).to(dtype).requires_grad_()
        with te.autocast(recipe={**RECIPES, **PARTLY}[name]):
            y = model(x)
        y.square().sum().backward()


def test_the_gradient_of_a_bias_is_of_what_was_not_quantized() -> None:
    model = te.Sequential(ops.Linear(IN, OUT))
    dy = normal(33, OUT).float()
    _, found = trained(model, normal(33, IN).float(), dy, DelayedScaling())
    torch.testing.assert_close(found[2], dy.sum(0))


def test_words() -> None:
    form: dict[str, Any] = {"dtype": torch.float32, "weight_dtype": torch.float32, "formats": (E4M3, E4M3, E5M2)}
    with pytest.raises(ValueError, match="Float8MatMul takes out_features in multiples of 16, got 24"):
        ops.Float8MatMul(ops.MatMul(IN, 24), **form)
    product = ops.MatMul(IN, OUT)
    for changed, words in (
        ({"dtype": torch.float64}, "gives float32"),
        ({"weight_dtype": torch.int8}, "gives float32"),
        ({"formats": (E4M3, torch.bfloat16, E5M2)}, "float8_e4m3fn or"),
    ):
        raises(TypeError, words, ops.Float8MatMul, product, **{**form, **changed})
    partly = ops.PartlyFloat8MatMul(product, kept=(True, False, False), **form)
    own = ops.OwnScalesMatMul(product, scalings=(OwnScales(QParams()),) * 3, **form)
    assert "not in 8 bits: y" in repr(partly) and "128, 256, torch.float32" in repr(partly)
    assert repr(own) == "OwnScalesMatMul(128, 256, torch.float32)"
    for op, words in (
        (ops.Float8MatMul(product, **form), "quantize it"),
        *((op, "takes x in float32") for op in (partly, own)),
    ):
        raises(TypeError, words, op.infer, Spec((5, IN), torch.bfloat16, torch.device("cpu")))
