"""Models that two ranks share and two more train by `fully_shard`, in FP8 too, and copies: four processes."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import te_fuser
from te_fuser import ops
from te_fuser.distributed.consistency import RankMismatchError, gather_values
from te_fuser.distributed.group import Group
from te_fuser.parallel import cut_sequence, parallelize
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.parallel import test_peers as two
from tests.parallel.models import adam, loaded, saved, spread
from tests.parallel.ranks import on_ranks
from tests.parallel.test_context import INNER, LAYER, listed, preset, run
from tests.parallel.test_parallelize import B, F, S, gated, initialize, laid_in, llama, mlp, turns
from tests.twins import assert_same_gradients, sequential, tensor

RANKS = 4
MODELS = {"mlp": mlp, "gated": gated, "llama": llama, "turns": turns}
PLACED: dict[str, Any] = {"default": None, "features": lambda p: Shard(1) if p.dim() == 2 else None}


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@on_ranks
def test_what_ranks_of_both_dimensions_tell() -> None:
    """All hear all, whatever dimension of the mesh they share."""
    mesh, rank = mesh_of(), dist.get_rank()
    groups = [Group.of("a test", mesh[name]) for name in ("tp", "dp")]
    assert gather_values(groups, "a test", rank) == [0, 1, 2, 3]
    assert gather_values(groups, "a test", rank)[0] == 0
    with pytest.raises(RankMismatchError, match="rank 0 has one thing; rank 1 has another thing"):
        gather_values(groups[1:], "one thing" if rank < 2 else "another thing", None)


@on_ranks
def test_a_region_of_some_waits_for_these_alone() -> None:
    """Ops of all ranks there are, too; and of two that agree on amaxes, of which one goes on to a call, both hear."""
    rank, x = dist.get_rank(), torch.ones(4, 32)
    of_all = te_fuser.Sequential(ops.Linear(32, 32), ops.AllReduce(dist.group.WORLD))
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    model = te_fuser.Sequential(ops.Linear(32, 32), ops.AllReduce(pairs[rank // 2]))

    def run(is_on: bool, **how: Any) -> None:
        recipe = DelayedScaling(amax_history_len=3 + len(how))
        with te_fuser.autocast(enabled=is_on, recipe=recipe, amax_reduction_group=pairs[rank // 2] if is_on else None):
            model(x).sum().backward()

    if rank < 2:
        run(True)
        with pytest.raises(RankMismatchError, match=r"rank 0 has x \[4, 32\].*; rank 1 has the entry of a region"):
            run(rank == 1, another=1)
    dist.barrier()
    assert of_all(x).shape == (4, 32)


@pytest.mark.parametrize("late", [False, True])
@on_ranks
def test_what_one_rank_raises_all_ranks_of_a_mesh_do(late: bool) -> None:
    """Ranks of other lines and columns raise, too, whenever they come; then they go on together."""
    mesh = mesh_of()
    cut = parallelize(te_fuser.Sequential(*mlp()), mesh["tp"])
    model = te_fuser.Sequential(*cut, ops.AllReduce(mesh["dp"]))
    x = tensor(S, B, F, grad=False)
    failing, rank = 1, dist.get_rank()
    if late:
        time.sleep(0.3 * rank)
    if rank == failing:
        with pytest.raises(ValueError, match=r"op \d \(LayerNorm"):
            model(tensor(S, B, F + 1))
    else:
        with pytest.raises(RankMismatchError, match=r"cannot run this call, so no rank .*: ValueError: op \d"):
            model(x)
    dist.barrier()
    with pytest.raises(RankMismatchError, match=r"rank \d .* has x \[6, 2, 8\]|rank \d .* has x \[7, "):
        model(tensor(S + (rank == failing), B, F))
    dist.barrier()
    assert model(x).shape == x.shape


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, mesh: DeviceMesh | None = None) -> None:
    """Steps on a rank's samples; without a mesh on all."""
    for step in steps:
        x = tensor(S, 2 * B, F, grad=False, seed=step)
        optimizer.zero_grad()
        model(x if mesh is None else x.chunk(2, 1)[mesh["dp"].get_local_rank()]).square().mean().backward()
        optimizer.step()


