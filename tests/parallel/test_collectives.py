"""Ops that ranks run together, against what one process computes of all that the ranks have, in float64."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu, silu
from torch.utils._python_dispatch import TorchDispatchMode

from te_fuser import ops
from te_fuser.ops.base import Spec
from te_fuser.ops.collectives import Collective
from te_fuser.verify import steps
from tests.parallel.models import own
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
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


class Called(TorchDispatchMode):
    """The names of the operators that are called in here."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.name()))
        return func(*args, **(kwargs or {}))


@on_ranks
def test_no_exchange_is_one_by_which_gloo_breaks_memory() -> None:
    """One whose name of a work has memory of its own, which two threads free (`ranks.py`): of gathers the plain one."""
    with Called() as called:
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
