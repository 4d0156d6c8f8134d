"""Ranks that agree on amaxes, and resuming from what was saved before they have agreed on those of a step."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_fuser as te
from te_fuser import ops
from te_fuser.params.scales import RECORDED
from te_fuser.quantization import amax_allreduce, not_finite, scale_update, states
from te_fuser.quantization.products import products
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.parallel.models import spread
from tests.parallel.random_cuts import agree_anew
from tests.parallel.ranks import WORLD, on_ranks

RECIPE = DelayedScaling(amax_history_len=3)


def step(model: Any, x: torch.Tensor, recipe: Recipe = RECIPE, group: Any = None) -> None:
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group):
        y = model(x)
    y.sum().backward()


def begun() -> int:
    """Number of this rank, where nobody has agreed on anything yet."""
    agree_anew()
    return dist.get_rank()


def models() -> tuple[te.Sequential, te.Sequential]:
    torch.manual_seed(0)
    return te.Sequential(ops.Linear(16, 16)), te.Sequential(ops.Linear(16, 32))


def is_the_same_on_all(*tensors: torch.Tensor) -> bool:
    mine = torch.cat([t.flatten() for t in tensors])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


def flat(model: Any) -> list[torch.Tensor]:
    return [t for pair in states(model).values() for t in pair]


@on_ranks
def test_largest() -> None:
    """The amax is that of both; on a rank that did not run a module, too."""
    rank = begun()
    one, other = models()
    x = torch.full((4, 16), float(rank + 1))
    step(one, x)
    step(one if rank == 0 else other, x)  # each another one
    for model in (one, other):
        assert is_the_same_on_all(*flat(model))
    assert states(one)["0.input"][1].tolist() == [1.0, 2.0, 0.0]
    assert states(other)["0.input"][1].tolist() == [2.0, 0.0, 0.0]
    assert float(states(other)["0.input"][0]) == 224.0


@on_ranks
def test_not_a_number() -> None:
    """Amaxes that are not finite on one rank change no scale on any, and are counted on all."""
    rank = begun()
    one, _ = models()
    for amax in (1.0, math.nan if rank == 0 else 1.0, math.inf if rank == 1 else 1.0):
        step(one, torch.full((4, 16), amax))
    assert states(one)["0.input"][1].tolist() == [1.0, 0.0, 0.0]
    assert not_finite(one)["0.input"] == 2


@on_ranks
def test_each_its_own() -> None:
    """Without reduce_amax, in groups of one rank, and by the recipes of single products."""
    rank = begun()
    one, other = models()
    x = torch.full((4, 16), float(rank + 1))
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    own = DelayedScaling(amax_history_len=3, reduce_amax=False)
    step(one, x, own)
    step(one, x, group=alone)
    assert states(one)["0.input"][1].tolist() == [rank + 1.0, rank + 1.0, 0.0]
    te.precision(one, {"*": own})
    step(te.Sequential(one, other), x)
    assert states(one)["0.input"][1].tolist() == [rank + 1.0] * 3
    assert is_the_same_on_all(*flat(other))


@on_ranks
def test_one_rank_alone() -> None:
    """A rank that evaluates, saves and copies alone waits for nobody."""
    rank = begun()
    one, _ = models()
    x = torch.full((4, 16), float(rank + 1))
    step(one, x)
    if rank == 0:
        with torch.no_grad(), te.autocast(recipe=RECIPE):
            one(x)
        one.state_dict()
    step(one, x)
    dist.barrier()
    assert is_the_same_on_all(*flat(one)) and states(one)["0.input"][1].tolist() == [2.0, 2.0, 0.0]


@on_ranks
def test_different() -> None:
    """Different numbers of products: an error on all, before anything runs."""
    rank = begun()
    made = [*models(), te.LayerNormMLP(16, 32)] if rank == 0 else [*models()]
    mine, fewest = len(products()), len(products()) - (2 if rank == 0 else 0)
    words = f"different numbers of products: this one {mine}, all {fewest} to {fewest + 2}"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words), te.autocast(recipe=RECIPE):
            raise AssertionError("it ran")
    assert not [name for model in made for name in model.state_dict() if "fp8" in name]
    if rank == 0:
        te.precision(made[2], {"*": None})
    step(made[0], torch.full((4, 16), float(rank + 1)))
    assert is_the_same_on_all(*flat(made[0]))


@on_ranks
def test_made_later() -> None:
    """Products that all ranks make later are agreed on, too; those of one rank are its own, which is said."""
    rank = begun()
    one, other = models()
    x = torch.full((4, 16), float(rank + 1))
    step(one, x)
    late = te.Sequential(ops.Linear(16, 48))
    for _ in range(2):
        step(late, x)
    assert is_the_same_on_all(*flat(late)) and states(late)["0.input"][1].tolist() == [2.0, 2.0, 0.0]
    own = te.Sequential(ops.Linear(16, 64)) if rank == 0 else None
    step(one, x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(own or one, x)
        step(own or one, x)
    assert [w for w in said if "different numbers of products (0 to 1)" in str(w.message)]
    assert own is None or states(own)["0.input"][1].tolist()[0] == 1.0
    assert rank == 0 or states(one)
    assert other is not None


@on_ranks
def test_same_training() -> None:
    """Two ranks with half a batch each have the scales of one with all of it."""
    rank = begun()
    torch.manual_seed(0)
    batches = torch.randn(4, 8, 16)
    found = []
    for whole in (False, True):
        torch.manual_seed(1)
        model = te.Sequential(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16))
        recipe = DelayedScaling(amax_history_len=3, reduce_amax=not whole)
        for x in batches:
            step(model, x if whole else x.chunk(WORLD)[rank], recipe)
        found.append(flat(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_ranks
def test_data_parallel() -> None:
    """Under DistributedDataParallel, which knows the buffers of a model that was loaded, and under fully_shard."""
    rank = begun()
    torch.manual_seed(0)
    made = [te.Sequential(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16)) for _ in range(3)]
    step(DistributedDataParallel(made[0]), (rank + 1) * torch.randn(8, 16))
    made[1].load_state_dict(made[0].state_dict())
    parallel = DistributedDataParallel(made[1])
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            y, z = parallel(torch.randn(8, 16)), parallel((rank + 1) * torch.randn(8, 16))
        (y + z).sum().backward()
    spread(made[2])
    for _ in range(2):
        step(made[2], (rank + 1) * torch.randn(8, 16))
    for model in made:
        assert len(states(model)) == 6 and is_the_same_on_all(*flat(model))
        assert all(float(history[0]) > 0 for _, history in states(model).values())


@on_ranks
def test_scales_of_now() -> None:
    """Recipes that keep nothing ask no other rank, and gradients are those of all ranks together."""
    rank = begun()
    torch.manual_seed(0)
    recipe, model = Float8CurrentScaling(), te.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 16))
    wrapped = DistributedDataParallel(model)
    x = torch.randn(8, 32)
    step(wrapped, x[4 * rank : 4 * rank + 4], recipe)
    found = [p.grad.clone() for p in model.parameters()]
    assert is_the_same_on_all(*found) and states(model) == {}
    model.zero_grad()
    if rank == 0:  # alone
        step(model, x, recipe)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    step(model, x[4 * rank : 4 * rank + 4], recipe)
    for p, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), gradient)


def test_a_group_of_one_rank_and_others(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        one, _ = models()
        step(one, torch.ones(4, 16), group=dist.group.WORLD)
        assert states(one)["0.input"][1].tolist() == [1.0, 0.0, 0.0]
        with te.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
            with te.autocast(recipe=RECIPE):
                one(torch.ones(4, 16))
            with te.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
                one(torch.ones(4, 16))
            with pytest.raises(ValueError, match="another group of ranks"):
                te.autocast(recipe=RECIPE, amax_reduction_group=dist.new_group([0])).__enter__()
    finally:
        dist.destroy_process_group()
    step(one, torch.ones(4, 16))


# ---- resuming


F = 32
WORDS = r"ranks have not agreed yet .* call te_fuser.quantization.states\(model\) on all ranks before"
RECIPES: dict[str, DelayedScaling] = {
    "max": DelayedScaling(amax_history_len=4),
    "newest": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "of scales before": DelayedScaling(
        amax_history_len=3, scaling_factor_compute_algo=lambda amax, scale, most, recipe: (scale + most / amax) / 2.0
    ),
}
NEWEST = RECIPES["newest"]


def made() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.LayerNormMLP(F, 2 * F, device="cpu"), ops.MatMul(F, F), te.from_torch(torch.nn.Linear(F, F))
    )


def data(step: int, overflows: bool = False) -> torch.Tensor:
    """Data of this rank, smaller where its number is larger: the others' amaxes count."""
    x = torch.randn(8, F, generator=torch.Generator().manual_seed(step)).chunk(dist.get_world_size())[dist.get_rank()]
    x = (1.0 + step) / (1.0 + dist.get_rank()) * x
    return torch.full_like(x, math.inf) if overflows and dist.get_rank() == 1 else x


