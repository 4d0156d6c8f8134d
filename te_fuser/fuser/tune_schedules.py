"""Tuning the schedules of generated CUDA kernels: variants alone first, then the fastest in its place in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from te_fuser.codegen.compiler import default_cache_dir
from te_fuser.codegen.description import KernelDescription, elements
from te_fuser.codegen.tuned_schedules import store_for
from te_fuser.config import config
from te_fuser.fuser.plan import Plan
from te_fuser.fuser.program import KernelFunction, descriptions, kernel_sizes

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_loader import GpuKernel
    from te_fuser.codegen.schedule import Schedule

MOST_VARIANTS = 12
_LAUNCHES = 10  # of a variant alone, between two events
_SOLO_GAIN = 0.97  # what a variant must reach alone, over the kernel that is in use, to be tried in the model

# compare(before, after), kernels by description key -> the model's time with the latter over that with the former
Compare = Callable[[Mapping[str, KernelFunction], Mapping[str, KernelFunction]], float]
# reason_not(kernels) -> why the model cannot run by them; empty when it can
ReasonNot = Callable[[Mapping[str, KernelFunction]], str]


def tune_schedules(
    plan: Plan, compare: Compare, reason_not: ReasonNot
) -> Iterator[tuple[str, float | None, bool, str]]:
    """(kernel, ratio in the model or None, taken, why not) for each generated kernel; what is taken stays on disk."""
    device = plan.x.device
    taken: dict[str, KernelFunction] = {}
    all_sizes = kernel_sizes(plan)
    for key, description in descriptions([*plan.forward, *plan.backward]).items():
        sizes = all_sizes[key]
        found = _fastest_alone(description, sizes, device)
        if found is None:
            yield description.name, None, False, "no schedule is faster alone"
            continue
        schedules, kernel, alone = found
        after: dict[str, KernelFunction] = {**taken, description.key: kernel.run}
        reason = reason_not(after)
        if reason:
            yield description.name, None, False, reason
            continue
        ratio = compare(taken, after)
        if ratio < 1:
            taken = after
            store = store_for(torch.cuda.get_device_name(device), config.cache_dir or default_cache_dir())
            store.put(description.key, schedules, sizes[0], alone=alone, in_model=ratio)
        yield description.name, ratio, ratio < 1, ""


def _fastest_alone(
    d: KernelDescription, sizes: tuple[int, int, int], device: torch.device
) -> tuple[tuple[Schedule, ...], GpuKernel, float] | None:
    """The variant that is fastest alone, and by how much; None when none gains enough over the kernel in use."""
    from te_fuser.codegen import cuda_loader

    folder = config.cache_dir
    in_use = cuda_loader.load([d], device, rows={d.key: sizes[0]}, cache_dir=folder)[0]
    tensors = _tensors(d, sizes, device)
    before = _seconds(in_use, tensors, sizes)
    least, best = _SOLO_GAIN * before, None
    for schedules in cuda_loader.variants(d, device, MOST_VARIANTS):
        try:
            kernel = cuda_loader.load_variant(d, device, schedules, cache_dir=folder)
        except ValueError:  # it does not fit this GPU
            continue
        seconds = _seconds(kernel, tensors, sizes)
        if seconds < least:
            best, least = (schedules, kernel), seconds
    return None if best is None else (*best, least / before)


def _tensors(d: KernelDescription, sizes: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory for a call of a kernel alone; kernels do not look at shapes."""
    rows, _, samples = sizes

    def made(tensor: object) -> torch.Tensor:
        count = elements(tensor.axes, tensor.width, rows, samples)  # type: ignore[attr-defined]
        return torch.randn(count, device=device).to(getattr(torch, tensor.dtype))  # type: ignore[attr-defined]

    seed = (torch.tensor([1, 0], device=device),) if d.streams else ()
    return (*map(made, d.loads), *seed, *map(made, (*d.stores, *d.sums)))


def _seconds(kernel: GpuKernel, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, int, int]) -> float:
    """Seconds of one launch of a kernel alone."""
    numbers = tuple(range(len(kernel.description.streams)))
    return seconds_alone(lambda: kernel.run.repeat(_LAUNCHES, tensors, *sizes, numbers)) / _LAUNCHES


def seconds_alone(work: Callable[[], None]) -> float:
    """Seconds that work takes on PyTorch's current device, by events; the least of three after one to warm up."""
    times = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return min(times[1:])


__all__ = ["Compare", "seconds_alone", "tune_schedules"]
