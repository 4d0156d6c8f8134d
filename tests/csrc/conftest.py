"""Kernels in C, and threads as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser import _native, codegen
from tests.c_library import compiled


@pytest.fixture(scope="session")
def cpu_library() -> str:
    return str(compiled("cpu_kernels.c", "-O2", f"-I{Path(codegen.__file__).parent / 'include'}"))


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Give torch's number of threads and the backend back after each test."""
    threads, backend = torch.get_num_threads(), _native.thread_backend()
    yield
    torch.set_num_threads(threads)
    _native.set_thread_backend(backend)