# Models resumed from a checkpoint run before the first one: the entry of any region folds all that was recorded.


def trained(model: Any, steps: range, recipe: DelayedScaling = NEWEST, overflow: int = -1) -> list[torch.Tensor]:
    """All that steps give, on the way without asking any other rank."""
    found = []
    for step in steps:
        model.zero_grad()
        with te.autocast(recipe=recipe):
            y = model(data(step, step == overflow))
        y.square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                found.append(p.grad.clone())
                p -= 1e-3 * torch.sign(p.grad.nan_to_num())
        found.append(y.detach().clone())
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True))


@contextmanager
def another_process() -> Iterator[None]:
    """In here nothing was recorded, and nothing agreed on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_update, "recorded", scale_update.Recorded())
        patch.setattr(amax_allreduce, "_kept", weakref.WeakKeyDictionary())
        yield


@contextmanager
def silent() -> Iterator[None]:
    """In here a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def loaded(saved: Any, model: Any = None, **how: Any) -> Any:
    model = made() if model is None else model
    model.load_state_dict(saved, **how)
    return model


def written(what: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, **how)


WAYS: dict[str, Callable[[Any], Any]] = {
    "state": lambda m: loaded(copy.deepcopy(m.state_dict())),
    "assigned": lambda m: loaded(copy.deepcopy(m.state_dict()), assign=True),
    "file": lambda m: loaded(written(m.state_dict(), weights_only=True)),
    "twice": lambda m: loaded(copy.deepcopy(loaded(copy.deepcopy(m.state_dict())).state_dict())),
    "into one that ran": lambda m: loaded(copy.deepcopy(m.state_dict()), ran()),
    "copy": copy.deepcopy,
    "copy of a copy": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "module": lambda m: written(m, weights_only=False),
}


