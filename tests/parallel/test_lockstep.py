"""Ranks that are about to run different calls of a model that they share: all raise, and say where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.capture import _Captured
from te_fuser.fuser.run import lockstep
from te_fuser.fuser.run.lockstep import Disagreement
from te_fuser.ops.group import Group
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import sequential, tensor

FEATURES = 8


def model(*more: torch.nn.Module) -> te_fuser.Sequential:
    return sequential(ops.LayerNorm(FEATURES), ops.AllGather(dist.group.WORLD), ops.Linear(FEATURES, 4), *more)


def raised(call: Callable[[], object], kind: type[Exception] = Disagreement) -> str:
    """What a call raises; then the ranks go on together."""
    with pytest.raises(kind) as caught:
        call()
    dist.barrier()
    return str(caught.value)


@on_ranks
def test_ranks_tell_each_other_once_for_each_shape() -> None:
    m, told = model(ops.GELU()), lockstep._tell
    with mock.patch.object(lockstep, "_tell", side_effect=told) as tell:
        for rows, count in ((4, 1), (4, 1), (6, 2), (4, 2), (6, 2)):
            for _ in range(2):
                m(tensor(rows, FEATURES)).sum().backward()
            assert tell.call_count == count
        with torch.no_grad():
            m(tensor(4, FEATURES, grad=False))
        assert tell.call_count == 3
        sequential(ops.Linear(FEATURES, 4))(tensor(4, FEATURES))
        assert tell.call_count == 3, "a list that no ranks share"


@on_ranks
def test_shapes() -> None:
    m, rank = model(), dist.get_rank()
    text = raised(lambda: m(tensor(4 + 2 * rank, FEATURES)))
    want = r"the ranks of group '\S+' are about to .* different .*: rank 0 has x \[4, 8\] float64 .*; rank 1 has x \[6,"
    assert re.match(want, text) and text.endswith("tensors of one shape and dtype")
    assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@on_ranks
def test_ops() -> None:
    m = model(ops.GELU() if dist.get_rank() else ops.SiLU())
    text = raised(lambda: m(tensor(4, FEATURES)))
    assert "rank 0 has step" in text and "SiLU" in text and "GELU" in text and "in the same way on each" in text
    m = model(*[ops.Bias(4)] * dist.get_rank())
    assert "rank 1 has op 4 (Bias '3')" in raised(lambda: m(tensor(4, FEATURES)))


@on_ranks
def test_modes_and_parameters() -> None:
    rank, m = dist.get_rank(), model()
    x = tensor(4, FEATURES)
    with torch.set_grad_enabled(rank == 0):
        assert "without gradients" in raised(lambda: m(x))
    m[0].weight.requires_grad_(rank == 0)
    text = raised(lambda: m(x))
    assert "rank 0 has op 0 (LayerNorm '0') with weight [8] float64 with a gradient; rank 1 has op 0 (Layer" in text


@on_ranks
def test_seeds() -> None:
    m, rank = model(ops.Dropout(0.5)), dist.get_rank()
    torch.manual_seed(5 + rank)
    text = raised(lambda: m(tensor(4, FEATURES)))
    assert "rank 0 has random numbers from seed 5" in text and "rank 1 has random numbers from seed 6" in text
    torch.manual_seed(5)
    m.eval()(tensor(4, FEATURES))
    m.train()(tensor(4, FEATURES))


@on_ranks
def test_an_error_of_one_rank_is_told_to_all() -> None:
    rank, m = dist.get_rank(), model()
    x = tensor(4, FEATURES + rank)
    text = raised(lambda: m(x), ValueError if rank else Disagreement)
    if not rank:
        assert re.match(r"rank 1 of group '\S+' cannot run this call, so .*: ValueError: op 0 \(LayerNorm", text)
    assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@on_ranks
def test_one_rank_may_look() -> None:
    m, x = model(), tensor(4, FEATURES)
    if dist.get_rank() == 0:
        assert "AllGather" in str(m.explain(x)) and m.plan(x)
    assert m(x).shape == (4 * WORLD, 4)


@on_ranks
def test_all_ranks_may_measure() -> None:
    """Each times its own steps, in as many runs as the others."""
    m, x = model(), tensor(4, FEATURES)
    assert "AllGather" in str(m.explain(x, measure=True))
    assert m(x).shape == (4 * WORLD, 4)


@on_ranks
def test_a_rank_that_does_not_come() -> None:
    m = model()
    with mock.patch.object(lockstep, "PATIENCE", 0.2):
        if dist.get_rank() == 0:
            with pytest.raises(Disagreement, match=r"rank 1 of group '\S+' did not plan call \d+ of the group"):
                m(tensor(4, FEATURES))
    dist.barrier()


@on_ranks
def test_a_graph_knows_its_ranks() -> None:
    """Other ranks, and the same ones connected anew, are told from those of the capture."""
    m = model()
    captured = _Captured(m)
    captured.check()
    with (
        mock.patch.object(Group, "process_group", return_value=object()),
        pytest.raises(ValueError, match=r"the ranks of 1 \(group '\S+'\) were connected anew since capture"),
    ):
        captured.check()
    m[1].group = dist.new_group(range(WORLD))
    with pytest.raises(ValueError, match="an attribute of 1 \\(AllGather\\) was set since the capture"):
        captured.check()
