"""The native runtime."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from te_fuser.fuser.run.call import GuardedCall
from te_fuser.guards import Facts

version: str
kernel_abi_version: int
instead: str

class CpuKernel:
    """A generated CPU kernel, loaded from a library; see `codegen/include/te_kernel_abi.h` for what it must export."""

    def __new__(
        cls,
        library: str,
        symbol: str,
        dtypes: tuple[str, ...],
        partial_floats: int,
        partial_floats_per_sample: int,
        scratch_floats: int,
        row_elements: int,
    ) -> CpuKernel:
        """Load `<symbol>_rows` and, with partial floats, `<symbol>_finish`.

        Raises RuntimeError if the library or a symbol is missing, ValueError for an unknown dtype or a negative size.
        """

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        rows: SupportsIndex,
        batch_inner: SupportsIndex,
        batch_size: SupportsIndex,
        integers: tuple[SupportsIndex, ...],
        /,
    ) -> None:
        """Run on contiguous CPU tensors; their sizes are the caller's business and not checked here.

        Raises TypeError for a tensor that is a subclass, has no memory of its own or another dtype, ValueError for a
        tensor that is not on the CPU or not contiguous and for a wrong number of tensors, MemoryError.
        """

# Over rows: tiles, rows per block, blocks per multiprocessor, per sample, sums. To add up sums: fixed, per sample.
CudaGrid = tuple[int, int, int, bool, bool] | tuple[int, int]
# symbol, threads, bytes of dynamic shared memory, grid, and where each argument comes from: (kind, index)
CudaLaunch = tuple[str, int, int, CudaGrid, tuple[tuple[str, int], ...]]

class CudaKernel:
    """A generated CUDA kernel: machine code, and what its launches need; see `codegen/cuda.py`, which makes them."""

    def __new__(
        cls,
        name: str,
        cubin: bytes,
        dtypes: tuple[str, ...],
        alignments: tuple[int, ...],
        inputs: int,
        launches: tuple[CudaLaunch, ...],
        partial_widths: tuple[int, ...],
        row_values: int,
        integers: int,
        waits: bool = False,
        overwrites: tuple[tuple[int, int], ...] = (),
        partial_rows: tuple[int, ...] = (),
    ) -> CudaKernel:
        """Prepare a kernel; neither a driver nor a device is needed yet.

        Args:
            dtypes: of the tensors of a call, those that are read first.
            alignments: bytes that each of them must start at a multiple of; misaligned inputs are copied.
            inputs: how many of the tensors are read.
            launches: in order; arguments are of the kinds "tensor", "partial", "row_value", "integer" (each with an
                index), "seed_value", "seed_offset", "rows", "batch_inner", "batch_size", "groups". Where the seed is
                among them, the last input is (seed, offset): on the device, then its own argument points to it; or on
                the host, then it is passed by value and that argument is null.
            partial_widths: floats of one row of each scratch tensor [groups * rows, width].
            partial_rows: rows of a group in each of them, as many as blocks add to the same sums; 1 if not given.
            row_values: number of scratch tensors [rows].
            integers: number of integers of a call.
            waits: whether every kernel begins with `te::wait_for_earlier`; from compute capability 9.0 on the GPU then
                starts it while the kernels before it in the stream end.
            overwrites: pairs of tensors, by their numbers in a call, the first of which is written and may have the
                memory of the second, which is read.

        Raises ValueError for an unknown dtype or kind, an index without anything behind it, an impossible size.
        """

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        rows: SupportsIndex,
        batch_inner: SupportsIndex,
        batch_size: SupportsIndex,
        integers: tuple[SupportsIndex, ...],
        /,
    ) -> None:
        """Launch on PyTorch's current stream of the tensors' device; nothing waits, and CUDA graphs can capture it.

        Sizes of tensors are the caller's business and not checked here.

        Raises TypeError for a tensor that is a subclass, has no memory of its own or another dtype, ValueError for a
        tensor that is not contiguous or on another device than the first, torch.OutOfMemoryError, RuntimeError with
        the driver's words, or when it had to be loaded while the stream is captured.
        """

    def load(self, device: int) -> None:
        """Load on a device, as its first call there would; RuntimeError with the driver's words."""

    def repeat(
        self,
        times: int,
        tensors: tuple[torch.Tensor, ...],
        rows: int,
        batch_inner: int,
        batch_size: int,
        integers: tuple[int, ...],
    ) -> None:
        """Launch the same call several times, to measure what a launch alone costs."""

    def sizes(self, rows: int, samples: int, multiprocessors: int) -> tuple[tuple[int, ...], int]:
        """Return the blocks of each launch, and the groups of rows that have partial sums of their own."""

