"""Random draws of ranks that share a value, bit for bit those of one process; random lists that they share."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

import te_fuser
from te_fuser import ops
from te_fuser.distributed.group import Group
from te_fuser.distributed.shard import Share
from te_fuser.formula.random import RandomStream, RankPlacement, Shared
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp
from te_fuser.fusions.dot_product_attention import _Attention
from te_fuser.fusions.match import FusionCall
from te_fuser.ops.attention.math import kept
from te_fuser.ops.base import walk
from tests.needs import needs_compiler
from tests.parallel.random_cuts import Case, cases, run
from tests.parallel.ranks import WORLD, Ranks, on_ranks
from tests.twins import sequential, tensor

SHAPE = (4, 6, 32)
# Cuts: the dimension of the rows, whether the features are, and into how many parts.
WAYS = {"first": (0, False, 1), "second": (1, False, 1), "features": (None, True, 1), "parts": (None, True, 2)}


def group() -> Group:
    return ops.AllReduce(dist.group.WORLD).group


def share_of(way: str) -> Share:
    dim, columns, parts = WAYS[way]
    return Share(() if dim is None else (group(),), dim or 0, (group(),) if columns and dim is None else (), parts)


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """In here what draws does so for this share of a value."""

    def shared(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
        return [replace(item, share=share) if item.lowered.op.draws() else item for item in listed]

    with mock.patch.object(pipeline, "LIST_PASSES", {**pipeline.LIST_PASSES, "shared": shared}):
        yield


def own(t: torch.Tensor, share: Share) -> torch.Tensor:
    """Part of a value that this rank has."""
    rank = dist.get_rank()
    if share.rows:
        t = t.chunk(WORLD, share.dim)[rank]
    if share.columns:
        t = torch.cat([part.chunk(WORLD, -1)[rank] for part in t.chunk(share.parts, -1)], -1)
    return t.detach().contiguous().requires_grad_(t.requires_grad)


def results(run: object, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx, whose draws begin anew."""
    torch.manual_seed(3)
    y = run(x)  # type: ignore[operator]
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@pytest.mark.parametrize(
    ("way", "dtype"), [(way, (torch.float32, torch.float64)[k % 2]) for k, way in enumerate(WAYS)], ids=str
)
@on_ranks
def test_dropout(way: str, dtype: torch.dtype) -> None:
    """Of several ops in one kernel, in both directions, of kernels, the reference and what is verified step by step."""
    share = share_of(way)
    model = sequential(ops.SiLU(), ops.Dropout(0.3), ops.GELU(), ops.DropPath(0.2, 1), ops.Dropout(0.2)).to(dtype)
    x, dy = tensor(*SHAPE).to(dtype), tensor(*SHAPE, grad=False, seed=5).to(dtype)
    x = x.detach().requires_grad_()
    want = [own(t, share) for t in results(model, x, dy)]
    assert 0 < (want[0] == 0).double().mean() < 1
    with sharing(share):
        for m in (copy.deepcopy(model), te_fuser.Sequential(*copy.deepcopy(model), verify=True)):
            for run in (m, m.reference):
                for got, wanted in zip(results(run, own(x, share), own(dy, share)), want, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
                    assert torch.equal(got == 0, wanted == 0)


@on_ranks
def test_lengths() -> None:
    """A plan holds for every length: where rows lie follows from each call's sizes."""
    share = share_of("second")
    model = sequential(ops.Dropout(0.5))
    xs = [torch.ones(3, length, 16, requires_grad=True) for length in (4, 6, 4, 10)]
    wanted = [own(results(model, x, x.detach())[0], share) for x in xs]
    with sharing(share):
        mine = copy.deepcopy(model)
        for x, want in zip(xs, wanted, strict=True):
            assert torch.equal(results(mine, own(x, share), own(x.detach(), share))[0], want)
        assert len(mine.plans_kept()) < 3


def test_heads() -> None:
    """Of attention's probabilities ranks share the heads; of each sample they have a block."""
    two, like = Group("two", 2), torch.empty(0)
    whole = kept(RandomStream(1, 2, 3), (2, 6, 5, 7), like, 0.3)
    for rank in range(2):
        with mock.patch.object(Share, "ranks", (0, rank)):
            placed = Share(columns=(two,)).placed((5, 2, 30))
        mine = kept(RandomStream(1, 2, 3, placed=placed), (2, 3, 5, 7), like, 0.3)
        assert torch.equal(mine, whole[:, 3 * rank : 3 * rank + 3])


class Drawing:
    """A library's attention that draws from PyTorch's generator."""

    by_structure, draws, emits = False, False, ()

    def forward(self, settings: object, tensors: object, blank: object, random: object) -> tuple[torch.Tensor, dict]:
        return torch.rand(8), {}


def drawn(rank: int, state: object = None, shared: bool = True) -> torch.Tensor:
    """Draws of a rank's attention, in a call that has drawn equally on all."""
    op = ops.DotProductAttention(2, 8, dropout=0.5, mask="none", layout="sequence_first")
    op.random_state = state  # type: ignore[assignment]
    attention = _Attention(Drawing(), op.settings(), (), False, Group())  # type: ignore[arg-type]
    placed = RankPlacement(Shared(columns=2), column_rank=rank)
    streams = {0: lambda: RandomStream(1, 2, 3, placed=placed)}
    torch.manual_seed(5)
    call = FusionCall([op], {}, frozenset(), streams, frozenset([0] if shared else []))
    found = attention.forward(call, torch.empty(0))
    after = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(4)) == (shared or state is not None), "the generator outside goes on"
    return found


def test_a_library_draws_from_a_state_for_each_rank() -> None:
    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
    plain = drawn(1, shared=False)
    torch.manual_seed(5)
    assert torch.equal(plain, torch.rand(8))


def test_a_library_draws_from_the_tracker_that_a_preset_was_given() -> None:
    tracker = te_fuser.CudaRNGStatesTracker()
    tracker.add("heads", 11)
    names = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": "heads"}
    layer = te_fuser.TransformerLayer(16, 32, 2, attention_dropout=0.5, device="cpu", **names)
    (op,) = [op for op in walk(layer) if isinstance(op, ops.DotProductAttention)]
    first, second = drawn(0, op.random_state), drawn(0, op.random_state)
    assert not torch.equal(first, second), "the tracker's state goes on"


# ---- random lists and cuts; more of them by python -m tests.parallel.random_cuts


SETTINGS: dict[str, Any] = {
    "database": None,
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@settings(max_examples=30, **SETTINGS)
@given(case=cases())
def test_random_lists_are_as_the_whole_ones(ranks: Ranks, case: Case) -> None:
    run(ranks, case)


@needs_compiler
@settings(max_examples=5, **SETTINGS)
@given(case=cases(copies=True))
def test_random_lists_by_copies_are_as_the_whole_ones(ranks: Ranks, case: Case) -> None:
    run(ranks, case)
