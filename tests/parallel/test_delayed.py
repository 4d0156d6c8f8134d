"""delay_wgrad_compute on two ranks: in models that they share, in pipelines of torch.distributed, under DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from te_fuser import ops
from te_fuser.parallel import backward_dw, parallelize
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.parallel.test_overlap import INNER, F, lean_llama
from tests.parallel.test_parallelize import EXACT, assert_as_whole, layer
from tests.twins import assert_same_gradients, sequential, tensor


def delaying(model: Any) -> Any:
    """The model, whose products leave their weights' gradients."""
    for m in model.modules():
        if isinstance(m, (ops.Linear, ops.MatMul)):
            m.delay_wgrad_compute = True
    return model


class Asked(nn.Module):
    """A model of which each backward is followed by `backward_dw`, by a hook of its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_post_accumulate_grad_hook(lambda _: backward_dw(self.inner))
        return self.inner(x)  # type: ignore[no-any-return]

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_modules(*args, **kwargs)


@pytest.mark.parametrize("kind", ["list", "preset"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_models_that_ranks_share(kind: str, sequence_parallel: bool) -> None:
    """Gathers that only gradients of weights need are delayed, too."""
    plain: Any = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    twin = lean_llama(0.0) if kind == "list" else layer(**plain)
    model = delaying(copy.deepcopy(twin)) if kind == "list" else layer(**plain, delay_wgrad_compute=True)
    model.load_state_dict(twin.state_dict())
    model = parallelize(model, mesh_of(), sequence_parallel)
    x = tensor(6, 2, F)
    dim = 0 if sequence_parallel else None
    own = x if dim is None else x.chunk(WORLD)[dist.get_rank()].detach().requires_grad_()
    model(own).sum().backward()
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert weights and all(p.grad is None for p in weights)
    backward_dw(model)
    assert all(p.grad is not None for p in weights)
    model.zero_grad()
    assert_as_whole(Asked(model), twin, 1, dim)
    if kind == "list":
        late = [s.name for segment in model.plan(own).segments for s in segment.late]
        assert late.count("all_gather.again.start") == (2 if sequence_parallel else 0)


def stages() -> list[te_fuser.Sequential]:
    made = [te_fuser.Residual(ops.LayerNorm(F), ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F)) for _ in "1234"]
    return [sequential(m) for m in made]


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("schedule", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
@on_ranks
def test_pipelines_of_torch(schedule: Any, delays: bool) -> None:
    """Four stages on two ranks: gradients of inputs first, those of weights where the schedule has room."""
    twins = stages()
    rank, micro, mine = dist.get_rank(), 4, {0: (0, 2), 1: (1, 3)}
    if schedule is ScheduleZBVZeroBubble:
        mine = {0: (0, 3), 1: (1, 2)}
    parts = {k: delaying(copy.deepcopy(twins[k])) if delays else copy.deepcopy(twins[k]) for k in mine[rank]}
    waiting = [0]

    def builder(model: nn.Module) -> Callable[[], Callable[[], None]]:
        def built() -> Callable[[], None]:
            waiting.append(waiting[-1] + 1)
            return run

        def run() -> None:
            waiting.append(waiting[-1] - 1)
            backward_dw(model)

        return built

    made = [
        PipelineStage(m, k, 4, torch.device("cpu"), dw_builder=builder(m) if delays else None) for k, m in parts.items()
    ]
    x, target = tensor(8, 2, F, grad=False), tensor(8, 2, F, grad=False, seed=1)
    pipeline = schedule(made, micro, loss_fn=lambda y, target: (y - target).square().sum(), scale_grads=False)
    last = 3 in mine[rank]
    pipeline.step(*([x] if rank == 0 else []), **({"target": target, "losses": []} if last else {}))
    y = x
    for twin in twins:
        y = twin(y)
    (y - target).square().sum().backward()
    for k, model in parts.items():
        for (name, p), q in zip(model.named_parameters(), twins[k].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **EXACT, msg=f"stage {k}, {name}")
    most = torch.tensor(max(waiting))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert len(waiting) == 1 + 4 * micro * delays and waiting[-1] == 0 and (most > 1) == delays


@on_ranks
def test_data_parallel() -> None:
    """DistributedDataParallel averages a gradient when it comes."""
    (twin, *_), x = stages(), tensor(8, 2, F, grad=False)
    model = DistributedDataParallel(delaying(copy.deepcopy(twin)))
    for _ in range(2):
        model.zero_grad()
        model(x.chunk(WORLD)[dist.get_rank()]).square().mean().backward()
        backward_dw(model)
    twin(x).square().mean().backward()
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    assert_same_gradients(found, {n: p.grad for n, p in twin.named_parameters()})


@on_ranks
def test_fully_shard_is_refused() -> None:
    (model, *_) = stages()
    fully_shard(delaying(model), mesh=mesh_of())
    model(tensor(8, 2, F)).sum().backward()
    with pytest.raises(RuntimeError, match="backward_dw: fully_shard reduces the gradients"):
        backward_dw(model)
