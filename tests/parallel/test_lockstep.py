"""Ranks that are about to run different calls of a model that they share: all raise, and say where they differ."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser
from te_fuser import ops
from te_fuser.capture import _Captured
from te_fuser.config import config
from te_fuser.distributed import stuck, telling
from te_fuser.distributed.group import Group
from te_fuser.distributed.telling import Disagreement
from te_fuser.fuser.run.fuser import Fuser
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


def hears_that_the_other_one_gave_up() -> None:
    """Rank 1 comes later than rank 0 has patience for."""
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(Disagreement, match=r"rank 0 .* cannot run .*: rank 0 of 2 \(world\) gave up, as rank 1"):
            model()(tensor(4, FEATURES))
    dist.barrier()


@on_ranks
def test_ranks_tell_each_other_once_for_each_shape() -> None:
    m, told = model(ops.GELU()), telling._tell
    with mock.patch.object(telling, "_tell", side_effect=told) as tell:
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
    """It is named, and finds when it comes that the others gave up."""
    m, rank = model(), dist.get_rank()
    with mock.patch.object(config, "patience", 0.2):
        if rank == 0:
            with pytest.raises(Disagreement, match=r"rank 1 of group 'world' did not come within 0.2 s, .* x \[4, 8\]"):
                m(tensor(4, FEATURES))
    hears_that_the_other_one_gave_up()
    assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@on_ranks
def test_a_rank_that_has_begun_is_waited_for() -> None:
    m, found = model(), Fuser._found

    def late(*call: Any) -> Any:
        time.sleep(1.0 * dist.get_rank())
        return found(*call)

    with mock.patch.object(config, "patience", 0.2), mock.patch.object(Fuser, "_found", late):
        assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)


@on_ranks
def test_a_rank_that_runs_what_it_knows() -> None:
    """It asks nobody: the other one waits for it, and says so."""
    m, rank = model(), dist.get_rank()
    m(tensor(4, FEATURES))
    if rank == 0:
        with (
            mock.patch.object(config, "patience", 0.2),
            pytest.raises(Disagreement, match=r"rank 1 .* did not come .* what one of them has run before and another"),
        ):
            m(tensor(6, FEATURES))
    assert m(tensor(4, FEATURES)).shape == (4 * WORLD, 4)
    hears_that_the_other_one_gave_up()


TIMEOUT = 6.0  # seconds of a group whose ranks wait in vain


def group_of_its_own(seconds: float = TIMEOUT) -> Any:
    """A group whose collectives wait for a short time: gloo's cannot be ended earlier."""
    return dist.new_group(range(WORLD), timeout=timedelta(seconds=seconds))


@pytest.mark.parametrize("new", ["shape", "gradients", "region", "tune"])
@on_ranks
def test_a_known_call_beside_a_new_one(new: str) -> None:
    """Whoever waits in a collective tells the other one why it does not come, and raises itself."""
    rank, group = dist.get_rank(), group_of_its_own()
    m = sequential(ops.LayerNorm(FEATURES), ops.AllGather(group), ops.Linear(FEATURES, 4)).float()
    x = tensor(4, FEATURES).float()
    m(x)

    def other() -> None:
        if new == "region":
            with te_fuser.autocast():
                m(x)
        elif new == "tune":
            m.tune(x)
        else:
            with torch.set_grad_enabled(new != "gradients"):
                m(tensor(6, FEATURES).float())

    with mock.patch.object(config, "patience", 1.0):
        stuck.watch([])  # by the patience of now
        text = raised(other if rank else lambda: m(x))
    ready = {"region": "the entry of a region", "tune": "x [4, 8]"}.get(new, "x [6, 8]")
    if rank == 0:
        assert text.startswith("in a call with [4, 8]: rank 0 of 2 ([0, 1]) waits in a collective of what")
        assert "while rank 1 of group '[0, 1]'" in text and ready in text
        if new == "region":  # which rank 1 told all ranks
            with pytest.raises(Disagreement, match="rank 1 of group 'world' cannot run"):
                telling.of_all([Group.of("a test", dist.group.WORLD)], "a test", None)
    else:
        assert "rank 0 of group '[0, 1]' cannot run this call" in text
        assert "rank 0 of 2 ([0, 1]) waits in a collective" in text and ready in text
    with pytest.raises(Disagreement, match="Nothing runs in group"):
        m(x)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("features", [FEATURES, FEATURES + 1])
