"""te_fuser.checkpoint whose ranks share what is kept."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.parallel import parallelize
from tests.parallel.ranks import mesh_of, on_ranks
from tests.parallel.test_parallelize import F, mlp
from tests.twins import assert_same_gradients, tensor


@pytest.mark.parametrize("group", ["default", "positions", "mesh"])
@pytest.mark.parametrize("rows", [4, 3])
@on_ranks
def test_each_rank_keeps_its_part(rows: int, group: str) -> None:
    """Of the first argument, also where parts are not equal; gradients are those of the model that shares nothing."""
    twin = te_fuser.Sequential(*mlp(), ops.Dropout(0.3), kernels="reference")
    model = parallelize(copy.deepcopy(twin), mesh_of())
    x, scale = tensor(rows, 1, F + 1, grad=False)[..., :F].requires_grad_(), tensor(1, seed=4)
    kept: list[torch.Tensor] = []
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if group == "positions":
            y = te_fuser.checkpoint(lambda x, s: model(x) * s, True, None, dist.group.WORLD, x, scale)
        else:
            given = {} if group == "default" else {"tp_group": mesh_of()}
            y = te_fuser.checkpoint(lambda x, s: model(x) * s, x, scale, distribute_saved_activations=True, **given)
    assert sum(t.numel() for t in kept if t is not scale) == -(-x.numel() // 2)
    memory = {t.untyped_storage().nbytes() for t in kept if t.numel() > 1}
    assert memory == {8 * -(-x.numel() // 2)}
    found = torch.autograd.grad(y.square().sum(), [x, scale])
    torch.manual_seed(3)
    wanted = torch.autograd.grad((twin(x) * scale).square().sum(), [x, scale])
    assert_same_gradients(dict(enumerate(found)), dict(enumerate(wanted)), 1e-11)  # type: ignore[arg-type]


@on_ranks
def test_what_ranks_have_apart_is_refused() -> None:
    model = parallelize(mlp(), mesh_of(), sequence_parallel=True)
    with pytest.raises(ValueError, match="by sequence_parallel each has its own part already"):
        te_fuser.checkpoint(model, tensor(4, 1, F), distribute_saved_activations=True)
    with pytest.raises(TypeError, match="shares the first argument, got NoneType: give a plain tensor first"):
        te_fuser.checkpoint(lambda x: x, None, distribute_saved_activations=True)
    with torch.no_grad():
        te_fuser.checkpoint(lambda x: x, None, distribute_saved_activations=True)


@on_ranks
def test_ranks_that_keep_parts_of_others_or_do_not_come() -> None:
    """Said in words on both: what is kept is compared, and who waits for parts in backward says it."""
    rank, x = dist.get_rank(), tensor(4, 1, F)
    given = {"distribute_saved_activations": True, "tp_group": dist.new_group(range(2), timedelta(seconds=1.0))}
    with pytest.raises(RankMismatchError, match=r"rank 0 has checkpoint .* x \[4, 1, .* rank 1 has .* x \[5, 1, "):
        te_fuser.checkpoint(torch.sin, tensor(4 + rank, 1, F), **given)
    y = te_fuser.checkpoint(torch.sin, x, **given)
    if rank:
        with pytest.raises(RankMismatchError, match=r"rank 0 .* did not come .* ready with checkpoint .* x \[6, 1, "):
            te_fuser.checkpoint(torch.sin, tensor(6, 1, F), **given)
    else:
        words = r"in the backward pass of a checkpoint, which gathers x \[4, 1, \d+\]: rank 0 .* waited in all_gather"
        with pytest.raises(RankMismatchError, match=words):
            y.sum().backward()
