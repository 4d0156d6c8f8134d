"""The products that there are."""

from __future__ import annotations

import copy
import gc

import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization.products import device_of, products, products_of


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


def test_variants_of_a_list_add_none() -> None:
    model, x = te.LayerNormMLP(16, 32, fuse_wgrad_accumulation=True), torch.randn(4, 16)
    gc.collect()
    count = len(products())
    for w in (model.fc1_weight, model.fc2_weight):
        w.main_grad = torch.zeros_like(w)
    model(x, is_first_microbatch=True).sum().backward()
    assert len(products()) == count and [*products_of(model)] == ["fc1", "fc2"]


def test_what_no_product_of_8_bits_takes_is_none() -> None:
    model = te.Sequential(ops.Linear(16, 10), ops.GELU(), ops.Linear(10, 16))
    assert products_of(model) == {}


def test_products_that_are_gone_are_none() -> None:
    gc.collect()
    count = len(products())
    model = te.LayerNormMLP(16, 32)
    assert len(products()) == count + 2
    del model
    gc.collect()
    assert len(products()) == count


def test_devices() -> None:
    model = te.Sequential(ops.Linear(16, 16), ops.Linear(16, 16, device="meta"))
    assert [device_of(w) for w in products_of(model).values()] == [torch.device("cpu"), None]
    bare = te.Linear(16, 16, skip_weight_param_allocation=True)
    found = [w for w in products() if w.owner is bare[0].owner]
    assert [device_of(w) for w in found] == [None]
