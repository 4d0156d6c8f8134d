"""The threads that CPU kernels run on: PyTorch's number, its pools, whole rows for each."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from te_fuser import _native
from tests.csrc.cpu_kernels import run_scale, run_where, scale_kernel, where_kernel
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.mark.parametrize("backend", ["openmp", "std"])
def test_workers_follow_torch_threads(cpu_library: str, backend: str) -> None:
    _native.set_thread_backend(backend)
    kernel = where_kernel(cpu_library)
    for threads in (1, 2, 3, 1, 2):
        torch.set_num_threads(threads)
        assert _native.num_threads() == threads
        workers, ran_on = run_where(kernel, 6)
        assert workers == [i * threads // 6 for i in range(6)]
        assert len(set(ran_on)) == threads


def test_a_new_python_thread_has_torchs_number(cpu_library: str) -> None:
    torch.set_num_threads(3)  # OpenMP's own count in a new thread would be its default
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_native.num_threads).result() == 3
        assert set(pool.submit(run_where, where_kernel(cpu_library), 6).result()[0]) == {0, 1, 2}


@pytest.mark.parametrize(("rows", "workers"), [(1, 1), (2, 2), (5, 3)])
def test_no_more_workers_than_rows_or_threads(cpu_library: str, rows: int, workers: int) -> None:
    torch.set_num_threads(3)
    assert set(run_where(where_kernel(cpu_library), rows)[0]) == set(range(workers))


@pytest.mark.parametrize(("rows", "workers"), [(65535, 1), (65536, 2), (1 << 20, 3)])
def test_little_work_stays_on_one_thread(cpu_library: str, rows: int, workers: int) -> None:
    torch.set_num_threads(3)
    kernel = _native.CpuKernel(cpu_library, "where", ("int64", "int64"), 0, 0, 0, 1)
    assert set(run_where(kernel, rows)[0]) == set(range(workers))


def test_uneven_rows_are_split_evenly(cpu_library: str) -> None:
    torch.set_num_threads(3)
    assert run_where(where_kernel(cpu_library), 8)[0] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("backend", ["openmp", "std"])
def test_several_python_threads_at_once(cpu_library: str, backend: str) -> None:
    _native.set_thread_backend(backend)
    torch.set_num_threads(2)
    kernel = scale_kernel(cpu_library, 64)

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        good = True
        for step in range(40):
            rows = (1, 40, 1500)[step % 3]
            x = torch.randint(-9, 9, (rows, 64), generator=generator).float()
            y, sums = run_scale(kernel, x, factor=seed)
            good = good and torch.equal(y, seed * x) and torch.equal(sums, (seed * x).sum(0))
        return good

    assert all(in_threads(*(partial(work, seed) for seed in range(1, 7))))


def test_the_interpreter_runs_on_during_a_kernel(cpu_library: str) -> None:
    kernel, flag = _native.CpuKernel(cpu_library, "await", ("int64",), 0, 0, 0, 1), torch.zeros(2, dtype=torch.int64)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(kernel, (flag,), 1, 1, 1, ())
        flag[0] = 1
        call.result()
    assert flag[1] == 1


def run_script(body: str, library: str) -> str:
    """Run a script in a process of its own, where nothing has started a thread yet."""
    script = f"import os, torch\nfrom te_fuser import _native\nlibrary = {library!r}\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchs_pool_is_the_only_pool_and_a_forked_process_has_its_own(cpu_library: str) -> None:
    script = """
        torch.set_num_threads(3)
        assert _native.thread_backend() == "openmp"
        kernel = _native.CpuKernel(library, "where", ("int64", "int64"), 0, 0, 0, 32768)
        tensors = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        threads = lambda: set(os.listdir("/proc/self/task"))
        torch.zeros(1 << 20).add_(1)
        before = threads()
        for _ in range(10):
            kernel(tensors, 6, 1, 1, ())
            torch.zeros(1 << 20).add_(1)
        assert len(set(tensors[1].tolist())) == 3
        assert {str(thread) for thread in tensors[1].tolist()} <= before
        more = len(threads() - before)
        torch.set_num_threads(2)
        kernel(tensors, 6, 1, 1, ())
        child = os.fork()
        if child == 0:
            tensors[0].fill_(-1)
            kernel(tensors, 6, 1, 1, ())
            right = tensors[0].tolist() == [0, 0, 0, 1, 1, 1] and _native.thread_backend() == "std"
            os._exit(0 if right else 1)
        print(more, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), _native.thread_backend())
    """
    assert run_script(script, cpu_library) == "0 0 openmp"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'tbb' is unknown"):
        _native.set_thread_backend("tbb")