# device, m, n, k, strides of a, b, out, c and aux (0 where there is none; of a mask in bits), and a number for what
# else the choice of an algorithm depends on: bits 0 and 1: a, b lie transposed; bit 2: TensorFloat-32; then, by four
# bits each, the alignments of a, b, c (or out) and out as powers of two, up to 256 bytes.
MatmulProblem = tuple[int, int, int, int, int, int, int, int, int, int]

class CudaMatmul:
    """A matrix product with an epilogue by cuBLASLt: out[m, n] = epilogue(a[m, k] b[k, n] + addend), sums in float32.

    A call takes one tuple of tensors: a, b, out, then, as far as this product has them, c (the addend), bias [n] or
    sums, aux; `arguments` has their names. Leading dimensions are rows, whose elements lie side by side and that may
    lie apart; factors may also lie transposed. What is read and lies otherwise is copied, what is written must not.

    Epilogues: "none"; "bias", "relu_bias", "gelu_bias" (tanh form); "gelu_aux_bias" writes the value before GELU to aux
    [m, n], "relu_aux_bias" a mask of bits to aux, uint8 [m, 16 ceil(n / 128)]; "dgelu" and "drelu" multiply by the
    activation's slope as aux has it; "dgelu_bgrad" and "drelu_bgrad" also write the sums over the output's rows to
    bias [n]; "sum_a" writes the sums of a over k to bias [m], "sum_b" those of b to bias [n].
    """

    def __new__(
        cls,
        name: str,
        dtype: str,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out_dtype: str | None = None,
        epilogue: str = "none",
        add: str = "none",
        on_empty: Callable[..., Any] | None = None,
        tuned: tuple[Callable[[MatmulProblem], bytes | None], Callable[[MatmulProblem, str], None]] | None = None,
        b_dtype: str | None = None,
        fast_accumulation: bool = False,
        scales_a: str = "one",
        scales_b: str = "one",
    ) -> CudaMatmul:
        """Configure a product; neither the library nor a device is needed yet.

        Args:
            dtype: of the factors: "float32", "bfloat16" or "float16".
            transpose_a, transpose_b: whether a is given as [k, m], b as [n, k].
            out_dtype: of everything else but masks.
            add: "none", "out" (to what out holds) or "c" (a tensor of its own, which is only read).
            on_empty: called with a call's tensors where m, n or k is 0.
            tuned: find(problem) gives an algorithm that was measured before, when a problem is first met, and
                drop(problem, why) hears that the library does not take it; the problem then runs by the first guess.
            b_dtype: of b where it is another: factors may be "float8_e4m3fn" and "float8_e5m2", not both the latter.
                Then a call has scale_a and scale_b behind b, float32 [], by which they are multiplied; they are [m, k]
                and [n, k], k a multiple of 16, and lie so or are copied.
            fast_accumulation: of factors of 8 bits, sums in fewer bits than float32 has.
            scales_a, scales_b: what of such a factor has a scale: "one" for all; "rows", each 128 numbers of a row,
                float32 [ceil(k / 128), rows]; "squares", each 128 rows of these too, float32 [ceil(rows / 128),
                ceil(k / 128) up to a multiple of 4]. Both have blocks, or none; one of them has no squares.

        Raises ValueError for an unknown dtype, epilogue or addend, and for factors that do not go together.
        """

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Run on PyTorch's current stream of the tensors' device; CUDA graphs can capture it once it has run.

        Raises TypeError for a tensor that is a subclass or has another dtype, ValueError for sizes that do not fit, a
        tensor on another device, or an output that does not lie in rows, torch.OutOfMemoryError, RuntimeError with the
        library's words, or when the problem had never run and the stream is captured.
        """

    @property
    def arguments(self) -> tuple[str, ...]: ...
    def make(self, *inputs: torch.Tensor) -> Any:
        """Run on the tensors that are read; what is written is made, and returned alone or as a tuple."""

    def problem(self, tensors: tuple[torch.Tensor, ...]) -> MatmulProblem:
        """Return the problem of a call, prepared but not run; raises as a call."""

    def problems(self) -> dict[MatmulProblem, int]:
        """Return every problem that was met, and how often it ran."""

    def algorithms(self, problem: MatmulProblem, most: int = 8) -> tuple[tuple[bytes, int, float], ...]:
        """Return (algorithm, bytes of workspace, waves) of the library's candidates, its best guess first.

        Raises RuntimeError for a problem that was never met.
        """

    def choose(self, problem: MatmulProblem, algorithm: bytes) -> None:
        """Take this algorithm for a problem that was met, from now on.

        Raises ValueError for what is no algorithm, RuntimeError with the library's words when it refuses it.
        """

    def refusal(self, m: int, n: int, k: int, device: int = 0) -> str | None:
        """Return why the library cannot run these sizes, laid out without gaps, on this device; None if it can."""

def cublaslt_refusal() -> str | None:
    """Return why cuBLASLt cannot be used here; None if it can."""

def cublaslt_version() -> int | None:
    """Return the library's version; None where there is no library."""