@on_ranks
def test_a_known_call_whose_collective_fails(features: int) -> None:
    """Where the backend's own error comes first, it is said in words as well; so is what was wrong elsewhere."""
    rank, group = dist.get_rank(), group_of_its_own(1.0)
    m = sequential(ops.LayerNorm(FEATURES), ops.AllGather(group), ops.Linear(FEATURES, 4))
    y = m(tensor(4, FEATURES))
    if rank:
        raised(lambda: m(tensor(6, features)), Disagreement if features == FEATURES else ValueError)
    else:
        text = raised(lambda: y.sum().backward())
        ready = r"is ready with x \[6, 8\]" if features == FEATURES else "cannot go on: ValueError: op 0"
        assert re.match(rf"in the backward pass of a call: .* while rank 1 of group '\[0, 1\]' {ready}", text)
    dist.destroy_process_group(group)


@on_ranks
def test_a_backend_that_can_end_what_waits_does() -> None:
    rank, group = dist.get_rank(), dist.new_group(range(WORLD))
    m = sequential(ops.LayerNorm(FEATURES), ops.AllGather(group), ops.Linear(FEATURES, 4))
    m(tensor(4, FEATURES))
    if rank:
        with mock.patch.object(config, "patience", 1.0), pytest.raises(Disagreement, match="waits in a collective"):
            m(tensor(6, FEATURES))
    else:
        ended = threading.Event()
        with (
            mock.patch.object(config, "patience", 1.0),
            mock.patch.object(telling, "entered", return_value=10**6),  # as if it were in one
            mock.patch.object(stuck, "_abort", side_effect=lambda group: ended.set()),
        ):
            stuck.watch([])
            assert ended.wait(TIMEOUT)
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks
def test_an_end_that_takes_long_holds_up_no_other() -> None:
    """NCCL's takes long where a graph has captured the group: a second one is heard of meanwhile."""
    rank, groups = dist.get_rank(), [dist.new_group(range(WORLD)) for _ in range(2)]
    models = [sequential(ops.LayerNorm(FEATURES), ops.AllGather(group), ops.Linear(FEATURES, 4)) for group in groups]
    for m in models:
        m(tensor(4, FEATURES))
    with mock.patch.object(config, "patience", 1.0):
        if rank:
            for m in models:
                with pytest.raises(Disagreement, match="waits in a collective"):
                    m(tensor(6, FEATURES))
        else:
            begun: list[Group] = []
            second = threading.Event()

            def end(group: Group) -> None:
                begun.append(group)
                second.set() if len(begun) == 2 else second.wait(TIMEOUT)

            with (
                mock.patch.object(telling, "entered", return_value=10**6),
                mock.patch.object(stuck, "_abort", side_effect=end),
            ):
                stuck.watch([])
                assert second.wait(TIMEOUT)
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


@on_ranks
def test_who_is_late_is_not_stuck() -> None:
    """It has started no collective that the other one has not."""
    rank, m = dist.get_rank(), model()
    m(tensor(4, FEATURES))
    with mock.patch.object(config, "patience", 2.0):
        stuck.watch([])
        time.sleep(1.7 * rank)
        assert m(tensor(6, FEATURES)).shape == (6 * WORLD, 4)


@on_ranks
def test_what_others_start_says_nothing() -> None:
    """Ranks may send one another different numbers of things."""
    m = model()
    (group,) = [op.group for op in m.modules() if isinstance(op, ops.AllGather)]
    m(tensor(4, FEATURES, grad=False))
    before = telling.entered(group)
    dist.barrier()
    dist.all_reduce(torch.zeros(1))
    assert telling.entered(group) == before
    m(tensor(4, FEATURES, grad=False))
    assert telling.entered(group) == before + 1


