"""Steps beside what ranks send, weights' gradients that wait for backward_dw, and calls that are delayed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

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
from te_fuser.distributed import dtensor
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.fuser.plan import overlap, segmenting
from te_fuser.fuser.plan.overlap import awaited, started
from te_fuser.fuser.steps.op_tasks import OpRunner
from te_fuser.fuser.steps.step import Step
from te_fuser.parallel import backward_dw, parallelize
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.parallel.test_parallelize import EXACT, assert_as_whole, layer
from tests.twins import assert_same_gradients, sequential, tensor

F, INNER, HEADS = 8, 12, 2


def layers(memory: str = "balanced") -> te_fuser.Sequential:
    """Two GPT layers."""
    made = []
    for _ in range(2):
        core = ops.DotProductAttention(HEADS, F // HEADS, mask="causal", layout="sequence_first")
        made.append(te_fuser.Residual(ops.LayerNorm(F), ops.Linear(F, 3 * F), core, ops.Linear(F, F)))
        made.append(te_fuser.Residual(ops.RMSNorm(F), ops.Linear(F, INNER), ops.GELU(), ops.Linear(INNER, F)))
    return sequential(*made, memory=memory)


def shared(twin: te_fuser.Sequential, sequence_parallel: bool = True) -> te_fuser.Sequential:
    mesh = mesh_of()
    return parallelize(copy.deepcopy(twin), mesh["tp"], sequence_parallel)


def in_segments() -> Any:
    """Plans have a segment wherever one can be."""
    return mock.patch.multiple(segmenting, SEGMENT_BYTES=1, _SHORT_END=0, WORTH_A_NODE=0)


def gaps(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps that run beside each exchange that is under way."""
    found = []
    for k, step in enumerate(steps):
        if ref := started(step):
            wait = next(n for n, s in enumerate(steps) if awaited(s) == ref)
            found.append([s for s in steps[k + 1 : wait] if not started(s) and not awaited(s)])
    return found


@pytest.mark.parametrize(
    ("memory", "sequence_parallel", "cut"),
    [("fast", False, False), ("fast", True, True), ("balanced", True, False)]
    + [("balanced", False, True), ("lean", True, True), ("lean", False, False)],
)
@on_ranks
def test_training(memory: str, sequence_parallel: bool, cut: bool) -> None:
    """Against the whole model, in one segment and in several; gradients of weights run beside what is sent."""
    twin = layers(memory)
    with in_segments() if cut else mock.patch.object(segmenting, "SEGMENT_BYTES", segmenting.SEGMENT_BYTES):
        model = shared(twin, sequence_parallel)
        for step in range(2):
            assert_as_whole(model, twin, step, 0 if sequence_parallel else None)
        x = tensor(6, 2, F)
        plan = model.plan(x.chunk(WORLD)[dist.get_rank()] if sequence_parallel else x)
    assert (len(plan.segments) > 2) == cut
    beside = [g for s in plan.segments for g in gaps(s.backward)]
    assert sum(any(not s.chain for s in g) for g in beside) >= 4
    again = [s for s in plan.backward if s.name == "all_gather.again.wait"]
    assert len(again) == (4 if sequence_parallel and memory != "fast" else 0)


def lean_gpt(dropout: float) -> te_fuser.Sequential:
    twin = layers("lean")
    for part in [m for m in twin.modules() if isinstance(m, ops.DotProductAttention)]:
        part.dropout = dropout
    return twin


def lean_llama(dropout: float) -> te_fuser.Sequential:
    heads: Any = {"heads": 4, "kv_heads": 2, "packing": "blocked", "layout": "sequence_first"}
    core = ops.DotProductAttention(head_dim=4, mask="causal", dropout=dropout, **heads)
    first = ops.RMSNorm(F), ops.Linear(F, 32, bias=False), ops.RotaryEmbedding(4, **heads), core
    second = ops.RMSNorm(F), ops.Linear(F, 2 * INNER, bias=False), ops.SwiGLU(), ops.Linear(INNER, F, bias=False)
    last = ops.Linear(16, F, bias=False), ops.Dropout(dropout)
    return sequential(te_fuser.Residual(*first, *last), te_fuser.Residual(*second), memory="lean")