def set_cublaslt(path: str) -> None:
    """Take another file than the library that PyTorch has loaded; "" for that one again."""

def cuda_driver_refusal() -> str | None:
    """Return why CUDA kernels cannot be launched here; None if they can."""

def set_cuda_driver(library: str, host_tensors: bool = False) -> None:
    """Take another library for the driver, and tensors on the CPU for ones on CUDA device 0: for tests."""

def num_threads() -> int:
    """Return how many threads a kernel may use now: as many as torch."""

def thread_backend() -> str:
    """Return where kernels run: 'openmp' is torch's own pool, 'std' makes threads for every call."""

def set_thread_backend(name: str) -> None:
    """Choose where kernels run; raises ValueError if that backend is not there."""

# slot, alike, rule, width, fixed sizes, dtype
StepOutput = tuple[int, int, int, int, tuple[int, ...] | None, torch.dtype]

class Step:
    """What runs between slots, a list of tensors."""

    def __call__(self, slots: list[Any]) -> None: ...

class KernelStep(Step):
    """kernel(tensors, rows, batch_inner, batch_size, streams): inputs made contiguous, outputs allocated."""

    def __init__(
        self,
        name: str,
        kernel: Callable[..., None] | None,
        inputs: Sequence[int],
        lead: int,
        batch_dim: int | None,
        outputs: Sequence[StepOutput],
        streams: tuple[int, ...],
        aliases: Sequence[tuple[int, int]],
        many_rows: int,
        large: Callable[[torch.Tensor], None],
        input_sizes: Sequence[tuple[int, int]] = (),
        dying: Sequence[int] = (),
        cut_dim: int | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            kernel: None where nothing is computed, and outputs are other names of inputs.
            inputs: the slots that the kernel reads.
            lead: the slot of the tensor [..., features] whose sizes are those of the call.
            batch_dim: the dimension of the lead that counts samples, where the kernel works per sample.
            outputs: the slots that it fills. `alike` is the tensor of the call (inputs first) that has the same sizes
                and dtype, or -1; then `rule` says them: 0 [..., width], 1 as given, 2 [samples], 3 [samples, width].
            streams: the kernel's integers.
            aliases: (new slot, old slot) that hold the same tensor afterwards.
            many_rows: from so many rows on, each output is shown to `large` before anything is written.
            input_sizes: (rule, width) of each input: how many elements it must have, or ValueError; a width of -1
                takes any number. Nothing is checked where there are none.
            dying: slots among the inputs that nobody reads after this step. In a program, outputs that `kernel` may
                store over one get its tensor where nobody else holds that and it has their sizes.
            cut_dim: the dimension of the lead along which ranks share its rows: each call's integers end with the
                number of rows that follow each other here and in the whole.
        """

class FunctionStep(Step):
    """slots[outputs] = function(*slots[inputs])."""

    def __init__(self, name: str, function: Callable[..., Any], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Prepare a step; a function with several outputs returns a tuple. Slot -1 takes what nobody reads."""

def attributes(objects: Iterable[object], name: str) -> tuple[Any, ...]:
    """That attribute of each object."""

def still_hold(facts: Facts) -> bool:
    """Whether all these facts hold, as far as one does not fail before."""

def tensor_place(tensor: object) -> bytes | None:
    """What is known of a tensor and where it lies, as bytes; None of what is no plain tensor in memory."""

def holders(tensors: tuple[torch.Tensor, ...]) -> bytes | None:
    """How often tensors that share memory are held: another answer later means that somebody else holds one or the
    memory, or that who held one let go. None where there is none, or where this torch does not tell.
    """

def like(
    known: GuardedCall, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
) -> list[torch.Tensor] | None:
    """The parameters of a call that is like the known one; None where it is not."""

def run_if_like(
    known: GuardedCall, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
) -> torch.Tensor | None:
    """The known call's function on x and the parameters; None where this call is not like that."""

def refusing(result: torch.Tensor) -> torch.Tensor:
    """A result that autograd recorded, whose backward refuses as those of our own nodes do."""

def refuse_create_graph(*gradients: torch.Tensor | None) -> None:
    """Refuse to run in a backward that is to be differentiated itself: RuntimeError when grad mode is on."""

def call_key(tensors: Iterable[torch.Tensor]) -> bytes | None:
    """The same as `tensor_key`, of DTensors too: of a rank's part, and the address of what says how they lie."""

def tensor_key(tensors: Iterable[torch.Tensor]) -> bytes | None:
    """What plans know of tensors: class, dtype, device, shape, requires_grad; None where one is no plain tensor."""

class PeerBuffers:
    """Buffers that the GPUs of a group write to one another by copy engines, and flags of them."""

    block_bytes: int
    under_way: int

    def __init__(
        self,
        group: str,
        device: int,
        rank: int,
        buffers: Sequence[int],
        flags: Sequence[int],
        block_bytes: int,
        count: int,
    ) -> None:
        """Streams for copies, over memory of each rank: `count` buffers of a block for every rank, and their flags."""

    @staticmethod
    def flag_bytes(ranks: int, buffers: int) -> int:
        """The bytes of the flags of so many buffers."""

    def gather(self, x: torch.Tensor, out: torch.Tensor, whole: bool = True) -> int:
        """Start to join every rank's x in out, or its block of every rank's x; the number of the buffer it takes."""

    def scatter(self, x: torch.Tensor) -> int:
        """Start to send each rank its block of x; the number of the buffer."""

    def wait(self, buffer: int) -> None:
        """Have the current stream wait for all blocks, its own among them, of what is scattered."""

    def close(self, buffer: int) -> None:
        """Have the current stream wait for all, and let others send anew."""

    def mark(self) -> None:
        """Note that the current stream has come so far, as behind a replay, for is_done()."""

    def release(self) -> None:
        """Let what waits for other ranks go on; what it computes is void."""

    def is_done(self) -> bool:
        """Whether the device is done with what was closed."""

class GatherMatmul:
    """A product of the rows that all ranks of a group have: as make(a, b, ..), of this rank's a."""

    def __new__(cls, make: Callable[..., Any], peers: Any, gives: bool = False) -> GatherMatmul:
        """`peers` gives buffers and tensors of their blocks; with `gives` the gathered a is given, too."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """What `make` gives of the gathered a."""

class MatmulScatter:
    """This rank's rows of the sum of all ranks' make(a, b, ..)."""

    def __new__(cls, make: Callable[..., Any], peers: Any, gives: bool = False) -> MatmulScatter:
        """`peers` gives buffers and tensors of their blocks; with `gives` all ranks' parts are given, not added up."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The rows; or each rank's part of them, and (buffers, number), which are to be closed."""

class QuantizeWeights:
    """The kernel that makes 8 bits of many weights in one launch; `kernels/quantize_weights.cu`."""

    def __new__(cls, cubin: bytes, dtype: str = "float8_e4m3fn") -> QuantizeWeights: ...
    def __call__(self, what: bytes, /, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What is made of the weights, one behind the other; alone where it is one tensor.

        Args:
            what: of each weight the number of its dtype (float32, bfloat16, float16), plus 4: by rows, 8: turned, 16:
                its amax is raised.
            tensors: of each weight [out, in], its scale and, where that is raised, its amax, float32 [].

        Raises TypeError and ValueError for tensors that are not so, RuntimeError with the driver's words.
        """

    def load(self, device: int) -> None:
        """Load on a device; RuntimeError with the driver's words."""

class Program:
    """Steps in order, and after each the slots that nobody reads any more."""

    def __init__(self, steps: Sequence[tuple[Callable[..., None], Sequence[int]]]) -> None:
        """Prepare a program of steps, each with the slots that nobody reads after it."""

    def run(
        self, slots: list[Any], may_overwrite: bool = True, watch: Callable[[int], object] | None = None, /
    ) -> None:
        """Run every step on these slots.

        Args:
            may_overwrite: whether outputs may be stored over what dies at their step.
            watch: called with its number before each step, and with the number of steps after the last.
        """
