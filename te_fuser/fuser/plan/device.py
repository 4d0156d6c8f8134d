"""Devices and their hosts as rooflines: what the planner predicts time from."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fuser import dtypes
from te_fuser.codegen.nvrtc import arch_of
from te_fuser.kernels.cublaslt.products import FIRST
from te_fuser.ops.products import half_gains

if TYPE_CHECKING:
    from te_fuser.fusions.match import Cost


@dataclass(frozen=True)
class Host:
    """Seconds that the host is busy with calls.

    Attributes:
        calls: of one call, by how a step is called (`Task.call`).
        node: of an autograd node of ours beyond its steps, forward and backward.
        gradient: of each gradient that such a node gives.
        guard: of refusing that PyTorch's own nodes are differentiated once more, for each result.
    """

    calls: Mapping[str, float]
    node: tuple[float, float] = (0.0, 0.0)
    gradient: float = 0.0
    guard: float = 0.0


# How a step is called -> the seconds of a call of a CPU, and of that of a GPU. "torch" is one of PyTorch's operations,
# "function" one or a few of them as a native step, "method" Python code with a call object around it; "recorded" and
# "recorded backward" are a function of PyTorch's that autograd records, and its node with one operation.
_CALLS = {
    "kernel": (1.6e-6, 9e-6),
    "product": (2.5e-6, 9e-6),
    "function": (2.5e-6, 12e-6),
    "method": (6e-6, 25e-6),
    "torch": (1.0e-6, 7e-6),
    "recorded": (3.2e-6, 15e-6),
    "recorded backward": (3.4e-6, 16e-6),
}
# By calls on tiny tensors, one thread of an AMD EPYC (9005), torch 2.13.
CPU_HOST = Host({kind: cpu for kind, (cpu, _) in _CALLS.items()}, node=(3e-6, 4e-6), gradient=0.3e-6, guard=1.7e-6)
# The host of an H200: from what eager PyTorch, te_fuser and an idle node take at 16 x 256 (docs/performance.md,
# by hand, commit 6ac7f2f). Steps of attention and of quack's products state theirs as so many calls of PyTorch, more
# than they take by now: what that leaves to others in small sizes was measured to be faster, or as fast.
GPU_HOST = Host({kind: gpu for kind, (_, gpu) in _CALLS.items()}, node=(9e-6, 14e-6), gradient=0.5e-6, guard=4e-6)
FREE_HOST = Host(dict.fromkeys(_CALLS, 0.0))

# Whether calls of this thread are to be captured: plans made now are for a device whose calls are replayed.
capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("te_fuser_capturing", default=False)


@dataclass(frozen=True)
class Link:
    """Connection between devices, with what collectives of large tensors reach over it.

    Attributes:
        rates: (ranks, bytes per second that each of them sends), by rising numbers of ranks.
        latency: seconds of a small collective, and the least of any.
        estimate: source of these numbers where nobody measured them; empty where they were measured.
        hidden: share of the time of sending that products beside it do not feel.
        beside: the same share for copies between GPUs that are one step with a product: 63 to 100% on two H200, over
            the four products of a layer (commit 891c75fb, `make gpu-bench RANKS=2 PART=links`).
    """

    rates: tuple[tuple[int, float], ...]
    latency: float
    estimate: str = ""
    hidden: float = 0.37
    beside: float = 0.8

    def seconds(self, cost: Cost) -> float:
        """The predicted time of what a step sends."""
        known = [rate for ranks, rate in self.rates if ranks <= cost.ranks] or [self.rates[0][1]]
        return max(self.latency, cost.sent / known[-1])

    def scaled(self, by: float, estimate: str) -> Link:
        return replace(self, rates=tuple((ranks, by * rate) for ranks, rate in self.rates), estimate=estimate)


# NCCL on two and on four H200 that NVLink connects, 8192 x 4096 in bfloat16; beside products 34 to 40% of the time was
# hidden (2026-11-22). What a small one takes is an assumption.
_NVLINK_4 = Link(((2, 204e9), (4, 264e9)), 15e-6)
_BY_NVLINK = "those of two and four H200 and the rate of its NVLink"
_PCIE = Link(((2, 20e9),), 25e-6, "the rate of PCIe 4.0")
_HOST_MEMORY = Link(((2, 1e9),), 100e-6, "gloo in one machine")


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    Attributes:
        bandwidth: bytes per second of a copy, read and written together.
        matrix_rate: floating-point operations per second of matrix products, by dtype name.
        vector_rate: float32 operations per second outside them.
        launch: seconds that one kernel costs beyond its work and what its call costs the host.
        capability: a GPU's compute capability; None: the CPU.
        multiprocessors: how many a GPU has.
        estimate: what a GPU's rates were taken from that nobody measured; empty where they were measured.
        replayed: whether calls are replayed as CUDA graphs, and cost the host nothing.
        converts: dtypes without products of their own: these are in float32, of copies, and rounded once.
        link: what it sends to the devices of other ranks by.
    """

    name: str
    bandwidth: float
    matrix_rate: Mapping[str, float]
    vector_rate: float
    launch: float
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    estimate: str = ""
    converts: frozenset[str] = frozenset()
    replayed: bool = False
    link: Link = _PCIE

    @property
    def kind(self) -> str:
        return "cpu" if self.capability is None else "cuda"

    @property
    def host(self) -> Host:
        """Seconds that calls cost its host; zeros where calls are replayed."""
        if self.replayed:
            return FREE_HOST
        return CPU_HOST if self.capability is None else GPU_HOST

    @property
    def arch(self) -> str:
        return arch_of(self.capability or (8, 0))

    def seconds(self, cost: Cost, dtype: str) -> float:
        """The predicted time: the larger of bytes and operations over their rates, plus launches and bytes apart.

        What is sent counts as far as it is not beside the rest, or hidden by other steps.
        """
        if cost.seconds is not None:
            return cost.seconds
        limits = self.limits(cost, dtype)
        limits["products"] /= cost.efficiency
        apart = (cost.apart + self._converted(cost, dtype)) / self.bandwidth
        limits["memory"] -= apart
        sending = limits.pop("link", 0.0)
        limits["link"] = cost.beside * sending
        felt = 1.0 - cost.beside - cost.hidden
        return limits.pop("launch") + apart + max(limits.values()) + felt * sending

    def limits(self, cost: Cost, dtype: str) -> dict[str, float]:
        """The least time for each resource at its full rate; for the "link" where something is sent."""
        dtype = cost.dtype or dtype
        if dtype not in self.matrix_rate:
            known = ", ".join(self.matrix_rate)
            raise ValueError(f"{self.name}: the rate of matrix products in {dtype} is not known, those in {known} are")
        sent = {"link": self.link.seconds(cost)} if cost.sent else {}
        return {
            "memory": (cost.read + cost.written + self._converted(cost, dtype)) / self.bandwidth,
            "products": cost.flops / self.matrix_rate[dtype],
            "arithmetic": cost.vector_operations / self.vector_rate,
            "launch": cost.launches * self.launch,
            **sent,
        }

    def _converted(self, cost: Cost, dtype: str) -> float:
        """The bytes of copies in float32, written and read again."""
        return 4.0 * (cost.read + cost.written) if cost.flops and dtype in self.converts else 0.0


