"""Parameters that are DTensors, in lists whose ops are not cut: each rank has them whole."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from tests.parallel.models import MODELS, assert_as_one_process, backward, whole_batch
from tests.parallel.ranks import mesh_of, on_ranks
from tests.twins import sequential, tensor


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            made = DTensor.from_local(p.detach().clone(), mesh, [Replicate()], run_check=False)
            setattr(module, name, nn.Parameter(made, p.requires_grad))
    return model


@pytest.mark.parametrize("kind", MODELS)
@on_ranks
def test_training(kind: str) -> None:
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
