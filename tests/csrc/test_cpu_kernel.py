"""The native runtime: checks of tensors, sharing of threads, and the calling convention of generated CPU kernels."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from te_fuser import _native, codegen
from tests.c_library import compiled
from tests.threads import in_threads


@pytest.fixture(scope="session")
def cpu_library() -> str:
    return str(compiled("cpu_kernels.c", "-O2", f"-I{Path(codegen.__file__).parent / 'include'}"))


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
def test_values_do_not_depend_on_threads(
    cpu_library: str, backend: str, threads: int, rows: int, features: int
) -> None:
    _native.set_thread_backend(backend)
    torch.set_num_threads(threads)
    x = torch.randint(-9, 9, (rows, features)).float()  # sums of small integers are exact in any order
    y, sums = run_scale(scale_kernel(cpu_library, features), x)
    assert torch.equal(y, 3 * x)
    assert torch.equal(sums, (3 * x).sum(0))


def test_results_repeat_bit_for_bit(cpu_library: str) -> None:
    torch.set_num_threads(2)
    kernel, x = scale_kernel(cpu_library, 33), torch.randn(5000, 33)
    first = run_scale(kernel, x)[1]
    assert all(torch.equal(first, run_scale(kernel, x)[1]) for _ in range(20))


def test_no_rows_store_zero_sums(cpu_library: str) -> None:
    y, sums = run_scale(scale_kernel(cpu_library, 5), torch.empty(0, 5))
    assert y.shape == (0, 5)
    assert torch.equal(sums, torch.zeros(5))


def test_an_empty_batch_is_no_error(cpu_library: str) -> None:
    kernel = _native.CpuKernel(cpu_library, "samples", ("float32",), 0, 1, 0, 1)
    kernel((torch.empty(0),), 0, 0, 0, ())


@pytest.mark.parametrize(("partial", "per_sample", "scratch"), [(0, 0, 0), (5, 0, 0), (0, 3, 1), (17, 2, 100)])
def test_blocks_are_zeroed_aligned_and_apart(cpu_library: str, partial: int, per_sample: int, scratch: int) -> None:
    torch.set_num_threads(3)
    kernel = _native.CpuKernel(cpu_library, "blocks", ("int64",), partial, per_sample, scratch, 32768)
    for _ in range(3):
        wrong = torch.full((6,), -1)
        kernel((wrong,), 6, 1, 4, (partial, per_sample, scratch))
        assert wrong.tolist() == [0] * 6


def test_blocks_larger_than_what_is_kept(cpu_library: str) -> None:
    per_sample, samples = 1 << 20, 20  # 80 MiB
    kernel = _native.CpuKernel(cpu_library, "blocks", ("int64",), 0, per_sample, 0, 1)
    for _ in range(2):
        wrong = torch.full((1,), -1)
        kernel((wrong,), 1, 1, samples, (0, per_sample, 0))
        assert wrong.item() == 0


def test_partial_floats_per_sample(cpu_library: str) -> None:
    torch.set_num_threads(2)
    kernel = _native.CpuKernel(cpu_library, "samples", ("float32",), 0, 1, 0, 32768)
    counts = torch.full((3,), torch.nan)
    kernel((counts,), 2 * 3 * 4, 4, 3, ())
    assert counts.tolist() == [8, 8, 8]


def test_many_tensors_and_integers(cpu_library: str) -> None:
    count = 60  # more than fit into the arrays on the stack
    kernel = _native.CpuKernel(cpu_library, "many", ("int64",) + ("uint8",) * count, 0, 0, 0, 1)
    total = torch.zeros(1, dtype=torch.int64)
    values = tuple(torch.tensor([i], dtype=torch.uint8) for i in range(count))
    kernel((total, *values), 1, 1, 1, (count, *(1000 * i for i in range(count))))
    assert total.item() == 1001 * sum(range(count))


# ---- tensors that are taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"],
)
def test_dtypes(cpu_library: str, dtype: str) -> None:
    touch_kernel(cpu_library, dtype)((torch.zeros(3, dtype=getattr(torch, dtype)),), 1, 1, 1, ())


def test_parameters_and_tensors_with_a_history_are_taken(cpu_library: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    touch_kernel(cpu_library, "float32", "float32", "float32")(
        (parameter, parameter * 2, parameter.detach()), 1, 1, 1, ()
    )


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
def test_row_major_views_are_taken(cpu_library: str, tensor: torch.Tensor) -> None:
    touch_kernel(cpu_library, "float32")((tensor,), 1, 1, 1, ())


def test_a_view_starts_at_its_offset(cpu_library: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(run_scale(scale_kernel(cpu_library, 3), x[1:])[0], 3 * x[1:])


def test_integer_likes(cpu_library: str) -> None:
    kernel, x, y, sums = scale_kernel(cpu_library, 3), torch.ones(2, 3), torch.empty(2, 3), torch.empty(3)
    kernel((x, y, sums), numpy.int64(2), 1, 2, (numpy.int64(3), True))
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


PLAIN, MEMORY = "must be a plain torch.Tensor.*", "has no memory of its own"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([1.0, 2.0], TypeError, f"{PLAIN}got list"),
    (None, TypeError, f"{PLAIN}got NoneType"),
    (torch.zeros(3).numpy(), TypeError, f"{PLAIN}got numpy.ndarray"),
    (torch.zeros(3).as_subclass(Subclass), TypeError, f"{PLAIN}got Subclass"),
    (fake_tensor("cpu"), TypeError, f"{PLAIN}got FakeTensor"),
    (fake_tensor("cuda"), TypeError, f"{PLAIN}got FakeTensor"),
    (torch.nn.UninitializedParameter(), TypeError, f"{PLAIN}got UninitializedParameter"),
    (torch.zeros(3, device="meta"), TypeError, MEMORY),
    (torch.eye(3).to_sparse(), TypeError, MEMORY),
    (torch.zeros(3).to_mkldnn(), TypeError, MEMORY),
    (freed_tensor(), ValueError, "has a shape but no memory"),
    (torch.zeros(3, 4).t(), ValueError, "must be contiguous"),
    (torch.zeros(4)[::2], ValueError, "must be contiguous"),
    (torch.zeros(1).expand(4), ValueError, "must be contiguous"),
    (torch.zeros(1, dtype=torch.bfloat16), TypeError, "must be float32, got bfloat16"),
    (torch.zeros(1, dtype=torch.int64), TypeError, "must be float32, got int64"),
    (torch.zeros(1, dtype=torch.complex64), TypeError, "must be float32, got a dtype of 64 bits"),
]


@pytest.mark.parametrize(("value", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_kernel_given_no_plain_tensor_refuses_it(
    cpu_library: str, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"kernel 'touch': tensor 1 {words}") as refused:
        touch_kernel(cpu_library, "float32", "float32")((torch.zeros(3), value), 1, 1, 1, ())
    assert (refused.value.__cause__ is not None) == (words == MEMORY)


def test_functorch_wrappers_are_refused(cpu_library: str) -> None:
    kernel = touch_kernel(cpu_library, "float32")

    def call(x: torch.Tensor) -> torch.Tensor:
        kernel((x,), 1, 1, 1, ())
        return x.sum()

    for transform in (torch.vmap(call), torch.func.grad(call)):
        with pytest.raises(TypeError, match="tensor 0 has no memory of its own"):
            transform(torch.zeros(3))
    with pytest.raises(ValueError, match="tensor 0 has a shape but no memory"):
        torch.func.functionalize(call)(torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")
def test_other_devices_are_refused(cpu_library: str) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 0 must be on the CPU"):
        touch_kernel(cpu_library, "float32")((torch.zeros(1, device="cuda"),), 1, 1, 1, ())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_tensors_is_refused(cpu_library: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"kernel 'touch' takes 2 tensors, got {count}"):
        touch_kernel(cpu_library, "float32", "float32")((torch.zeros(1),) * count, 1, 1, 1, ())


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
        (((), 1, 1, 1), {}, TypeError, r"takes \(tensors, .*, integers\) by their places"),
        (((), 1, 1, 1, (), 1), {}, TypeError, "by their places"),
        (((), 1, 1, 1), {"integers": ()}, TypeError, "by their places"),
    ],
)
def test_wrong_arguments_are_refused(
    cpu_library: str, arguments: tuple[object, ...], keywords: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"kernel 'touch'.*{message}"):
        touch_kernel(cpu_library)(*arguments, **keywords)  # type: ignore[arg-type]


def test_a_missing_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="kernel 'scale': cannot load the library .*nowhere.so"):
        _native.CpuKernel(str(tmp_path / "nowhere.so"), "scale", (), 0, 0, 0, 1)


@pytest.mark.parametrize(("symbol", "partials", "missing"), [("gone", 0, "gone_rows"), ("touch", 1, "touch_finish")])
def test_a_missing_symbol_is_refused(cpu_library: str, symbol: str, partials: int, missing: str) -> None:
    with pytest.raises(RuntimeError, match=f"kernel '{symbol}': the library .* has no symbol '{missing}'"):
        _native.CpuKernel(cpu_library, symbol, (), partials, 0, 0, 1)


def test_wrong_construction_is_refused(cpu_library: str) -> None:
    with pytest.raises(ValueError, match="kernel 'touch': tensor 1 has the unknown dtype 'float31'"):
        touch_kernel(cpu_library, "float32", "float31")
    with pytest.raises(ValueError, match="kernel 'touch': the numbers of floats .* must not be negative"):
        _native.CpuKernel(cpu_library, "touch", (), 0, 0, -1, 1)
    with pytest.raises(TypeError):
        _native.CpuKernel(cpu_library, "touch", ["float32"], 0, 0, 0, 1)  # type: ignore[arg-type]


def test_a_kernel_says_what_it_is(cpu_library: str) -> None:
    assert repr(touch_kernel(cpu_library)) == f"<CpuKernel touch from {cpu_library}>"
    assert isinstance(_native.version, str)
    assert _native.kernel_abi_version == 1


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
