"""The native runtime: checks of tensors, sharing of threads, and the calling convention of generated CPU kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

import te_fuser
from te_fuser import _native

INCLUDE = Path(te_fuser.__file__).parent / "codegen" / "include"

# Each kernel here stands for one promise of te_kernel_abi.h.
SOURCE = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "te_kernel_abi.h"

/* scale: x, y, column sums of y; integers: features, factor. Sums go through scratch to see that it is there. */
void scale_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  const float* x = (const float*)l->tensors[0];
  float* y = (float*)l->tensors[1];
  const int64_t features = l->integers[0];
  float *scratch = l->scratch[worker], *partial = l->partials[worker];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t f = 0; f < features; ++f) scratch[f] = x[r * features + f] * (float)l->integers[1];
    for (int64_t f = 0; f < features; ++f) {
      y[r * features + f] = scratch[f];
      partial[f] += scratch[f];
    }
  }
}
void scale_finish(const te_launch* l, int64_t workers) {
  float* sums = (float*)l->tensors[2];
  for (int64_t f = 0; f < l->integers[0]; ++f) {
    sums[f] = 0;
    for (int64_t w = 0; w < workers; ++w) sums[f] += l->partials[w][f];
  }
}

/* where: the worker and the thread that each row met. */
void where_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  for (int64_t r = begin; r < end; ++r) {
    ((int64_t*)l->tensors[0])[r] = worker;
    ((int64_t*)l->tensors[1])[r] = (int64_t)syscall(SYS_gettid);
  }
}

/* blocks: row r tells what is wrong with the worker's blocks (0: nothing), then makes them dirty for the next call. */
void blocks_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  const int64_t partial_floats = l->integers[0] + l->integers[1] * l->batch_size, scratch_floats = l->integers[2];
  float *partial = l->partials[worker], *scratch = l->scratch[worker];
  int64_t wrong = 0;
  if ((size_t)partial % 64 || (size_t)scratch % 64) wrong |= 1;
  if (!partial != !partial_floats || !scratch != !scratch_floats) wrong |= 2;
  for (int64_t i = 0; i < partial_floats; ++i) {
    if (partial[i] != 0) wrong |= 4;
    partial[i] = (float)(worker + 1);
  }
  for (int64_t i = 0; i < scratch_floats; ++i) scratch[i] = (float)-(worker + 1);
  for (int64_t i = 0; i < partial_floats; ++i) if (partial[i] != (float)(worker + 1)) wrong |= 8;
  for (int64_t r = begin; r < end; ++r) ((int64_t*)l->tensors[0])[r] = wrong;
}
void blocks_finish(const te_launch* l, int64_t workers) { (void)l; (void)workers; }

/* samples: counts the rows of each sample. */
void samples_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  for (int64_t r = begin; r < end; ++r) l->partials[worker][(r / l->batch_inner) % l->batch_size] += 1;
}
void samples_finish(const te_launch* l, int64_t workers) {
  for (int64_t s = 0; s < l->batch_size; ++s) {
    float count = 0;
    for (int64_t w = 0; w < workers; ++w) count += l->partials[w][s];
    ((float*)l->tensors[0])[s] = count;
  }
}

/* await: returns when somebody has written the flag, or after a minute; stores 1 if it saw the flag. */
void await_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  volatile int64_t* flag = (volatile int64_t*)l->tensors[0];
  const time_t limit = time(NULL) + 60;
  while (flag[0] == 0 && time(NULL) < limit) usleep(100);
  flag[1] = flag[0];
  (void)begin; (void)end; (void)worker;
}

void touch_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  (void)l; (void)begin; (void)end; (void)worker;
}

/* bytes: adds the integers and the first byte of each of the last tensors. */
void many_rows(const te_launch* l, int64_t begin, int64_t end, int64_t worker) {
  int64_t* sum = (int64_t*)l->tensors[0];
  for (int64_t i = 0; i < l->integers[0]; ++i) *sum += ((uint8_t*)l->tensors[1 + i])[0] + l->integers[1 + i];
  (void)begin; (void)end; (void)worker;
}
"""


