"""Regions of FP8 on ranks that share products, against the whole model in one process: one scale, 8 bits are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.parallel.test_amax_allreduce import is_the_same_on_all

F, FFN, TOKENS = 32, 64, 8
RECIPE = DelayedScaling(amax_history_len=4)
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F))


def cut(sequence_parallel: bool = True) -> te.Sequential:
    model = mlp()
    te.parallelize(model, mesh_of()["tp"], sequence_parallel)
    return model


def mine(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return t.chunk(WORLD, dim)[dist.get_rank()]


@contextmanager
def sent() -> Iterator[list[torch.dtype]]:
    """The dtypes of what is gathered in here."""
    found: list[torch.dtype] = []
    gather = dist.ProcessGroup._allgather_base

    def noted(ranks: dist.ProcessGroup, made: torch.Tensor, t: torch.Tensor) -> Any:
        found.append(t.dtype)
        return gather(ranks, made, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_allgather_base", noted)
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
    """Gathers before a column's product and gradients of a row's are sent in 8 bits, by the whole model's scales."""
    run = None if way == "fused" else lambda m, x: m.reference(x)
    with sent() as dtypes:
        found = steps(cut(), True, run=run)
    if run is None:
        assert dtypes[:6] == [torch.uint8] * 6, dtypes  # behind these whole gradients are put together
    wanted = steps(mlp(), False, run=run)
    wanted[:2] = [mine(t) for t in wanted[:2]]
    torch.testing.assert_close(found, wanted, **NEAR)


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
def test_current_scales_of_ranks_with_other_data() -> None:
    """Gathered values are sent unquantized and scaled as a whole then; each rank scales its cut of others alone."""
    model, twin, recipe, rows = cut(), mlp(), Float8CurrentScaling(), 4 * TOKENS
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, F, generator=g) * torch.logspace(-3, 3, rows)[:, None] for _ in range(2))
    found = []
    with sent() as dtypes:
        for m, shared in ((model, True), (twin, False)):
            own_x, own_dy = (mine(t).clone() if shared else t for t in (x, dy))
            with te.autocast(recipe=recipe):
                y = m(own_x.requires_grad_())
            y.backward(own_dy)
            gradients = [whole(p.grad) for p in m.parameters()]
            found.append([y.detach(), own_x.grad, *gradients])
    assert torch.uint8 not in dtypes
    for a, b in zip(found[0], [*map(mine, found[1][:2]), *found[1][2:]], strict=True):
        assert (a - b).norm() <= 0.15 * b.norm(), ((a - b).norm(), b.norm())  # E5M2 rounds by up to 1/8


OF_NOW = {"current": Float8CurrentScaling(), "blocks": Float8BlockScaling()}
WIDE = {"current": 32, "blocks": 256}  # of whose parts, a rank's each, the recipe takes all
PRESETS: dict[str, Any] = {
    "LayerNormMLP": lambda f: te.LayerNormMLP(f, 2 * f),
    "TransformerLayer": lambda f: te.TransformerLayer(f, 2 * f, 4, hidden_dropout=0.0, attention_dropout=0.0),
}


def numbers_of(kind: str, by: str, preset: str, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """y, dx and all gradients: of the model in float64, of the whole one in the region, or of the one that is cut."""
    torch.manual_seed(0)
    model, g = te.Sequential(PRESETS[preset](WIDE[by])), torch.Generator().manual_seed(3)
    rows = 2 * TOKENS
    x, dy = (torch.randn(rows, 2, WIDE[by], generator=g) * torch.logspace(-1, 1, rows)[:, None, None] for _ in range(2))
    if kind == "exact":
        model, x, dy = model.double(), x.double(), dy.double()
    if kind == "cut":
        te.parallelize(model, mesh_of()["tp"], sequence_parallel)
        x, dy = ((mine(t).clone() if sequence_parallel else t) for t in (x, dy))
    with te.autocast(enabled=kind != "exact", recipe=OF_NOW[by]):
        y = model(x.requires_grad_())
    y.backward(dy)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("by", "preset", "sequence_parallel"),
    [("current", "LayerNormMLP", False), ("current", "TransformerLayer", True), ("blocks", "LayerNormMLP", True)],
)
@on_ranks
def test_scales_of_now_err_as_those_of_the_whole_model(by: str, preset: str, sequence_parallel: bool) -> None:
    """All numbers, held against float64: each rank scales what it has by itself, or all that was gathered."""
    exact, in_8_bits, found = (numbers_of(k, by, preset, sequence_parallel) for k in ("exact", "whole", "cut"))
    for name, wanted in exact.items():
        others = wanted, in_8_bits[name]
        wanted, known = map(mine, others) if sequence_parallel and name in "xy" else others
        error, usual = (float((t.double() - wanted).norm()) for t in (found[name], known))
        assert error <= 1.1 * usual + 1e-6 * float(wanted.norm()), (name, error, usual)
        if not name.endswith("key_bias"):  # whose gradient is 0
            assert usual < 0.2 * float(wanted.norm()), (name, usual)


@on_ranks
def test_what_is_made_in_a_region_is_agreed_on() -> None:
    """Amaxes of the new model wait for the fold that reduces them: scales are 1 on all ranks until then."""
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
    assert names.index("layer_norm_quantize_fwd") + 1 == names.index("gather_float8_matmul_bias")
    specs = [plan.graph.values[n.input] for n in plan.graph.nodes if n.op.kind is ops.AllGather]
    assert [(v.spec.dtype, v.gradient_dtype) for v in specs] == [(torch.float8_e4m3fn, torch.bfloat16)]
    specs = [plan.graph.values[n.input] for n in plan.graph.nodes if n.op.kind is ops.ReduceScatter]
    assert [(v.spec.dtype, v.gradient_dtype) for v in specs] == [(torch.bfloat16, torch.float8_e5m2)]
    back = [step.name for step in plan.backward]
    both = [name.removeprefix("gather_").removeprefix("scatter_") for name in back]
    assert both.count("float8_matmul_backward") == 4 and "transposed8" not in names
    assert back.count("transposed8") == 2  # x of the first product and dy of the second, as they arrived
