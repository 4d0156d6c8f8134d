"""Schedules of generated kernels that were measured: for which rows they hold, and which are taken.

There is no GPU here: kernels are texts that nobody runs, and times are made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.codegen import cuda_loader, nvrtc
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.codegen.schedule import Schedule
from te_fuser.codegen.tuned_schedules import store_for
from te_fuser.config import config
from te_fuser.fuser import fuser as fuser_module
from te_fuser.fuser import measure
from te_fuser.fuser.plan import Plan
from te_fuser.fuser.program import descriptions, kernel_rows, kernel_sizes
from te_fuser.kernels import column_sums
from te_fuser.verify import steps
from tests.fake_cuda import FakeDriver, in_place

GPU_NAME = "NVIDIA H200"
GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, with tensors on the CPU that stand for those on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU_NAME)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *known, **options: Compiled(b"nowhere:-", ()))
    monkeypatch.setattr(cuda_loader, "_is_capturing", lambda index: False)
    for made in ("_made", "_written"):
        monkeypatch.setattr(cuda_loader, made, {})
    for ready in ("_ready", "_written_ready"):
        monkeypatch.setattr(cuda_loader, ready, set())
    monkeypatch.setattr(fuser_module, "target_for", lambda device, dtype, kernels: "cuda")
    column_sums._kernel.cache_clear()
    with in_place(library) as fake:
        yield fake
    column_sums._kernel.cache_clear()


def reshaped(**options: Any) -> Sequential:
    """A norm of heads: of each of the 10 rows it sees four."""
    return Sequential(ops.Linear(64, 256), ops.Reshape(-1, 64), ops.RMSNorm(64), **options)


def source() -> torch.Tensor:
    return torch.randn(10, 64, requires_grad=True)


def kernels_of(plan: Plan) -> dict[str, KernelDescription]:
    """By name."""
    return {d.name: d for d in descriptions([*plan.forward, *plan.backward]).values()}


def variants(d: KernelDescription) -> list[tuple[Schedule, ...]]:
    return cuda_loader.variants(d, GPU)


# ---- rows ------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_kernels_call() -> None:
    plan = reshaped().plan(source())
    rows = {name: kernel_rows(plan)[d.key] for name, d in kernels_of(plan).items()}
    assert rows == {"rms_norm_fwd": 40, "rms_norm_bwd": 40, "bias_bwd": 10}


def test_a_kernel_in_several_places_has_the_rows_of_the_largest() -> None:
    parts = [ops.SiLU(), ops.MatMul(16, 64), ops.Reshape(-1, 16), ops.SiLU(), ops.MatMul(16, 4), ops.Reshape(-1, 16)]
    model = Sequential(*parts, ops.SiLU()).requires_grad_(False)
    plan = model.plan(torch.randn(40, 16))
    (d,) = kernels_of(plan).values()
    assert [s.name for s in plan.forward].count(d.name) == 3  # of 40, 160 and 40 rows
    assert kernel_sizes(plan) == {d.key: (160, 1, 1)}


def test_measured_schedules_are_looked_up_by_the_rows_of_each_kernel(driver: FakeDriver, tmp_path: Path) -> None:
    """Where a model changes its rows, a kernel takes neither the model's class of rows nor loses its own."""
    model, x = reshaped(), source()
    d = kernels_of(model.plan(x))["rms_norm_fwd"]
    _, own, other = variants(d)[:3]
    store = store_for(GPU_NAME, tmp_path)
    store.put(d.key, own, 40)
    store.put(d.key, other, 10)
    fuser_module.prepare(model.plan(x), ())
    (kernel,) = (k for k in cuda_loader.loaded() if k.description.key == d.key)
    assert kernel.text.schedules == own


def test_whoever_loads_a_plans_kernels_says_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, int]] = []

    def load(
        wanted: Sequence[KernelDescription], target: str, device: Any, rows: Mapping[str, int], written: Any = ()
    ) -> dict[str, InterpretedKernel]:
        given.append({d.name: rows[d.key] for d in wanted})
        return {d.key: InterpretedKernel(d) for d in wanted}

    for module in (fuser_module, measure, steps):
        monkeypatch.setattr(module, "load_kernels", load)
    model, x = reshaped(verify=True), source()
    model(x)
    model.explain(x, measure=True)
    assert given == [{"rms_norm_fwd": 40, "rms_norm_bwd": 40, "bias_bwd": 10}] * 3
