"""The native launch of CUDA kernels on machines without a GPU: a driver that counts, and kernels that it emulates."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fuser import _native
from te_fuser.codegen import cuda, nvrtc
from te_fuser.codegen.cuda_loader import native_kernel
from te_fuser.codegen.description import Target, describe
from te_fuser.formula import expr
from te_fuser.formula.expr import Axes
from tests.codegen import corpus
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED, complaints, sizes_of
from tests.fake_cuda import CXX, REAL_DRIVER, Emulation, FakeDriver, in_place
from tests.needs import needs_compiler
from tests.threads import in_threads

CORPUS = corpus.descriptions()


# A kernel that does nothing: x, y and the sums of y, in launches as the generator plans them.
ROWS, FINISH = (1, 1, 2, False, True), (1, 0)
LAUNCHES = (
    ("rows", 128, 0, ROWS, (("tensor", 0), ("tensor", 1), ("partial", 0), ("rows", 0), ("integer", 0))),
    ("finish", 1024, 0, FINISH, (("partial", 0), ("tensor", 2), ("groups", 0), ("batch_size", 0))),
)


def kernel(**changes: Any) -> _native.CudaKernel:
    """The kernel, with some of the constructor's arguments changed."""
    arguments: dict[str, Any] = {
        "name": "nothing",
        "cubin": b"nowhere:-",
        "dtypes": ("float32",) * 3,
        "alignments": (16, 16, 4),
        "inputs": 1,
        "launches": LAUNCHES,
        "partial_widths": (8,),
        "row_values": 0,
        "integers": 1,
    }
    return _native.CudaKernel(**{**arguments, **changes})


def tensors(rows: int = 4) -> tuple[torch.Tensor, ...]:
    return torch.zeros(rows, 8), torch.zeros(rows, 8), torch.zeros(8)


# ---- the driver -------------------------------------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    _native.set_cuda_driver(REAL_DRIVER)


def test_a_missing_driver_is_named(restored: None) -> None:
    _native.set_cuda_driver("libcuda_of_nowhere.so.1")
    problem = _native.cuda_driver_refusal()
    assert problem is not None and "CUDA driver cannot be loaded: libcuda_of_nowhere.so.1" in problem
    with pytest.raises(RuntimeError, match="kernel 'nothing': the CUDA driver cannot be loaded: libcuda_of_nowhere"):
        kernel().load(0)


def test_a_driver_without_a_function_is_named(tmp_path: Path, restored: None) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    _native.set_cuda_driver(str(library))
    assert "old.so has no cuGetErrorName: it is too old" in str(_native.cuda_driver_refusal())


def test_a_driver_that_cannot_start_says_why(library: Path) -> None:
    with in_place(library) as fake:
        fake.failing = 100
        assert "cannot be initialized: a fake error (CUDA_ERROR_FAKE)" in str(_native.cuda_driver_refusal())


