"""Settings of the process that tests run in, so that they depend neither on the machine nor on its user."""

from __future__ import annotations

import platform
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch

from te_fuser import fusions
from te_fuser.codegen.compiler import TARGET_FLAGS
from te_fuser.config import config
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import tuned
from te_fuser.fuser.plan.device import DEVICES, cpu_device
from te_fuser.fusions import registry
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack

# The CPUs that tests plan for, whatever they run on.
CPUS = {"avx512": cpu_device(2, "AVX512", {"bfloat16": 2.5}), "avx2": cpu_device(2, "AVX2", {})}
AVX2_FLAGS = ("-march=haswell",)


def settle(patch: pytest.MonkeyPatch, cpu: str, folder: Path) -> None:
    """Set them all, for the CPU of that name; nothing is kept in `folder`."""
    # Test processes share the cores, and two pools on one core wait for each other.
    torch.set_num_threads(1)
    _one_cpu(patch, cpu)
    patch.delenv("COLUMNS", raising=False)  # plans are printed as wide as a terminal is
    _own_nodes(patch)
    _nothing_tuned(patch, folder)
    _no_optional_packages(patch)


def _one_cpu(patch: pytest.MonkeyPatch, name: str) -> None:
    """Prices, and so plans, are those of a CPU that the command names, not of the one that it runs on."""
    patch.setitem(DEVICES, "cpu", CPUS[name])
    if name == "avx2":
        patch.setitem(TARGET_FLAGS, platform.machine(), AVX2_FLAGS)


def _own_nodes(patch: pytest.MonkeyPatch) -> None:
    """Small models run as PyTorch's functions; in tests they stand for large ones, but where `recorded()` is."""
    nothing: ContextVar[frozenset[str]] = ContextVar("te_fuser_disabled", default=frozenset({fusions.RECORDED}))
    patch.setattr(registry, "_disabled", nothing)


def _nothing_tuned(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide the choices that `tune` found on this machine from the plans of tests; a test's own folder counts."""
    empty = tuned.TunedChoices(folder / "none.json")

    def store_for(device_name: str) -> tuned.TunedChoices:
        return empty if config.cache_dir is None else tuned.store_for(device_name)

    patch.setattr(pipeline, "store_for", store_for)


def _no_optional_packages(patch: pytest.MonkeyPatch) -> None:
    """Plans are those of a machine without them, unless a test puts one in place."""
    for package in (cudnn_frontend, flash_attn_4, quack):
        patch.setattr(package.PACKAGE, "version", lambda: None)