def compile_library(folder: Path) -> Path:
    """Compile SOURCE into a shared library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "kernels.c", folder / "kernels.so"
    source.write_text(SOURCE)
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{INCLUDE}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_library(tmp_path_factory.mktemp("native")))


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Give torch's number of threads and the backend back after each test."""
    threads, backend = torch.get_num_threads(), _native.thread_backend()
    yield
    torch.set_num_threads(threads)
    _native.set_thread_backend(backend)


def scale_kernel(library: str, features: int) -> _native.CpuKernel:
    return _native.CpuKernel(library, "scale", ("float32",) * 3, features, 0, features, features)


def where_kernel(library: str) -> _native.CpuKernel:
    return _native.CpuKernel(library, "where", ("int64", "int64"), 0, 0, 0, 32768)


def touch_kernel(library: str, *dtypes: str) -> _native.CpuKernel:
    return _native.CpuKernel(library, "touch", dtypes, 0, 0, 0, 1)


def run_scale(kernel: _native.CpuKernel, x: torch.Tensor, factor: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    y, sums = torch.full_like(x, torch.nan), torch.full((features,), torch.nan)
    kernel((x, y, sums), rows, 1, max(rows, 1), (features, factor))
    return y, sums


def run_where(kernel: _native.CpuKernel, rows: int) -> tuple[list[int], list[int]]:
    workers, threads = torch.full((rows,), -1), torch.full((rows,), -1)
    kernel((workers, threads), rows, 1, 1, ())
    return workers.tolist(), threads.tolist()


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openmp", "std"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "features"), [(1, 1), (3, 7), (4097, 65)])
def test_values_do_not_depend_on_threads(library: str, backend: str, threads: int, rows: int, features: int) -> None:
    _native.set_thread_backend(backend)
    torch.set_num_threads(threads)
    x = torch.randint(-9, 9, (rows, features)).float()  # sums of small integers are exact in any order
    y, sums = run_scale(scale_kernel(library, features), x)
    assert torch.equal(y, 3 * x)
    assert torch.equal(sums, (3 * x).sum(0))


def test_results_repeat_bit_for_bit(library: str) -> None:
    torch.set_num_threads(2)
    kernel, x = scale_kernel(library, 33), torch.randn(5000, 33)
    first = run_scale(kernel, x)[1]
    assert all(torch.equal(first, run_scale(kernel, x)[1]) for _ in range(20))


def test_no_rows_store_zero_sums(library: str) -> None:
    y, sums = run_scale(scale_kernel(library, 5), torch.empty(0, 5))
    assert y.shape == (0, 5)
    assert torch.equal(sums, torch.zeros(5))


def test_an_empty_batch_is_no_error(library: str) -> None:
    kernel = _native.CpuKernel(library, "samples", ("float32",), 0, 1, 0, 1)
    kernel((torch.empty(0),), 0, 0, 0, ())


@pytest.mark.parametrize(("partial", "per_sample", "scratch"), [(0, 0, 0), (5, 0, 0), (0, 3, 1), (17, 2, 100)])
def test_blocks_are_zeroed_aligned_and_apart(library: str, partial: int, per_sample: int, scratch: int) -> None:
    torch.set_num_threads(3)
    kernel = _native.CpuKernel(library, "blocks", ("int64",), partial, per_sample, scratch, 32768)
    for _ in range(3):
        wrong = torch.full((6,), -1)
        kernel((wrong,), 6, 1, 4, (partial, per_sample, scratch))
        assert wrong.tolist() == [0] * 6


def test_blocks_larger_than_what_is_kept(library: str) -> None:
    per_sample, samples = 1 << 20, 20  # 80 MiB
    kernel = _native.CpuKernel(library, "blocks", ("int64",), 0, per_sample, 0, 1)
    for _ in range(2):
        wrong = torch.full((1,), -1)
        kernel((wrong,), 1, 1, samples, (0, per_sample, 0))
        assert wrong.item() == 0


def test_partial_floats_per_sample(library: str) -> None:
    torch.set_num_threads(2)
    kernel = _native.CpuKernel(library, "samples", ("float32",), 0, 1, 0, 32768)
    counts = torch.full((3,), torch.nan)
    kernel((counts,), 2 * 3 * 4, 4, 3, ())
    assert counts.tolist() == [8, 8, 8]


def test_many_tensors_and_integers(library: str) -> None:
    count = 60  # more than fit into the arrays on the stack
    kernel = _native.CpuKernel(library, "many", ("int64",) + ("uint8",) * count, 0, 0, 0, 1)
    total = torch.zeros(1, dtype=torch.int64)
    values = tuple(torch.tensor([i], dtype=torch.uint8) for i in range(count))
    kernel((total, *values), 1, 1, 1, (count, *(1000 * i for i in range(count))))
    assert total.item() == 1001 * sum(range(count))


# ---- threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openmp", "std"])
def test_workers_follow_torch_threads(library: str, backend: str) -> None:
    _native.set_thread_backend(backend)
    kernel = where_kernel(library)
    for threads in (1, 2, 3, 1, 2):
        torch.set_num_threads(threads)
        assert _native.num_threads() == threads
        workers, ran_on = run_where(kernel, 6)
        assert workers == [i * threads // 6 for i in range(6)]
        assert len(set(ran_on)) == threads


def test_a_new_python_thread_has_torchs_number(library: str) -> None:
    torch.set_num_threads(3)  # OpenMP's own count in a new thread would be its default
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_native.num_threads).result() == 3
        assert set(pool.submit(run_where, where_kernel(library), 6).result()[0]) == {0, 1, 2}


@pytest.mark.parametrize(("rows", "workers"), [(1, 1), (2, 2), (5, 3)])
def test_no_more_workers_than_rows_or_threads(library: str, rows: int, workers: int) -> None:
    torch.set_num_threads(3)
    assert set(run_where(where_kernel(library), rows)[0]) == set(range(workers))


@pytest.mark.parametrize(("rows", "workers"), [(65535, 1), (65536, 2), (1 << 20, 3)])
def test_little_work_stays_on_one_thread(library: str, rows: int, workers: int) -> None:
    torch.set_num_threads(3)
    kernel = _native.CpuKernel(library, "where", ("int64", "int64"), 0, 0, 0, 1)
    assert set(run_where(kernel, rows)[0]) == set(range(workers))


def test_uneven_rows_are_split_evenly(library: str) -> None:
    torch.set_num_threads(3)
    assert run_where(where_kernel(library), 8)[0] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("backend", ["openmp", "std"])
def test_several_python_threads_at_once(library: str, backend: str) -> None:
    _native.set_thread_backend(backend)
    torch.set_num_threads(2)
    kernel, start = scale_kernel(library, 64), threading.Barrier(6)

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        good = True
        for step in range(40):
            rows = (1, 40, 1500)[step % 3]
            x = torch.randint(-9, 9, (rows, 64), generator=generator).float()
            y, sums = run_scale(kernel, x, factor=seed)
            good = good and torch.equal(y, seed * x) and torch.equal(sums, (seed * x).sum(0))
        return good

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(1, 7)))


