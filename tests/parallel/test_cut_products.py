"""Products that two ranks share, against the same list in one process, in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from tests.parallel.cutting import ByReference, assert_as_whole, part
from tests.parallel.ranks import mesh_of, on_ranks
from tests.twins import sequential, tensor

SHAPE = (4, 6, 8)


def share(linear: ops.Linear, mode: str, sequence_dim: int | None = None) -> ops.Linear:
    """A copy that the ranks share, with this rank's part of the parameters."""
    made = copy.deepcopy(linear)
    made.group = mesh_of()["tp"]
    made.parallel_mode = mode
    if sequence_dim is not None:
        made.sequence_parallel, made.sequence_dim = True, sequence_dim
    made.weight = torch.nn.Parameter(part(linear.weight.detach(), int(mode == "row")).clone())
    if mode == "column" and linear.bias is not None:
        made.bias = torch.nn.Parameter(part(linear.bias.detach(), 0).clone())
    return made


@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("mode", ["column", "row"])
@on_ranks
def test_linear(mode: str, sequence_dim: int | None) -> None:
    """Values that are not cut along the features are whole, or cut along the sequence."""
    whole = sequential(ops.Linear(8, 12, bias=mode == "column"))
    cut = te_fuser.Sequential(share(whole[0], mode, sequence_dim), kernels="reference")
    ends = {"column": (sequence_dim, -1), "row": (-1, sequence_dim)}[mode]
    copies = [(m, whole) for m in (cut, copy.deepcopy(cut), pickle.loads(pickle.dumps(cut)))]
    for model, twin in (*copies, (ByReference(cut), ByReference(whole))):
        assert_as_whole(model, twin, {"x": tensor(*SHAPE, grad=False)}, {}, ends)
    assert "ranks=2 (tp)" in repr(cut[0]) and f"parallel_mode='{mode}'" in repr(cut[0])


@on_ranks
def test_attributes_that_are_set_are_for_the_next_call() -> None:
    linear = ops.Linear(8, 6, dtype=torch.float64)
    model, x = sequential(linear), tensor(*SHAPE)
    assert model(x).shape == (4, 6, 6)
    linear.group = mesh_of()["tp"]
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
