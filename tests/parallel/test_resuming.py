"""Resuming in FP8 on several ranks from what was saved behind a step, whose amaxes ranks have not agreed on yet."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import te_fuser as te
from te_fuser import ops
from te_fuser.params.scales import RECORDED
from te_fuser.quantization import amax_allreduce, scale_update, states
from te_fuser.recipe import DelayedScaling
from tests.parallel.ranks import on_ranks
from tests.parallel.test_amax_allreduce import is_the_same_on_all

F = 32
WORDS = r"ranks have not agreed yet .* call te_fuser.quantization.states\(model\) on all ranks before"
RECIPES: dict[str, DelayedScaling] = {
    "max": DelayedScaling(amax_history_len=4),
    "newest": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "of scales before": DelayedScaling(
        amax_history_len=3, scaling_factor_compute_algo=lambda amax, scale, most, recipe: (scale + most / amax) / 2.0
    ),
}
RECIPE = RECIPES["newest"]


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


def trained(model: Any, steps: range, recipe: DelayedScaling = RECIPE, overflow: int = -1) -> list[torch.Tensor]:
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


def flat(model: Any) -> list[torch.Tensor]:
    return [t for both in states(model).values() for t in both]


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
def test_data_parallel() -> None:
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
            with torch.no_grad(), te.autocast(recipe=RECIPE):
                twin(data(9))
        found = trained(twin, range(2, 4))
    assert same(found, trained(model, range(2, 4)))