def test_the_interpreter_runs_on_during_a_kernel(library: str) -> None:
    kernel, flag = _native.CpuKernel(library, "await", ("int64",), 0, 0, 0, 1), torch.zeros(2, dtype=torch.int64)
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


def test_torchs_pool_is_the_only_pool(library: str) -> None:
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
        print(len(threads() - before))
    """
    assert run_script(script, library) == "0"


def test_a_forked_process_makes_its_own_threads(library: str) -> None:
    script = """
        torch.set_num_threads(2)
        kernel = _native.CpuKernel(library, "where", ("int64", "int64"), 0, 0, 0, 32768)
        tensors = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        kernel(tensors, 4, 1, 1, ())
        child = os.fork()
        if child == 0:
            tensors[0].fill_(-1)
            kernel(tensors, 4, 1, 1, ())
            os._exit(0 if tensors[0].tolist() == [0, 0, 1, 1] and _native.thread_backend() == "std" else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), _native.thread_backend())
    """
    assert run_script(script, library) == "0 openmp"


def test_importing_leaves_the_default_device_alone() -> None:
    """Whoever made CUDA the default before has no context from the import, and no error where there is no GPU."""
    text = """
        import torch
        torch.set_default_device("cuda")
        import te_fuser
        assert not torch.cuda.is_initialized()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'tbb' is unknown"):
        _native.set_thread_backend("tbb")


