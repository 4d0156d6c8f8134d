"""Attention as graphs of NVIDIA's Python front end of cuDNN, which read and store heads by their strides.

The package (nvidia-cudnn-frontend, imported as `cudnn`) is optional, and imported when a plan for a GPU at hand first
asks for it. One lock guards all graphs: a handle of cuDNN is not for two threads at once, and backward passes have
threads of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from te_fuser.codegen.progress import Progress
from te_fuser.kernels.attention.qkv_views import HeadsForm, lying
from te_fuser.kernels.packages.optional import PACKAGES, current_stream, give_context, refuse_capture

PACKAGE = PACKAGES["nvidia-cudnn-frontend"]
_UNMADE = "a graph of cuDNN for attention that is not built yet"  # in a capture
_IO_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
_ONES = (1, 1, 1, 1)
_lock = threading.RLock()
# Sizes and strides of heads [b, h, S, D].
Form = tuple[tuple[int, ...], tuple[int, ...]]
# (package, handle) -> a graph, and the numbers of its tensors.
Described = Callable[[Any, Any], "tuple[Any, tuple[int, ...]]"]
P = TypeVar("P", bound="CudnnProblem")
G = TypeVar("G", bound="CudnnGraph")


def unusable(cudnn_version: int) -> str | None:
    """Reason why the front end cannot use PyTorch's loaded cuDNN, of that version."""
    found = _version_in_use()
    if isinstance(found, str):
        return found
    if found != cudnn_version:
        return f"{PACKAGE} has loaded cuDNN {found}, PyTorch {cudnn_version}: both must use one (see LD_LIBRARY_PATH)"
    return None


@functools.cache
def _version_in_use() -> int | str:
    """The cuDNN that the front end has loaded, or why there is none."""
    try:
        return int(_package().backend_version())
    except Exception as error:  # whatever an import of it may raise
        return f"{PACKAGE} does not load: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class AttentionBackward:
    """Problem of backward on packed heads; gradients lie as q, k, v and out."""

    q: HeadsForm
    k: HeadsForm
    v: HeadsForm
    out: HeadsForm
    dtype: torch.dtype
    causal: bool
    dropout: float
    scale: float
    device: int

    def choices(self, d: _Description) -> dict[str, Any]:
        """Dropout with its seed and offset, scale, and whether later positions are hidden."""
        found: dict[str, Any] = {"attn_scale": self.scale, "use_causal_mask": self.causal}
        if self.dropout:
            seed, offset = (d.add(name, (_ONES, _ONES), d.kinds.INT64) for name in ("seed", "offset"))
            found["dropout"] = (self.dropout, seed, offset)
        return found


@dataclass(frozen=True)
class Banded:
    """Problem of graphs of both directions: where heads lie, as their gradients do in theirs.

    Attributes:
        band: (left, right), how many positions before and after its own a query sees; None: all of them.
        from_the_end: whether positions are counted from the last query and key.
        lengths: whether int32 lengths [b] of queries and of keys are given.
    """

    q: Form
    k: Form
    v: Form
    out: Form
    dtype: torch.dtype
    scale: float
    band: tuple[int | None, int | None]
    from_the_end: bool
    lengths: bool
    device: int

    def choices(self, d: _Description) -> dict[str, Any]:
        """Scale, band and lengths, as both nodes take them."""
        corners, (left, right) = d.cudnn.diagonal_alignment, self.band
        found: dict[str, Any] = {"attn_scale": self.scale}
        if self.band != (None, None):
            found["diagonal_alignment"] = corners.BOTTOM_RIGHT if self.from_the_end else corners.TOP_LEFT
        if left is not None:
            found["diagonal_band_left_bound"] = left + 1  # it counts the query's own position
        if right is not None:
            found["diagonal_band_right_bound"] = right
        if self.lengths:
            ones = ((self.q[0][0], 1, 1, 1), _ONES)
            given = {name: d.add(name, ones, d.kinds.INT32) for name in ("seq_len_q", "seq_len_kv")}
            found |= {"use_padding_mask": True, **given}
        return found


class CudnnProblem(Protocol):
    """Problem of a graph: something on a device, which the words of an error show."""

    @property
    def device(self) -> int: ...