def ran() -> Any:
    trained(model := made(), range(7, 9))
    return model


@pytest.mark.parametrize(("way", "process"), [("state", "the same process"), *((w, "another process") for w in WAYS)])
@on_ranks
def test_each_rank_goes_on_with_what_it_saved(way: str, process: str) -> None:
    trained(model := made(), range(2))
    is_saved = way not in ("copy", "copy of a copy", "pickle", "module")
    with pytest.warns(UserWarning, match=WORDS) if is_saved else silent():
        twin = WAYS[way](model)
    with another_process() if process == "another process" else nullcontext():
        found = [*trained(twin, range(2, 5)), *flat(twin)]
    wanted = [*trained(model, range(2, 5)), *flat(model)]
    assert same(found, wanted) and is_the_same_on_all(*flat(twin))


@pytest.mark.parametrize(("steps", "overflows"), [(1, True), (3, False)])
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks
def test_each_recipe(recipe: str, overflows: bool, steps: int) -> None:
    """Also where the last step's amaxes were infinite on one rank, which moves nothing on any."""
    trained(model := made(), range(steps), RECIPES[recipe], overflow=steps - 1 if overflows else -1)
    with pytest.warns(UserWarning, match=WORDS):
        saved = copy.deepcopy(model.state_dict())
    twin = loaded(saved)
    for m in (model, twin):  # an overflow has left NaN there
        m.load_state_dict(made().state_dict(), strict=False)
    found = [*trained(twin, range(4, 6), RECIPES[recipe]), *flat(twin)]
    assert same(found, [*trained(model, range(4, 6), RECIPES[recipe]), *flat(model)])