def _rates(
    float32: float, half: float, float64: float, float16: float | None = None, narrow: float = 0.0
) -> dict[str, float]:
    """Rates by dtype, from 10**12 operations per second; those of 8 bits are `narrow` times the half's."""
    rates = {"float32": float32, "bfloat16": half, "float16": half if float16 is None else float16, "float64": float64}
    rates |= dict.fromkeys(dtypes.FLOAT8, narrow * half) if narrow else {}
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


# What one core does, in 10**12 operations per second, by the vectors it has: float32 products, other operations.
_CORES = {"AVX512": (0.13, 0.03), "AVX2": (0.06, 0.02)}
_PLAIN_CORE = (0.025, 0.01)
_HALF = ("bfloat16", "float16")
_CORE_BANDWIDTH = 10e9


def cpu_device(threads: int, capability: str, half: Mapping[str, float]) -> Device:
    """The CPU with so many threads and what `torch.backends.cpu.get_cpu_capability` says.

    Args:
        half: "bfloat16" and "float16", where it has products in them -> how many times faster than in float32.
    """
    products, others = (threads * rate for rate in _CORES.get(capability, _PLAIN_CORE))
    bfloat16, float16 = (products * half.get(dtype, 1.0) for dtype in _HALF)
    rates = _rates(products, bfloat16, 0.35 * products, float16)
    converts = frozenset(_HALF) - half.keys()
    bandwidth = threads * _CORE_BANDWIDTH
    return Device("cpu", bandwidth, rates, others * 1e12, 0.0, converts=converts, link=_HOST_MEMORY)


# Of its data sheet's peak an H200 reaches so much: copies, products on random data, other operations.
_COPY, _PRODUCTS, _OTHERS = 0.875, 0.8, 0.45
_BY_DATA_SHEET = "its data sheet"


def _by_data_sheet(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    bandwidth: float,
    *,
    tf32: float,
    half: float,
    float64: float,
    float32: float,
    link: Link = _PCIE,
) -> Device:
    """A GPU by the vendor's peaks without sparsity, in 10**12 bytes and operations per second."""
    rates = _rates(_PRODUCTS * tf32, _PRODUCTS * half, _PRODUCTS * float64, narrow=2.0 if capability >= FIRST else 0.0)
    copy, others = _COPY * bandwidth * 1e12, _OTHERS * float32 * 1e12
    return Device(name, copy, rates, others, 4e-6, capability, multiprocessors, _BY_DATA_SHEET, link=link)