# ---- tensors that are taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"],
)
def test_dtypes(library: str, dtype: str) -> None:
    touch_kernel(library, dtype)((torch.zeros(3, dtype=getattr(torch, dtype)),), 1, 1, 1, ())


def test_parameters_and_tensors_with_a_history_are_taken(library: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    touch_kernel(library, "float32", "float32", "float32")((parameter, parameter * 2, parameter.detach()), 1, 1, 1, ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3)[1:],  # an offset into its storage
        torch.zeros(5, 1).t(),  # the strides of axes of one element mean nothing
        torch.zeros(3, 0, 2).transpose(0, 2),  # nor do those of a tensor without elements
        torch.tensor(1.0),
        torch.zeros(2, 3, 4).flatten(1),
    ],
)
def test_row_major_views_are_taken(library: str, tensor: torch.Tensor) -> None:
    touch_kernel(library, "float32")((tensor,), 1, 1, 1, ())


def test_a_view_starts_at_its_offset(library: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(run_scale(scale_kernel(library, 3), x[1:])[0], 3 * x[1:])


def test_keywords_and_integer_likes(library: str) -> None:
    kernel, x, y, sums = scale_kernel(library, 3), torch.ones(2, 3), torch.empty(2, 3), torch.empty(3)
    kernel((x, y, sums), numpy.int64(2), batch_size=2, batch_inner=1, integers=(numpy.int64(3), True))
    assert torch.equal(y, x)


# ---- refusals ---------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """Stands for DTensor and its like: its memory is not what it means."""


def fake_tensor(device: str) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(3, device=device)


def freed_tensor() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([1.0, 2.0], "got list"),
        (None, "got NoneType"),
        (torch.zeros(3).numpy(), "got numpy.ndarray"),
        (torch.zeros(3).as_subclass(Subclass), "got Subclass"),
        (fake_tensor("cpu"), "got FakeTensor"),
        (fake_tensor("cuda"), "got FakeTensor"),
        (torch.nn.UninitializedParameter(), "got UninitializedParameter"),
    ],
)
def test_other_types_are_refused(library: str, value: object, got: str) -> None:
    with pytest.raises(TypeError, match=f"kernel 'touch': tensor 1 must be a plain torch.Tensor.*{got}"):
        touch_kernel(library, "float32", "float32")((torch.zeros(3), value), 1, 1, 1, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(3).to_mkldnn(),
    ],
    ids=["meta", "sparse", "mkldnn"],
)
def test_tensors_without_plain_memory_are_refused(library: str, tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="kernel 'touch': tensor 0 has no memory of its own") as refused:
        touch_kernel(library, "float32")((tensor,), 1, 1, 1, ())
    assert refused.value.__cause__ is not None


def test_functorch_wrappers_are_refused(library: str) -> None:
    kernel = touch_kernel(library, "float32")

    def call(x: torch.Tensor) -> torch.Tensor:
        kernel((x,), 1, 1, 1, ())
        return x.sum()

    for transform in (torch.vmap(call), torch.func.grad(call)):
        with pytest.raises(TypeError, match="tensor 0 has no memory of its own"):
            transform(torch.zeros(3))
    with pytest.raises(ValueError, match="tensor 0 has a shape but no memory"):
        torch.func.functionalize(call)(torch.zeros(3))