class CudnnGraph:
    """A graph that cuDNN supports; its kernel is chosen and loaded at the first run."""

    def __init__(self, problem: CudnnProblem, described: Described, what: str) -> None:
        self._device, self._words = problem.device, f"cuDNN's {what} failed for {problem}"
        self._cudnn, self._handle = _package(), _handle(problem.device)
        self._graph, self._uids = described(self._cudnn, self._handle)
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([self._cudnn.heur_mode.A])
        self._graph.check_support()
        self._launch: Callable[[list[int], int], None] | None = None
        self._workspace: int | None = None

    def run_on(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run on tensors that lie as it was told, in the order of their numbers."""
        self._run(lambda: tensors, lambda: [tensor.data_ptr() for tensor in tensors], tensors[0])

    def _run(
        self, tensors: Callable[[], Sequence[torch.Tensor]], addresses: Callable[[], list[int]], like: torch.Tensor
    ) -> None:
        with torch.cuda.device(self._device):
            give_context(self._device)
            self._load()
            workspace = like.new_empty(self._workspace or 1, dtype=torch.uint8)
            with self._running():
                if self._launch is None:
                    self._graph.execute([*tensors()], workspace, handle=self._handle, tensor_uids=self._uids)
                else:
                    self._launch(addresses(), workspace.data_ptr())

    def _load(self) -> None:
        if self._workspace is not None:
            return
        refuse_capture(_UNMADE)
        try:
            with _lock:
                if self._workspace is None:
                    self._graph.build_plans()
                    self._launch = _launch_by_addresses(self._graph, self._uids, self._handle)
                    self._workspace = int(self._graph.get_workspace_size())
        except Exception as error:
            raise self._failure(error) from error

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run on PyTorch's current stream, one thread at a time."""
        stream = current_stream(self._device)
        try:
            with _lock:
                self._cudnn.set_stream(handle=self._handle, stream=stream)
                yield
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{self._words}: {error}; te_fuser.fusions.disabled('attention_cuda_cudnn_frontend') plans without it"
        )


