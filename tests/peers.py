"""Copy engines and flags on CPUs: streams are threads of the fake driver, and ranks write to memory that they share.

The native steps are those of GPUs. Each stream begins what it is given after a random while, so a wrong order shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from te_fuser.distributed.group import Group
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan.device import device_named
from te_fuser.fusions.match import Match
from te_fuser.kernels import peers
from te_fuser.kernels.cublaslt import products
from tests import fake_cublaslt, fake_cuda

_numbers = itertools.count()
_others: dict[int, list[torch.Tensor]] = {}  # what ranks have mapped of others, by the number of the memory


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
    ranks.barrier().wait()
    mine.unlink()
    addresses, own = [t.data_ptr() for t in mapped], mapped.pop(group.rank)
    _others[number] = mapped
    weakref.finalize(own, _others.pop, number)  # as symmetric memory, of which all goes when the own part does
    return own, addresses


def _meet(group: Group, device: torch.device) -> None:
    """As a GPU's synchronization: what streams were given is done."""
    ctypes.CDLL(str(fake_cuda.compile_driver())).fake_drain()
    group.process_group().barrier().wait()


@contextlib.contextmanager
def standing_in(delay: int = 200) -> Iterator[fake_cuda.FakeDriver]:
    """In here this CPU stands for GPUs, on each rank, and nothing speaks against exchanges by copies.

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
        _meet(Group.of("all", dist.group.WORLD), torch.device("cpu"))


@contextlib.contextmanager
def emulated(delay: int = 200) -> Iterator[fake_cuda.FakeDriver]:
    """In here plans are those of H200s, too: kernels and cuBLASLt's products run on tensors of this CPU, in float32."""
    with standing_in(delay) as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "device_of", lambda device: device_named("h200"))
        patch.setattr("te_fuser.fusions.cublaslt.why_no_product", _why_no_product)
        patch.setattr(products, "obstacle_on", lambda *_: None)
        patch.setattr(products, "refusal_of", lambda *_: None)
        for configured in (products.configured, products.product_of):
            configured.cache_clear()
        with _emulation().in_plans():
            yield driver
        for configured in (products.configured, products.product_of):
            configured.cache_clear()


@functools.cache
def _emulation() -> fake_cuda.Emulation:
    """One for a process, which compiles a kernel once."""
    return fake_cuda.Emulation(Path(tempfile.mkdtemp(prefix="te_fuser-emulated-")))


def _why_no_product(m: Match, kind: str, at: int = 0) -> str | None:
    if kind.startswith("wgrad") and (kind == "wgrad_onto") != m[at].accumulate_into_main_grad:
        return "the weight's gradient goes to its main_grad"
    return None if m.dtype == torch.float32 else "the products that stand for a GPU's are in float32"