def test_a_freed_storage_is_refused(library: str) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 0 has a shape but no memory"):
        touch_kernel(library, "float32")((freed_tensor(),), 1, 1, 1, ())


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4).t(), torch.zeros(4)[::2], torch.zeros(1).expand(4)])
def test_other_layouts_are_refused(library: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 0 must be contiguous"):
        touch_kernel(library, "float32")((tensor,), 1, 1, 1, ())


@pytest.mark.parametrize(
    ("dtype", "got"),
    [(torch.bfloat16, "got bfloat16"), (torch.int64, "got int64"), (torch.complex64, "got a dtype of 64 bits")],
)
def test_other_dtypes_are_refused(library: str, dtype: torch.dtype, got: str) -> None:
    with pytest.raises(TypeError, match=f"kernel 'touch': tensor 1 must be float32, {got}"):
        touch_kernel(library, "float32", "float32")((torch.zeros(1), torch.zeros(1, dtype=dtype)), 1, 1, 1, ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_other_devices_are_refused(library: str) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 0 must be on the CPU"):
        touch_kernel(library, "float32")((torch.zeros(1, device="cuda"),), 1, 1, 1, ())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_tensors_is_refused(library: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"kernel 'touch' takes 2 tensors, got {count}"):
        touch_kernel(library, "float32", "float32")((torch.zeros(1),) * count, 1, 1, 1, ())


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (([], 1, 1, 1, ()), {}, TypeError, "'tensors' must be a tuple, got list"),
        (((), 1, 1, 1, [1]), {}, TypeError, "'integers' must be a tuple, got list"),
        (((), 1.5, 1, 1, ()), {}, TypeError, "'rows' must be an integer, got float"),
        (((), 1, 1, 1, ("a",)), {}, TypeError, "'integers' must be an integer, got str"),
        (((), 1 << 63, 1, 1, ()), {}, ValueError, "'rows' does not fit"),
        (((), -1, 1, 1, ()), {}, ValueError, "rows must not be negative"),
        (((), 1, 0, 1, ()), {}, ValueError, "batch_inner and batch_size must be positive"),
        (((), 1, 1, 0, ()), {}, ValueError, "batch_inner and batch_size must be positive"),
        (((), 0, 1, -1, ()), {}, ValueError, "batch_inner and batch_size must be positive"),
        (((), 1, 1, 1), {}, TypeError, "'integers' is missing"),
        (((), 1, 1, 1, (), 1), {}, TypeError, "takes 5 arguments, got 6"),
        (((), 1, 1, 1), {"rows": 1}, TypeError, "'rows' was given twice"),
        (((), 1, 1, 1), {"seeds": ()}, TypeError, "unknown argument 'seeds'"),
    ],
)
def test_wrong_arguments_are_refused(
    library: str, arguments: tuple[object, ...], keywords: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"kernel 'touch'.*{message}"):
        touch_kernel(library)(*arguments, **keywords)  # type: ignore[arg-type]


def test_a_missing_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="kernel 'scale': cannot load the library .*nowhere.so"):
        _native.CpuKernel(str(tmp_path / "nowhere.so"), "scale", (), 0, 0, 0, 1)


@pytest.mark.parametrize(("symbol", "partials", "missing"), [("gone", 0, "gone_rows"), ("touch", 1, "touch_finish")])
def test_a_missing_symbol_is_refused(library: str, symbol: str, partials: int, missing: str) -> None:
    with pytest.raises(RuntimeError, match=f"kernel '{symbol}': the library .* has no symbol '{missing}'"):
        _native.CpuKernel(library, symbol, (), partials, 0, 0, 1)


def test_wrong_construction_is_refused(library: str) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 1 has the unknown dtype 'float31'"):
        touch_kernel(library, "float32", "float31")
    with pytest.raises(ValueError, match="kernel 'touch': the numbers of floats .* must not be negative"):
        _native.CpuKernel(library, "touch", (), 0, 0, -1, 1)
    with pytest.raises(TypeError):
        _native.CpuKernel(library, "touch", ["float32"], 0, 0, 0, 1)  # type: ignore[arg-type]


def test_a_kernel_says_what_it_is(library: str) -> None:
    assert repr(touch_kernel(library)) == f"<CpuKernel touch from {library}>"
    assert isinstance(_native.version, str)
    assert _native.kernel_abi_version == 1
