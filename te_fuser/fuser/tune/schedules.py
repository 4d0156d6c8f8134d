"""Tuning the schedules of generated CUDA kernels: variants alone first, then the fastest in its place in the model.

A schedule has to make the whole model faster by the margin, and all new schedules together have to make it faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fuser.codegen.description import NUMBERS, KernelDescription, Load, Store, Sum, elements_of
from te_fuser.codegen.tuned_schedules import store_for
from te_fuser.config import config
from te_fuser.fuser.steps.step import KernelFunction
from te_fuser.kernels.tuning_trials import Deciding, Trial, concluded, seconds_alone

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_loader import GpuKernel
    from te_fuser.codegen.schedule import Schedule
    from te_fuser.fuser.plan.plan import Plan

MOST_VARIANTS = 12
_LAUNCHES = 10  # of a variant alone, between two events
_SOLO_GAIN = 0.97  # what a variant must reach alone, over the kernel that is in use, to be tried in the model

# compare(before, after), kernels by description key -> the model's time with the latter over that with the former
Compare = Callable[[Mapping[str, KernelFunction], Mapping[str, KernelFunction]], float]
# reason_not(kernels) -> why the model cannot run by them; empty when it can
ReasonNot = Callable[[Mapping[str, KernelFunction]], str]


@dataclass(frozen=True)
class _Variant:
    """A kernel by other schedules, its time alone over the kernel's in use, the model's with it."""

    description: KernelDescription
    rows: int
    schedules: tuple[Schedule, ...]
    kernel: GpuKernel
    alone: float
    in_model: float | None = None


def tune_schedules(
    plan: Plan,
    compare: Compare,
    margin: float,
    reason_not: ReasonNot = lambda kernels: "",
    deciding: Deciding = Deciding(),  # noqa: B008 - frozen
) -> list[Trial]:
    """Tune the schedule of each generated kernel of a plan; what is taken stays on disk.

    Args:
        reason_not: tells wrong kernels from right ones.
        deciding: who says which schedule is worth trying.
    """
    device = plan.x.device
    taken, trials = list[_Variant](), list[Trial]()
    for description, sizes in ((g.description, g.sizes) for g in plan.generated.values()):
        variant = _fastest_of(deciding, description, sizes, device)
        trial = _try(description, variant, taken, compare, margin, reason_not)
        if variant is not None and trial.taken:
            taken.append(dataclasses.replace(variant, in_model=trial.ratio))
        trials.append(trial)
    trials = concluded(trials, "schedules of kernels together", lambda: compare({}, _kernels(taken)))
    if any(t.taken for t in trials) and deciding.writes:
        store = store_for(torch.cuda.get_device_name(device))
        for v in taken:
            store.put(v.description.key, v.schedules, v.rows, alone=v.alone, in_model=v.in_model)
    return trials


def _try(
    description: KernelDescription,
    variant: _Variant | None,
    taken: Sequence[_Variant],
    compare: Compare,
    margin: float,
    reason_not: ReasonNot,
) -> Trial:
    """Try the fastest variant of a kernel against what was taken so far."""
    place = f"{description.name} schedule"
    if variant is None:
        return Trial(place, "new", None, False, "no schedule is faster alone")
    after = _kernels([*taken, variant])
    reason = reason_not(after)
    if reason:
        return Trial(place, "new", None, False, reason)
    ratio = compare(_kernels(taken), after)
    return Trial(place, "new", ratio, ratio < 1 - margin)


def _kernels(variants: Iterable[_Variant]) -> dict[str, KernelFunction]:
    return {v.description.key: v.kernel.run for v in variants}


def _fastest_of(
    deciding: Deciding, d: KernelDescription, sizes: tuple[int, int, int], device: torch.device
) -> _Variant | None:
    """The variant that is fastest alone where that is decided."""
    from te_fuser.codegen import cuda_loader

    own = _fastest_alone(d, sizes, device)
    listed = list(cuda_loader.variants(d, device, MOST_VARIANTS))
    found = deciding.first(f"schedules of {d.name}", None if own is None else [listed.index(own.schedules), own.alone])
    if found is None or own is not None and listed[found[0]] == own.schedules:
        return None if found is None else own
    kernel = cuda_loader.load_variant(d, device, listed[found[0]], cache_dir=config.cache_dir)
    return _Variant(d, sizes[0], listed[found[0]], kernel, found[1])


def _fastest_alone(d: KernelDescription, sizes: tuple[int, int, int], device: torch.device) -> _Variant | None:
    from te_fuser.codegen import cuda_loader

    folder = config.cache_dir
    in_use = cuda_loader.load([d], device, rows={d.key: sizes[0]}, cache_dir=folder)[0]
    tensors = _tensors(d, sizes, device)
    before = _seconds(in_use, tensors, sizes)
    best, least = None, _SOLO_GAIN
    for schedules in cuda_loader.variants(d, device, MOST_VARIANTS):
        try:
            kernel = cuda_loader.load_variant(d, device, schedules, cache_dir=folder)
        except ValueError:  # it does not fit this GPU
            continue
        alone = _seconds(kernel, tensors, sizes) / before
        if alone < least:
            best, least = _Variant(d, sizes[0], schedules, kernel, alone), alone
    return best


def _tensors(d: KernelDescription, sizes: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory for a call of a kernel alone; kernels do not look at shapes."""
    rows, _, samples = sizes

    def made(tensor: Load | Store | Sum) -> torch.Tensor:
        return torch.randn(elements_of(tensor, rows, samples), device=device).to(getattr(torch, tensor.dtype))

    raised = [torch.zeros(len(NUMBERS), device=device) for _ in d.maxima]
    seed = [torch.tensor([1, 0], device=device)] if d.streams else []
    return (*map(made, d.loads), *raised, *seed, *map(made, d.outputs))


def _seconds(kernel: GpuKernel, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, int, int]) -> float:
    numbers = tuple(range(1, kernel.description.integers + 1))
    return seconds_alone(lambda: kernel.run.repeat(_LAUNCHES, tensors, *sizes, numbers)) / _LAUNCHES