_NVLINK_3, _NVLINK_5 = _NVLINK_4.scaled(2 / 3, _BY_NVLINK), _NVLINK_4.scaled(2.0, _BY_NVLINK)
_SAME_NVLINK = _NVLINK_4.scaled(1.0, _BY_NVLINK)
_B200 = _rates(900, 1700, 37, narrow=2.0)
# Bandwidth is that of a copy, matrix rates are those of large products on random data. In 8 bits an H200 ran those of a
# layer 1.74 to 2.0 times as fast as in bfloat16 (by hand, `python -m benchmarks.gpu.quantized` at commit ae102cf).
_GPUS = (
    Device("h200", 4.2e12, _rates(400, 790, 60, narrow=1.85), 30e12, 4e-6, (9, 0), 132, link=_NVLINK_4),
    Device("h100", 3.0e12, _rates(370, 700, 60, narrow=2.0), 30e12, 4e-6, (9, 0), 132, link=_SAME_NVLINK),
    Device("a100", 1.7e12, _rates(140, 270, 19), 12e12, 4e-6, (8, 0), 108, _BY_DATA_SHEET, link=_NVLINK_3),
    Device("b200", 6.8e12, _B200, 45e12, 4e-6, (10, 0), 148, _BY_DATA_SHEET, link=_NVLINK_5),
    _by_data_sheet("h200-nvl", (9, 0), 132, 4.8, tf32=418, half=835, float64=60, float32=60),
    _by_data_sheet("h100-nvl", (9, 0), 132, 3.9, tf32=418, half=835, float64=60, float32=60),
    _by_data_sheet("h100-pcie", (9, 0), 114, 2.0, tf32=378, half=756, float64=51, float32=51),
    _by_data_sheet("a100-40gb", (8, 0), 108, 1.555, tf32=156, half=312, float64=19.5, float32=19.5, link=_NVLINK_3),
    _by_data_sheet("a10", (8, 6), 72, 0.6, tf32=62.5, half=125, float64=0.49, float32=31.2),
    _by_data_sheet("l4", (8, 9), 58, 0.3, tf32=60, half=121, float64=0.47, float32=30.3),
    _by_data_sheet("l40", (8, 9), 142, 0.864, tf32=90.5, half=181, float64=1.41, float32=90.5),
    _by_data_sheet("l40s", (8, 9), 142, 0.864, tf32=183, half=362, float64=1.43, float32=91.6),
)
# The CPU at hand, with as many cores as PyTorch has threads.
_CPU = cpu_device(
    torch.get_num_threads(),
    torch.backends.cpu.get_cpu_capability(),
    {dtypes.name_of(dtype): gain for dtype, gain in half_gains().items()},
)
DEVICES: dict[str, Device] = {d.name: d for d in (_CPU, *_GPUS)}


def device_named(name: str) -> Device:
    """The device of that name; ValueError when it is unknown, TypeError when it is no name."""
    known = f"known: {', '.join(DEVICES)}; to plan for the device that x is on, leave device= out"
    if not isinstance(name, str):
        raise TypeError(f"a device to plan for is a name, like 'h200', got {name!r}; {known}")
    key = name.lower()
    if key not in DEVICES:
        raise ValueError(f"unknown device {name!r}; {known}")
    return DEVICES[key]


def device_of(device: torch.device) -> Device:
    """The roofline of the device at hand."""
    if device.type != "cuda":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(device)
    # The GPU that the driver's name means, by whole words; the one that says most of it.
    words = _words(name)
    known = [d for d in _GPUS if _words(d.name) <= words] if not words & _A_PART_OR_LESS else []
    best = max(known, key=lambda d: len(_words(d.name)), default=None)
    found = best or _estimated(name, torch.cuda.get_device_properties(device))
    return replace(found, replayed=True) if capturing.get() else found


# ------------------------------------------------------------------------------------------------ GPUs at hand

_A_PART_OR_LESS = {"mig", "laptop", "max"}  # a GPU with such a word in its name is not the one that the others name


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _estimated(name: str, properties: Any) -> Device:
    """A GPU that is in no table, by its memory and multiprocessors, beside the nearest one."""
    major, minor, count = properties.major, properties.minor, properties.multi_processor_count

    def distance(d: Device) -> int:
        known = d.capability or (0, 0)
        return abs(10 * (known[0] - major) + known[1] - minor)

    nearest = min(_GPUS, key=distance)
    scale = count / nearest.multiprocessors
    # GeForce cards add up products of half precision, and of TF32, at half the rate of the others.
    products = scale / 2 if "geforce" in _words(name) else scale
    # Bytes per second of a copy by the clock (kHz, two transfers) and the width (bits) of the memory; 0: not known.
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    bandwidth = _COPY * 2e3 * clock * width / 8
    return Device(
        name,
        bandwidth or scale * nearest.bandwidth,
        {dtype: products * rate for dtype, rate in nearest.matrix_rate.items()},
        scale * nearest.vector_rate,
        nearest.launch,
        (major, minor),
        count,
        f"its properties and the rates of {nearest.name}",
        link=nearest.link.scaled(1.0, f"those of {nearest.name}"),
    )
