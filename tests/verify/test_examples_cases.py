"""Layouts of the tensors that verify tries."""

from __future__ import annotations

import pytest
import torch

from te_fuser.verify.examples import LAYOUTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_keep_the_numbers(name: str) -> None:
    t = torch.randn(3, 4, 5, 2)
    laid = LAYOUTS[name](t)
    assert laid.shape == t.shape
    if name not in ("same rows", "ones"):
        assert torch.equal(laid, t)
    if name != "contiguous":
        assert not laid.is_contiguous() or laid.data_ptr() % 16
