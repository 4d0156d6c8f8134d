"""Copy engines and flags on CPUs: streams are threads of the fake driver, and ranks write to memory that they share.

The native steps are those of GPUs. Each stream begins what it is given after a random while, so a wrong order shows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from te_fuser.kernels import peers
from te_fuser.ops.group import Group
from tests import fake_cuda, fake_cublaslt

_numbers = itertools.count()


def _allocate(group: Group, size: int, device: torch.device) -> peers.Memory:
    """A file for each rank, which all of them map."""
    ranks, number = group.process_group(), next(_numbers)
    store = ranks.get_group_store()
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    mine = folder / f"te_fuser-peers-{os.getpid()}-{number}"
    mine.write_bytes(bytes(size))
    store.set(f"peers/{group.name}/{number}/{group.rank}", str(mine))
    paths = [store.get(f"peers/{group.name}/{number}/{rank}").decode() for rank in range(group.size)]
    mapped = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    _kept.append(mapped)
    ranks.barrier().wait()
    mine.unlink()
    return mapped[group.rank], [t.data_ptr() for t in mapped]


_kept: list[list[torch.Tensor]] = []  # what streams of threads may write to still


def _meet(group: Group, device: torch.device) -> None:
    group.process_group().barrier().wait()


@contextlib.contextmanager
def standing_in(delay: int = 200) -> Iterator[fake_cuda.FakeDriver]:
    """In here GPUs are stood for by this CPU, on each rank, and nothing speaks against exchanges by copies.

    Args:
        delay: the most microseconds that a stream takes to begin something.
    """
    driver, library = fake_cuda.compile_driver(), fake_cublaslt.compile_library()
    with fake_cuda.in_place(driver) as state, fake_cublaslt.in_place(library), pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "obstacle", lambda group, device: None)
        patch.setattr(peers, "allocate", _allocate)
        patch.setattr(peers, "meet", _meet)
        patch.setattr(peers, "_peers", type(peers._peers)())
        state.delay = delay
        yield state
        dist.barrier()