class BackwardGraph(CudnnGraph):
    """Graph of attention's backward on packed heads."""

    def __init__(self, problem: AttentionBackward) -> None:
        super().__init__(
            problem, lambda cudnn, handle: _described_backward(cudnn, problem, handle), "backward of attention"
        )
        self._problem = problem
        self._offsets = [form[2] * problem.dtype.itemsize for form in (problem.q, problem.k, problem.v)]

    def run(self, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, saved: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The gradient of the packed input x; `saved` are logsumexp, seed and offset."""
        p, dx = self._problem, torch.empty_like(x)
        kept = [tensor.contiguous() for tensor in (saved if p.dropout else saved[:1])]
        self._run(lambda: [*_heads(x, p), y, dy, *kept, *_heads(dx, p)], lambda: self._addresses(x, dx, y, dy, kept), x)
        return dx

    def _addresses(
        self, x: torch.Tensor, dx: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, kept: list[torch.Tensor]
    ) -> list[int]:
        """Addresses of all tensors, in the order of their numbers."""
        heads, to_heads = x.data_ptr(), dx.data_ptr()
        read = [y.data_ptr(), dy.data_ptr(), *[tensor.data_ptr() for tensor in kept]]
        return [*[heads + k for k in self._offsets], *read, *[to_heads + k for k in self._offsets]]


def _heads(packed: torch.Tensor, p: AttentionBackward) -> list[torch.Tensor]:
    return [lying(packed, form) for form in (p.q, p.k, p.v)]


def _launch_by_addresses(graph: Any, uids: tuple[int, ...], handle: Any) -> Callable[[list[int], int], None] | None:
    """The end of the front end's `execute`, f(addresses, workspace), where it has one."""
    try:
        lowered, index = graph._lowered_graph, graph._plans[graph._plan_index].cpp_index
        run, backend, order = lowered._execute_with_raw_ptrs, handle.backend_handle, graph._variant_pack_uids()
    except (AttributeError, IndexError):
        return None
    if graph.selected_engine is not None or index is None or tuple(order) != uids:
        return None
    array = ctypes.c_void_p * len(uids)

    def launch(addresses: list[int], workspace: int) -> None:
        given = array(*addresses)
        run(ctypes.addressof(given), len(addresses), workspace, backend, index)

    return launch


def graph_for(problem: AttentionBackward) -> BackwardGraph | str:
    """A graph for a problem, or why cuDNN does not take it."""
    return made(problem, BackwardGraph, "backward")


def made(problem: P, make: Callable[[P], G], direction: str) -> G | str:
    """Make a graph of a problem, or say why cuDNN does not take it."""
    with torch.cuda.device(problem.device):
        refuse_capture(_UNMADE)
        give_context(problem.device)
        with _lock:
            try:
                return make(problem)
            except Exception as error:  # a refusal, or a front end that is called in another way by now
                return f"cuDNN has no {direction} for it: {type(error).__name__}: {error}"


@functools.cache
def _package() -> Any:
    """The front end, which takes the cuDNN beside PyTorch, or the one that is loaded."""
    with Progress(f"importing {PACKAGE}"):
        return importlib.import_module("cudnn")


@functools.cache
def _handle(device: int) -> Any:
    """cuDNN's handle on a device, made while it is the current one."""
    return _package().create_handle()


def graphs_for(problem: Banded) -> tuple[CudnnGraph, CudnnGraph] | str:
    """Forward and backward, or why cuDNN does not take it.

    Forward runs on q, k, v, lengths of queries and keys if there are any, the output, and the log of sums of
    exponentials [b, h, S, 1]; backward on q, k, v, the output, its gradient, that log, the lengths, dq, dk, dv.
    """

    def of(described: Callable[[Any, Banded, Any], tuple[Any, tuple[int, ...]]], direction: str) -> CudnnGraph | str:
        what = f"{direction} of attention"
        return made(
            problem, lambda p: CudnnGraph(p, lambda cudnn, handle: described(cudnn, p, handle), what), direction
        )

    forward, backward = of(_described_forward, "forward"), of(_described_backward, "backward")
    if isinstance(forward, str) or isinstance(backward, str):
        return forward if isinstance(forward, str) else str(backward)
    return forward, backward


class _Description:
    """A graph in the making; tensors are numbered in the order in which they are added."""

    def __init__(self, cudnn: Any, p: Banded | AttentionBackward, handle: Any) -> None:
        self.kinds, self.p, self.cudnn = cudnn.data_type, p, cudnn
        self.io = getattr(self.kinds, _IO_TYPES[p.dtype])
        wide = self.kinds.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.io, intermediate_data_type=wide, compute_data_type=wide, handle=handle
        )
        self.uids: list[int] = []
        b, h, length, _ = p.q[0]
        self.stats: Form = (b, h, length, 1), (h * length, length, 1, 1)  # where the log of sums lies

    def add(self, name: str, form: Form | HeadsForm, kind: Any = None) -> Any:
        """Add a tensor that is read."""
        kind = self.io if kind is None else kind
        return self.graph.tensor(name=name, dim=form[0], stride=form[1], data_type=kind, uid=self._next())

    def give(self, tensor: Any, form: Form | HeadsForm, kind: Any = None) -> None:
        """Mark a tensor as written, and give it its form."""
        tensor.set_output(True).set_uid(self._next()).set_dim(form[0]).set_stride(form[1])
        tensor.set_data_type(self.io if kind is None else kind)

    def _next(self) -> int:
        self.uids.append(len(self.uids) + 1)
        return self.uids[-1]


def _described_forward(cudnn: Any, p: Banded, handle: Any) -> tuple[Any, tuple[int, ...]]:
    d = _Description(cudnn, p, handle)
    read = {name: d.add(name, form) for name, form in (("q", p.q), ("k", p.k), ("v", p.v))}
    out, stats = d.graph.sdpa(**read, **p.choices(d), generate_stats=True)
    d.give(out, p.out)
    d.give(stats, d.stats, d.kinds.FLOAT)
    return d.graph, tuple(d.uids)


def _described_backward(cudnn: Any, p: Banded | AttentionBackward, handle: Any) -> tuple[Any, tuple[int, ...]]:
    """The graph as the front end is told it, and its tensors' numbers in order."""
    d = _Description(cudnn, p, handle)
    read = {name: d.add(name, form) for name, form in zip(("q", "k", "v"), (p.q, p.k, p.v), strict=True)}
    read |= {name: d.add(name, p.out) for name in ("o", "dO")}
    read["stats"] = d.add("stats", d.stats, d.kinds.FLOAT)
    gradients = d.graph.sdpa_backward(**read, **p.choices(d))
    for gradient, form in zip(gradients, (p.q, p.k, p.v), strict=True):
        d.give(gradient, form)
    return d.graph, tuple(d.uids)
