"""Kernels in C, and threads as they were."""

from collections.abc import Iterator

import pytest
import torch

from te_fuser import _native
from tests.csrc.cpu_kernels import compile_library


@pytest.fixture(scope="session")
def cpu_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_library(tmp_path_factory.mktemp("native")))


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Give torch's number of threads and the backend back after each test."""
    threads, backend = torch.get_num_threads(), _native.thread_backend()
    yield
    torch.set_num_threads(threads)
    _native.set_thread_backend(backend)
