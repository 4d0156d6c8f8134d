"""Ops that ranks run together, products that they share, inputs that are still sent, and the processes themselves."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, silu

import te_fuser
from te_fuser import ops
from te_fuser.ops.base import Spec
from te_fuser.ops.collectives import Collective
from te_fuser.verify import steps
from tests.parallel.cutting import part
from tests.parallel.models import own
from tests.parallel.ranks import WORLD, Ranks, RanksFailedError, mesh_of, on_ranks
from tests.refused import Computed
from tests.twins import sequential, tensor

SHAPE = (4, 6, 8)
Tensors = Sequence[torch.Tensor]


def tp() -> ops.Group:
    return ops.AllReduce(mesh_of()["tp"]).group


def cat(xs: Tensors, dim: int) -> list[torch.Tensor]:
    return [torch.cat(list(xs), dim)] * WORLD


def sums(xs: Tensors) -> list[torch.Tensor]:
    return [sum(xs[1:], xs[0])] * WORLD


def exchanged(xs: Tensors, cut: int, join: int) -> list[torch.Tensor]:
    return [torch.cat([x.chunk(WORLD, cut)[rank] for x in xs], join) for rank in range(WORLD)]


# Arguments, and what each rank gets of what all of them have.
OPS: dict[str, tuple[Callable[..., Collective], tuple[int, ...], Callable[[Tensors], list[torch.Tensor]]]] = {
    **{f"all_gather {d}": (ops.AllGather, (d,), lambda xs, d=d: cat(xs, d)) for d in (0, 1, -1)},
    **{
        f"reduce_scatter {d}": (ops.ReduceScatter, (d,), lambda xs, d=d: list(sums(xs)[0].chunk(WORLD, d)))
        for d in (0, 1, -1)
    },
    **{
        f"all_to_all {c}, {j}": (ops.AllToAll, (c, j), lambda xs, c=c, j=j: exchanged(xs, c, j))
        for c, j in [(0, 1), (1, 0), (-1, 0), (1, -1), (0, 0)]
    },
    "all_reduce": (ops.AllReduce, (), sums),
    "all_reduce_gradient": (ops.AllReduceGradient, (), lambda xs: [xs[0]] * WORLD),
}


@pytest.mark.parametrize("name", OPS)
@on_ranks
def test_values_and_gradients(name: str) -> None:
    """Of the sum of all ranks' losses, or of one where all have the same."""
    kind, arguments, meaning = OPS[name]
    rank, same = dist.get_rank(), kind is ops.AllReduceGradient
    xs = [tensor(*SHAPE, seed=0 if same else r) for r in range(WORLD)]
    wanted = [silu(y) for y in meaning([gelu(x, approximate="tanh") for x in xs])]
    dys = [tensor(*y.shape, grad=False, seed=9 if kind is ops.AllReduce else 9 + r) for r, y in enumerate(wanted)]
    losses = [(y * dy).sum() for y, dy in zip(wanted, dys, strict=True)]
    sum(losses[: 1 if kind is ops.AllReduce else WORLD]).backward()
    want = xs[0 if same else rank].grad

    op = kind(tp(), *arguments)
    model = sequential(ops.GELU(), op, ops.SiLU(), verify=True)
    for run in (model, model.reference, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = tensor(*SHAPE, seed=0 if same else rank)
        y = run(x)
        torch.testing.assert_close(y, wanted[rank].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(y, x, dys[rank])[0], want, rtol=1e-12, atol=1e-12)
    plain = tensor(*SHAPE, grad=False, seed=0 if same else rank)
    alone = meaning([x.detach() for x in xs])[rank]
    torch.testing.assert_close(op(plain), alone)
    turned = plain.transpose(0, 2).contiguous().transpose(0, 2)
    with torch.inference_mode():
        torch.testing.assert_close(op(turned), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks
def test_dtypes(dtype: torch.dtype) -> None:
    """Whole numbers, which each dtype adds up as they are; one tensor without elements."""
    rank, group = dist.get_rank(), tp()
    for shape in (SHAPE, (0, 6, 8)):
        xs = [tensor(*shape, grad=False, seed=r).mul(4).round().to(dtype) for r in range(WORLD)]
        for kind, arguments, meaning in OPS.values():
            if kind is not ops.AllReduceGradient:
                made = kind(group, *arguments)(xs[rank])
                assert torch.equal(made, meaning(xs)[rank]) and made.dtype == dtype


@on_ranks
def test_wrong_sizes_raise_before_anything_is_sent() -> None:
    group, rank = tp(), dist.get_rank()
    where = rf"on rank {rank} of {WORLD} \(tp\): "
    with pytest.raises(ValueError, match=where + r"dimension 0 of an input of shape \[3, 8\] cannot be cut into 2"):
        sequential(ops.GELU(), ops.ReduceScatter(group))(tensor(3, 8))
    with pytest.raises(ValueError, match=where + r".*no dimension 2 to join along"):
        ops.AllGather(group, 2)(tensor(4, 8))
    with pytest.raises(
        ValueError, match=where + r"dimension -1 of an input of shape \[4, 7\].*pad it to a multiple of 2"
    ):
        ops.AllToAll(group, -1, 0).reference, ops.AllToAll(group, -1, 0)(tensor(4, 7))
    dist.barrier()
    assert torch.equal(ops.AllReduce(group)(torch.ones(2)), torch.full((2,), float(WORLD)))


@pytest.mark.parametrize("name", OPS)
@on_ranks
def test_what_is_in_flight_is_held(name: str) -> None:
    """One rank comes late; meanwhile nobody else holds what the other has sent, and memory is taken and filled."""
    kind, arguments, expected = OPS[name]
    op, rank = kind(tp(), *arguments), dist.get_rank()
    if op.forth is None:
        return
    xs = [tensor(64, 32, 32, grad=False, seed=r) for r in range(WORLD)]
    mine = xs[rank].clone()
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)
    started = op.forth.start(mine, op.group)
    del mine
    others = [torch.full((64, 32, 32), torch.nan, dtype=torch.float64) for _ in range(16)]
    found = op.forth.wait(started, op.group)
    torch.testing.assert_close(found, expected(xs)[rank], rtol=1e-13, atol=1e-13)
    assert all(bool(t.isnan().all()) for t in others)


@on_ranks
def test_no_exchange_is_one_by_which_gloo_breaks_memory() -> None:
    """One whose name of a work has memory of its own, which two threads free (`ranks.py`): of gathers the plain one."""
    with Computed() as called:
        for kind, arguments, _ in OPS.values():
            op = kind(tp(), *arguments)
            for exchange in filter(None, (op.forth, op.back)):
                exchange.run(tensor(*SHAPE, grad=False), op.group)
    exchanges = {name.removeprefix("c10d::") for name in called.names if "c10d" in name}
    assert exchanges == {"_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_"}


@pytest.mark.parametrize("name", OPS)
@on_ranks
def test_bytes_that_are_sent(name: str) -> None:
    """Bytes that a rank sends: a sum that all get sends its terms, and then the sum's parts."""
    kind, arguments, expected = OPS[name]
    op, x = kind(tp(), *arguments), tensor(*SHAPE, grad=False)
    spec = Spec(x.shape, x.dtype, x.device)
    forth = {"all_gather": 1.0, "reduce_scatter": 0.5, "all_to_all": 0.5, "all_reduce": 1.0, "all_reduce_gradient": 0.0}
    back = {"all_gather": 1.0, "reduce_scatter": 0.5, "all_to_all": 0.5, "all_reduce": 0.0, "all_reduce_gradient": 1.0}
    key = name.partition(" ")[0]
    assert op.sent_bytes(spec, back=False) == forth[key] * x.nbytes
    assert op.sent_bytes(spec, back=True) == back[key] * x.nbytes


@on_ranks
def test_groups() -> None:
    """Ways to give a group, what a copy knows, and calls that follow another group."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    by_mesh, by_group = ops.AllReduce(mesh["tp"]).group, ops.AllReduce(mesh["tp"].get_group()).group
    assert (by_mesh.name, by_mesh.size, by_mesh.rank, by_mesh.title) == (by_group.name, WORLD, rank, "tp")
    assert copy.deepcopy(by_mesh) == pickle.loads(pickle.dumps(by_mesh)) == by_mesh
    with pytest.raises(
        ValueError, match=r"AllReduce takes one dimension of a mesh, got a mesh of 2: give mesh\['tp'\]"
    ):
        ops.AllReduce(mesh)
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="AllReduce: this process is not in the group"):
            ops.AllReduce(alone)
    model = sequential(ops.GELU(), ops.AllReduce(mesh["dp"]))
    x = tensor(4, 8, grad=False)
    once = model(x)
    revision = model[1].revision
    model[1].group = mesh["tp"]
    assert model[1].revision > revision
    torch.testing.assert_close(model(x), WORLD * once)
    model[1].group = dist.group.WORLD
    torch.testing.assert_close(model(x), WORLD * once)


@on_ranks
def test_verified_steps() -> None:
    """Steps that each rank runs by itself are verified; how often a reference runs depends on a rank's findings."""
    labels: list[str] = []

    def noted(label: str, *given: Any, **how: Any) -> Any:
        labels.append(label)
        return judge(label, *given, **how)

    group, judge = tp(), steps.judge
    parts = ops.LayerNorm(8), ops.AllGather(group), ops.MatMul(8, 6), ops.ReduceScatter(group), ops.Bias(6)
    model = sequential(*parts, dtype=torch.float32, verify=True)
    with mock.patch.object(steps, "judge", noted):
        model(own(tensor(*SHAPE, dtype=torch.float32))).sum().backward()
    assert len(labels) >= 6 and not [label for label in labels if "all_gather" in label or "reduce_scatter" in label]


@on_ranks
def test_plans_show_them() -> None:
    """Start and wait are steps; what is exchanged is said, with the sizes."""
    group = tp()
    model = sequential(ops.LayerNorm(8), ops.AllGather(group), ops.MatMul(8, 6), ops.ReduceScatter(group), ops.Bias(6))
    x = own(tensor(*SHAPE))
    shown = str(model.explain(x, details=True))
    for words in ("all_gather.start", "reduce_scatter.wait", "reduce_scatter.input_gradient.start"):
        assert words in shown, shown
    assert "[4, 3, 8] of each of 2 ranks (tp), joined along dimension 0" in shown
    assert "[8, 3, 6] of each of 2 ranks (tp), cut along dimension 0, added up" in shown
    alone = sequential(ops.LayerNorm(8), ops.AllGather(ops.Group()), ops.MatMul(8, 6))
    assert "ranks" not in str(alone.explain(x, details=True))


# ---- products that two ranks share


@on_ranks
def test_attributes_that_are_set_are_for_the_next_call() -> None:
    linear = ops.Linear(8, 6, dtype=torch.float64)
    model, x = sequential(linear), tensor(*SHAPE)
    assert model(x).shape == (4, 6, 6)
    linear.group = mesh_of()["tp"]
    linear.parallel_mode = "column"
    assert "ranks=2 (tp)" in repr(linear) and "parallel_mode='column'" in repr(linear)
    with pytest.raises(ValueError, match=r"MatMul.*weight has shape \[6, 8\], the op was made for \[3, 8\]"):
        model(x)
    linear.weight = torch.nn.Parameter(part(linear.weight.detach(), 0))
    linear.bias = torch.nn.Parameter(part(linear.bias.detach(), 0))
    assert model(x).shape == (4, 6, 3)
    linear.sequence_parallel = True
    assert model(part(x, 0)).shape == (4, 6, 3)
    linear.parallel_mode = "row"
    with pytest.raises(ValueError, match=r"weight has shape \[3, 8\], the op was made for \[6, 4\]"):
        model(x)


@on_ranks
def test_sizes_that_ranks_cannot_cut() -> None:
    linear = ops.Linear(8, 5, dtype=torch.float64)
    linear.group, linear.parallel_mode = ops.Group.of("Linear", dist.group.WORLD), "column"
    model = sequential(ops.GELU(), linear)
    with pytest.raises(ValueError, match=r"op 1 \(MatMul '1.matmul'\): MatMul: out_features=5 cannot be cut into 2"):
        model(tensor(*SHAPE))


# ---- inputs that a collective of PyTorch still sends


F = 8


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, under way; its gradient is that of the sum of all ranks' losses."""
    y = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    assert isinstance(y, AsyncCollectiveTensor)
    return y


@pytest.mark.parametrize("plain_first", [False, True])
@on_ranks
def test_lists_wait_for_their_input(plain_first: bool) -> None:
    model = sequential(ops.LayerNorm(F), ops.Linear(F, F), ops.GELU())
    whole = tensor(2 * WORLD, F)
    if plain_first:  # whose plan is there then
        model(whole)
    x = whole.detach().chunk(WORLD)[dist.get_rank()].clone().requires_grad_()
    y, want = model(summed(x)), model(whole)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    dy = tensor(*y.shape, grad=False, seed=1)
    y.backward(dy)
    want.backward(WORLD * dy)
    assert whole.grad is not None
    torch.testing.assert_close(x.grad, whole.grad.chunk(WORLD)[dist.get_rank()])


@on_ranks
def test_named_inputs_and_single_ops_wait_too() -> None:
    x, own = tensor(2 * WORLD, F), tensor(2, F, grad=False, seed=dist.get_rank())
    skip = torch.cat([tensor(2, F, grad=False, seed=rank) for rank in range(WORLD)])
    listed = te_fuser.Sequential(ops.GELU(), ops.Add("skip"))
    torch.testing.assert_close(listed(x, skip=summed(own)), listed(x, skip=skip), rtol=0, atol=0)
    torch.testing.assert_close(ops.GELU()(summed(own)), ops.GELU()(skip), rtol=0, atol=0)


# ---- the processes that tests run in


@pytest.mark.parametrize("number", [1, 2])
@on_ranks
def test_ranks_know_each_other(number: int) -> None:
    total = torch.tensor([float(number * dist.get_rank())])
    dist.all_reduce(total)
    assert total.item() == number and torch.get_num_threads() == 1


@on_ranks
def one_fails() -> None:
    print("before", os.getpid(), flush=True)
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


@on_ranks
def both_end() -> None:
    if dist.get_rank() == 0:
        print("the end", file=sys.stderr)
        os._exit(3)
    os.kill(os.getpid(), signal.SIGTERM)


def gloo_threads() -> int:
    """Number of threads that run the works of this process's groups."""
    return sum(path.read_text().strip() == "pt_gloo_runloop" for path in Path("/proc/self/task").glob("*/comm"))


@on_ranks
def test_a_group_of_gloo_has_one_thread() -> None:
    dist.barrier()  # by which its threads have begun
    before = gloo_threads()
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier(group)
    assert before >= 1 and gloo_threads() == before + 1
    dist.destroy_process_group(group)


def body_of(test: object) -> object:
    return vars(test)["body"]


def test_a_failure_shows_both_logs_and_leaves_no_process(ranks: Ranks) -> None:
    """One raises while the other waits for it; the next body gets new processes, and so it goes on."""
    with pytest.raises(RanksFailedError) as failed:
        ranks.run(body_of(one_fails), {})
    text = str(failed.value)
    first, second = text.split("---- rank 1 raised")
    assert text.startswith("one_fails failed") and "rank 0 did not answer in time" in first and "before" in first
    assert "ValueError: only here" in second and "before" in second
    for line in (line for line in text.splitlines() if line.startswith("before")):
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)
    ranks.run(body_of(test_ranks_know_each_other), {"number": 3})
    with pytest.raises(RanksFailedError, match=r"rank 0 ended with exit code 3, and wrote:\nthe end") as failed:
        ranks.run(body_of(both_end), {})
    assert "rank 1 ended by SIGTERM, and wrote:" in str(failed.value)
