"""Products that two ranks share, against the same list in one process, in float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser
from te_fuser import ops
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import randomize, sequential, tensor

SHAPE = (4, 6, 8)
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def part(t: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's block."""
    return t.chunk(WORLD, dim)[dist.get_rank()]


def share(linear: ops.Linear, mode: str, sequence_dim: int | None = None) -> ops.Linear:
    """A copy that the ranks share, with this rank's part of the parameters."""
    made = copy.deepcopy(linear)
    made.group = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"]
    made.parallel_mode = mode
    if sequence_dim is not None:
        made.sequence_parallel, made.sequence_dim = True, sequence_dim
    made.weight = torch.nn.Parameter(part(linear.weight.detach(), int(mode == "row")).clone())
    if mode == "column" and linear.bias is not None:
        made.bias = torch.nn.Parameter(part(linear.bias.detach(), 0).clone())
    return made


def calls(model: te_fuser.Sequential) -> list[Any]:
    return [model, model.reference, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("mode", ["column", "row"])
@on_ranks
def test_linear(mode: str, sequence_dim: int | None) -> None:
    """What is not cut along the features is whole, or cut along the sequence."""
    whole = randomize(ops.Linear(8, 12, bias=mode == "column", dtype=torch.float64))
    x = tensor(*SHAPE)
    y = whole(x)
    dy = tensor(*y.shape, grad=False, seed=1)
    y.backward(dy)
    assert x.grad is not None
    rows = sequence_dim
    ends = {"column": (rows, -1), "row": (-1, rows)}[mode]
    own_x, want, own_dy, dx = (
        t.detach() if dim is None else part(t.detach(), dim)
        for t, dim in zip((x, y, dy, x.grad), (ends[0], ends[1], ends[1], ends[0]), strict=True)
    )
    linear = share(whole, mode, sequence_dim)
    model = te_fuser.Sequential(linear, kernels="reference")
    for run in calls(model):
        leaf = own_x.clone().requires_grad_()
        model.zero_grad()
        made = run(leaf)
        torch.testing.assert_close(made, want, **EXACT)
        owner = run if isinstance(run, te_fuser.Sequential) else model
        names = dict(owner.named_parameters())
        gradients = torch.autograd.grad(made, [leaf, *names.values()], own_dy)
        torch.testing.assert_close(gradients[0], dx, **EXACT)
        torch.testing.assert_close(gradients[1], part(whole.weight.grad, int(mode == "row")), **EXACT)
        if mode == "column":
            torch.testing.assert_close(gradients[2], part(whole.bias.grad, 0), **EXACT)
    assert "ranks=2 (tp)" in repr(linear) and f"parallel_mode='{mode}'" in repr(linear)


@on_ranks
def test_attributes_that_are_set_are_for_the_next_call() -> None:
    linear = ops.Linear(8, 6, dtype=torch.float64)
    model, x = sequential(linear), tensor(*SHAPE)
    assert model(x).shape == (4, 6, 6)
    linear.group = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"]
    linear.parallel_mode = "column"
    with pytest.raises(ValueError, match=r"MatMul.*weight has shape \[6, 8\], the op was made for \[3, 8\]"):
        model(x)
    linear.weight = torch.nn.Parameter(part(linear.weight.detach(), 0))
    linear.bias = torch.nn.Parameter(part(linear.bias.detach(), 0))
    assert model(x).shape == (4, 6, 3)
    linear.sequence_parallel = True
    assert model(part(x, 0)).shape == (4, 6, 3)
    linear.parallel_mode = "row"
    with pytest.raises(ValueError, match=r"weight has shape \[3, 8\], the op was made for \[6, 4\]"):
        model(x)


@on_ranks
def test_sizes_that_ranks_cannot_cut() -> None:
    linear = ops.Linear(8, 5, dtype=torch.float64)
    linear.group, linear.parallel_mode = ops.Group.of("Linear", dist.group.WORLD), "column"
    model = sequential(ops.GELU(), linear)
    with pytest.raises(ValueError, match=r"op 1 \(MatMul '1.matmul'\): MatMul: out_features=5 cannot be cut into 2"):
        model(tensor(*SHAPE))
