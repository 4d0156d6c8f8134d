"""Hooks in models that ranks share: what a hook cuts out of its list knows what ranks have there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.parallel import Column, Row, parallelize
from tests.parallel.ranks import mesh_of, on_ranks
from tests.parallel.test_parallelize import B, F, S, assert_as_whole
from tests.twins import sequential, tensor

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2}
KINDS: dict[str, Callable[..., Any]] = {
    "forward": nn.Module.register_forward_hook,
    "forward-pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward-pre": nn.Module.register_full_backward_pre_hook,
}


def model() -> te_fuser.Sequential:
    """All ops on heads, a list among them, in a residual: its sum reads what is named before the hooks."""
    turned = te_fuser.Sequential(ops.HeadNorm(4, **HEADS), ops.RotaryEmbedding(4, **HEADS))
    core = ops.DotProductAttention(head_dim=4, mask="causal", layout="sequence_first", dropout=0.1, **HEADS)
    return sequential(
        te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, 32), turned, core, ops.Linear(16, F), ops.Dropout(0.1))
    )


PLACES = {
    "HeadNorm": ["0.2.0"],
    "RotaryEmbedding": ["0.2.1"],
    "DotProductAttention": ["0.3"],
    "both products": ["0.1", "0.4"],
    "a list": ["0.2"],
    "the residual": ["0"],
    "a list and an op in it": ["0.2", "0.2.1"],
    "all": ["0", "0.0", "0.1", "0.2", "0.2.0", "0.2.1", "0.3", "0.4", "0.5"],
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks
def test_hooks_of_all_kinds(place: str) -> None:
    """Values and gradients of the whole model, those that ranks add up among them, and each hook runs."""
    at = [*PLACES].index(place)
    some = [*KINDS.items(), *KINDS.items()][at % 4 : at % 4 + 2]  # so each kind is in four places
    for number, (kind, register) in enumerate(some, at // 4):
        sequence_parallel = number % 2 == 1
        whole, ran = model(), list[str]()
        shared = parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel)
        for path in PLACES[place]:
            register(whole.get_submodule(path), lambda *_: None)
            register(shared.get_submodule(path), lambda *_, path=path, ran=ran: ran.append(path))
        assert_as_whole(shared, whole, dim=0 if sequence_parallel else None)
        assert {*ran} == {*PLACES[place]}, kind


@on_ranks
def test_hooks_that_come_and_go() -> None:
    """Hooks of all modules, and a list with options of its own; an op that is called alone takes all heads."""
    whole = model().eval()
    whole[0][2].memory = "lean"
    shared = parallelize(copy.deepcopy(whole), mesh_of())
    assert_as_whole(shared, whole)
    for register in (nn.modules.module.register_module_forward_hook, shared[0][3].register_forward_hook):
        hook = register(lambda *_: None)
        assert_as_whole(shared, whole)
        packed = tensor(S, B, 32)
        torch.testing.assert_close(shared[0][3](packed), whole[0][3](packed))
        hook.remove()
        assert_as_whole(shared, whole)


@on_ranks
def test_an_op_that_takes_whole_rows_is_refused() -> None:
    """Between hooks too it would see the features of its rank alone."""
    cut = sequential(ops.Linear(F, 16), ops.LayerNorm(16), ops.Linear(16, F))
    parallelize(cut, mesh_of(), plan={"0": Column(), "2": Row()})
    for op in cut[:2]:
        op.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"op 2 \(LayerNorm '1'\): LayerNorm goes over all features of a row"):
        cut(tensor(S, B, F))