@on_ranks
def test_what_ran_on_one_rank_alone() -> None:
    """A product that another rank ran: nothing is recorded of it here, and its amax is of all."""
    parts = torch.nn.ModuleList([made(), made()])
    trained(parts[dist.get_rank()], range(1))
    with pytest.warns(UserWarning, match=WORDS):
        twins = loaded(copy.deepcopy(parts.state_dict()), torch.nn.ModuleList([made(), made()]))
    for both in (twins, parts):
        trained(both[dist.get_rank()], range(1, 2))
    assert same(flat(twins), flat(parts)) and is_the_same_on_all(*flat(twins))


@on_ranks
def test_resuming_in_data_parallel() -> None:
    """DistributedDataParallel hands on rank 0's buffers when it is made, and leaves what each rank recorded."""
    trained(model := made(), range(1))
    with pytest.warns(UserWarning, match=WORDS):
        twin = loaded(copy.deepcopy(model.state_dict()))
    results = [trained(DistributedDataParallel(m), range(1, 4)) for m in (twin, model)]
    assert same(*results) and same(flat(twin), flat(model))


@on_ranks
def test_one_rank_saves_for_all() -> None:
    """Exact where all were asked before; else it says so, and ranks agree on what this one recorded."""
    trained(model := made(), range(2))
    where: list[Any] = [None]
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=WORDS):
            where = [copy.deepcopy(model.state_dict())]
    dist.broadcast_object_list(where)
    near = loaded(where[0])
    states(model)
    with silent():
        saved = copy.deepcopy(model.state_dict())
    assert not any(RECORDED in said for said in saved._metadata.values())
    where = [saved]
    dist.broadcast_object_list(where)
    exact = loaded(where[0])
    assert same(trained(exact, range(2, 4)), trained(model, range(2, 4))) and same(flat(exact), flat(model))
    trained(near, range(2, 3))
    assert is_the_same_on_all(*flat(near)) and all(float(h[1]) > 0 for _, h in states(near).values())


@pytest.mark.parametrize("process", ["the same process", "another process"])
@on_ranks
def test_one_rank_loads_alone(process: str) -> None:
    """Nobody waits for it: what it brings is agreed on with the next step."""
    trained(model := made(), range(2))
    with pytest.warns(UserWarning, match=WORDS):
        saved = copy.deepcopy(model.state_dict())
    twin = made()
    if dist.get_rank() == 0:
        twin.load_state_dict(saved)
    with another_process() if process == "another process" else nullcontext():
        trained(twin, range(2, 5))
        newest = [history[0] for _, history in states(twin).values()]
    assert is_the_same_on_all(*newest)


@on_ranks
def test_who_evaluates_first_waits_for_nobody() -> None:
    trained(model := made(), range(2))
    twin = copy.deepcopy(model)
    with another_process():
        if dist.get_rank() == 0:
            with torch.no_grad(), te.autocast(recipe=NEWEST):
                twin(data(9))
        found = trained(twin, range(2, 4))
    assert same(found, trained(model, range(2, 4)))
