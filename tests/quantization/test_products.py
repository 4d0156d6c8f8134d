"""The products that there are, and te_fuser.precision: recipes by path."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.quantization.products import device_of, products, products_of
from te_fuser.recipe import DelayedScaling, Format
from tests.refused import raises


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


RECIPE, OTHER = DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=5, fp8_format=Format.E4M3)


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
    with te.autocast(recipe=RECIPE):
        y = model(torch.randn(4, 16))
    y.square().sum().backward()
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
    "no match": (
        lambda: te.precision(Model(), {"*.fc3": None}),
        ValueError,
        r"'\*.fc3' matches no product; near it: .*fc",
    ),
    "later": (lambda: te.precision(Model(), {"*": None, "lmhead": None}), ValueError, "'lmhead'.*'lm_head'"),
    "nothing": (lambda: te.precision(te.LayerNorm(16), {"*": None}), ValueError, "has none whose sizes"),
    "no recipe": (lambda: te.precision(Model(), {"*": "fp8"}), TypeError, "'fp8'"),
    "no pattern": (lambda: te.precision(Model(), {3: None}), TypeError, "a pattern and a recipe or None, got 3"),
    "no mapping": (lambda: te.precision(Model(), RECIPE), TypeError, r"got DelayedScaling as the mapping: {"),
    "no module": (lambda: te.precision([], {}), TypeError, "got list as the module"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    call, error, words = BAD[case]
    raises(error, words, call)


def test_an_error_changes_nothing() -> None:
    model = Model()
    raises(ValueError, "matches no product", te.precision, model, {"*": None, "typo": RECIPE})
    assert len(lengths(model)) == 5