@needs_compiler
def test_the_declarations_are_the_drivers(tmp_path: Path) -> None:
    """The hand-written numbers and argument lists are those of CUDA's own header."""
    folders = nvrtc.cuda_include_folders()
    if not folders:
        pytest.skip("no CUDA headers")
    fields = {
        "init": "cuInit", "get_error_name": "cuGetErrorName", "get_error_string": "cuGetErrorString",
        "device_get": "cuDeviceGet", "device_get_attribute": "cuDeviceGetAttribute",
        "primary_context_retain": "cuDevicePrimaryCtxRetain", "context_get_current": "cuCtxGetCurrent",
        "context_push_current": "cuCtxPushCurrent", "context_pop_current": "cuCtxPopCurrent",
        "module_load_data": "cuModuleLoadData", "module_get_function": "cuModuleGetFunction",
        "function_set_attribute": "cuFuncSetAttribute", "stream_is_capturing": "cuStreamIsCapturing",
        "copy_on_device": "cuMemcpyDtoDAsync", "launch_kernel": "cuLaunchKernelEx",
    }  # fmt: skip
    checks = "\n".join(f"static_assert(same(&{c}, te::CudaDriver{{}}.{f}));" for f, c in fields.items())
    source = tmp_path / "declarations.cpp"
    source.write_text(
        """
        #include <cuda.h>
        #include <cstddef>
        #include <type_traits>
        #include "cuda_driver.h"
        template <class T> struct Plain { using type = T; };
        template <class T> struct Plain<T*> { using type = typename Plain<T>::type*; };
        template <> struct Plain<CUstreamCaptureStatus> { using type = int; };
        template <> struct Plain<CUdevice_attribute> { using type = int; };
        template <> struct Plain<CUfunction_attribute> { using type = int; };
        template <> struct Plain<CUresult> { using type = int; };
        template <> struct Plain<CUlaunchConfig> { using type = te::CudaDriver::Configuration; };
        template <> struct Plain<const CUlaunchConfig> { using type = const te::CudaDriver::Configuration; };
        template <class... A, class... B>
        constexpr bool same(CUresult (*)(A...), int (*)(B...)) {
          return (std::is_same_v<typename Plain<A>::type, B> && ...);
        }
        using te::CudaDriver;
        static_assert(CUDA_SUCCESS == CudaDriver::success);
        static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == CudaDriver::multiprocessor_count);
        static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == CudaDriver::max_dynamic_shared_size_bytes);
        static_assert(CU_STREAM_CAPTURE_STATUS_NONE == CudaDriver::capture_status_none);
        static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == CudaDriver::compute_capability_major);
        static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == CudaDriver::may_start_early);
        using Attribute = CudaDriver::Attribute;
        using Configuration = CudaDriver::Configuration;
        static_assert(sizeof(CUlaunchAttribute) == sizeof(Attribute));
        static_assert(offsetof(CUlaunchAttribute, value) == offsetof(Attribute, value));
        static_assert(offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0);
        static_assert(sizeof(CUlaunchConfig) == sizeof(Configuration));
        static_assert(offsetof(CUlaunchConfig, blockDimX) == offsetof(Configuration, block_x));
        static_assert(offsetof(CUlaunchConfig, sharedMemBytes) == offsetof(Configuration, shared_bytes));
        static_assert(offsetof(CUlaunchConfig, hStream) == offsetof(Configuration, stream));
        static_assert(offsetof(CUlaunchConfig, attrs) == offsetof(Configuration, attributes));
        static_assert(offsetof(CUlaunchConfig, numAttrs) == offsetof(Configuration, attribute_count));
        """
        + checks
    )
    ours = Path(__file__).parents[2] / "csrc"
    command = [str(CXX), "-std=c++17", "-fsyntax-only", f"-I{folders[0]}", f"-I{ours}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


# ---- construction -----------------------------------------------------------------------------------------------


def test_a_kernel_needs_no_driver_to_be_made() -> None:
    assert repr(kernel()) == "<CudaKernel nothing, 2 launches>"


def changed_launch(**changes: Any) -> tuple[Any, ...]:
    names = ("symbol", "threads", "shared_bytes", "grid", "arguments")
    return (tuple({**dict(zip(names, LAUNCHES[0], strict=True)), **changes}.values()), LAUNCHES[1])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtypes": ("float32", "float31", "float32")}, ValueError, "tensor 1 has the unknown dtype 'float31'"),
        ({"dtypes": (), "alignments": (), "inputs": 0}, ValueError, "takes no tensor"),
        ({"alignments": (16, 16)}, ValueError, "one alignment for each dtype"),
        ({"alignments": (16, 16, 0)}, ValueError, "alignments lie between 1 and 64"),
        ({"inputs": 4}, ValueError, "inputs more than there are tensors"),
        ({"partial_widths": (-1,)}, ValueError, "negative width"),
        ({"partial_rows": (1, 1)}, ValueError, "one number of partial rows for each width"),
        ({"partial_rows": (0,)}, ValueError, "1 to 65536 rows of partial sums"),
        ({"partial_widths": ()}, ValueError, r"'rows' has an argument \(partial, 0\), which there is not"),
        ({"integers": 0}, ValueError, r"'rows' has an argument \(integer, 0\)"),
        ({"launches": ()}, ValueError, "1 to 4 launches"),
        ({"launches": (LAUNCHES[0],) * 5}, ValueError, "1 to 4 launches"),
        ({"launches": (LAUNCHES[1],)}, ValueError, "first launch must be one over rows"),
        (
            {"launches": (LAUNCHES[0], ("finish", 1024, 0, FINISH, (("partial", 0), ("groups", 0))))},
            ValueError,
            "all of",
        ),
        ({"launches": (("rows", 1),)}, ValueError, "a launch is "),
        ({"launches": changed_launch(threads=1025)}, ValueError, "1 to 1024 threads"),
        ({"launches": changed_launch(threads=0)}, ValueError, "1 to 1024 threads"),
        ({"launches": changed_launch(shared_bytes=-1)}, ValueError, "negative shared memory"),
        ({"launches": changed_launch(grid=(0, 1, 1, False, False))}, ValueError, "must be positive"),
        ({"launches": changed_launch(grid=(-1, 0))}, ValueError, "cannot be negative"),
        ({"launches": changed_launch(grid=(1, 2, 3))}, TypeError, "a grid is"),
        ({"launches": changed_launch(arguments=(("colour", 0),))}, ValueError, "unknown kind 'colour'"),
        ({"launches": changed_launch(arguments=(("tensor", 3),))}, ValueError, r"\(tensor, 3\)"),
        ({"launches": changed_launch(arguments=("tensor",))}, ValueError, r"an argument is \(kind, index\)"),
        ({"cubin": "text"}, TypeError, "bytes"),
        ({"dtypes": ["float32"] * 3}, TypeError, "tuple"),
    ],
)
def test_wrong_construction_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernel(**changes)


