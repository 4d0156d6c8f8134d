"""te_fuser under the names of Transformer Engine's imports: scripts change `transformer_engine` to `te_fuser` alone."""

from __future__ import annotations

import importlib

import pytest

import te_fuser
from tests.parallel.ranks import in_a_fork

SCRIPT = """
import sys
import torch
import transformer_engine

transformer_engine.pytorch.Linear, transformer_engine.common.recipe.Format
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch import LayerNormLinear, TransformerLayer

layer = TransformerLayer(32, 64, 2, device="cpu")
x = torch.randn(16, 2, 32, requires_grad=True)
fp8_recipe = recipe.DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    y = layer(x, attention_mask=None)
y.sum().backward()
assert x.grad.isfinite().all() and recipe.DelayedScaling is DelayedScaling
assert isinstance(layer, transformer_engine.pytorch.TransformerLayer) and te.LayerNormLinear is LayerNormLinear
assert "transformer_engine.parallel" not in sys.modules
"""


def run(script: str) -> None:
    exec(script, {"__name__": "__main__"})


def test_a_script_changes_the_packages_name_alone() -> None:
    in_a_fork(run, SCRIPT.replace("transformer_engine", "te_fuser"))


def test_it_has_what_the_package_has_and_loads_nothing_twice() -> None:
    alias = importlib.import_module("te_fuser.pytorch")
    assert dir(alias) == sorted(te_fuser.__all__)
    assert all(getattr(alias, name) is getattr(te_fuser, name) for name in te_fuser.__all__)
    with pytest.raises(AttributeError, match="module 'te_fuser.pytorch' has no attribute 'GroupedLinear'"):
        alias.GroupedLinear()
    with pytest.raises(ModuleNotFoundError, match="not a package"):
        importlib.import_module("te_fuser.pytorch.config")
