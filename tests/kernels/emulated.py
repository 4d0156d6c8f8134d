"""Kernels written by hand, run on the CPU by an emulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from te_fuser.codegen.cuda_source_kernel import TextKernel
from tests.fake_cuda import FakeDriver, running


def emulating(kernels: Callable[[], Iterable[TextKernel[Any]]]) -> Any:
    """A fixture of a module: the driver that runs these kernels, which are compiled in one go."""

    @pytest.fixture(scope="module")
    def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
        with running(set(kernels()), tmp_path_factory.mktemp("emulated")) as driver:
            yield driver

    return emulated


def launched(
    driver: FakeDriver, run: Callable[..., list[torch.Tensor]], *given: Any
) -> tuple[list[torch.Tensor], int, bytes]:
    """Results of a run, how many kernels that took, and the last one's name; plans are made before."""
    run(*given)
    driver.launches = 0
    return run(*given), driver.launches, driver.last_symbol