def kept_by(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Bytes that a call keeps for backward, of whole storages, beside parameters."""
    apart = {dtensor.own_part(p).untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = dtensor.own_part(t).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    y.sum().backward()
    return sum(size for place, size in kept.items() if place not in apart)


@pytest.mark.parametrize(("made", "dropout"), [(lean_gpt, 0.1), (lean_llama, 0.0)])
@on_ranks
def test_lean_keeps_a_ranks_share(made: Callable[[float], te_fuser.Sequential], dropout: float) -> None:
    """Of all that one process keeps a rank has half, as it lies in memory; results are those of the whole."""
    twin = made(dropout)
    model = shared(twin)
    assert_as_whole(model, twin, 0, 0)
    x = tensor(256, 8, F, grad=False)
    own = x.chunk(WORLD)[dist.get_rank()].clone()
    assert 1.0 <= kept_by(model, own.requires_grad_()) * WORLD / kept_by(twin, x.requires_grad_()) <= 1.03


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("norm", [False, True])
@on_ranks
def test_what_needs_no_gradient_before_products(norm: bool, memory: str) -> None:
    """x, or all that a frozen norm gives: weights' gradients are the last steps, and wait for what they read."""
    twin = sequential(ops.LayerNorm(64), ops.Linear(64, 512), ops.GELU(), ops.Linear(512, 64), memory=memory)[
        1 - norm :
    ]
    for p in twin[0].parameters() if norm else ():
        p.requires_grad_(False)
    model, x = shared(twin), tensor(128, 64)
    y = model(x.chunk(WORLD)[dist.get_rank()])
    y.square().sum().backward()
    twin(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if q.requires_grad:
            torch.testing.assert_close(p.grad.full_tensor().reshape(q.shape), q.grad, msg=name)


@pytest.mark.parametrize("late", [0, 1])
@on_ranks
def test_what_is_under_way_is_held(late: int) -> None:
    """One rank comes late; what the others sent is as it was when they wait for it, and lies where it lay."""
    sent: dict[Any, tuple[int, torch.Tensor, int]] = {}
    call, waits = OpRunner.__call__, []

    def watched(self: OpRunner, slots: list[Any]) -> None:
        task = self._task
        if task.phase == "wait":
            waits.append(task.node.label)
            slot, before, place = sent.pop(task.started)
            assert slots[slot].data_ptr() == place and torch.equal(slots[slot], before)
        if task.phase == "start":
            what = slots[self._first]
            sent[task.started] = self._first, what.clone(), what.data_ptr()
            if dist.get_rank() == late:
                time.sleep(0.01)
        call(self, slots)

    twin = layers("lean")
    model = shared(twin)
    with mock.patch.object(OpRunner, "__call__", watched):
        assert_as_whole(model, twin, 0, 0)
    assert not sent and len(waits) == 4 * 5


@on_ranks
def test_every_order_gives_the_same() -> None:
    """Bit for bit: filled gaps, late waits alone, and all in the order of the covers."""
    twin, found = layers("fast"), []
    x = tensor(6, 2, F).chunk(WORLD)[dist.get_rank()]

    def run() -> list[torch.Tensor]:
        model = shared(twin)
        leaf = x.detach().clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        return [y.detach(), leaf.grad, *(p.grad.to_local() for p in model.parameters())]  # type: ignore[list-item,union-attr]

    def as_covered(self: overlap._Order, fill: bool) -> list[Step]:
        return list(self.segment.backward)

    late = overlap._Order.backward
    orders: list[Callable[..., Any]] = [late, lambda self, fill: late(self, False), as_covered]
    for order in orders:
        with mock.patch.object(overlap._Order, "backward", order):
            found.append(run())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@on_ranks
def test_ranks_that_order_otherwise_are_told() -> None:
    """Steps are compared before a first run, in their order."""
    twin, late = layers("fast"), overlap._Order.backward
    model, x = shared(twin), tensor(6, 2, F).chunk(WORLD)[dist.get_rank()]

    def order(self: overlap._Order, fill: bool) -> list[Step]:
        return late(self, fill and dist.get_rank() == 0)

    with mock.patch.object(overlap._Order, "backward", order), pytest.raises(RankMismatchError, match="step"):
        model(x)


# ---- delay_wgrad_compute


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
