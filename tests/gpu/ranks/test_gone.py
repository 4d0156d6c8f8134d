"""A rank that ends in the middle: the GPU of the other one waits for the group's timeout, and then that rank raises."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.kernels import peers
from tests.gpu.ranks.conftest import RANKS
from tests.gpu.ranks.models import batch, mesh, mlps, own
from tests.parallel.ranks import Ranks, RanksFailedError, on_ranks


@on_ranks
def one_is_gone(replayed: bool) -> None:
    """Not a test: the body of the next one."""
    model = te_fuser.parallelize(mlps(), mesh(), sequence_parallel=True)
    x = own(batch()).contiguous()
    group = peers.Group.of("a test", mesh())
    if peers.obstacle(group, x.device) is not None:  # ranks that share a GPU
        print("heard of it")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(consistency, "timeout", lambda group: 1.0)
        patch.setattr(peers, "_LOOK", 0.1)  # the other one has a few seconds, when one is gone
        run = te_fuser.cuda_graph(model, x) if replayed else model
        for _ in range(3):
            run(x)
        torch.cuda.synchronize()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 30.0
        words = "waited in an exchange by copy engines for 1 s, .* and rank 1 of group 'tp' did not come"
        with pytest.raises(RankMismatchError, match=words):
            while time.monotonic() < until:
                run(x)
                torch.cuda.synchronize()  # released, so what it gave is void
    print("heard of it", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # NCCL would wait for the other one at the end


@pytest.mark.parametrize("replayed", [False, True])
def test_a_rank_that_is_gone(replayed: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The wait of the other one's GPU ends, in a call and in a replay, and what follows raises."""
    ranks = Ranks(tmp_path, request.config.getoption("--cpu"), world=RANKS, deadline=60, gpu=True)
    with pytest.raises(RanksFailedError) as error:
        ranks.run(vars(one_is_gone)["body"], {"replayed": replayed})
    ranks.stop()
    assert "heard of it" in str(error.value)
