"""Recipes that keep nothing, on a GPU: the kernels' bytes, and models by cuBLASLt against the emulation there."""

from __future__ import annotations

import itertools

import pytest
import torch

import te_fuser as te
from te_fuser import fusions
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.quantizers import QuantizeBlocks
from te_fuser.recipe import Float8BlockScaling, Float8CurrentScaling, Format, QParams, Recipe
from tests.float8 import E4M3, OURS
from tests.gpu.test_float8_regions import BF16, F16, F32, GPU, MODELS, F, assert_as_emulated, compare, data, made, step
from tests.kernels.test_quantizers import DTYPES, NOTHING, SIZES, check_blocks, matrix

LARGE = [(8192, 4096), (8191, 4096), (70_001, 128), (16, 65536)]
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "current e4m3": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(power_2_scale=True)),
    "blocks": Float8BlockScaling(),
}
every = pytest.mark.parametrize("name", RECIPES)


def recipe_of(name: str) -> Recipe:
    """A recipe that this machine runs."""
    why = products.obstacle_on(GPU, scales=RECIPES[name].scales)
    if why is not None:
        pytest.skip(why)
    return RECIPES[name]


@pytest.mark.parametrize("size", [*SIZES, *NOTHING, *LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_for_each_block(size: tuple[int, int], dtype: torch.dtype) -> None:
    for square, wanted in itertools.product((False, True), ("rows", "turned", "both")):
        check_blocks(matrix(*size, dtype).cuda(), QuantizeBlocks(dtype, E4M3, wanted, square))


@every
@pytest.mark.parametrize("model_name", MODELS)
def test_as_emulated(model_name: str, name: str) -> None:
    recipe = recipe_of(name)
    model, twin = made(model_name)
    for k in range(2):
        assert_as_emulated(model, twin, data(k, 130, 3, F) * (1.0 + k), recipe)


@every
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("rows", [1, 7, 128, 333])
def test_dtypes_and_tokens(dtype: torch.dtype, name: str, rows: int) -> None:
    recipe = recipe_of(name)
    model, twin = made("mlp", dtype)
    x = data(0, rows, F, dtype=dtype)
    assert_as_emulated(model, twin, x, recipe)
    with te.autocast(recipe=recipe):
        said = str(model.explain(x.requires_grad_(), details=True))
    assert "op own_scales" not in said and "op float8" not in said


@every
def test_without_gradients_and_nothing(name: str) -> None:
    recipe = recipe_of(name)
    model, twin = made("mlp")
    for rows in (0, 5, 64):
        x = data(0, rows, F)
        with torch.no_grad(), te.autocast(recipe=recipe):
            y = model(x)
            with fusions.disabled(*OURS):
                compare({"y": y}, {"y": twin(x)})


@every
def test_main_grad(name: str) -> None:
    recipe = recipe_of(name)
    torch.manual_seed(0)
    plain = te.LayerNormMLP(F, 2 * F, device="cuda", params_dtype=BF16)
    model = te.LayerNormMLP(F, 2 * F, device="cuda", params_dtype=BF16, fuse_wgrad_accumulation=True)
    model.load_state_dict(plain.state_dict())
    for p in model.parameters():
        if p.dim() > 1:
            p.main_grad = torch.ones_like(p, dtype=F32)  # type: ignore[attr-defined]
    x = data(0, 100, F)
    wanted = step(plain, x, recipe)  # type: ignore[arg-type]
    step(model, x, recipe)  # type: ignore[arg-type]
    for weight, p in model.named_parameters():
        if p.dim() > 1:
            compare({"w": p.main_grad - 1.0}, {"w": wanted[weight].float()})  # type: ignore[operator]
