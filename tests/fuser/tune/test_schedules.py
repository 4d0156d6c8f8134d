"""Schedules of generated kernels that were measured: for which rows they hold, and which are taken.

There is no GPU here: kernels are texts that nobody runs, and times are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.codegen import cuda_loader, nvrtc
from te_fuser.codegen.description import NUMBERS, KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.codegen.schedule import Schedule
from te_fuser.codegen.tuned_schedules import store_for
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run import loading
from te_fuser.fuser.steps.step import KernelFunction
from te_fuser.fuser.tune import schedules
from te_fuser.fuser.tune import tune as tuning
from te_fuser.kernels.tuning_trials import Deciding
from tests.codegen import tile_cases
from tests.codegen.corpus import Kit
from tests.fake_cuda import FakeDriver, as_new_process, forget_written, in_place

GPU_NAME = "NVIDIA H200"
GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, with tensors on the CPU that stand for those on a GPU."""
    as_new_process(monkeypatch, tmp_path, GPU_NAME)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *known, **options: Compiled(b"nowhere:-", ()))
    monkeypatch.setattr(pipeline, "target_for", lambda *_: "cuda")
    with in_place(library) as fake:
        yield fake
    forget_written()


def reshaped(**options: Any) -> Sequential:
    """A norm of heads: of each of the 10 rows it sees four."""
    return Sequential(ops.Linear(64, 256), ops.Reshape(-1, 64), ops.RMSNorm(64), **options)


def source() -> torch.Tensor:
    return torch.randn(10, 64, requires_grad=True)


def kernels_of(plan: Plan) -> dict[str, KernelDescription]:
    """By name."""
    return {g.description.name: g.description for g in plan.generated.values()}


def variants(d: KernelDescription) -> list[tuple[Schedule, ...]]:
    return cuda_loader.variants(d, GPU)


def test_memory_for_a_call_fits_every_kind_of_tensor() -> None:
    """Numbers that are raised, a seed, and what is stored transposed."""
    d = tile_cases.dropout(Kit(), 24, "float8_e4m3fn")
    tensors = schedules._tensors(d, (21, 1, 1), torch.device("cpu"))
    InterpretedKernel(d)(tensors, 21, 1, 1, (0,))
    assert [t.numel() for t in tensors] == [21 * 24, 1, len(NUMBERS), 2, 21 * 24, 32 * 24, 24]
    assert tensors[2][0].item() > 0.0


# ---- rows ------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_kernels_call() -> None:
    plan = reshaped().plan(source())
    rows = {g.description.name: g.sizes[0] for g in plan.generated.values()}
    assert rows == {"rms_norm_fwd": 40, "rms_norm_bwd": 40, "bias_bwd": 10}


def test_a_kernel_in_several_places_has_the_rows_of_the_largest() -> None:
    parts = [ops.SiLU(), ops.MatMul(16, 64), ops.Reshape(-1, 16), ops.SiLU(), ops.MatMul(16, 4), ops.Reshape(-1, 16)]
    model = Sequential(*parts, ops.SiLU()).requires_grad_(False)
    plan = model.plan(torch.randn(40, 16))
    (d,) = kernels_of(plan).values()
    assert [s.name for s in plan.forward].count(d.name) == 3  # of 40, 160 and 40 rows
    assert plan.generated[d.key].sizes == (160, 1, 1)


def test_measured_schedules_are_looked_up_by_the_rows_of_each_kernel(driver: FakeDriver, tmp_path: Path) -> None:
    """Kernels of a model that changes its rows take the schedule of their own rows, not of the model's."""
    model, x = reshaped(), source()
    d = kernels_of(model.plan(x))["rms_norm_fwd"]
    _, own, other = variants(d)[:3]
    store = store_for(GPU_NAME, tmp_path)
    store.put(d.key, own, 40)
    store.put(d.key, other, 10)
    loading.load(model.plan(x))
    (kernel,) = (k for k in cuda_loader.loaded() if k.description.key == d.key)
    assert kernel.text.schedules == own


def test_whoever_loads_a_plans_kernels_says_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, int]] = []

    def load(
        wanted: Sequence[KernelDescription], target: str, device: Any, rows: Mapping[str, int], written: Any = ()
    ) -> dict[str, InterpretedKernel]:
        given.append({d.name: rows[d.key] for d in wanted})
        return {d.key: InterpretedKernel(d) for d in wanted}

    monkeypatch.setattr(loading, "load_kernels", load)
    model, x = reshaped(verify=True), source()
    model(x)
    model.explain(x, measure=True, details=True)
    # as many as there would be if the call had 16 rows, the next power of two; what is verified has a plan of its own
    assert given == [{"rms_norm_fwd": 64, "rms_norm_bwd": 64, "bias_bwd": 16}] * 4


# ---- what is taken ---------------------------------------------------------------------------------------------

MARGIN = 0.005
TOGETHER = "schedules of kernels together"


