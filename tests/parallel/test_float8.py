"""Regions of FP8 on ranks that share products, against the whole model in one process: one scale, 8 bits are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling
from tests.parallel.ranks import WORLD, on_ranks
from tests.quantization.test_agreement import is_the_same_on_all

F, FFN, TOKENS = 32, 64, 8
RECIPE = DelayedScaling(amax_history_len=4)
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F))


def cut(sequence_parallel: bool = True) -> te.Sequential:
    model = mlp()
    te.parallelize(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"], sequence_parallel)
    return model


def mine(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return t.chunk(WORLD, dim)[dist.get_rank()]


@contextmanager
def sent() -> Iterator[list[torch.dtype]]:
    """The dtypes of what is gathered in here."""
    found: list[torch.dtype] = []
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out

    def noted(t: torch.Tensor, *rest: Any, out: torch.Tensor) -> torch.Tensor:
        found.append(t.dtype)
        return gather(t, *rest, out=out)  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops._c10d_functional, "all_gather_into_tensor_out", noted)
        yield found


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def steps(model: Any, shared: bool, recipe: DelayedScaling = RECIPE, run: Any = None) -> list[torch.Tensor]:
    """y, dx and gradients of the last of three steps, and the states."""
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(TOKENS, F, generator=g) for _ in range(2))
        x, dy = (mine(t).clone() if shared else t for t in (x, dy))
        x.requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=recipe):
            y = model(x) if run is None else run(model, x)
        y.backward(dy)
    gradients = [whole(p.grad) for p in model.parameters()]
    numbers = [t for name, pair in sorted(states(model).items()) for t in pair]
    return [y.detach(), x.grad, *gradients, *numbers]  # type: ignore[list-item]


@pytest.mark.parametrize("way", ["fused", "reference"])
@on_ranks
def test_values_are_those_of_the_whole_model_and_8_bits_are_sent(way: str) -> None:
    """What the column's product takes, and the gradient of what the row's gives; scales are the whole model's."""
    run = None if way == "fused" else lambda m, x: m.reference(x)
    with sent() as dtypes:
        found = steps(cut(), True, run=run)
    if run is None:
        assert dtypes[:6] == [torch.uint8] * 6, dtypes  # behind these whole gradients are put together
    wanted = steps(mlp(), False, run=run)
    wanted[:2] = [mine(t) for t in wanted[:2]]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **NEAR)


@pytest.mark.parametrize("why", ["each its own scale", "each its own group", "a product's own recipe"])
@on_ranks
def test_what_has_no_common_scale_is_sent_as_it_is(why: str) -> None:
    own = DelayedScaling(amax_history_len=4, reduce_amax=False)
    model, recipe = cut(), own if why == "each its own scale" else RECIPE
    alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    if why == "a product's own recipe":
        te.precision(model, {"*": own})
    group = alone if why == "each its own group" else None
    with sent() as dtypes, te.autocast(recipe=recipe, amax_reduction_group=group):
        x = torch.randn(TOKENS // WORLD, F, generator=torch.Generator().manual_seed(dist.get_rank()))
        y = model(x.requires_grad_())
        torch.testing.assert_close(y, model.reference(x), rtol=0.05, atol=0.05)
        y.sum().backward()
    assert set(dtypes) == {torch.float32}


@on_ranks
def test_what_is_made_in_a_region_is_agreed_on() -> None:
    """What it records waits for the fold that reduces it: scales are 1 on all ranks until then."""
    first = cut()
    steps(first, True)
    made: list[te.Sequential] = []

    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        made[:] = made or [cut()]
        return made[0](x)  # type: ignore[no-any-return]

    with sent() as dtypes:
        found = steps(first, True, run=run)
    assert dtypes[:6] == [torch.uint8] * 6, dtypes
    assert is_the_same_on_all(*(t for pair in states(made[0]).values() for t in pair))
    wanted = steps(mlp(), False)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        assert (a - mine(b)).norm() <= 0.1 * mine(b).norm()


@on_ranks
def test_scales_of_each_rank_stay_its_own_where_a_later_region_agrees() -> None:
    """Histories of ranks hold different amaxes yet: what the later region exchanges is sent as it is."""
    model, own = cut(), DelayedScaling(amax_history_len=4, reduce_amax=False)
    steps(model, True, own)
    with sent() as dtypes:
        found = steps(model, True)
    assert set(dtypes) == {torch.float32}
    wanted = steps(mlp(), False)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        assert (a - mine(b)).norm() <= 0.1 * mine(b).norm()


@on_ranks
def test_plans_follow_the_ranks_that_agree() -> None:
    """A plan of one region is none of another, whose scales may differ; what each rank folded alone keeps its own."""
    model = cut()
    x = torch.randn(TOKENS // WORLD, F, requires_grad=True)
    alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    kinds = []
    for group in (None, alone, dist.group.WORLD):
        with sent() as dtypes, te.autocast(recipe=RECIPE, amax_reduction_group=group):
            model(x)
        kinds.append(set(dtypes))
    assert kinds == [{torch.uint8}, {torch.float32}, {torch.float32}]


@on_ranks
def test_on_a_gpu_what_arrives_is_turned() -> None:
    """The kernel before stores rows alone; sums over tokens read what is turned behind the exchange."""
    model = cut().to(torch.bfloat16)
    x = torch.randn(16 * WORLD, F, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        plan = model.plan(x, device="h200")
    names = [step.name for step in plan.forward]
    gather = names.index("all_gather.start")
    assert names.index("layer_norm_quantize_fwd") < gather < names.index("float8_matmul_bias")
    specs = [plan.graph.values[n.input] for n in plan.graph.nodes if n.op.kind is ops.AllGather]
    assert [(v.spec.dtype, v.gradient_dtype) for v in specs] == [(torch.float8_e4m3fn, torch.bfloat16)]
    specs = [plan.graph.values[n.input] for n in plan.graph.nodes if n.op.kind is ops.ReduceScatter]
    assert [(v.spec.dtype, v.gradient_dtype) for v in specs] == [(torch.bfloat16, torch.float8_e5m2)]
    back = [step.name for step in plan.backward]
    assert back.count("float8_matmul_backward") == 4 and "transposed8" not in names
    assert back.count("transposed8") == 2  # x of the first product and dy of the second, as they arrived