def whole(tensors: dict[str, Any], like: nn.Module, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Parameters of a model, or what is kept of them, in the shapes of the whole one."""
    shapes = {name: p.shape for name, p in like.named_parameters()}
    laid = {} if model is None else laid_in(model)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in tensors.items()}
    return {n: (laid[n].whole(t) if n in laid else t).reshape(shapes[n]) for n, t in full.items()}


def parameters(model: nn.Module, like: nn.Module) -> dict[str, torch.Tensor]:
    return whole(dict(model.named_parameters()), like, model)


CASES = [*((kind, "default") for kind in ("mlp", "llama", "turns")), ("gated", "features")]


@pytest.mark.parametrize(("kind", "placed"), CASES)
@on_ranks
def test_training(kind: str, placed: str) -> None:
    """As one process with the whole batch."""
    mesh, twin = mesh_of(), MODELS[kind]()
    model = spread(parallelize(copy.deepcopy(twin), mesh["tp"]), mesh["dp"], shard_placement_fn=PLACED[placed])
    optimizers = adam(model), adam(twin)
    for step in range(2):
        train(model, optimizers[0], range(step, step + 1), mesh)
        train(twin, optimizers[1], range(step, step + 1))
        want = {name: p.grad for name, p in twin.named_parameters()}
        assert_same_gradients(whole({n: p.grad for n, p in model.named_parameters()}, twin, model), want, 1e-10)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, twin)]
        assert isinstance(norms[0], DTensor)
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert_same_gradients(parameters(model, twin), parameters(twin, twin), 1e-10)


def for_four() -> te_fuser.Sequential:
    """Weights in parts, and learned sinks, that up to four ranks can share."""
    heads: Any = {"heads": 8, "kv_heads": 4, "packing": "blocked", "layout": "sequence_first"}
    core = ops.DotProductAttention(head_dim=2, mask="causal", scores=ops.AttentionScores(sink="learned"), **heads)
    first = ops.RMSNorm(F), ops.Linear(F, 32), ops.RotaryEmbedding(2, **heads), core, ops.Linear(16, F)
    return sequential(te_fuser.Residual(*first), *gated())


@on_ranks
def test_checkpoints_of_two_ranks_on_one_and_on_four(tmp_path: Path) -> None:
    """Models made on the meta device, cut, and made real go on, with their optimizers, where two ranks were."""
    mesh, x = mesh_of(), tensor(S, 2 * B, F, grad=False)
    whole_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))["tp"]
    like = for_four()

    def made(tp: DeviceMesh | None) -> te_fuser.Sequential:
        with torch.device("meta"):
            model = for_four()
            model = model if tp is None else parallelize(model, tp, tp is whole_mesh)
        return model.to_empty(device="cpu")

    def step(model: te_fuser.Sequential, optimizer: torch.optim.Optimizer, tp: DeviceMesh | None) -> None:
        own = x[:4].chunk(RANKS)[tp.get_local_rank()] if tp is whole_mesh else x[:4]
        optimizer.zero_grad()
        model(own).square().sum().backward()
        optimizer.step()

    model = parallelize(for_four(), mesh["tp"])
    optimizer = adam(model)
    step(model, optimizer, mesh["tp"])
    pair = mesh["tp"].get_group()
    folder = tmp_path / str(dist.get_rank() // 2)  # each pair its own
    dcp.save(saved(model, optimizer), checkpoint_id=folder, process_group=pair)
    dist.barrier()
    want = {name: t.clone() for name, t in parameters(model, like).items()}
    step(model, optimizer, mesh["tp"])
    for tp in (None, whole_mesh):
        other = made(tp)
        of_other = loaded(other, folder if tp is None else tmp_path / "0", tp is None)
        torch.testing.assert_close(parameters(other, like), want, rtol=0, atol=0)
        step(other, of_other, tp)
        torch.testing.assert_close(parameters(other, like), parameters(model, like), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "placed"), CASES[2:])
@on_ranks
def test_checkpoints(kind: str, placed: str, tmp_path: Path) -> None:
    """Of weights in parts: saved where they are cut twice, loaded whole, saved and loaded back, once cut and twice."""
    mesh, made, placed_by = mesh_of(), MODELS[kind], PLACED[placed]
    like = made()
    model = spread(parallelize(made(), mesh["tp"]), mesh["dp"], shard_placement_fn=placed_by)
    optimizer = adam(model)
    train(model, optimizer, range(2), mesh)
    state = saved(model, optimizer)
    shapes = {name: t.shape for name, t in like.state_dict().items()}
    assert {name: t.shape for name, t in state["model"].items()} == shapes and [*state["model"]] == [*shapes]
    dcp.save(state, checkpoint_id=tmp_path / "spread")
    want = parameters(model, like)

    alone = made()
    of_alone = loaded(alone, tmp_path / "spread")
    torch.testing.assert_close(parameters(alone, like), want, rtol=0, atol=0)
    dcp.save(saved(alone, of_alone), checkpoint_id=tmp_path / "alone")

    cut = parallelize(made(), mesh["tp"])
    of_cut = loaded(cut, tmp_path / "alone")
    torch.testing.assert_close(parameters(cut, like), want, rtol=0, atol=0)
    dcp.save(saved(cut, of_cut), checkpoint_id=tmp_path / "cut")

    back = spread(parallelize(made(), mesh["tp"]), mesh["dp"], shard_placement_fn=placed_by)
    of_back = loaded(back, tmp_path / "cut")
    for key in ("exp_avg", "exp_avg_sq"):
        states = [
            whole({n: o.state[p][key] for n, p in m.named_parameters()}, like, m)
            for m, o in ((model, optimizer), (back, of_back))
        ]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    for m, o in ((model, optimizer), (back, of_back)):
        train(m, o, range(2, 4), mesh)
    torch.testing.assert_close(parameters(back, like), parameters(model, like), rtol=0, atol=0)


@on_ranks
def test_whole_states_are_gathered_and_loaded() -> None:
    mesh, like = mesh_of(), gated()
    model = spread(parallelize(gated(), mesh["tp"]), mesh["dp"])
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(state, like.state_dict(), rtol=0, atol=0)
    model.load_state_dict({name: 2 * t for name, t in state.items()})
    want = {name: 2 * p.detach() for name, p in like.named_parameters()}
    torch.testing.assert_close(parameters(model, like), want, rtol=0, atol=0)


@on_ranks
def test_whole_states_of_the_first_rank() -> None:
    """Optimizers' too: training goes on as that of the model that they are of."""
    mesh, options = mesh_of(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, other = (spread(parallelize(gated(), mesh["tp"]), mesh["dp"]) for _ in range(2))
    optimizer, of_other = adam(model), adam(other)
    train(model, optimizer, range(2), mesh)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    given = states if dist.get_rank() == 0 else ({}, {})
    set_model_state_dict(other, given[0], options=options)
    set_optimizer_state_dict(other, of_other, given[1], options=options)
    train(model, optimizer, range(2, 4), mesh)
    train(other, of_other, range(2, 4), mesh)
    like = gated()
    torch.testing.assert_close(parameters(other, like), parameters(model, like), rtol=0, atol=0)
    gathered = [
        get_optimizer_state_dict(*pair, options=StateDictOptions(full_state_dict=True))["state"]
        for pair in ((model, optimizer), (other, of_other))
    ]
    torch.testing.assert_close(*gathered, rtol=0, atol=0)


@on_ranks
def test_initialization_from_meta() -> None:
    mesh, twin = mesh_of(), gated()
    with torch.device("meta"):
        model = spread(parallelize(gated(), mesh["tp"]), mesh["dp"])
    initialize(model.to_empty(device="cpu"), twin)
    torch.testing.assert_close(parameters(model, twin), parameters(twin, twin), rtol=0, atol=0)
    train(model, adam(model), range(1), mesh)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_sequences_and_weights(sequence_parallel: bool) -> None:
    """Two ranks cut the sequence, two more the weights, with what is left of it or whole; draws are one process's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layer = preset("TransformerLayer", F, INNER, 8, kv_channels=2, num_gqa_groups=4, **LAYER)
    twin = nn.Sequential(layer, listed("interleaved", heads=8, kv_heads=4))
    model = copy.deepcopy(twin)
    for part in model:
        parallelize(part, mesh["tp"], sequence_parallel, context=mesh["cp"])
    x, dy = (tensor(8, B, F, grad=False, seed=seed) for seed in (1, 2))

    def own(t: torch.Tensor) -> torch.Tensor:
        mine = cut_sequence(t, mesh["cp"])
        return cut_sequence(mine, mesh["tp"]) if sequence_parallel else mine

    found = [run(model, own(x), own(dy)), run(twin, x, dy)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, own(want), rtol=1e-10, atol=1e-10)
    terms = whole({name: p.grad for name, p in model.named_parameters()}, twin, model)
    for gradient in terms.values():
        dist.all_reduce(gradient, group=mesh["cp"].get_group())
    assert_same_gradients(terms, {name: p.grad for name, p in twin.named_parameters()}, 1e-10)


@on_ranks
def test_sequences_and_samples() -> None:
    """Two ranks cut the sequence and two the batch, parameters lie on all four, which average their gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    twin = listed(dropout=0.0)
    model = parallelize(copy.deepcopy(twin), context=mesh["cp"])
    spread(model, mesh["dp", "cp"]._flatten())
    x = tensor(8, 2 * B, F, grad=False)
    mine = cut_sequence(x.chunk(2, 1)[mesh["dp"].get_local_rank()], mesh["cp"])
    for m, given in ((model, mine), (twin, x)):
        m(given).square().mean().backward()
    want = {name: p.grad for name, p in twin.named_parameters()}
    assert_same_gradients(whole({n: p.grad for n, p in model.named_parameters()}, twin), want, 1e-10)


# ---- regions of FP8


TOKENS, BATCH, STEPS = 8, 4, 3
RECIPES: dict[str, tuple[Recipe, int]] = {  # and features, of whose parts, a rank's each, the recipe takes all
    "delayed": (DelayedScaling(amax_history_len=2), 32),
    "current": (Float8CurrentScaling(), 32),
    "blocks": (Float8BlockScaling(), 256),
}


def wide_mlp(features: int) -> te_fuser.Sequential:
    torch.manual_seed(0)
    inner = 2 * features
    layer = te_fuser.Residual(
        ops.LayerNorm(features), ops.Linear(features, inner), ops.GELU(), ops.Linear(inner, features)
    )
    return te_fuser.Sequential(layer, te_fuser.LayerNormMLP(features, inner, device="cpu"))


def trained(
    model: Any, recipe: Recipe | None, features: int, first: bool | None, mesh: DeviceMesh | None = None
) -> None:
    """Steps on a rank's samples; without a mesh on all. Gradients are those of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dtype = torch.float32 if recipe else torch.float64
    for step in range(STEPS):
        if step:
            optimizer.step()
        optimizer.zero_grad()
        x = torch.randn(TOKENS, BATCH, features, generator=torch.Generator().manual_seed(step)).to(dtype)
        own = x if mesh is None else x.chunk(2, 1)[mesh["dp"].get_local_rank()]
        group = None if mesh is None else dist.group.WORLD
        is_on = recipe is not None
        with te_fuser.autocast(enabled=is_on, recipe=recipe, amax_reduction_group=group), microbatch(first):
            y = model(own)
        (y.square().sum() * (0.5 if mesh is None else 1.0)).backward()  # `fully_shard` averages over two


def whole_gradients(model: Any, like: Any) -> dict[str, torch.Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters()}, like, model)


@pytest.mark.parametrize(("by", "first"), [("delayed", True), ("current", None), ("blocks", True)])
@on_ranks
def test_training_in_regions(by: str, first: bool | None) -> None:
    """Errors are as large as the whole model's in that region; by delayed scaling, with agreed scales, the same."""
    (recipe, features), mesh = RECIPES[by], mesh_of()
    twin = wide_mlp(features)
    model = spread(te_fuser.parallelize(copy.deepcopy(twin), mesh["tp"]), mesh["dp"])
    exact = copy.deepcopy(twin).double()
    trained(model, recipe, features, first, mesh)
    trained(twin, recipe, features, first)
    trained(exact, None, features, None)
    found, known = whole_gradients(model, twin), whole_gradients(twin, twin)
    for name, right in whole_gradients(exact, exact).items():
        error, usual = (float((t[name].double() - right).norm()) for t in (found, known))
        size, apart = float(right.norm()), float((found[name] - known[name]).norm())
        assert error <= 1.1 * usual + 0.01 * size, (name, error, usual)
        assert 0.0 < usual < 0.2 * size, (name, usual, size)
        if by == "delayed":
            assert apart <= 0.005 * size, (name, apart, size)
    if by == "delayed":
        for (name, own), (other, theirs) in zip(*(sorted(states(m).items()) for m in (model, twin)), strict=True):
            halves = 2.0 if name.endswith("output_gradient") else 1.0  # before the average
            assert name == other
            torch.testing.assert_close(own[1], halves * theirs[1], rtol=1e-4, atol=1e-6)


# ---- exchanges by copies


@on_ranks
def test_many_exchanges() -> None:
    vars(two.test_many_exchanges_of_any_size_in_any_order)["body"](60)


@on_ranks
def test_products() -> None:
    for gives in (False, True):
        vars(two.test_a_product_of_gathered_rows)["body"](gives)
    vars(two.test_a_product_that_is_scattered)["body"]()
