"""Measuring on a GPU: contests in long alternating blocks, energy and clock, kernels by name, memory.

Everything but energy and kernels works without a GPU too, so that the benchmark can be tried anywhere.
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from benchmarks.common import turn_seconds

Step = Callable[[], object]

_FIRST_CALLS = 3  # compile, plan, allocate
_CALLS_TO_ESTIMATE = 5
_TRACED = 5
_HOLDING_CYCLES, _HOLDING_KERNEL = 40_000_000, "spin_kernel"
_NAME_LENGTH = 100  # of a kernel in a record: the libraries' are long, and differ early


@dataclass(frozen=True)
class Effort:
    """Length of a measurement.

    Attributes:
        rounds: how often each contender has its block.
        block: seconds that a block lasts at least. A card that is limited by power changes its clock within a second
            of a new load: shorter blocks would measure the contender before.
        warm_up: seconds of work before the first round.
    """

    rounds: int = 5
    block: float = 2.0
    warm_up: float = 5.0

    def in_shorter_blocks(self, times: int) -> Effort:
        """As long in all, in so many times as many rounds: where what disturbs lasts longer than a block."""
        return Effort(times * self.rounds, self.block / times, self.warm_up)


FULL, QUICK = Effort(), Effort(3, 0.3, 0.5)
TRIAL = Effort(2, 0.0, 0.0)  # does it run at all
SHORT = Effort(5, 0.3, 0.5)  # for what memory bounds or the host: nothing there throttles


def no_longer(effort: Effort, limit: Effort) -> Effort:
    """The smaller of two efforts."""
    return Effort(min(effort.rounds, limit.rounds), min(effort.block, limit.block), min(effort.warm_up, limit.warm_up))


# ------------------------------------------------------------------------------------------------- the card


class Card:
    """The device that is measured: waits for it, and reads its energy counter and clock where it has them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml = _Nvml(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None

    @property
    def is_gpu(self) -> bool:
        """True if the card has streams, graphs, events and a memory of its own."""
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """Vendor's name of the card."""
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU"

    def synchronize(self) -> None:
        """Wait until everything that was called has been done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def hold(self) -> None:
        """Keep it busy for some 20 ms, while what is called next queues up behind."""
        if self.is_gpu:
            torch.cuda._sleep(_HOLDING_CYCLES)

    def joules(self) -> float | None:
        """Its energy counter: what it has used since the driver was loaded."""
        return self._nvml.joules() if self._nvml else None

    def clock_mhz(self) -> int | None:
        """The multiprocessors' clock, now."""
        return self._nvml.clock_mhz() if self._nvml else None

    def describe(self) -> dict[str, str]:
        """Driver, power limit and highest clock, as nvidia-smi says; nothing where it is missing."""
        query = {"driver": "driver_version", "power limit": "power.limit", "highest clock": "clocks.max.sm"}
        command = ["nvidia-smi", f"--query-gpu={','.join(query.values())}", "--format=csv,noheader", "-i", "0"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        return {**dict(zip(query, map(str.strip, answer.split(",")), strict=True)), "energy": self.energy_source()}

    def energy_source(self) -> str:
        """Source of the numbers on energy, or why there are none."""
        return self._nvml.source if self._nvml else "no energy counter: not a GPU"


class _Nvml:
    """The two readings that are needed, from the driver's management library itself: no package has to be there."""

    _SM_CLOCK = 1

    def __init__(self, properties: Any) -> None:
        self._handle = ctypes.c_void_p()
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            self._check(self._library.nvmlInit_v2())
            name = f"GPU-{properties.uuid}".encode()
            self._check(self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)))
            self.source = "NVML's total energy counter (libnvidia-ml.so.1)"
        except (OSError, RuntimeError) as error:
            self._library = None
            self.source = f"no energy counter: {error}"

    def joules(self) -> float | None:
        used = ctypes.c_ulonglong()
        if self._library is None or self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(used)):
            return None
        return used.value * 1e-3

    def clock_mhz(self) -> int | None:
        clock = ctypes.c_uint()
        if self._library is None:
            return None
        failed = self._library.nvmlDeviceGetClockInfo(self._handle, self._SM_CLOCK, ctypes.byref(clock))
        return None if failed else clock.value

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"NVML answered with error {code}")


# ------------------------------------------------------------------------------------------------- contests


