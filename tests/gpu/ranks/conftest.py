"""Tests of this folder run on RANKS GPUs, one a rank; where there are fewer, ranks share them by gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.parallel.ranks import WORLD, Ranks

RANKS = int(os.environ.get("RANKS", WORLD))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The processes, started once for a file."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = Ranks(folder, request.config.getoption("--cpu"), world=RANKS, gpu=True)
    yield processes
    processes.stop()


@pytest.fixture(autouse=True)
def _a_gpu_for_each(request: pytest.FixtureRequest) -> None:
    """gloo has no reduce-scatter of tensors on GPUs, and what it sends is in no CUDA graph."""
    if request.node.get_closest_marker("nccl") and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs: gloo, by which ranks share one, has no reduce-scatter there, and no graphs")