# ---- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPUS)
def test_sizes_are_those_of_the_generator(name: str) -> None:
    text = cuda.generate(CORPUS[name])
    native = native_kernel(CORPUS[name], text, b"nowhere:-")
    for rows, samples, multiprocessors in itertools.product((0, 1, 5, 77, 8192, 10**7), (0, 1, 3, 1000), (1, 3, 132)):
        want = sizes_of(text, rows, samples, multiprocessors)
        assert native.sizes(rows, samples, multiprocessors) == (want.blocks, want.groups)


# ---- launching --------------------------------------------------------------------------------------------------


def test_a_call_launches_every_kernel_of_it(driver: FakeDriver) -> None:
    native = kernel()
    native(tensors(), 4, 1, 1, (7,))
    assert (driver.loads, driver.launches) == (1, 2)
    assert (driver.last_symbol, driver.last_threads, driver.last_blocks) == (b"finish", 1024, 1)
    native(tensors(100), 100, 1, 1, (7,))
    assert (driver.loads, driver.launches) == (1, 4)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows_are_summed_at_once(rows: int, driver: FakeDriver) -> None:
    """One block does them all and stores the sums itself."""
    kernel(partial_widths=(1 << 48,))(tensors(rows), rows, 0 if rows == 0 else 1, min(rows, 1), (7,))
    assert (driver.launches, driver.last_symbol) == (1, b"rows")


def test_several_blocks_that_add_to_one_sum_are_always_added_up(driver: FakeDriver) -> None:
    native = kernel(partial_rows=(3,))
    assert native.sizes(1, 1, 1) == ((1, 1), 1) and kernel(partial_rows=(1,)).sizes(1, 1, 1) == ((1, 0), 1)
    native(tensors(1), 1, 1, 1, (7,))
    assert (driver.launches, driver.last_symbol) == (2, b"finish")


def test_no_rows_and_no_sums_launch_nothing(driver: FakeDriver) -> None:
    launch = ("rows", 32, 0, (1, 1, 1, False, False), (("tensor", 0), ("tensor", 1)))
    native = kernel(launches=(launch,), partial_widths=(), integers=0, dtypes=("float32",) * 2, alignments=(4, 4))
    native(tensors(0)[:2], 0, 0, 0, ())
    assert driver.launches == 0


@pytest.mark.parametrize(("waits", "capability", "early"), [(True, 9, 2), (True, 10, 2), (True, 8, 0), (False, 9, 0)])
def test_kernels_that_wait_for_earlier_ones_may_start_early(
    driver: FakeDriver, waits: bool, capability: int, early: int
) -> None:
    driver.capability = capability
    kernel(waits=waits)(tensors(), 4, 1, 1, (0,))
    assert (driver.launches, driver.early) == (2, early)


def test_repeat_launches_again(driver: FakeDriver) -> None:
    kernel().repeat(5, tensors(), 4, 1, 1, (7,))
    assert driver.launches == 10
    with pytest.raises(ValueError, match="times must be positive"):
        kernel().repeat(0, tensors(), 4, 1, 1, (7,))


@pytest.mark.parametrize("shared_bytes", [48 * 1024, 100_000])  # 48 KiB beside a kernel's static memory are too many
def test_much_shared_memory_is_asked_for(shared_bytes: int, driver: FakeDriver) -> None:
    native = kernel(launches=(*changed_launch(shared_bytes=shared_bytes)[:1], LAUNCHES[1]))
    native(tensors(), 4, 1, 1, (7,))
    assert driver.launches == 2
    with pytest.raises(RuntimeError, match="'rows' cannot have 300000 bytes of shared memory: a fake error"):
        kernel(launches=(*changed_launch(shared_bytes=300_000)[:1], LAUNCHES[1])).load(0)