@dataclass(frozen=True)
class Block:
    """One contender's turn: seconds and energy of one call, and the clock at its end."""

    seconds: float
    joules: float | None
    mhz: int | None


@dataclass(frozen=True)
class Result:
    """All blocks of one contender."""

    blocks: tuple[Block, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(b.seconds for b in self.blocks)

    def as_data(self) -> dict[str, Any]:
        """For a record."""
        seconds = [b.seconds for b in self.blocks]
        joules = [b.joules for b in self.blocks if b.joules is not None]
        clocks = [b.mhz for b in self.blocks if b.mhz is not None]
        found: dict[str, Any] = {
            "ms": 1e3 * self.seconds,
            "range_ms": [1e3 * min(seconds), 1e3 * max(seconds)],
            "rounds_ms": [1e3 * s for s in seconds],
        }
        if joules:
            found["joules"] = statistics.median(joules)
            found["watts"] = statistics.median(b.joules / b.seconds for b in self.blocks if b.joules is not None)
        if clocks:
            found["mhz"] = statistics.median(clocks)
        return found

    def over(self, other: Result) -> float:
        """Ratio of times to another's: the median over the rounds, whose blocks lie near each other in time."""
        return statistics.median(a.seconds / b.seconds for a, b in zip(self.blocks, other.blocks, strict=True))


def contest(steps: Mapping[str, Step], effort: Effort, card: Card) -> dict[str, Result]:
    """Let contenders take turns; who begins changes from round to round.

    Args:
        steps: what to call, by name.
    """
    counts = {name: calls_in_a_block(step, effort, card) for name, step in steps.items()}
    names = list(steps)
    until = time.perf_counter() + effort.warm_up
    while time.perf_counter() < until:
        for name in names:
            turn_seconds(steps[name], max(1, counts[name] // 4), card.synchronize)
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for number in range(effort.rounds):
        for k in range(len(names)):
            name = names[(k + number) % len(names)]
            blocks[name].append(block(steps[name], counts[name], card))
    return {name: Result(tuple(found)) for name, found in blocks.items()}


def calls_in_a_block(step: Step, effort: Effort, card: Card) -> int:
    """Number of calls that fill a block; the first ones have been made then."""
    for _ in range(_FIRST_CALLS):
        step()
    seconds = turn_seconds(step, _CALLS_TO_ESTIMATE if effort.block else 1, card.synchronize)
    return max(1, math.ceil(effort.block / seconds))


def block(step: Step, count: int, card: Card) -> Block:
    """One turn of so many calls."""
    card.synchronize()
    energy, start = card.joules(), time.perf_counter()
    for _ in range(count):
        step()
    clock = card.clock_mhz()  # the GPU still has work in its queue: the clock under load
    card.synchronize()
    seconds, after = time.perf_counter() - start, card.joules()
    joules = None if energy is None or after is None else (after - energy) / count
    return Block(seconds / count, joules, clock)


# ------------------------------------------------------------------------------------- kernels and memory

_MEMSET = "gpu_memset"
_ON_GPU = {"kernel", "gpu_memcpy", _MEMSET}
# Parts of the names of kernels: of cuBLAS and of attention's libraries. A product with an epilogue counts as a product.
_PRODUCTS = ("gemm", "Gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")
_ATTENTION = ("cudnn", "sdpa", "flash", "fmha", "attention")
_ANY = "kernel_cutlass"  # so CuTe's compiler begins the name of any kernel, a norm's too


@dataclass(frozen=True)
class Trace:
    """Work of one call on the GPU, seen by the profiler; times in seconds.

    Attributes:
        kernels: kernels and copies together.
        memsets: beside them. On Hopper a library's product clears its counters by one first, the floor's too.
        span: from the first one's begin to the last one's end, of calls one after the other.
        products, attention: in kernels of either kind.
        rest: in which only other kernels run; one that begins before the kernel ahead of it ends counts from then on.
        names: how often each kernel runs, and its seconds, by name.
        order: the names of one call, as the kernels began; empty where calls differ.
    """

    kernels: float
    memsets: float
    span: float
    products: float
    attention: float
    rest: float
    names: Mapping[str, tuple[float, float]]
    order: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """For a record: `by_name` has a row for each kernel, `order` their numbers in the order of one call."""
        rows = [
            {"kernel": name[:_NAME_LENGTH], "count": run[0], "ms": 1e3 * run[1]} for name, run in self.names.items()
        ]
        numbers = {name: k for k, name in enumerate(self.names)}
        found: dict[str, Any] = {"kernels": self.kernels, "memsets": self.memsets}
        found |= {"by_name": rows, "order": [numbers[n] for n in self.order]}
        own = self.products + self.attention
        if not own:
            return found
        idle = self.span - own - self.rest
        parts = {"products": self.products, "attention": self.attention, "rest": self.rest, "idle": idle}
        return {**found, "over_own_products": self.span / own, **{f"{k}_ms": 1e3 * v for k, v in parts.items()}}


def traced(step: Step, card: Card, repeats: int = _TRACED) -> Trace | None:
    """Run a few calls under the profiler; None without a GPU."""
    if not card.is_gpu:
        return None
    for _ in range(_TRACED):
        step()
    card.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        card.hold()  # else the GPU waits for the host in the first call, and in no other
        for _ in range(repeats):
            step()
        card.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summarized(events, repeats)


def summarized(events: Sequence[Mapping[str, Any]], repeats: int) -> Trace:
    """The profiler's events (times in microseconds) as numbers of one call."""
    on_gpu = (e for e in events if e.get("cat") in _ON_GPU and _HOLDING_KERNEL not in e["name"])
    found = sorted(on_gpu, key=lambda e: e["ts"])
    if not found:
        raise RuntimeError("the profiler saw no kernel: is another profiler attached to this process?")
    span = max(e["ts"] + e["dur"] for e in found) - found[0]["ts"]
    scale = 1e-6 / repeats
    names: dict[str, tuple[float, float]] = {}
    spent = {"products": 0.0, "attention": 0.0}
    for e in found:
        count, seconds = names.get(e["name"], (0.0, 0.0))
        names[e["name"]] = (count + 1 / repeats, seconds + e["dur"] * scale)
        kind = kind_of(e["name"].lower())
        if kind in spent:
            spent[kind] += e["dur"] * scale
    rest = _covered(found) * scale - sum(spent.values())
    order = _order([e["name"] for e in found], repeats)
    memsets = sum(e["cat"] == _MEMSET for e in found)
    counts = (len(found) - memsets) / repeats, memsets / repeats
    return Trace(*counts, span * scale, spent["products"], spent["attention"], rest, names, order)


def _covered(events: Sequence[Mapping[str, Any]]) -> float:
    """Microseconds in which at least one of these runs; they are in the order of their beginnings."""
    total, until = 0.0, events[0]["ts"]
    for e in events:
        end = e["ts"] + e["dur"]
        total += max(0.0, end - max(until, e["ts"]))
        until = max(until, end)
    return total


def _order(names: Sequence[str], repeats: int) -> tuple[str, ...]:
    """The names of one of the calls, where all are alike."""
    each, left = divmod(len(names), repeats)
    calls = {tuple(names[k * each : (k + 1) * each]) for k in range(repeats)}
    return calls.pop() if not left and len(calls) == 1 else ()


def kind_of(name: str) -> str:
    """Kind of a kernel, by its name; attention first, since its libraries' names may hold a product's."""
    kinds = (("attention", _ATTENTION), ("products", _PRODUCTS))
    return next((kind for kind, parts in kinds if any(part in name.removeprefix(_ANY) for part in parts)), "rest")


def peak_bytes(step: Step, card: Card) -> int | None:
    """The most memory that a call takes beyond what was there before it; None without a GPU."""
    if not card.is_gpu:
        return None
    card.synchronize()
    before = torch.cuda.memory_allocated(card.device)
    torch.cuda.reset_peak_memory_stats(card.device)
    step()
    card.synchronize()
    return torch.cuda.max_memory_allocated(card.device) - before


def kept_bytes(forward: Callable[[], object], apart: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps for backward, each storage once; those of `apart` (parameters) do not count."""
    skipped = {_own(t).untyped_storage().data_ptr() for t in apart}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = _own(t).untyped_storage()
        if storage.data_ptr() not in skipped:
            storages[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()
    total = sum(s.nbytes() for s in storages.values())
    del result
    return total


def _own(t: torch.Tensor) -> torch.Tensor:
    """Part that this process has of a shared tensor, which may be under way."""
    t = t._local_tensor if isinstance(t, DTensor) else t
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t