@on_ranks
def test_an_interrupt_takes_back_what_was_begun() -> None:
    rank, m = dist.get_rank(), model()
    (group,) = [op.group for op in m.modules() if isinstance(op, ops.AllGather)]
    m(tensor(4, FEATURES))
    store, number = group.process_group().get_group_store(), telling._next(group)
    if rank:
        begin = mock.patch.object(telling, "begin", side_effect=telling.begin)
        found = mock.patch.object(Fuser, "_found", side_effect=KeyboardInterrupt)
        with begin as begun, found, pytest.raises(KeyboardInterrupt):
            m(tensor(5, FEATURES))
        assert begun.called and not store.check([telling._key(number, rank, telling._BEGUN)])
    dist.barrier()
    assert m(tensor(6, FEATURES)).shape == (6 * WORLD, 4)


@on_ranks
def test_a_seed_of_another_number() -> None:
    """A generator that was given another seed is compared anew, and one that was not costs nothing."""
    m, rank = model(ops.Dropout(0.5)), dist.get_rank()
    torch.manual_seed(5)
    with mock.patch.object(telling, "_tell", side_effect=telling._tell) as tell:
        for seed, count in ((5, 1), (5, 1), (6, 2), (6, 2)):
            torch.manual_seed(seed)
            m(tensor(4, FEATURES)).sum().backward()
            assert tell.call_count == count
        m.eval()
        torch.manual_seed(8)
        m(tensor(4, FEATURES)).sum().backward()
        torch.manual_seed(9)
        m(tensor(4, FEATURES)).sum().backward()
        assert tell.call_count == 3, "nothing is drawn"
    m.train()
    torch.manual_seed(7 + rank)
    assert "random numbers from seed 7" in raised(lambda: m(tensor(4, FEATURES)))


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
    if rank == 1:  # which rank 0 has told all
        with pytest.raises(Disagreement, match=r"rank 0 of group 'world' cannot run .* '\[0, 1\]' are about to do"):
            telling.of_all([Group.of("a test", dist.group.WORLD)], "a test", None)
    dist.destroy_process_group(group)


@on_ranks
def test_a_region_by_a_function() -> None:
    """Where a function lies differs among ranks, which says nothing."""
    held = [object() for _ in range(1000 * dist.get_rank())]

    def newest(history: torch.Tensor) -> torch.Tensor:
        return history[0]

    m, x = model().float(), tensor(4, FEATURES).float()
    with te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(amax_compute_algo=newest)):
        m(x).sum().backward()
    assert held is not None


@on_ranks
def test_a_region_that_one_rank_enters_later() -> None:
    """The other one runs what it knows: amaxes are not waited for without words."""
    rank, m, x = dist.get_rank(), model().float(), tensor(4, FEATURES).float()
    m(x)
    if rank == 0:
        with (
            mock.patch.object(config, "patience", 0.2),
            pytest.raises(Disagreement, match=r"rank 1 .* did not come .* ready with the entry of a region of FP8"),
            te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(margin=3)),
        ):
            m(x)
    assert m(x).shape == (4 * WORLD, 4)
    hears_that_the_other_one_gave_up()


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
    """Each rank's part of a DTensor; and a replay counts once for all ops of a group."""
    m = te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8))
    te_fuser.parallelize(m, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"], sequence_parallel=True)
    captured = _Captured(m)
    with mock.patch.object(telling, "start") as started:
        captured.check()
    started.assert_called_once()
    with torch.no_grad():
        m[1].weight.mul_(2.0)
    captured.check()
    m[1].weight._local_tensor = m[1].weight._local_tensor.clone()
    with pytest.raises(ValueError, match=r"parameter 1.weight has other memory than at capture"):
        captured.check()