def test_the_context_is_current_only_during_the_call(driver: FakeDriver, library: Path) -> None:
    fake = ctypes.CDLL(str(library))
    native = kernel()
    native(tensors(), 4, 1, 1, (7,))
    assert fake.fake_depth() == 0 and driver.pushes == driver.pops > 0
    # On a thread that has the right context already, as one of PyTorch's, nothing is pushed.
    context = ctypes.c_void_p()
    fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    fake.cuCtxPushCurrent_v2(context)
    pushes = driver.pushes
    native(tensors(), 4, 1, 1, (7,))
    assert driver.pushes == pushes and fake.fake_current() == 0
    fake.cuCtxPopCurrent_v2(ctypes.byref(context))


def test_devices_are_loaded_one_by_one(driver: FakeDriver) -> None:
    native = kernel()
    for device in (0, 1, 1, 0):
        native.load(device)
    assert driver.loads == 2
    with pytest.raises(RuntimeError, match="kernel 'nothing': there is no cuda:2"):
        native.load(2)
    for impossible in (-1, 64, 1 << 33):
        with pytest.raises(ValueError, match="there is no device number"):
            native.load(impossible)


def test_threads_share_a_kernel(driver: FakeDriver) -> None:
    native = kernel()

    def work() -> None:
        for rows in range(1, 40):
            native(tensors(rows), rows, 1, 1, (7,))

    in_threads(*[work] * 6)
    assert (driver.loads, driver.launches) == (1, 6 * (39 * 2 - 2))  # one or two rows are summed at once
    assert driver.pushes == driver.pops


DRAWING = (("rows", 128, 0, ROWS, (("tensor", 0), ("tensor", 1), ("seed_value", 0), ("seed_offset", 0))),)


def drawing(**changes: Any) -> _native.CudaKernel:
    """A kernel whose last input is a seed."""
    arguments = {"dtypes": ("float32", "int64", "float32"), "alignments": (16, 8, 16), "inputs": 2}
    return kernel(**(arguments | {"launches": DRAWING, "partial_widths": (), "integers": 0} | changes))


def test_a_seed_on_the_host_comes_by_value(driver: FakeDriver) -> None:
    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    drawing()((x, torch.tensor([3, 4]), y), 4, 1, 1, ())
    assert driver.launches == 1
    for wrong in (torch.tensor([3]), torch.tensor([[3, 4]])):
        with pytest.raises(ValueError, match=r"tensor 1 must be \(seed, offset\), two numbers"):
            drawing()((x, wrong, y), 4, 1, 1, ())
    with pytest.raises(TypeError, match="tensor 1 must be int64, got float32"):
        drawing()((x, torch.zeros(2), y), 4, 1, 1, ())
    assert driver.launches == 1


def test_what_draws_must_have_a_seed() -> None:
    with pytest.raises(ValueError, match="it draws, and its last input is no seed"):
        drawing(inputs=1)


def test_a_captured_stream_loads_nothing(driver: FakeDriver) -> None:
    native = kernel()
    driver.capturing = 1
    with pytest.raises(RuntimeError, match="'nothing' is not loaded on cuda:0, and its stream is being captured: run"):
        native(tensors(), 4, 1, 1, (7,))
    driver.capturing = 0
    native.load(0)
    driver.capturing = 1
    native(tensors(), 4, 1, 1, (7,))
    assert driver.launches == 2


def test_the_drivers_words_reach_the_caller(driver: FakeDriver) -> None:
    native = kernel()
    native.load(0)
    driver.failing = 700
    with pytest.raises(RuntimeError, match="'rows'.*an illegal memory access was encountered .CUDA_ERROR_ILLEGAL_ADD"):
        native(tensors(), 4, 1, 1, (7,))
    driver.failing = 0
    native(tensors(), 4, 1, 1, (7,))  # and it works again
    assert driver.pushes == driver.pops
    with pytest.raises(RuntimeError, match="its machine code has no function 'missing'"):
        kernel(launches=changed_launch(symbol="missing")).load(0)
    with pytest.raises(RuntimeError, match="its machine code cannot be loaded on cuda:0: a fake error"):
        kernel(cubin=b"nothing that it knows").load(0)


def test_too_large_scratch_is_torchs_error(driver: FakeDriver) -> None:
    native = kernel(partial_widths=(1 << 48,))
    with pytest.raises(torch.OutOfMemoryError, match="kernel 'nothing': no memory for its partial sums"):
        native(tensors(), 4, 1, 1, (7,))
    assert driver.launches == 0


