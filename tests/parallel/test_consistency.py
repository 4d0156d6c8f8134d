"""Ranks that are about to run different calls of a model that they share: all raise, and say where they differ."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

import te_fuser
from te_fuser import ops
from te_fuser.capture import _Captured
from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.group import Group
from te_fuser.fuser.pipeline import Fuser
from tests.parallel.ranks import WORLD, Ranks, RanksFailedError, mesh_of, on_ranks
from tests.twins import sequential, tensor

FEATURES = 8


def model(*more: torch.nn.Module) -> te_fuser.Sequential:
    return sequential(ops.LayerNorm(FEATURES), ops.AllGather(dist.group.WORLD), ops.Linear(FEATURES, 4), *more)


def raised_alone(call: Callable[[], object], kind: type[Exception] = RankMismatchError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def raised(call: Callable[[], object], kind: type[Exception] = RankMismatchError) -> str:
    """Words of the error that a call raises; then the ranks go on together."""
    text = raised_alone(call, kind)
    dist.barrier()
    return text


@on_ranks
def test_calls_are_compared_once_for_each_shape() -> None:
    m = model(ops.GELU())
    with mock.patch.object(consistency, "_post", side_effect=consistency._post) as post:
        for rows, count in ((4, 1), (4, 1), (6, 2), (4, 2), (6, 2)):
            for _ in range(2):
                m(tensor(rows, FEATURES)).sum().backward()
            assert post.call_count == count
        with torch.no_grad():
            m(tensor(4, FEATURES, grad=False))
        assert post.call_count == 3
        sequential(ops.Linear(FEATURES, 4))(tensor(4, FEATURES))
        assert post.call_count == 3, "a list that no ranks share"


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
def test_an_error_of_one_rank_is_told_to_all() -> None:
    rank, m = dist.get_rank(), model()
    x = tensor(4, FEATURES + rank)
    text = raised(lambda: m(x), ValueError if rank else RankMismatchError)
    if not rank:
        assert re.match(r"rank 1 of group '\S+' cannot run this call, so .*: ValueError: op 0 \(LayerNorm", text)
    assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@on_ranks
def test_one_rank_may_look() -> None:
    m, x = model(), tensor(4, FEATURES)
    if dist.get_rank() == 0:
        assert "AllGather" in str(m.explain(x, details=True)) and m.plan(x)
    assert m(x).shape == (4 * WORLD, 4)


TIMEOUT = 1.5  # seconds of a group whose ranks wait in vain


@contextlib.contextmanager
def group_of_its_own(seconds: float = TIMEOUT) -> Iterator[dist.ProcessGroup]:
    """A group whose ranks wait for a short time."""
    group = dist.new_group(range(WORLD), timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def with_group(group: dist.ProcessGroup) -> te_fuser.Sequential:
    return sequential(ops.LayerNorm(FEATURES), ops.AllGather(group), ops.Linear(FEATURES, 4)).float()


def x_of(rows: int) -> torch.Tensor:
    return tensor(rows, FEATURES).float()


@on_ranks
def test_a_rank_that_does_not_come() -> None:
    """A late rank is named when the group's timeout is over, and hears of that when it comes; then they go on."""
    with group_of_its_own() as group:
        m = with_group(group)
        if dist.get_rank() == 0:
            words = (
                r"rank 1 of group '\[0, 1\]' did not come within the group's timeout of 1.5 s, while rank 0 .* is ready"
            )
            with pytest.raises(
                RankMismatchError, match=words + r" with a call of op 1 \(AllGather '1'\) with x \[4, 8\]"
            ):
                m(x_of(4))
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(
                RankMismatchError, match=r"rank 0 .* cannot run .*: rank 0 of 2 \(\[0, 1\]\) gave up, as"
            ):
                m(x_of(4))
        dist.barrier()
        assert m(x_of(4)).shape == (4 * WORLD, 4)


