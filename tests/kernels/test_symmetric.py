"""Symmetric memory: why it cannot be used, and that NVLink multicast never is; GPUs and PyTorch's part are imitated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fuser.kernels import symmetric
from te_fuser.ops.group import Group

TWO = Group("tp", 2, "tp")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host of two GPUs that read one another's memory, whose ranks are both in one group."""
    found = SimpleNamespace(gpus=2, peers=True, here=True, ranks=[0, 1], backend="CUDA", multicast=0, asked=[])

    def handle(name: str, size: int) -> Any:
        found.asked.append((name, size, symmetric.os.environ.get(symmetric.MULTICAST)))
        return SimpleNamespace(multicast_ptr=found.multicast, buffer_ptrs=[size, 2 * size])

    memory = SimpleNamespace(get_backend=lambda device: found.backend, get_symm_mem_workspace=handle)
    found.memory, found.patch = memory, monkeypatch
    symmetric._memory()  # the real one declares the operators
    monkeypatch.setattr(symmetric, "_memory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: found.peers)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Group, "is_here", lambda self: found.here)
    monkeypatch.setattr(Group, "process_group", lambda self: None)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: found.ranks)
    for name in (symmetric.MULTICAST, symmetric.OVERLAPPING, symmetric.NATIVE, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return found


def test_nothing_speaks_against_two_gpus_of_one_host(host: Any) -> None:
    assert symmetric.obstacle(TWO, CUDA) is None
    assert symmetric.obstacle(TWO, torch.device("cuda")) is None
    host.patch.setenv("LOCAL_WORLD_SIZE", "2")
    assert symmetric.obstacle(TWO, CUDA) is None
    host.patch.setenv(symmetric.MULTICAST, "1")
    assert symmetric.obstacle(TWO, CUDA) is None


def test_reasons(host: Any) -> None:
    assert symmetric.obstacle(TWO, torch.device("cpu")) == "symmetric memory is of GPUs, the input is on cpu"
    host.gpus = 1
    assert "this process sees 1 GPU, and tp has 2 ranks: let each process see all of them" in said()
    host.patch.setenv(symmetric.OVERLAPPING, "1")
    assert symmetric.obstacle(TWO, CUDA) is None
    host.gpus, host.peers = 2, False
    assert said() == "GPU 0 cannot access the memory of GPU 1"
    host.patch.setenv("LOCAL_WORLD_SIZE", "8")
    host.ranks = [7, 8]
    assert said() == "the ranks of tp are on 2 hosts"
    host.here = False
    assert said() == "torch.distributed knows no group 'tp' in this process"
    host.patch.setenv(symmetric.MULTICAST, "0")
    assert said() == f"{symmetric.MULTICAST}=0 asks for NVLink multicast, which is not used here: unset it"
    host.patch.setenv(symmetric.NATIVE, "1")
    assert said().startswith(f"{symmetric.NATIVE} is set, by which")
    host.backend = "NVSHMEM"
    assert said().startswith("PyTorch's symmetric memory is by NVSHMEM here") and "unset TORCH_SYMMMEM" in said()


def test_a_pytorch_without_it(host: Any) -> None:
    host.patch.setattr(symmetric, "_OPERATORS", ("fused_nothing",))
    assert said() == "this PyTorch has no torch.ops.symm_mem.fused_nothing"

    def missing() -> Any:
        raise ImportError("no module")

    host.patch.setattr(symmetric, "_memory", missing)
    assert said() == "this PyTorch has no symmetric memory (no module)"


def said() -> str:
    why = symmetric.obstacle(TWO, CUDA)
    assert why is not None
    return why


def test_multicast_is_off_before_ranks_meet(host: Any) -> None:
    symmetric.workspace(TWO, 64)
    assert host.asked == [("tp", 64, "1")]


def test_what_was_made_with_multicast_is_not_used(host: Any) -> None:
    host.multicast = 4096
    with pytest.raises(RuntimeError, match=r"of tp was made with NVLink multicast.*set TORCH_SYMM_MEM_DISABLE_MULT"):
        symmetric.workspace(TWO, 64)
    host.patch.setenv(symmetric.MULTICAST, "0")
    with pytest.raises(RuntimeError, match="asks for NVLink multicast, which is not used here: unset it"):
        symmetric.workspace(TWO, 64)
    assert len(host.asked) == 1


def test_memory_that_cannot_be_had_is_said_with_what_to_do(host: Any) -> None:
    def fails(name: str, size: int) -> Any:
        raise RuntimeError("overlapping devices")

    host.memory.get_symm_mem_workspace = fails
    words = r"of tp cannot be had in 64 bytes \(overlapping devices\): leave .* out by te_fuser.fusions.disabled"
    with pytest.raises(RuntimeError, match=words):
        symmetric.workspace(TWO, 64)


def test_what_a_captured_graph_goes_by_stays(host: Any) -> None:
    host.patch.setattr(symmetric, "_graphed", {})
    symmetric.workspace(TWO, 64)
    assert not symmetric._graphed
    host.patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        symmetric.workspace(TWO, 64)
    assert len(symmetric._graphed) == 1
    symmetric.workspace(TWO, 128)
    assert len(symmetric._graphed) == 2


def test_pytorch_declares_the_operators_as_they_are_called() -> None:
    """By name and in this order, in every version that is supported."""
    symmetric._memory()
    gather, scatter = (getattr(torch.ops.symm_mem, name).default._schema for name in symmetric._OPERATORS)
    assert [a.name for a in gather.arguments] == ["A", "Bs", "gather_dim", "group_name", "return_A"]
    assert [a.name for a in scatter.arguments] == ["A", "B", "reduce_op", "scatter_dim", "group_name"]
