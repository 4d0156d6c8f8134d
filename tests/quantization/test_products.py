"""Tensors of 8 bits with their scale; the products that there are, and te_fuser.precision: recipes by path."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import quantize, states
from te_fuser.quantization.products import device_of, products, products_of
from te_fuser.recipe import DelayedScaling, Format
from tests.float8 import E4M3, E5M2, FORMATS, codes, nearest_codes, telling_numbers
from tests.needs import needs_compiler
from tests.quantization.folded import RECIPE, step
from tests.refused import raises, refusals

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


def test_products_stand_in_the_order_of_their_construction() -> None:
    late = te.Sequential()
    first, second, third = ops.MatMul(16, 32), te.LayerNormMLP(32, 48), ops.Linear(48, 64)
    late.extend([third, first])
    own = [w for w in products() if w.owner in (first, second, third)]
    assert [(w.owner, w.name) for w in own] == [
        (first, "weight"),
        (second, "fc1_weight"),
        (second, "fc2_weight"),
        (third, "weight"),
    ]
    assert [*products_of(late)] == ["1", "0"]
    twin = copy.deepcopy(late)
    assert len(products_of(twin)) == 2 and products()[-1].owner in (twin[0], twin[1])


def test_variants_of_a_list_add_none_and_those_that_are_gone_are_none() -> None:
    model, x = te.LayerNormMLP(16, 32, fuse_wgrad_accumulation=True), torch.randn(4, 16)
    gc.collect()
    count = len(products())
    for w in (model.fc1_weight, model.fc2_weight):
        w.main_grad = torch.zeros_like(w)
    model(x, is_first_microbatch=True).sum().backward()
    assert len(products()) == count and [*products_of(model)] == ["fc1", "fc2"]
    other = te.LayerNormMLP(16, 32)
    assert len(products()) == count + 2
    del other
    gc.collect()
    assert len(products()) == count


def test_devices_and_what_no_product_of_8_bits_takes() -> None:
    model = te.Sequential(ops.Linear(16, 16), ops.Linear(16, 16, device="meta"))
    assert [device_of(w) for w in products_of(model).values()] == [torch.device("cpu"), None]
    bare = te.Linear(16, 16, skip_weight_param_allocation=True)
    found = [w for w in products() if w.owner is bare[0].owner]
    assert [device_of(w) for w in found] == [None]
    model = te.Sequential(ops.Linear(16, 10), ops.GELU(), ops.Linear(10, 16))
    assert products_of(model) == {}


OTHER = DelayedScaling(amax_history_len=5, fp8_format=Format.E4M3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([te.LayerNormMLP(16, 32), te.LayerNormMLP(16, 32)])
        self.lm_head = te.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def lengths(model: Any) -> dict[str, int]:
    """Path -> the length of the history, after a step."""
    step(model, torch.randn(4, 16))
    return {name.removesuffix(".input"): len(h) for name, (_, h) in states(model).items() if name.endswith(".input")}


def test_recipes_by_path_of_which_the_last_pattern_counts() -> None:
    model = Model()
    te.precision(model, {"*.fc2": OTHER, "lm_head": None})
    want = {"layers.0.fc1": 3, "layers.0.fc2": 5, "layers.1.fc1": 3, "layers.1.fc2": 5}
    assert lengths(model) == want
    te.precision(model, {"lm_head": RECIPE, "layers.1": None, "layers.1.fc2": RECIPE})
    assert lengths(model)["lm_head"] == 3 and lengths(model)["layers.0.fc2"] == 5
    assert lengths(model)["layers.1.fc2"] == 3
    model = Model()
    te.precision(model, {"*": None, "layers.0": OTHER, "*.fc1": RECIPE})
    assert lengths(model) == {"layers.0.fc1": 3, "layers.0.fc2": 5, "layers.1.fc1": 3}


def test_own_precision_is_that_of_no_region_where_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 16)
    plain = model(x)
    with te.autocast(recipe=RECIPE):
        assert not torch.equal(model(x), plain)  # plans are made anew below
        te.precision(model, {"*": None})
        assert torch.equal(model(x), plain)
    te.precision(model, {"*": OTHER})
    assert torch.equal(model(x), plain)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no match": (lambda: te.precision(Model(), {"*.fc3": None}), ValueError,
     r"'\*.fc3' matches no product; near it: .*fc"),
    "later": (lambda: te.precision(Model(), {"*": None, "lmhead": None}), ValueError, "'lmhead'.*'lm_head'"),
    "nothing": (lambda: te.precision(te.LayerNorm(16), {"*": None}), ValueError, "has none whose sizes"),
    "no recipe": (lambda: te.precision(Model(), {"*": "fp8"}), TypeError, "'fp8'"),
    "no pattern": (lambda: te.precision(Model(), {3: None}), TypeError, "a pattern and a recipe or None, got 3"),
    "no mapping": (lambda: te.precision(Model(), RECIPE), TypeError, r"got DelayedScaling as the mapping: {"),
    "no module": (lambda: te.precision([], {}), TypeError, "got list as the module"),
}  # fmt: skip


test_bad_arguments = refusals(BAD)


def test_an_error_changes_nothing() -> None:
    model = Model()
    raises(ValueError, "matches no product", te.precision, model, {"*": None, "typo": RECIPE})
    assert len(lengths(model)) == 5
