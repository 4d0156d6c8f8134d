"""Devices as rooflines: what the planner predicts time from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fuser.fusions.match import Cost


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    Attributes:
        bandwidth: bytes per second of a copy, read and written together.
        matrix_rate: floating-point operations per second of matrix products, by dtype name.
        vector_rate: float32 operations per second outside them.
        launch: seconds that one kernel costs beyond its work.
        capability: a GPU's compute capability; None: the CPU.
    """

    name: str
    bandwidth: float
    matrix_rate: Mapping[str, float]
    vector_rate: float
    launch: float
    capability: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """PyTorch's name of the kind of device."""
        return "cpu" if self.capability is None else "cuda"

    def seconds(self, cost: Cost, dtype: str) -> float:
        """The predicted time: the larger of bytes and operations over their rates, plus launches and bytes apart."""
        if cost.seconds is not None:
            return cost.seconds
        limits = self.limits(cost, dtype)
        limits["products"] /= cost.efficiency
        apart = cost.apart / self.bandwidth
        limits["memory"] -= apart
        return limits.pop("launch") + apart + max(limits.values())

    def limits(self, cost: Cost, dtype: str) -> dict[str, float]:
        """The least time for each resource at its full rate: "memory", "products", "arithmetic", "launch"."""
        return {
            "memory": (cost.read + cost.written) / self.bandwidth,
            "products": cost.flops / self.matrix_rate.get(dtype, self.matrix_rate["float32"]),
            "arithmetic": cost.vector_operations / self.vector_rate,
            "launch": cost.launches * self.launch,
        }


def _rates(float32: float, half: float, float64: float, float16: float | None = None) -> dict[str, float]:
    """By dtype, from 10**12 operations per second."""
    rates = {"float32": float32, "bfloat16": half, "float16": half if float16 is None else float16, "float64": float64}
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


# Bandwidth is that of a copy, matrix rates are those of large products on random data.
# What one core does, in 10**12 operations per second, by the vectors it has: float32 products, other operations.
_CORES = {"AVX512": (0.13, 0.03), "AVX2": (0.06, 0.02)}
_PLAIN_CORE = (0.025, 0.01)
_CORE_BANDWIDTH = 10e9


def _cpu() -> Device:
    """The CPU at hand, with as many cores as PyTorch has threads."""
    threads = torch.get_num_threads()
    products, others = (threads * rate for rate in _CORES.get(torch.backends.cpu.get_cpu_capability(), _PLAIN_CORE))
    rates = _rates(products, products * _bfloat16_gain(), 0.35 * products, 0.2 * products)
    return Device("cpu", threads * _CORE_BANDWIDTH, rates, others * 1e12, 4e-6)


def _bfloat16_gain() -> float:
    """How much faster than in float32 products are in bfloat16, by the instructions that there are."""
    gains = (("_is_amx_tile_supported", 8.0), ("_is_avx512_bf16_supported", 2.5))
    return next((gain for name, gain in gains if getattr(torch.cpu, name, lambda: False)()), 0.2)


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _cpu(),
        Device("h200", 4.2e12, _rates(400, 790, 60), 30e12, 4e-6, (9, 0)),
        Device("h100", 2.9e12, _rates(400, 760, 60), 30e12, 4e-6, (9, 0)),
        Device("a100", 1.7e12, _rates(140, 270, 19), 12e12, 4e-6, (8, 0)),
        Device("b200", 6.8e12, _rates(900, 1700, 37), 45e12, 4e-6, (10, 0)),
    )
}


def device_named(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: when it is unknown.
    """
    key = name.lower()
    if key not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(DEVICES)}")
    return DEVICES[key]


def device_of(device: torch.device) -> Device:
    """The roofline of the device at hand."""
    if device.type != "cuda":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(device).lower()
    return next((d for key, d in DEVICES.items() if key in name), DEVICES["h100"])
