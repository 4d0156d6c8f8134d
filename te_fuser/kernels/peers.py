"""Peers: buffers that the GPUs of a group write to one another, so that no collective's kernel takes multiprocessors.

The memory is PyTorch's symmetric memory. NVLink multicast is never used: it is switched off before a group's ranks
first meet, and each buffer is looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser import _native
from te_fuser.distributed import consistency
from te_fuser.distributed.exchange import Work
from te_fuser.distributed.group import Group

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_BUFFERS = 3  # of a group at first: exchanges that are under way at once, of which a plan seldom has more than two
_ALIGNMENT = 256  # bytes
_SHAPES = 256  # of blocks, whose tensors are kept
_LOOK, _SOON = 1.0, 0.01  # seconds from one look at a device to the next, and to release one again
_WITHOUT = (
    "leave exchanges by copy engines out by te_fuser.fusions.disabled('peer_copies'), and NCCL exchanges as before"
)

Memory = tuple[torch.Tensor, Sequence[int]]  # this rank's bytes, and where those of each rank lie for this process


# ------------------------------------------------------------------------------------------------ can it be used


def obstacle(group: Group, device: torch.device) -> str | None:
    """Reason, as far as this process knows, why ranks cannot write to one another."""
    if device.type != "cuda":
        return f"copy engines are of GPUs, the input is on {device.type}"
    why = _why_no_memory(device) or _why_multicast()
    if why is None and os.environ.get(CONNECTIONS) == "1":
        why = f"{CONNECTIONS}=1 lets a stream that waits for another rank hold up all others: unset it, or set it to 32"
    if why is None and not group.is_here():
        why = f"torch.distributed knows no group {group.title!r} in this process"
    return why or _why_not_one_host(group) or _why_no_peers(group, device)


def _why_no_memory(device: torch.device) -> str | None:
    """Reason why PyTorch gives no memory that several GPUs write to."""
    try:
        backend = _symmetric_memory().get_backend(device)
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    if backend != "CUDA":
        return f"PyTorch's symmetric memory is by {backend} here, and this takes that by CUDA: unset TORCH_SYMMMEM"
    return None


def _why_multicast() -> str | None:
    """Reason for which NVLink multicast would be used; None where it would not."""
    asked = os.environ.get(MULTICAST, "1")
    return None if asked == "1" else f"{MULTICAST}={asked} asks for NVLink multicast, which is not used here: unset it"


def _why_not_one_host(group: Group) -> str | None:
    """Reason why the ranks are not on one host, as far as their launcher says so."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or local == "0":
        return None
    ranks = torch.distributed.get_process_group_ranks(group.process_group())
    hosts = {rank // int(local) for rank in ranks}
    return None if len(hosts) == 1 else f"the ranks of {group.title} are on {len(hosts)} hosts"


def _why_no_peers(group: Group, device: torch.device) -> str | None:
    """Reason why this host has too few GPUs, or some that do not write to one another."""
    count, index = torch.cuda.device_count(), torch.cuda.current_device() if device.index is None else device.index
    if count < group.size and os.environ.get(OVERLAPPING) != "1":
        return (
            f"this process sees {count} GPU{'' if count == 1 else 's'}, and {group.title} has {group.size} ranks: let "
            "each process see all of them, and choose its own by torch.cuda.set_device"
        )
    others = [k for k in range(count) if k != index and not torch.cuda.can_device_access_peer(index, k)]
    return f"GPU {index} cannot access the memory of GPU {others[0]}" if others else None


# ------------------------------------------------------------------------------------------------------- buffers


class Peers:
    """Buffers of a group on a device, which grow on all ranks when needed."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.ranks, self.rank = group.size, group.rank
        self._group, self._device = group, device
        self._native: _native.PeerBuffers | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._count = _BUFFERS
        self._earlier: list[tuple[_native.PeerBuffers, torch.Tensor]] = []  # in which exchanges are under way still
        self._graphed: list[Any] = []  # what captured CUDA graphs go by, which has to stay when there are larger ones
        self._started = self._seen = 0  # exchanges and replays of graphs with some, and how many a look has seen
        self._since = time.monotonic()  # when a look found the device done, or more started
        self._given_up = ""  # why nothing is exchanged any more

    def buffers(self, block_bytes: int) -> _native.PeerBuffers:
        """Buffers for one more exchange of such blocks; all ranks ask in one order."""
        self.check()
        self._started += 1
        found = self._native
        if found is None or block_bytes > found.block_bytes or found.under_way == self._count:
            found = self._native = self._grown(block_bytes, found)
        elif self._is_captured() and (found, self._memory) not in self._graphed:
            self._graphed.append((found, self._memory))
        return found

    def blocks(self, buffer: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The block of each rank in a buffer, as a tensor like that, and all joined, [R, ..]."""
        return self._blocks(buffer, like.shape, like.dtype)

    def check(self) -> None:
        """Refuse more exchanges where the device waited for other ranks in vain."""
        if self._given_up:
            raise consistency.RankMismatchError(f"{self._given_up}. Nothing is exchanged any more: end the processes")

    def mark(self) -> None:
        """Note that the current stream has replayed exchanges."""
        self._started += 1
        for buffers in self._all():
            buffers.mark()

    def look(self) -> None:
        """End what the device waits for since the group's timeout."""
        now, longest = time.monotonic(), consistency.timeout(self._group)
        if self.is_done() or self._seen != self._started:
            self._seen, self._since = self._started, now
        elif now - self._since >= longest:
            self._given_up = (
                f"the device of {self._group} waited in an exchange by copy engines for {longest:.3g} s, the group's "
                f"timeout, and {self._silent()} of group {self._group.title!r} did not come"
            )
            while not (self.is_done() or _ending.wait(_SOON)):
                self.release()  # once for each wait
            warnings.warn(f"{self._given_up}: what it gave since is void", RuntimeWarning, stacklevel=1)

    def _silent(self) -> str:
        """The other ranks, but those that say in the store that their devices wait, too."""
        store, key = self._group.process_group().get_group_store(), "te_fuser/waits/{}".format
        silent = [f"{rank}" for rank in range(self.ranks) if rank != self.rank]
        with contextlib.suppress(RuntimeError):  # where the store is gone
            store.set(key(self.rank), "")
            time.sleep(2 * _LOOK)
            silent = [rank for rank in silent if not store.check([key(rank)])]
        return f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}" if silent else "no other rank"

    def is_done(self) -> bool:
        """True where the device is done with all exchanges that were waited for."""
        return all(buffers.is_done() for buffers in self._all())

    def release(self) -> None:
        """Let what waits for other ranks on the device go on; what it computes is void."""
        for buffers in self._all():
            buffers.release()

    def _all(self) -> list[_native.PeerBuffers]:
        return [] if self._native is None else [self._native, *[b for b, _ in (*self._earlier, *self._graphed)]]

    def _is_captured(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _grown(self, block_bytes: int, before: _native.PeerBuffers | None) -> _native.PeerBuffers:
        if self._is_captured():
            raise RuntimeError(
                f"exchanges of {self._group.title} need larger buffers, which all ranks make together, and a CUDA "
                "graph is being captured: run the model once with inputs like these before"
            )
        if before is not None:
            self._count += before.under_way == self._count
            block_bytes = max(block_bytes, before.block_bytes)
            self._earlier = [(b, m) for b, m in (*self._earlier, (before, self._memory)) if b.under_way]
        block_bytes = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        data = self._count * self.ranks * block_bytes
        self._memory, addresses = allocate(
            self._group, data + _native.PeerBuffers.flag_bytes(self.ranks, self._count), self._device
        )
        flags = self._memory[data:].view(torch.int32).view(self._count, 2, self.ranks)
        flags[:, 0], flags[:, 1] = 0, 1
        meet(self._group, self._device)
        memory, ranks, size = self._memory, self.ranks, self.ranks * block_bytes

        @functools.lru_cache(_SHAPES)
        def blocks(buffer: int, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            elements = memory[buffer * size : (buffer + 1) * size].view(dtype).view(ranks, -1)
            joined = elements[:, : shape.numel()].unflatten(1, shape)
            return *joined.unbind(0), joined

        self._blocks = blocks
        index = self._device.index or 0
        places = [*addresses], [address + data for address in addresses]
        return _native.PeerBuffers(self._group.title, index, self.rank, *places, block_bytes, self._count)


class ByCopies:
    """A transport by copy engines: sums are float32 where the blocks are, rounded once."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def gather(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        buffers = self._peers.buffers(sent.nbytes)
        return _Copies(buffers, buffers.gather(sent, made), (sent, made))

    def swap(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        buffers = self._peers.buffers(sent.nbytes // self._peers.ranks)
        return _Copies(buffers, buffers.gather(sent, made, False), (sent, made))

    def scatter(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        buffers = self._peers.buffers(made.nbytes)
        number = buffers.scatter(sent)
        return _Copies(buffers, number, (sent, made), self._peers.blocks(number, made)[-1])


class _Copies:
    """Copies under way, with their tensors; `blocks` are to be added up."""

    def __init__(
        self,
        buffers: _native.PeerBuffers,
        number: int,
        held: tuple[torch.Tensor, torch.Tensor] | None,
        blocks: torch.Tensor | None = None,
    ) -> None:
        self._buffers, self._number, self._held, self._blocks = buffers, number, held, blocks

    def wait(self) -> None:
        held, self._held = self._held, None
        if held is None:  # as works of torch.distributed, which may be waited for again
            return
        if self._blocks is not None:
            self._buffers.wait(self._number)
            torch.sum(self._blocks, 0, out=held[1])
        self._buffers.close(self._number)

    def __del__(self) -> None:
        if self._held is not None:  # nobody has waited, and its tensors go back to the allocator now
            with contextlib.suppress(Exception):
                self.wait()


def closed(opened: tuple[_native.PeerBuffers, int], *behind: object) -> tuple[()]:
    """Give back a buffer that a step left open, when the current stream has come so far."""
    opened[0].close(opened[1])
    return ()


@dataclass(frozen=True)
class PeersOf:
    """The peers of a group on a device, asked for each time: a group may be made anew."""

    group: Group
    device: torch.device

    @property
    def ranks(self) -> int:
        return self.group.size

    def buffers(self, block_bytes: int) -> _native.PeerBuffers:
        """See `Peers.buffers`."""
        return peers_of(self.group, self.device).buffers(block_bytes)

    def blocks(self, buffer: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `Peers.blocks`."""
        return peers_of(self.group, self.device).blocks(buffer, like)

    def transport(self) -> ByCopies:
        """A transport by copies between them."""
        return ByCopies(peers_of(self.group, self.device))


_peers: weakref.WeakKeyDictionary[Any, dict[torch.device, Peers]] = weakref.WeakKeyDictionary()


def peers_of(group: Group, device: torch.device) -> Peers:
    """The peers of a group on a device, the same for all exchanges of it."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known = _peers.setdefault(group.process_group(), {})
    if device not in known:
        known[device] = Peers(group, device)
        _watch()
    return known[device]


def known_peers(groups: Iterable[Group]) -> list[Peers]:
    """The peers of these groups that there are."""
    return [peers for group in groups for peers in _peers.get(group.process_group(), {}).values()]


_ending = threading.Event()


@functools.cache
def _watch() -> None:
    """Look at all peers now and then: no backend ends what a device waits for."""

    def run() -> None:
        while not _ending.wait(_LOOK):
            found = list[Peers]()
            with contextlib.suppress(RuntimeError):  # where one more is made meanwhile
                found = [peers for known in _peers.values() for peers in known.values()]
            for peers in found:
                with contextlib.suppress(RuntimeError, ValueError, RuntimeWarning):  # where the group is gone meanwhile
                    peers.look()

    def end() -> None:  # a thread in native code at the end of the interpreter would abort it
        _ending.set()
        thread.join(2 * _LOOK)

    thread = threading.Thread(target=run, name="te_fuser: exchanges by copies", daemon=True)
    thread.start()
    atexit.register(end)


def _symmetric_allocation(group: Group, size: int, device: torch.device) -> Memory:
    """Memory of so many bytes on each rank, which every rank can write."""
    os.environ.setdefault(MULTICAST, "1")
    why = _why_multicast()
    if why is not None:
        raise RuntimeError(f"symmetric memory of {group.title} cannot be had: {why}")
    try:
        memory = _allocated(size, device)
        found = _symmetric_memory().rendezvous(memory, group.name)
    except RuntimeError as error:
        raise RuntimeError(
            f"symmetric memory of {group.title} cannot be had in {size} bytes ({error}): {_WITHOUT}"
        ) from error
    if found.multicast_ptr:
        raise RuntimeError(
            f"the symmetric memory of {group.title} was made with NVLink multicast, which is not used here: set "
            f"{MULTICAST}=1 before anything else makes it, or {_WITHOUT}"
        )
    if found.buffer_ptrs[group.rank] != memory.data_ptr():
        raise RuntimeError(f"the symmetric memory of {group.title} lies elsewhere than its tensor: {_WITHOUT}")
    return memory, found.buffer_ptrs


def _allocated(size: int, device: torch.device) -> torch.Tensor:
    """Memory of so many bytes; where there is no room, the allocator gives back first."""
    try:
        return _symmetric_memory().empty(size, dtype=torch.uint8, device=device)  # type: ignore[no-any-return]
    except RuntimeError:
        torch.cuda.empty_cache()
        return _symmetric_memory().empty(size, dtype=torch.uint8, device=device)  # type: ignore[no-any-return]


def meet(group: Group, device: torch.device) -> None:
    """All ranks have come here, and their devices are done with what they were given."""
    torch.cuda.synchronize(device)
    options = torch.distributed.BarrierOptions()
    options.device_ids = [device.index or 0]
    group.process_group().barrier(options).wait()
    torch.cuda.synchronize(device)


allocate: Callable[[Group, int, torch.device], Memory] = _symmetric_allocation


def _symmetric_memory() -> Any:
    """PyTorch's module, which takes its time to be imported."""
    return importlib.import_module("torch.distributed._symmetric_memory")
