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
        host: seconds of host time that one PyTorch operation costs.
        capability: a GPU's compute capability; None: the CPU.
    """

    name: str
    bandwidth: float
    matrix_rate: Mapping[str, float]
    vector_rate: float
    launch: float
    host: float = 5e-6
    capability: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """PyTorch's name of the kind of device."""
        return "cpu" if self.capability is None else "cuda"

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, such as "sm_90a"."""
        assert self.capability is not None
        major, minor = self.capability
        # From Hopper on, the instructions of one architecture alone have an "a" in its name.
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def seconds(self, cost: Cost, dtype: str) -> float:
        """The predicted time: the larger of bytes over bandwidth and operations over rate, plus launches."""
        if cost.seconds is not None:
            return cost.seconds
        memory = (cost.read + cost.written) / self.bandwidth
        matrix = cost.flops / self.matrix_rate.get(dtype, self.matrix_rate["float32"])
        vector = cost.vector_operations / self.vector_rate
        return max(memory, matrix, vector) + cost.launches * self.launch


# Bandwidth is that of a copy, matrix rates are those of large products on random data.
DEVICES: dict[str, Device] = {
    "cpu": Device("cpu", 12e9, {"float32": 260e9, "bfloat16": 150e9, "float16": 60e9, "float64": 90e9}, 60e9, 6e-6, 4e-6),
    "h200": Device(
        "h200", 4.2e12, {"float32": 400e12, "bfloat16": 790e12, "float16": 790e12, "float64": 60e12}, 30e12, 4e-6, 10e-6, (9, 0)
    ),
    "h100": Device(
        "h100", 2.9e12, {"float32": 400e12, "bfloat16": 760e12, "float16": 760e12, "float64": 60e12}, 30e12, 4e-6, 10e-6, (9, 0)
    ),
    "a100": Device(
        "a100", 1.7e12, {"float32": 140e12, "bfloat16": 270e12, "float16": 270e12, "float64": 19e12}, 12e12, 4e-6, 10e-6, (8, 0)
    ),
    "b200": Device(
        "b200", 6.8e12, {"float32": 900e12, "bfloat16": 1700e12, "float16": 1700e12, "float64": 37e12}, 45e12, 4e-6, 10e-6, (10, 0)
    ),
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
