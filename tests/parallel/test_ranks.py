"""The processes that tests run in: a failure says what each wrote, nothing is left behind, and they start anew."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ranks import Ranks, RanksFailedError, on_ranks


@pytest.mark.parametrize("number", [1, 2])
@on_ranks
def test_ranks_know_each_other(number: int) -> None:
    total = torch.tensor([float(number * dist.get_rank())])
    dist.all_reduce(total)
    assert total.item() == number and torch.get_num_threads() == 1


@on_ranks
def one_fails() -> None:
    print("before", os.getpid(), flush=True)
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


@on_ranks
def both_end() -> None:
    if dist.get_rank() == 0:
        print("the end", file=sys.stderr)
        os._exit(3)
    os.kill(os.getpid(), signal.SIGTERM)


def gloo_threads() -> int:
    """Number of threads that run the works of this process's groups."""
    return sum(path.read_text().strip() == "pt_gloo_runloop" for path in Path("/proc/self/task").glob("*/comm"))


@on_ranks
def test_a_group_of_gloo_has_one_thread() -> None:
    dist.barrier()  # by which its threads have begun
    before = gloo_threads()
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.barrier(group)
    assert before >= 1 and gloo_threads() == before + 1
    dist.destroy_process_group(group)


def body(test: object) -> object:
    return vars(test)["body"]


def test_a_failure_shows_both_logs_and_leaves_no_process(ranks: Ranks) -> None:
    """One raises while the other waits for it; the next body gets new processes, and so it goes on."""
    with pytest.raises(RanksFailedError) as failed:
        ranks.run(body(one_fails), {})
    text = str(failed.value)
    first, second = text.split("---- rank 1 raised")
    assert text.startswith("one_fails failed") and "rank 0 did not answer in time" in first and "before" in first
    assert "ValueError: only here" in second and "before" in second
    for line in (line for line in text.splitlines() if line.startswith("before")):
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)
    ranks.run(body(test_ranks_know_each_other), {"number": 3})
    with pytest.raises(RanksFailedError, match=r"rank 0 ended with exit code 3, and wrote:\nthe end") as failed:
        ranks.run(body(both_end), {})
    assert "rank 1 ended by SIGTERM, and wrote:" in str(failed.value)
