"""Products of 8 bits: scales of tensors and blocks, given and by recipes, against float64 and what 8 bits stand for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import te_fuser
import te_fuser as te
from te_fuser import ops
from te_fuser.ops.blockwise_scaling import dequantized, quantized, scales_of
from te_fuser.quantization import quantize
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
from tests.ops.check import normal, spec
from tests.refused import raises, refusals


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
def test_scales_of_special_numbers(case: str, block: tuple[int, int] | None) -> None:
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


K, N = 48, 32
KERNELS = ("reference", pytest.param("generated", marks=needs_compiler))
TOLERANCES = [(E4M3, 0.125, 0.0675), (E5M2, 0.25, 0.125)]


def given_model(
    given: torch.dtype = torch.float32, dtype: torch.dtype = E4M3, **options: object
) -> te_fuser.Sequential:
    """A norm that gives 8 bits, a product of them, its bias and an activation."""
    parts = (ops.LayerNorm(K), ops.Quantize(dtype), ops.QuantizedMatMul(K, N, dtype=given), ops.Bias(N))
    return te_fuser.Sequential(*parts, ops.GELU(), **options).to(given)  # type: ignore[arg-type]


def given_tensors(exact: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The named inputs of such a list, for what it quantizes and its weight."""
    scale = (torch.finfo(dtype).max / exact.abs().max()).float()
    held = quantize(weight, E4M3, 448 / weight.abs().max().item())
    scales = {"scale": scale, "input_scale": scale.reciprocal(), "weight_scale": held.scale_inverse}
    return {"weight": held.data, **scales}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "relative", "absolute"), TOLERANCES)
def test_given_in_8_bits_against_float64(
    dtype: torch.dtype, relative: float, absolute: float, given: torch.dtype, kernels: str
) -> None:
    """Also with the gradients of all that is before and behind; the gradient passes by what was quantized."""
    ours, weight = given_model(given, dtype, kernels=kernels), normal(N, K).float() * K**-0.5
    x, dy = (normal(33, n).to(given) for n in (K, N))
    norm, bias = ours[0].double(), ours[3].double()
    exact_x = x.double().requires_grad_()
    h = torch.nn.functional.layer_norm(exact_x, (K,), norm.weight, norm.bias)
    y = torch.nn.functional.gelu(h @ weight.double().mT + bias.bias, approximate="tanh")
    leaves = [norm.weight, norm.bias, bias.bias]
    wanted = torch.autograd.grad(y, [exact_x, *leaves], dy.double())
    named = given_tensors(h.detach(), weight, dtype)
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
    a, b = (quantize(normal(*shape).float(), d, 3.7) for shape, d in zip(((2, 5, K), (N, K)), pair, strict=True))
    op = te_fuser.Sequential(ops.QuantizedMatMul(K, N, dtype=given))
    named = {"weight": b.data, "input_scale": a.scale_inverse, "weight_scale": b.scale_inverse}
    wanted = exactly(a.data, a.scale_inverse) @ exactly(b.data, b.scale_inverse).mT
    eps = torch.finfo(given).eps
    for y in (op(a.data, **named), op.reference(a.data, **named)):
        assert y.dtype == given and y.shape == (2, 5, N)
        torch.testing.assert_close(y.double(), wanted, rtol=4 * eps, atol=4 * eps * wanted.abs().max().item())


@needs_compiler
def test_given_in_8_bits_verified() -> None:
    ours, x = given_model(verify=True), normal(9, K).float().requires_grad_()
    ours(x, **given_tensors(torch.full((), 3.0), normal(N, K).float(), E4M3)).sum().backward()


@pytest.mark.parametrize("rows", [0, 1])
def test_given_in_8_bits_few_rows(rows: int) -> None:
    x = torch.ones(rows, K, requires_grad=True)
    y = given_model()(x, **given_tensors(torch.full((), 3.0), normal(N, K).float(), E4M3))
    y.sum().backward()
    assert y.shape == (rows, N) and x.grad is not None and x.grad.shape == (rows, K)


def run(x: torch.Tensor, **changed: torch.Tensor) -> torch.Tensor:
    named = given_tensors(torch.ones(()), torch.ones(N, K), E4M3)
    named.pop("scale")
    return te_fuser.Sequential(ops.QuantizedMatMul(K, N, dtype=torch.float32))(x, **{**named, **changed})


NARROW = torch.ones(2, K).to(E4M3)
REFUSED = {
    "in": (lambda: ops.QuantizedMatMul(40, 32, dtype=torch.float32), ValueError,
     "in_features in multiples of 16, got 40"),
    "out": (lambda: ops.QuantizedMatMul(32, 8, dtype=torch.float32), ValueError,
     "out_features in multiples of 16, got 8"),
    "dtype": (lambda: ops.QuantizedMatMul(32, 32, dtype=E4M3), TypeError, "gives float32, bfloat16, float16, got"),
    "wide": (lambda: run(torch.ones(2, K)), TypeError, "takes float8_e4m3fn or float8_e5m2, got float32: quantize it"),
    "features": (lambda: run(torch.ones(2, 32).to(E4M3)), ValueError, "made for 48 features, got 32"),
    "weight": (lambda: run(NARROW, weight=torch.ones(N, K)), TypeError, "'weight' is float32, it takes float8"),
    "its shape": (lambda: run(NARROW, weight=torch.ones(K, K).to(E4M3)), ValueError,
     r"\[48, 48\], it needs \[32, 48"),
    "e5m2 twice": (lambda: run(torch.ones(2, K).to(E5M2), weight=torch.ones(N, K).to(E5M2)), TypeError,
     "both float8_e5m2: quantize one to float8_e4m3fn"),
    "scale": (lambda: run(NARROW, input_scale=torch.ones(3)), ValueError,
     r"'input_scale' is one number.*got float32 \[3"),
    "missing": (lambda: te_fuser.Sequential(ops.QuantizedMatMul(K, N, dtype=torch.float32))(NARROW), ValueError,
     r"op 0 \(QuantizedMatMul.*pass it: model\(x, weight="),
}  # fmt: skip


test_refused_in_words = refusals(REFUSED)


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
        raises(TypeError, words, op.infer, spec(5, IN, dtype=torch.bfloat16))
