"""Products that exchange their rows through symmetric memory while they run, against the whole list, in bfloat16."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.kernels import symmetric
from tests.gpu.ranks.models import assert_near, backward, batch, by_nccl, device, gradients, mesh, mlps, own
from tests.parallel.ranks import on_ranks
from tests.symmetric import standing_in, taken

pytestmark = pytest.mark.gpu
FORWARD = ["all_gather_matmul", "matmul_reduce_scatter"]
BACKWARD = {f"{name}_backward" for name in FORWARD}


@contextlib.contextmanager
def pipelined() -> Iterator[None]:
    """In here plans take them; on CPUs what stands for PyTorch's operators."""
    with contextlib.nullcontext() if device() == "cuda" else standing_in(), taken():
        yield


@pytest.mark.parametrize("memory", ["fast", "lean"])
@on_ranks
def test_as_the_whole_list(memory: str) -> None:
    """Both directions, over calls of growing sizes, which want larger buffers; then replayed."""
    twin = mlps(memory=memory)
    model = te_fuser.parallelize(copy.deepcopy(twin), mesh(), sequence_parallel=True)
    with pipelined():
        for part, seed in ((2, 1), (1, 2), (1, 3)):
            x, dy = (t[: len(t) // part] for t in (batch(seed), batch(seed + 50)))
            plan = model.plan(own(x).contiguous().requires_grad_())
            assert [s.name for s in plan.forward if s.name in FORWARD] == 2 * FORWARD
            assert {s.name for s in plan.backward} >= BACKWARD
            model.zero_grad()
            got = backward(model, own(x).contiguous(), own(dy).contiguous())
            twin.zero_grad()
            want = backward(twin, x, dy)
            for name, g, w in zip(("y", "dx"), got, want, strict=True):
                assert_near(g, own(w), name)
            for (name, gradient), q in zip(gradients(model), twin.parameters(), strict=True):
                assert q.grad is not None
                assert_near(gradient, q.grad, name)
        if by_nccl():
            replayed = te_fuser.cuda_graph(model, own(x).contiguous().requires_grad_())
            for seed in (4, 5):
                x, dy = batch(seed), batch(seed + 50)
                for g, w in zip(backward(replayed, own(x), own(dy)), backward(twin, x, dy), strict=True):
                    assert_near(g, own(w))


@on_ranks
def test_by_no_multicast() -> None:
    group = ops.Group.of("a test", dist.group.WORLD)
    if device() == "cuda":
        symmetric.workspace(group, 1 << 16)
        found = symmetric._memory().get_symm_mem_workspace(group.name, 1 << 16)
        assert found.multicast_ptr == 0 and found.world_size == group.size
        assert symmetric.obstacle(group, torch.device("cuda")) is None
    with mock.patch.dict(os.environ, {symmetric.MULTICAST: "0"}):
        with pytest.raises(RuntimeError, match="asks for NVLink multicast, which is not used here"):
            symmetric.workspace(group, 1 << 16)
        why = symmetric.obstacle(group, torch.device("cuda"))
        assert why is None or device() == "cpu" or "asks for NVLink multicast" in why
