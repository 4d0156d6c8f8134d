"""Models in DistributedDataParallel, spread by `fully_shard`, or with DTensors: as one process with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.run import segment
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.parallel.models import (
    FEATURES,
    MODELS,
    Layers,
    adam,
    assert_as_one_process,
    assert_step_as_one_process,
    backward,
    gradients,
    loaded,
    own,
    plain_list,
    residual_layers,
    saved,
    spread,
    transformer_layers,
    whole_batch,
)
from tests.parallel.ranks import WORLD, mesh_of, on_ranks
from tests.twins import assert_same_gradients, sequential, tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, "default") for kind in MODELS),
        *((k, o) for o in OPTIONS if o != "default" for k in ("list", "checkpoint")),
    ],
)
@on_ranks
def test_gradients(kind: str, options: str) -> None:
    model, twin = MODELS[kind](), MODELS[kind]()
    parallel = DistributedDataParallel(model, **OPTIONS[options])
    for step in range(3):
        assert_step_as_one_process(parallel, twin, step)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks
def test_no_sync(options: str) -> None:
    """Of several micro-batches the last one sums over the ranks what all have added."""
    model, twin = residual_layers(), residual_layers()
    parallel = DistributedDataParallel(model, **OPTIONS[options])
    backward(parallel, own(whole_batch()))  # static_graph learns here; PyTorch takes no no_sync before
    for step in range(2):
        for m in (parallel, twin):
            m.zero_grad()
        for micro in range(3):
            x = whole_batch(3 * step + micro)
            backward(twin, x)
            with parallel.no_sync() if micro < 2 else nullcontext():
                backward(parallel, own(x))
        assert_as_one_process(parallel, twin)


class Branches(nn.Module):
    """One of them is in no call; the other reads one of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = plain_list(), plain_list()
        self.both = sequential(ops.Linear(FEATURES, FEATURES), ops.Output("middle"), ops.Linear(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, middle = self.both(self.used(x), outputs=("middle",))
        return middle


@on_ranks
def test_parameters_that_nothing_reaches() -> None:
    model, twin = Branches(), Branches()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        assert_step_as_one_process(parallel, twin, step)
    assert gradients(parallel)["unused.1.weight"] is None


@contextmanager
def small_segments(events: list[str]) -> Iterator[None]:
    """In here lists are cut wherever they may be; each backward of a segment is an event."""

    def run(program: Any, slots: Any, *rest: Any, **how: Any) -> None:
        ran(program, slots, *rest, **how)
        if rest:
            events.append("segment")

    ran = segment.run_program
    small = mock.patch.multiple(segmenting, SEGMENT_BYTES=1, WORTH_A_NODE=0)
    with small, mock.patch.object(segment, "run_program", run):
        yield


def noted(model: nn.Module, events: list[str]) -> DistributedDataParallel:
    """The model on all ranks; each gradient, and each sum of some, is an event."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=1e-4)

    def summed(state, bucket):  # DDP refuses annotations that are text
        events.append("sum")
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] / WORLD)

    parallel.register_comm_hook(None, summed)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    return parallel


def assert_summed_in_between(backwards: list[str], segments: int) -> None:
    """Each segment's parameters got their gradients behind it, and some were summed before the next one ran."""
    assert backwards.count("segment") == segments > 3
    ends = [k for k, event in enumerate(backwards) if event == "segment"]
    for end, following in zip(ends, [*ends[1:], len(backwards)], strict=True):
        assert following > end + 1, "a segment whose parameters got their gradients later"
    assert "sum" in backwards[: ends[1]], "nothing was summed before the second segment ran"


@on_ranks
def test_hooks_fire_between_segments() -> None:
    """So the ranks sum the gradients of the last layers while those of the first ones are not there yet."""
    events: list[str] = []
    with small_segments(events):
        model, twin = residual_layers(), residual_layers()
        parallel = noted(model, events)
        for step in range(2):  # DDP orders its buckets by the first
            events.clear()
            assert_step_as_one_process(parallel, twin, step)
        segments = len(model.plan(own(whole_batch())).segments)
    assert_summed_in_between(events[: len(events) - segments], segments)  # without the twin's


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": MXFP8BlockScaling(),
}


def layers_of_products() -> te_fuser.Sequential:
    """Lists in a list, wide enough for products of 8 bits."""
    torch.manual_seed(0)
    parts = [(ops.LayerNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)) for _ in range(4)]
    return te_fuser.Sequential(*(te_fuser.Residual(*part) for part in parts), ops.RMSNorm(32))


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks
def test_hooks_fire_between_segments_in_regions(recipe: str) -> None:
    """No segment ends between 8 bits and their product, but one may end where the layers do; values are the same."""
    events: list[str] = []
    found = []
    for small in (True, False):
        with small_segments(events) if small else nullcontext():
            model = layers_of_products()
            parallel = noted(model, events)
            for step in range(2):
                events.clear()
                model.zero_grad()
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
                with te_fuser.autocast(recipe=RECIPES[recipe]):
                    y = parallel(x)
                y.square().sum().backward()
            with te_fuser.autocast(recipe=RECIPES[recipe]):
                segments = len(model.plan(x).segments)
        if small:
            assert_summed_in_between(events, segments)
        else:
            assert segments == 1
        found.append([y, *gradients(parallel).values()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


# ---- fully_shard


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, alone: bool = False) -> list[torch.Tensor]:
    """The losses; `alone` on the whole batch."""
    losses = []
    for step in steps:
        x = whole_batch(step)
        optimizer.zero_grad()
        losses.append(backward(model, x if alone else own(x)))
        optimizer.step()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, none of them cut."""
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "reshard"), [*((kind, True) for kind in MODELS), ("residual", False), ("TransformerLayer", False)]
)
@on_ranks
def test_training_of_spread_models(kind: str, reshard: bool) -> None:
    """Gradients and parameters after steps of AdamW, of a model and of a copy that was made before it was cut."""
    twin = MODELS[kind]()
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard)
    optimizers = adam(model), adam(twin)
    for step in range(2):
        ours, theirs = (
            train(model, optimizers[0], range(step, step + 1)),
            train(twin, optimizers[1], range(step, step + 1), alone=True),
        )
        assert_as_one_process(model, twin)
        dist.all_reduce(ours[0])
        torch.testing.assert_close(ours[0] / WORLD, theirs[0])
    assert_same_gradients(whole(model), whole(twin))


class Twice(Layers):
    """Layers that each call goes through twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@on_ranks
def test_layers_that_run_twice_of_which_some_parameters_rest() -> None:
    twin = Twice(transformer_layers().layers)
    for name, p in twin.named_parameters():
        p.requires_grad_("query" not in name and "fc1" not in name)
    model = spread(copy.deepcopy(twin))
    for step in range(2):
        backward(model, own(whole_batch(step)))
        backward(twin, whole_batch(step))
    assert_as_one_process(model, twin)


@on_ranks
def test_plans_of_what_is_cut() -> None:
    """Calls that are alike are planned once; a look at a layer takes its parameters whole."""
    model, x = spread(transformer_layers()), own(whole_batch())
    optimizer = adam(model)
    train(model, optimizer, range(1))
    with mock.patch.object(pipeline, "make_plan", side_effect=AssertionError("planned again")):
        train(model, optimizer, range(1, 3))
    layer = next(iter(model))  # type: ignore[call-overload]
    words = rf"on rank {dist.get_rank()}: .*weight is a DTensor.*fully_shard.*after its unshard\(\)"
    with pytest.raises(TypeError, match=words):
        layer.explain(x, details=True)
    layer.unshard()
    assert "attention" in str(layer.explain(x, details=True))


@on_ranks
def test_whole_weights_are_not_held_between_forward_and_backward() -> None:
    """Neither as they are, nor joined."""
    model, held = spread(transformer_layers(), reshard_after_forward=True), list[torch.Tensor]()

    def note(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(own(whole_batch())).square().mean()
    weights = [t for t in held if t.dim() == 2 and FEATURES in t.shape]
    assert len(weights) >= 6 * 2 and not any(t.untyped_storage().size() for t in weights)
    loss.backward()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks
def test_gradients_are_summed_by_the_last_micro_batch(reshard: bool) -> None:
    twin = residual_layers()
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        backward(model, own(whole_batch(micro)))
        backward(twin, whole_batch(micro))
    assert_as_one_process(model, twin)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["looped", "TransformerLayer"])
@on_ranks
def test_mixed_precision(kind: str, reshard: bool) -> None:
    """Each rank computes in bfloat16 what a model in bfloat16 does; gradients are averaged in float32."""
    twin = MODELS[kind]().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = spread(copy.deepcopy(twin), reshard_after_forward=reshard, mp_policy=policy)
    x, low = whole_batch(dtype=torch.float32), twin.bfloat16()
    backward(model, own(x))
    parts = []
    for rank in range(WORLD):
        low.zero_grad()
        backward(low, own(x, rank).bfloat16())
        parts.append({name: None if g is None else g.float() for name, g in gradients(low).items()})
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    assert_same_gradients(gradients(model), mean, 1e-6)


@pytest.mark.parametrize("kind", ["residual", "LayerNormMLP", "TransformerLayer"])
@on_ranks
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    """Saved and loaded bit for bit, and what goes on from there goes on as if nothing had been."""
    model = spread(MODELS[kind]())
    optimizer = adam(model)
    train(model, optimizer, range(2))
    dcp.save(saved(model, optimizer), checkpoint_id=tmp_path)
    want = train(model, optimizer, range(2, 4))
    other = spread(MODELS[kind]())
    fresh = loaded(other, tmp_path)
    got = train(other, fresh, range(2, 4))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(whole(other), whole(model), rtol=0, atol=0)
    assert [*saved(other, fresh)["model"]] == [*MODELS[kind]().state_dict()]


# ---- DTensors in lists whose ops are not cut


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            made = DTensor.from_local(p.detach().clone(), mesh, [Replicate()], run_check=False)
            setattr(module, name, nn.Parameter(made, p.requires_grad))
    return model


@pytest.mark.parametrize("kind", MODELS)
@on_ranks
def test_training_with_replicas(kind: str) -> None:
    """Gradients lie as parameters do; calls that are alike are planned once, of a copy too."""
    twin = MODELS[kind]()
    model = replicated(copy.deepcopy(twin), mesh_of())
    frozen = next(name for name, _ in model.named_parameters() if name.endswith("weight"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, twin)]
    for step in range(3):
        if step == 2:
            model, twin = copy.deepcopy(model), copy.deepcopy(twin)
            for m in (model, twin):
                m.get_parameter(frozen).requires_grad_(False)
        x = whole_batch(step)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m.zero_grad()
            backward(m, x)
        assert_as_one_process(model, twin)
        assert all(type(p.grad) in (DTensor, type(None)) for p in model.parameters())
        if step == 1:
            with mock.patch.object(pipeline, "make_plan", side_effect=AssertionError("planned again")):
                backward(model, x)
            backward(twin, x)
            assert_as_one_process(model, twin)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks
def test_every_way_of_a_call() -> None:
    """The reference, without gradients, verified, one op alone, a hook of a parameter, and what a look says."""
    parts = ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8)
    twin = sequential(*parts)
    model = replicated(copy.deepcopy(twin), mesh_of())
    x, want = tensor(4, 8), twin(tensor(4, 8))
    for run in (model, model.reference, te_fuser.Sequential(*model, verify=True)):
        model.zero_grad()
        y = run(x)
        torch.testing.assert_close(y, want)
        y.square().sum().backward()
        twin.zero_grad()
        twin(x).square().sum().backward()
        assert_as_one_process(model, twin)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(model[1](x), twin[1](x))
    seen = []
    model[1].weight.register_hook(lambda g: seen.append(type(g)))
    model(x).sum().backward()
    assert seen == [DTensor] and "matmul" in str(model.explain(x, details=True)).lower()


@on_ranks
def test_another_placement_raises_on_all_ranks() -> None:
    mesh, model = mesh_of(), sequential(ops.GELU(), ops.Linear(8, 16))
    x = tensor(4, 8)
    model(x)
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Shard(0)]))
    where = rf"op 1 \(MatMul '1.matmul'\), on rank {dist.get_rank()}: parameter weight is a DTensor on .*tp.*Shard"
    for call in (model, model.plan, model.reference):
        with pytest.raises(TypeError, match=where + r".*takes it whole in each rank: te_fuser.parallelize\("):
            call(x)
    main = sequential(ops.MatMul(8, 8, accumulate_into_main_grad=True))
    with pytest.raises(TypeError, match="accumulate_into_main_grad takes plain parameters, and weight is a DTensor"):
        replicated(main, mesh)(x)
