"""Products that exchange their rows while they run, on two ranks, against the same list in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser
from te_fuser import ops
from te_fuser.fuser.graph.refs import RECOMPUTED
from te_fuser.fuser.plan.plan import Plan
from te_fuser.kernels import symmetric
from tests.parallel.cutting import EXACT, assert_as_whole, part
from tests.parallel.ranks import WORLD, on_ranks
from tests.symmetric import called, standing_in, taken
from tests.twins import randomize, tensor

FEATURES, INNER = 8, 12
SHAPE = (6, 3, FEATURES)
OPTIONS: dict[str, Any] = {"dtype": torch.float64}
FORWARD = ["all_gather_matmul", "matmul_reduce_scatter"]
BACKWARD = [f"{name}_backward" for name in reversed(FORWARD) for _ in ("dx", "dW")]


def mlp(layers: int = 2, main_grad: bool = False, **options: Any) -> te_fuser.Sequential:
    """A bias behind either product, and a norm and a residual behind what is scattered."""

    def layer() -> te_fuser.Residual:
        sizes, given = ((FEATURES, INNER), (INNER, FEATURES)), {"accumulate_into_main_grad": main_grad, **OPTIONS}
        up, down = (ops.Linear(*each, **given) for each in sizes)
        return te_fuser.Residual(ops.LayerNorm(FEATURES, **OPTIONS), up, ops.GELU(), down)

    model: te_fuser.Sequential = randomize(te_fuser.Sequential(*(layer() for _ in range(layers)), **options))
    return model


def products(model: torch.nn.Module) -> Iterator[ops.Linear]:
    return (m for m in model.modules() if isinstance(m, ops.Linear))


def shared(whole: te_fuser.Sequential) -> te_fuser.Sequential:
    """The same as two ranks share it."""
    model = copy.deepcopy(whole)
    group = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"]
    for m in products(model):
        m.group, m.sequence_parallel = group, True
        m.parallel_mode = "column" if m.in_features == FEATURES else "row"
        m.weight = torch.nn.Parameter(part(m.weight.detach(), int(m.parallel_mode == "row")).clone())
        if m.parallel_mode == "column":
            assert m.bias is not None
            m.bias = torch.nn.Parameter(part(m.bias.detach(), 0).clone())
    return model


@contextmanager
def pipelined() -> Iterator[None]:
    with standing_in(), taken():
        yield


def exchanges(plan: Plan) -> tuple[list[str], list[str]]:
    """The steps of products and of exchanges, of either direction, but for what is gathered again."""
    forward, backward = ([s.name for s in steps if _is_one(s.name)] for steps in (plan.forward, plan.backward))
    return forward, backward


def _is_one(name: str) -> bool:
    return any(part in name for part in ("mat", "gather", "scatter")) and ".again" not in name


@pytest.mark.parametrize("memory", ["fast", 0])
@pytest.mark.parametrize("shape", [SHAPE, (4, FEATURES)])
@on_ranks
def test_layers(shape: tuple[int, ...], memory: str | int) -> None:
    """Gradients of weights wait for what is computed, or gathered, again; else what was gathered is there for them."""
    whole = mlp(memory=memory)
    model = shared(whole)
    with pipelined():
        plan = model.plan(tensor(shape[0] // WORLD, *shape[1:]))
        assert exchanges(plan) == (2 * FORWARD, 2 * BACKWARD)
        again = {s.name for s in plan.backward if any(r.kind is RECOMPUTED for r in (*s.reads(), *s.writes()))}
        assert again >= {*BACKWARD, "all_gather.again.wait"} if memory == 0 else not again
        assert_as_whole(model, whole, {"x": tensor(*shape)}, {}, ends=(0, 0))
    assert sorted(called) == ["fused_all_gather_matmul"] * 4 + ["fused_matmul_reduce_scatter"] * 4


@on_ranks
def test_main_grad() -> None:
    whole = mlp(main_grad=True)
    model = shared(whole)
    for m in (*products(whole), *products(model)):
        m.weight.main_grad = torch.full_like(m.weight, 0.5)
    with pipelined():
        assert exchanges(model.plan(tensor(3, 3, FEATURES)))[1] == 2 * [f"{name}_main_grad" for name in BACKWARD]
        assert_as_whole(model, whole, {"x": tensor(*SHAPE)}, {}, ends=(0, 0))


@on_ranks
def test_a_frozen_weight() -> None:
    """Its step for dx runs, that for dW does not."""
    whole = mlp(1)
    model = shared(whole)
    for m in (whole, model):
        for name, p in m.named_parameters():
            p.requires_grad_("1.weight" not in name)
    with pipelined():
        assert exchanges(model.plan(tensor(3, 3, FEATURES)))[1] == BACKWARD[:3]
        x, dy = tensor(*SHAPE), tensor(*SHAPE, grad=False, seed=9)
        mine = part(x.detach(), 0).requires_grad_()
        wanted = {n: p for n, p in whole.named_parameters() if p.requires_grad}
        got = torch.autograd.grad(model(mine), [mine, *(p for p in model.parameters() if p.requires_grad)], part(dy, 0))
        want = torch.autograd.grad(whole(x), [x, *wanted.values()], dy)
        torch.testing.assert_close(got[0], part(want[0], 0), **EXACT)
        (at,) = (k for k, name in enumerate(wanted, 1) if "3.weight" in name)
        torch.testing.assert_close(got[at], part(want[at], 1), **EXACT)
        with torch.no_grad():
            torch.testing.assert_close(model(mine), part(whole(x), 0), **EXACT)


@on_ranks
def test_an_input_without_a_gradient() -> None:
    """Of a row that begins a list the weight's gradient alone is needed, and what gathers dy gives dx too."""
    row = te_fuser.Sequential(next(m for m in products(shared(mlp(1))) if m.parallel_mode == "row"))
    with pipelined():
        plan = row.plan(tensor(6, 3, INNER // WORLD, grad=False))
    assert exchanges(plan)[0] == ["matmul_reduce_scatter"]
    assert "matmul_reduce_scatter_backward" not in exchanges(plan)[1]
    reasons = {r.reason for r in plan.refusals if r.name == "matmul_reduce_scatter_backward"}
    assert reasons == {"nobody needs the gradients that it makes 0.d_output with"}


@on_ranks
def test_each_step_keeps_its_promises() -> None:
    model = shared(mlp(1, verify=True))
    with pipelined():
        x = part(tensor(*SHAPE).detach(), 0).requires_grad_()
        (dx,) = torch.autograd.grad(model(x).sum(), x)
        (want,) = torch.autograd.grad(model.reference(x).sum(), x)
    torch.testing.assert_close(dx, want, **EXACT)


@on_ranks
def test_nothing_to_multiply() -> None:
    group = ops.Group.of("test", dist.group.WORLD)
    b = tensor(FEATURES, INNER, grad=False)
    y, gathered = symmetric.all_gather_matmul(b.new_empty(0, 3, FEATURES), b, group)
    assert y.shape == (0, 3, INNER) and gathered.shape == (0, 3, FEATURES)
    assert symmetric.matmul_reduce_scatter(b.new_empty(0, FEATURES), b, group).shape == (0, INNER)
    y = symmetric.matmul_reduce_scatter(b.new_empty(4, 3, 0), b.new_empty(0, INNER), group)
    torch.testing.assert_close(y, b.new_zeros(2, 3, INNER))