@on_ranks
def test_a_rank_that_plans_for_long_is_waited_for() -> None:
    m, found = model(), Fuser._executable

    def late(*call: Any) -> Any:
        time.sleep(2.5 * dist.get_rank())  # longer than a look takes
        return found(*call)

    with mock.patch.object(Fuser, "_executable", late):
        assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@pytest.mark.parametrize("new", ["gradients", "region", "tune", "error", "nothing"])
@on_ranks
def test_a_known_call_beside_a_new_one(new: str) -> None:
    """Both raise when the group's timeout is over: the one names its step, the other one who did not come to what."""
    rank = dist.get_rank()
    with group_of_its_own() as group:
        m = with_group(group)
        y = m(x_of(4))

        def other() -> None:
            if new == "region":
                with te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(margin=7), amax_reduction_group=group):
                    m(x_of(4))
            elif new == "tune":
                m.tune(x_of(4))
            elif new == "error":
                m(tensor(4, FEATURES + 1).float())
            elif new != "nothing":
                with torch.no_grad():
                    m(x_of(6))

        if rank == 0:
            text = raised_alone(lambda: m(x_of(4)))
            assert text.startswith("step 'all_gather.wait' of op 1 (AllGather '1'): rank 0 of 2 ([0, 1]) waited in")
            text = raised_alone(lambda: y.sum().backward())  # the group is broken
            assert text.startswith("step 'all_gather") and "op 1 (AllGather '1'): rank 0 of 2 ([0, 1]) waited" in text
        elif new == "error":
            with pytest.raises(ValueError, match="op 0"):
                other()
        elif new == "nothing":
            other()
        else:
            ready = {"region": "the entry of a region", "tune": "x [4, 8]"}.get(new, "x [6, 8]")
            text = raised_alone(other)
            assert text.startswith("rank 0 of group '[0, 1]' did not come within the group's timeout") and ready in text


