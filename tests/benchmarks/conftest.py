"""A bench for tests of what is measured on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

import te_fuser
from benchmarks.gpu.contest import measure
from benchmarks.gpu.contest.bench import TOY as TOY_SCALE
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.parts import floor
from tests.benchmarks.pretended import PretendedEvent, PretendedGpu, PretendedGraph, PretendedProfile, PretendedStream


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on the CPU that takes every path of a GPU's."""
    products, stream = floor.products, PretendedStream()
    by_kind = {kind: floor._TORCH[name] for name, kind in floor._KINDS.items()}
    for owner, name, value in (
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "_sleep", lambda cycles: None),
        (torch.cuda, "Event", PretendedEvent),
        (torch.cuda, "Stream", PretendedStream),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "CUDAGraph", PretendedGraph),
        (torch.cuda, "graph", lambda graph: contextlib.nullcontext()),
        (torch.cuda, "memory_allocated", lambda device: 5 << 20),
        (torch.cuda, "reset_peak_memory_stats", lambda device: None),
        (torch.cuda, "max_memory_allocated", lambda device: 7 << 20),
        (torch.profiler, "profile", PretendedProfile),
        (torch, "compile", lambda model, **options: model),
        (te_fuser, "cuda_graph", lambda model, x: model),
        (products, "obstacle", lambda: None),
        (products, "multiply", lambda kind, a, b: by_kind[kind](a, b)),
    ):
        monkeypatch.setattr(owner, name, value)
    return Bench(PretendedGpu(), TOY_SCALE, measure.TRIAL)