@pytest.fixture
def faster_alone(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, whatever differs from the model's choice takes half the time."""

    def seconds(kernel: cuda_loader.GpuKernel, *known: object) -> float:
        return 1.0 if kernel.text.schedules == variants(kernel.description)[0] else 0.5

    monkeypatch.setattr(schedules, "_seconds", seconds)


class Times:
    """A clock: how a model compares with the one before, contest by contest, and which kernels were exchanged."""

    def __init__(self, *ratios: float) -> None:
        self.ratios, self.contests = list(ratios), list[tuple[int, int]]()

    def compare(self, before: Mapping[str, KernelFunction], after: Mapping[str, KernelFunction]) -> float:
        self.contests.append((len(before), len(after)))
        return self.ratios[len(self.contests) - 1]


def kept(plan: Plan, folder: Path) -> list[str]:
    """The kernels whose schedules are on disk for their rows."""
    store = store_for(GPU_NAME, folder)
    return [name for name, d in kernels_of(plan).items() if store.find(d.key, plan.generated[d.key].sizes[0])]


NAMES = ["rms_norm_fwd", "rms_norm_bwd", "bias_bwd"]


@pytest.mark.parametrize("ratio", [0.9999, 0.9951, 1.0])
def test_what_gains_less_than_the_margin_is_not_kept(ratio: float, faster_alone: None, tmp_path: Path) -> None:
    plan, times = reshaped().plan(source()), Times(*[ratio] * 3)
    trials = schedules.tune_schedules(plan, times.compare, MARGIN)
    assert [(t.place, t.choice, t.ratio, t.taken) for t in trials] == [
        (f"{name} schedule", "new", ratio, False) for name in NAMES
    ]
    assert times.contests == [(0, 1)] * 3 and kept(plan, tmp_path) == []


def test_what_gains_is_kept_and_loaded_from_then_on(faster_alone: None, tmp_path: Path) -> None:
    plan, times = reshaped().plan(source()), Times(0.99, 0.9999, 0.98, 0.97)
    trials = schedules.tune_schedules(plan, times.compare, MARGIN)
    assert [(t.ratio, t.taken) for t in trials] == [(0.99, True), (0.9999, False), (0.98, True), (0.97, True)]
    assert (trials[-1].place, trials[-1].choice) == (TOGETHER, "all")
    assert times.contests == [(0, 1), (1, 2), (1, 2), (0, 2)]
    assert kept(plan, tmp_path) == ["rms_norm_fwd", "bias_bwd"]
    d = kernels_of(plan)["rms_norm_fwd"]
    before = len(cuda_loader.loaded())
    loading.load(plan)
    (kernel,) = cuda_loader.load([d], GPU, rows={d.key: plan.generated[d.key].sizes[0]}, cache_dir=tmp_path)
    assert kernel.text.schedules == variants(d)[1] and len(cuda_loader.loaded()) == before


def test_where_another_rank_decides(faster_alone: None, tmp_path: Path) -> None:
    """Whatever is faster here, its schedules are tried; it keeps them on disk, too."""
    plan, asked = reshaped().plan(source()), list[Any]()

    def first(what: str, value: Any) -> Any:
        asked.append((what, value))
        return [2, 0.9] if "rms_norm_fwd" in what else None

    trials = schedules.tune_schedules(plan, Times(0.9, 0.9).compare, MARGIN, deciding=Deciding(first, False))
    assert asked == [(f"schedules of {name}", [1, 0.5]) for name in NAMES]
    assert [(t.ratio, t.taken) for t in trials] == [(0.9, True), (None, False), (None, False), (0.9, True)]
    kernel = next(k for k in cuda_loader.loaded() if k.text.schedules == variants(kernels_of(plan)["rms_norm_fwd"])[2])
    assert kernel.description.name == "rms_norm_fwd" and kept(plan, tmp_path) == []


def test_schedules_that_are_not_faster_together_are_dropped(faster_alone: None, tmp_path: Path) -> None:
    plan, times = reshaped().plan(source()), Times(0.9, 0.9, 1.1, 1.0)
    trials = schedules.tune_schedules(plan, times.compare, MARGIN)
    assert [t.reason for t in trials] == ["together not faster", "together not faster", "", ""]
    assert not any(t.taken for t in trials) and trials[-1].ratio == 1.0 and kept(plan, tmp_path) == []


def test_schedules_that_compute_something_else_are_refused(faster_alone: None, tmp_path: Path) -> None:
    plan = reshaped().plan(source())
    trials = schedules.tune_schedules(plan, lambda *kernels: pytest.fail("timed"), MARGIN, lambda kernels: "wrong")
    assert [(t.ratio, t.taken, t.reason) for t in trials] == [(None, False, "wrong")] * 3
    assert kept(plan, tmp_path) == []


def test_schedules_that_are_not_faster_alone_are_not_tried(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_seconds", lambda *known: 1.0)
    trials = schedules.tune_schedules(reshaped().plan(source()), lambda *kernels: pytest.fail("timed"), MARGIN)
    assert [(t.ratio, t.reason) for t in trials] == [(None, "no schedule is faster alone")] * 3


@pytest.mark.parametrize(("margin", "taken"), [(0.05, False), (0.01, True)])
def test_tune_hands_its_margin_on(margin: float, taken: bool, faster_alone: None) -> None:
    def call(prepared: object) -> Callable[[], None]:
        return lambda: None

    rounds: Any = SimpleNamespace(
        effort=tuning.Effort(margin=margin), prepared=lambda *known: None, call=call, ratio=lambda first, second: 0.98
    )
    check: Any = SimpleNamespace(reason=lambda prepared: "")
    trials = tuning._schedule_trials(reshaped().plan(source()), rounds, check, Deciding())
    assert [t.taken for t in trials] == [taken] * (4 if taken else 3)