@on_ranks
def test_an_interrupt_while_planning_is_told_to_nobody() -> None:
    """An interrupted rank may call again."""
    m, x = model(), tensor(6, FEATURES)
    if dist.get_rank():
        with mock.patch.object(Fuser, "_executable", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            m(x)
    assert m(x).shape == (6 * WORLD, 4)


@on_ranks
def one_is_killed(new: bool) -> None:
    """Not a test: the body of the next one."""
    m = with_group(dist.new_group(range(WORLD), timeout=timedelta(seconds=TIMEOUT)))
    m(x_of(4))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text = raised_alone(lambda: m(x_of(6 if new else 4)))
    assert "op 1 (AllGather" in text and ("rank 1 of group '[0, 1]' did not come" if new else "waited in") in text
    print("heard of it")


@pytest.mark.parametrize("new", [False, True])
def test_a_rank_that_is_killed(new: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ranks = Ranks(tmp_path, request.config.getoption("--cpu"), deadline=60)
    with pytest.raises(RanksFailedError) as error:
        ranks.run(vars(one_is_killed)["body"], {"new": new})
    ranks.stop()
    assert "rank 1 ended by SIGKILL" in str(error.value) and "heard of it" in str(error.value)


@on_ranks
def test_a_seed_of_another_number() -> None:
    """A generator that was given another seed is compared anew, and one that was not costs nothing."""
    m, rank = model(ops.Dropout(0.5)), dist.get_rank()
    torch.manual_seed(5)
    with mock.patch.object(consistency, "_post", side_effect=consistency._post) as post:
        for seed, count in ((5, 1), (5, 1), (6, 2), (6, 2)):
            torch.manual_seed(seed)
            m(tensor(4, FEATURES)).sum().backward()
            assert post.call_count == count
        m.eval()
        torch.manual_seed(8)
        m(tensor(4, FEATURES)).sum().backward()
        torch.manual_seed(9)
        m(tensor(4, FEATURES)).sum().backward()
        assert post.call_count == 3, "nothing is drawn"
    m.train()
    torch.manual_seed(7 + rank)
    text = raised(lambda: m(tensor(4, FEATURES)))
    assert "rank 0 has random numbers from seed 7" in text and "rank 1 has random numbers from seed 8" in text
    torch.manual_seed(5)
    m(tensor(4, FEATURES))


@on_ranks
def test_sums_of_gradients() -> None:
    m, rank = model(), dist.get_rank()
    m[1], up = ops.Identity(), m[2]
    up.group, up.parallel_mode, up.sequence_parallel = dist.group.WORLD, "column", True
    up.weight, up.bias = (torch.nn.Parameter(p.chunk(WORLD)[rank].detach().clone()) for p in (up.weight, up.bias))
    if rank:
        assert te_fuser.parallel.leave_sums_to_engine(m) == ["0.weight", "0.bias"]
    text = raised(lambda: m(tensor(4, FEATURES)))
    assert "rank 0 has the gradient of weight of op 0 (LayerNorm '0'), of which ranks have terms, added up by" in text
    assert "or on none" in text


@on_ranks
def test_regions() -> None:
    """A region of one rank meets the other one's call, and another recipe its own."""
    rank = dist.get_rank()
    for make in (model, lambda: sequential(ops.Linear(FEATURES, 4), ops.AllReduce(dist.group.WORLD))):
        m = make().float()
        x = tensor(4, FEATURES).float()

        def one_alone(m: te_fuser.Sequential = m, x: torch.Tensor = x) -> None:
            with te_fuser.autocast(enabled=rank == 1):
                m(x)

        text = raised(one_alone)
        want = (
            r"the ranks of group 'world' are .*: rank 0 has x \[4, 8\] .*; rank 1 has the entry of a region of FP8 by D"
        )
        assert re.match(want, text) and "on all ranks" in text
    with te_fuser.autocast():
        m(x).sum().backward()

    def two_recipes() -> None:
        with te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(margin=1 + rank)):
            m(x)

    text = raised(two_recipes)
    assert "rank 0 has the entry of a region of FP8 by DelayedScaling(" in text and "margin=2" in text
    with te_fuser.autocast():
        m(x).sum().backward()


@on_ranks
def test_regions_and_a_group_of_its_own() -> None:
    """Amaxes are agreed on by all, and the list is shared by a group that is not all: the call and the entry meet."""
    rank, group = dist.get_rank(), dist.new_group(range(WORLD))
    m, x = sequential(ops.Linear(FEATURES, 4), ops.AllReduce(group)).float(), tensor(4, FEATURES).float()

    def one_alone() -> None:
        with te_fuser.autocast(enabled=rank == 0, recipe=te_fuser.recipe.DelayedScaling(margin=5)):
            m(x)

    text = raised(one_alone)
    assert "the ranks of group '[0, 1]' are" in text and "rank 0 has the entry of a region" in text
    dist.destroy_process_group(group)


@on_ranks
def test_a_region_by_a_function() -> None:
    """Addresses of a function differ among ranks, and are not compared."""
    held = [object() for _ in range(1000 * dist.get_rank())]

    def newest(history: torch.Tensor) -> torch.Tensor:
        return history[0]

    m, x = model().float(), tensor(4, FEATURES).float()
    with te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(amax_compute_algo=newest)):
        m(x).sum().backward()
    assert held is not None


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


@on_ranks
def test_a_graph_knows_the_memory_of_what_ranks_cut() -> None:
    """Each rank's part of a DTensor."""
    m = te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8))
    te_fuser.parallelize(m, mesh_of()["tp"], sequence_parallel=True)
    captured = _Captured(m)
    captured.check()
    with torch.no_grad():
        m[1].weight.mul_(2.0)
    captured.check()
    m[1].weight._local_tensor = m[1].weight._local_tensor.clone()
    with pytest.raises(ValueError, match=r"parameter 1.weight has other memory than at capture"):
        captured.check()


def test_counts_are_those_of_the_group_not_of_its_name() -> None:
    """Of ranks that are connected anew one may have compared more before: all begin from zero."""
    found = []
    for comparisons in (3, 1):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        try:
            group = Group.of("a test", dist.group.WORLD)
            numbers = [consistency._post(group, {}) for _ in range(comparisons)]
            found.append((group.name, numbers))
        finally:
            dist.destroy_process_group()
    (one, before), (other, now) = found
    assert one == other and before == [1, 2, 3] and now == [1]