def test_numbers_that_do_not_fit_are_refused(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="must be below"):
        kernel()(tensors(), 4, 1 << 31, 1, (7,))
    with pytest.raises(ValueError, match="takes 1 integers, got 2"):
        kernel()(tensors(), 4, 1, 1, (7, 8))


def misaligned(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows * columns + 1)[1:].view(rows, columns)


def test_misaligned_inputs_are_copied_and_outputs_refused(driver: FakeDriver) -> None:
    x, y, sums = tensors()
    kernel()((misaligned(4, 8), y, sums), 4, 1, 1, (7,))
    assert (driver.copies, driver.launches) == (1, 2)
    with pytest.raises(ValueError, match="tensor 1 is written and must start at a multiple of 16 bytes"):
        kernel()((x, misaligned(4, 8), sums), 4, 1, 1, (7,))
    kernel(alignments=(4, 4, 4))((misaligned(4, 8), misaligned(4, 8), sums), 4, 1, 1, (7,))
    assert driver.copies == 1


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (0, torch.zeros(4, 8).double(), TypeError, "tensor 0 must be float32, got float64"),
        (1, torch.zeros(8, 4).t(), ValueError, "tensor 1 must be contiguous"),
        (2, torch.zeros(8, device="meta"), TypeError, "tensor 2 has no memory of its own"),
        (2, [1.0], TypeError, "tensor 2 must be a plain torch.Tensor or torch.nn.Parameter, got list"),
    ],
)
def test_other_tensors_are_refused(
    driver: FakeDriver, position: int, value: Any, error: type[Exception], message: str
) -> None:
    given = list(tensors())
    given[position] = value
    with pytest.raises(error, match=f"kernel 'nothing': {message}"):
        kernel()(tuple(given), 4, 1, 1, (7,))
    assert driver.launches == 0


def test_tensors_on_the_cpu_are_refused(library: Path) -> None:
    with in_place(library, host_tensors=False), pytest.raises(ValueError, match="tensor 0 must be on a CUDA device"):
        kernel()(tensors(), 4, 1, 1, (7,))


# ---- values -----------------------------------------------------------------------------------------------------

# Every way to pass something: sums of both kinds, statistics, random streams, parts, samples, scalars.
EMULATED = [
    "layer_norm_fwd-40-bf16", "layer_norm_bwd-257-f32", "rms_norm_bwd-1024-bf16", "swiglu_fwd-3-f32",
    "dropout_add_layer_norm_fwd-257-f32", "dropout_add_layer_norm_bwd-257-f32", "dropout_swiglu_bwd-40-f16",
    "scale_shift_bwd-17-f32", "drop_path_bwd-40-bf16", "prelu_bwd-257-f32", "gains_bwd-40-f32", "cast-257-f32",
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", EMULATED)
def test_values_come_through(name: str, driver: FakeDriver, emulation: Emulation) -> None:
    emulation.load([CORPUS[n] for n in EMULATED])
    d = CORPUS[name]
    (native,) = emulation.load([d])
    seed = (torch.tensor([SEED, OFFSET]),) if d.streams else ()
    streams = tuple(FIRST_STREAM + k for k in range(len(d.streams)))
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (13, (1, 1)), (24, (2, 3))):
        read, made = corpus.inputs(d, rows, batch[1], seed=rows), corpus.outputs(d, rows, batch[1])
        native((*read.values(), *seed, *made), rows, *batch, streams)
        assert not complaints(d, read, made, rows, batch)


@needs_compiler
def test_sums_apart_from_stores(driver: FakeDriver, tmp_path: Path) -> None:
    """Rows too long for both: numbers go from the first launch to the second through memory."""
    (d,) = (d for d in corpus.layer_norm(corpus.Kit(), 65536) if d.sums)
    emulation = Emulation(tmp_path)
    (native,) = emulation.load([d])
    read, made = corpus.inputs(d, 3), corpus.outputs(d, 3)
    native((*read.values(), *made), 3, 1, 1, ())
    assert driver.launches == 2  # and so few rows are summed at once
    assert not complaints(d, read, made, 3)


@needs_compiler
def test_a_misaligned_input_gives_the_same_values(driver: FakeDriver, emulation: Emulation) -> None:
    x = expr.leaf("x", Axes.FULL, 16)
    d = describe("twice", [Target("y", x + x, Axes.FULL, 16, "float32")], (), {"x": (Axes.FULL, 16, "float32")})
    (native,) = emulation.load([d])
    x_values, y = misaligned(5, 16).normal_(), torch.full((5, 16), torch.nan)
    native((x_values, y), 5, 1, 1, ())
    assert driver.copies == 1
    assert torch.equal(y, 2 * x_values)
