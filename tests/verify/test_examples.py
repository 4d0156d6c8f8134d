"""Lists of ops that a pattern stands for, made to be verified."""

from __future__ import annotations

import torch

from te_fuser import ops
from te_fuser.fusions import Details, OneOf, Optional, Repeat, fusion
from te_fuser.verify.examples import examples, expand


def test_patterns_are_expanded() -> None:
    pattern = (ops.MatMul, Optional(ops.Bias), OneOf(ops.GELU, ops.ReLU), Repeat(ops.Identity, 0))
    kinds = [[kind.__name__ for kind in found] for found in expand(pattern)]
    assert ["MatMul", "Bias", "GELU", "Identity"] in kinds
    assert ["MatMul", "ReLU"] in kinds or ["MatMul", "ReLU", "Identity"] in kinds
    assert len(kinds) <= 12


def test_examples_match_and_fit_together() -> None:
    pattern = [ops.Fork, ops.LayerNorm, ops.MatMul, ops.Add, ops.AdaptiveLayerNorm, ops.DropPath, ops.SwiGLU]
    entry = fusion(forward=pattern, name="long", details=Details(registered=False))(lambda m, x: x)
    found = list(examples(entry, 16, torch.Generator().manual_seed(0)))
    assert all(list(entry.stops(e.ops, 0)) == [len(pattern)] for e in found)
    changed = {e.label.rpartition(" with ")[2] for e in found if e.changed}
    assert {"bias=False", "zero_centered_gamma=True", "gate_first=False"} <= changed
