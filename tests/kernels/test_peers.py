"""Memory of peers: why there is none, and that NVLink multicast is never used; GPUs and PyTorch's part are imitated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fuser.distributed.group import Group
from te_fuser.kernels import peers

TWO = Group("tp", 2, "tp")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host of two GPUs that write to one another's memory, whose ranks are both in one group."""
    found = SimpleNamespace(gpus=2, peers=True, here=True, ranks=[0, 1], backend="CUDA", multicast=0, asked=[])

    def rendezvous(memory: torch.Tensor, name: str) -> Any:
        found.asked.append((name, memory.numel(), peers.os.environ.get(peers.MULTICAST)))
        return SimpleNamespace(multicast_ptr=found.multicast, buffer_ptrs=[memory.data_ptr(), 4096])

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    found.memory = SimpleNamespace(get_backend=lambda device: found.backend, empty=empty, rendezvous=rendezvous)
    found.patch = monkeypatch
    monkeypatch.setattr(peers, "_symmetric_memory", lambda: found.memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: found.peers)
    monkeypatch.setattr(Group, "is_here", lambda self: found.here)
    monkeypatch.setattr(Group, "process_group", lambda self: None)
    monkeypatch.setattr(Group, "rank", 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: found.ranks)
    for name in (peers.MULTICAST, peers.OVERLAPPING, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return found


def test_nothing_speaks_against_two_gpus_of_one_host(host: Any) -> None:
    assert peers.obstacle(TWO, CUDA) is None
    assert peers.obstacle(TWO, torch.device("cuda")) is None
    host.patch.setenv("LOCAL_WORLD_SIZE", "2")
    assert peers.obstacle(TWO, CUDA) is None
    host.patch.setenv(peers.MULTICAST, "1")
    assert peers.obstacle(TWO, CUDA) is None


def test_reasons(host: Any) -> None:
    assert peers.obstacle(TWO, torch.device("cpu")) == "copy engines are of GPUs, the input is on cpu"
    host.gpus = 1
    assert "this process sees 1 GPU, and tp has 2 ranks: let each process see all of them" in said()
    host.patch.setenv(peers.OVERLAPPING, "1")
    assert peers.obstacle(TWO, CUDA) is None
    host.gpus, host.peers = 2, False
    assert said() == "GPU 0 cannot access the memory of GPU 1"
    host.patch.setenv("LOCAL_WORLD_SIZE", "8")
    host.ranks = [7, 8]
    assert said() == "the ranks of tp are on 2 hosts"
    host.here = False
    assert said() == "torch.distributed knows no group 'tp' in this process"
    host.patch.setenv(peers.MULTICAST, "0")
    assert said() == f"{peers.MULTICAST}=0 asks for NVLink multicast, which is not used here: unset it"
    host.backend = "NVSHMEM"
    assert said().startswith("PyTorch's symmetric memory is by NVSHMEM here") and "unset TORCH_SYMMMEM" in said()

    def missing() -> Any:
        raise ImportError("no module")

    host.patch.setattr(peers, "_symmetric_memory", missing)
    assert said() == "this PyTorch has no symmetric memory (no module)"


def said() -> str:
    why = peers.obstacle(TWO, CUDA)
    assert why is not None
    return why


def test_multicast_is_off_before_ranks_meet(host: Any) -> None:
    peers.allocate(TWO, 64, CUDA)
    assert host.asked == [("tp", 64, "1")]


def test_what_was_made_with_multicast_is_not_used(host: Any) -> None:
    host.multicast = 4096
    with pytest.raises(RuntimeError, match=r"of tp was made with NVLink multicast.*set TORCH_SYMM_MEM_DISABLE_MULT"):
        peers.allocate(TWO, 64, CUDA)
    host.patch.setenv(peers.MULTICAST, "0")
    with pytest.raises(RuntimeError, match="asks for NVLink multicast, which is not used here: unset it"):
        peers.allocate(TWO, 64, CUDA)
    assert len(host.asked) == 1


def test_memory_that_cannot_be_had_is_said_with_what_to_do(host: Any) -> None:
    def fails(memory: torch.Tensor, name: str) -> Any:
        raise RuntimeError("overlapping devices")

    host.memory.rendezvous = fails
    words = r"of tp cannot be had in 64 bytes \(overlapping devices\): leave .* out by te_fuser.fusions.disabled"
    with pytest.raises(RuntimeError, match=words):
        peers.allocate(TWO, 64, CUDA)


def test_memory_that_lies_elsewhere_than_its_tensor_is_not_used(host: Any) -> None:
    """As in an allocation that several tensors share."""
    host.memory.rendezvous = lambda memory, name: SimpleNamespace(multicast_ptr=0, buffer_ptrs=[4096, 4096])
    with pytest.raises(RuntimeError, match="the symmetric memory of tp lies elsewhere than its tensor: leave"):
        peers.allocate(TWO, 64, CUDA)


def test_one_queue_for_all_streams_is_refused(host: Any) -> None:
    host.patch.setenv(peers.CONNECTIONS, "1")
    assert said().startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 lets a stream that waits for another rank hold up all")
    host.patch.setenv(peers.CONNECTIONS, "32")
    assert peers.obstacle(TWO, CUDA) is None


def test_pytorch_has_what_is_called() -> None:
    """By name, in every version that is supported."""
    memory = peers._symmetric_memory()
    assert all(callable(getattr(memory, name)) for name in ("get_backend", "empty", "rendezvous"))
