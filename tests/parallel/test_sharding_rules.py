"""Ops of users with rules of their own, on two ranks against one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.parallel.cutting import ByReference, assert_as_whole, part
from tests.parallel.ranks import mesh_of, on_ranks
from tests.sharding.test_rules import ByRow, InBlocks, Plain
from tests.twins import randomize, tensor

F, SHAPE = 8, (4, 6, 8)


def layer(first: ops.FusableOperation, between: ops.FusableOperation | None = None) -> te_fuser.Sequential:
    """A feed-forward layer with ops of users."""
    middle = [] if between is None else [between]
    parts = [first, ops.Linear(F, 2 * F), ops.GELU(), *middle, ops.Linear(2 * F, F), ops.RMSNorm(F)]
    return randomize(te_fuser.Sequential(*parts, kernels="reference").double())


def assert_as_one_process(whole: te_fuser.Sequential, cut: te_fuser.Sequential, rows: int | None) -> None:
    """Output and all gradients, called, as the reference, and of a copy."""
    for model, twin in ((cut, whole), (copy.deepcopy(cut), whole), (ByReference(cut), ByReference(whole))):
        assert_as_whole(model, twin, {"x": tensor(*SHAPE, grad=False)}, {}, (rows, rows))


@on_ranks
def test_a_rule_by_rows() -> None:
    """The gradient of its weight is added up, by default."""
    whole = layer(ByRow(F))
    cut = te_fuser.parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel=True)
    assert_as_one_process(whole, cut, 0)


@on_ranks
def test_an_op_without_a_rule() -> None:
    """The op runs where values are whole, and is refused elsewhere before anything is sent."""
    whole = layer(Plain(F))
    assert_as_one_process(whole, te_fuser.parallelize(copy.deepcopy(whole), mesh_of()), None)
    cut = te_fuser.parallelize(copy.deepcopy(whole), mesh_of(), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"op 0 \(Plain '0'\): Plain does not say .*@te_fuser.parallel.sharding_rule"):
        cut(part(tensor(*SHAPE), 0))


@pytest.mark.parametrize("rows", [None, 0])
@on_ranks
def test_a_rule_by_features(rows: int | None) -> None:
    """Each rank has its block of the features, and of the weight."""
    whole = layer(ByRow(F), InBlocks(2 * F))
    cut: Any = te_fuser.parallelize(
        copy.deepcopy(whole),
        mesh_of(),
        sequence_parallel=rows is not None,
        plan={"1": te_fuser.parallel.Column(), "4": te_fuser.parallel.Row()},
    )
    cut[3].weight = torch.nn.Parameter(part(whole[3].weight.detach(), 0).clone())
    assert_as_one_process(whole, cut, rows)
