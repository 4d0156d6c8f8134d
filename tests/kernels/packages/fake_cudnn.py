"""NVIDIA's front end of cuDNN for a machine without a GPU: it takes graphs as the real one, and computes by PyTorch.

A test puts it in place with `in_place`. Dropout is recorded and not computed.
"""

from __future__ import annotations

import ctypes
import types

import torch

from te_fuser.kernels.attention import cudnn as attention_cudnn_frontend
from te_fuser.kernels.packages import cudnn_frontend
from tests.kernels.attention import varlen
from tests.kernels.packages import fake_packages

NAMES = ("BFLOAT16", "HALF", "FLOAT", "DOUBLE", "INT64", "INT32")
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32)
DTYPES = dict(zip(NAMES, _TYPES, strict=True))
VERSION = "1.32.0"
STREAM = 5


class GraphNotSupported(Exception):
    """The front end's own error, which is no RuntimeError."""


class Described:
    """A tensor of a graph, whose setters give it back."""

    def __init__(self, uid, dim=(), stride=(), data_type=None):
        self.uid, self.data_type, self.output = uid, data_type, False
        self.dim, self.stride = tuple(dim), tuple(stride)

    def __getattr__(self, name):
        prefix, _, field = name.partition("_")
        if prefix != "set" or field not in vars(self):
            raise AttributeError(name)

        def set_to(value):
            setattr(self, field, tuple(value) if field in ("dim", "stride") else value)
            return self

        return set_to


class Graph:
    """One backward of attention; its steps must come in the front end's order."""

    STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
    WORKSPACE = 96

    def __init__(self, package, handle, **types_of):
        self.package, self.handle, self.types_of, self.done, self.node = package, handle, types_of, [], None
        package.graphs.append(self)

    def tensor(self, *, name, dim, stride, data_type, uid):
        assert len(dim) == len(stride) == 4 and data_type in NAMES, name
        return Described(uid, dim, stride, data_type)

    def sdpa(self, *, q, k, v, attn_scale, generate_stats, **choices):
        assert self.node is None and generate_stats
        self.read = {"q": q, "k": k, "v": v}
        self.choices = self._chosen(choices)
        self.node, self.made = (attn_scale, None), [Described(None) for _ in range(2)]
        return list(self.made)

    def _chosen(self, choices):
        """Alignment of the diagonal, and both bounds of its band."""
        if choices.pop("use_padding_mask", False):
            for name in ("seq_len_q", "seq_len_kv"):
                self.read[name] = choices.pop(name)
                assert self.read[name].data_type == "INT32" and self.read[name].dim == (self.read["q"].dim[0], 1, 1, 1)
        alignment = choices.pop("diagonal_alignment", "TOP_LEFT")
        left, right = (choices.pop(f"diagonal_band_{side}_bound", None) for side in ("left", "right"))
        assert not choices and (left is None or left >= 1) and (right is None or right >= 0)
        return alignment, (None if left is None else left - 1, right)

    def sdpa_backward(
        self, *, q, k, v, o, dO, stats, attn_scale, use_causal_mask=None, dropout=None, **choices,  # noqa: N803
    ):  # fmt: skip
        assert self.node is None and stats.data_type == "FLOAT" and stats.dim == (*q.dim[:3], 1)
        self.read = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        self.node, self.dropout = (attn_scale, use_causal_mask), dropout
        if use_causal_mask is None:
            self.choices = self._chosen(choices)
        if dropout is not None:
            self.read |= {"seed": dropout[1], "offset": dropout[2]}
        self.made = [Described(None) for _ in range(3)]
        return list(self.made)

    def _step(self, name):
        assert name == self.STEPS[len(self.done)]
        self.done.append(name)

    def validate(self):
        self._step("validate")
        assert all(t.output and len(t.dim) == 4 for t in self.made)

    def build_operation_graph(self):
        self._step("build_operation_graph")

    def create_execution_plans(self, modes):
        self._step("create_execution_plans")
        assert modes == ["A"]

    def check_support(self):
        self._step("check_support")
        if self.package.refuses is not None:
            raise self.package.refuses

    def build_plans(self):
        if self.package.does_not_load is not None:
            raise self.package.does_not_load
        self._step("build_plans")

    def get_workspace_size(self):
        return self.WORKSPACE

    def execute(self, tensors, workspace, handle, tensor_uids):
        assert self.done == list(self.STEPS) and handle is self.handle and handle.stream == STREAM
        assert workspace.numel() == self.WORKSPACE and workspace.dtype == torch.uint8
        assert len(tensors) == len(tensor_uids) == len(set(tensor_uids))
        if self.package.fails is not None:
            raise self.package.fails
        self._compute(dict(zip(tensor_uids, tensors, strict=True)))

    def _compute(self, given):
        lying = {t.uid: self._lying(given[t.uid], t) for t in (*self.read.values(), *self.made)}
        self.package.last = {name: lying[t.uid].clone() for name, t in self.read.items()}
        if self.node[1] is None:
            for described, found in zip(self.made, self._banded(**self.package.last), strict=True):
                lying[described.uid].copy_(found)
            return
        made = fake_packages.attention_backward(self.package.last, *self.node)
        for described, gradient in zip(self.made, made, strict=True):
            lying[described.uid].copy_(gradient)

    def _banded(self, q, k, v, o=None, dO=None, stats=None, seq_len_q=None, seq_len_kv=None):  # noqa: N803
        """Both nodes where no causal mask is told; what is behind a length is NaN."""
        (alignment, window), (scale, _) = self.choices, self.node
        corners = {"TOP_LEFT": "top_left", "BOTTOM_RIGHT": "bottom_right"}
        kernel = varlen.Kernel(scale, window, blind=torch.nan, corner=corners[alignment])
        lengths = [None if n is None else n.flatten() for n in (seq_len_q, seq_len_kv)]
        spans = varlen.Spans(False, lengths=lengths[0], key_lengths=lengths[1])
        q, k, v, o, dO = (None if t is None else t.transpose(1, 2) for t in (q, k, v, o, dO))  # noqa: N806
        if o is None:
            out, lse = varlen.forward(kernel, spans, q, k, v)
            return out.transpose(1, 2), lse[..., None]
        made = varlen.backward(kernel, spans, q, k, v, o, dO, stats.squeeze(-1))
        return [t.transpose(1, 2) for t in made[:3]]

    # Runs on addresses, as the front end has them inside.
    selected_engine, _plan_index = None, 0
    _plans = (types.SimpleNamespace(cpp_index=3),)

    @property
    def _lowered_graph(self):
        if not self.package.takes_addresses:
            raise AttributeError("_lowered_graph")
        return types.SimpleNamespace(_execute_with_raw_ptrs=self._execute_with_raw_ptrs)

    def _variant_pack_uids(self):
        return sorted(t.uid for t in (*self.read.values(), *self.made))

    def _execute_with_raw_ptrs(self, address, count, workspace, handle, index):
        assert self.done == list(self.STEPS) and self.handle.stream == STREAM and workspace
        assert (handle, index) == (self.handle.backend_handle, 3)
        if self.package.fails is not None:
            raise self.package.fails
        self.package.by_addresses += 1
        described = sorted((*self.read.values(), *self.made), key=lambda t: t.uid)
        addresses = (ctypes.c_void_p * count).from_address(address)
        self._compute({t.uid: self._memory(at, t) for at, t in zip(addresses, described, strict=True)})

    def _memory(self, address, described):
        """Tensor over the memory that begins at an address."""
        exact = self.types_of["io"] == "DOUBLE" and described.data_type == "FLOAT"  # of float64 in tests
        dtype = torch.float64 if exact else DTYPES[described.data_type]
        reach = 1 + sum((n - 1) * step for n, step in zip(described.dim, described.stride, strict=True))
        memory = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(described.dim, described.stride)

    def _lying(self, tensor, described):
        exact = tensor.dtype == DTYPES[described.data_type]
        assert exact or (described.data_type == "FLOAT" and tensor.dtype == torch.float64)  # of float64 in tests
        if described.data_type in ("FLOAT", "INT64", "INT32"):  # what PyTorch gave: dense, of as many elements
            assert tensor.is_contiguous() and tensor.numel() == torch.Size(described.dim).numel()
            return tensor.view(described.dim)
        # Dense memory counts as it was described, whatever its sizes are.
        assert described.stride[-1] == 1 and (tensor.is_contiguous() or tensor.stride() == described.stride)
        return tensor.as_strided(described.dim, described.stride, tensor.storage_offset())


class Package(types.ModuleType):
    """The module `cudnn`.

    Attributes:
        graphs: all that were begun.
        refuses, does_not_load, fails: what to raise when support is asked for, plans are built, a graph runs.
        takes_addresses: whether graphs have a way to be run on addresses.
        by_addresses: how many runs went that way.
        last: what the last run was given, by the names of the node's inputs.
    """

    def __init__(self, version=91900):
        super().__init__("cudnn")
        self.data_type = types.SimpleNamespace(**{name: name for name in NAMES})
        self.diagonal_alignment = types.SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
        self.heur_mode = types.SimpleNamespace(A="A")
        self.cudnnGraphNotSupportedError = GraphNotSupported
        self.graphs, self.handles, self.last, self.version = [], [], {}, version
        self.refuses = self.does_not_load = self.fails = None
        self.takes_addresses, self.by_addresses = True, 0

    def backend_version(self):
        return self.version

    def create_handle(self):
        self.handles.append(types.SimpleNamespace(stream=0, backend_handle=17))
        return self.handles[-1]

    def set_stream(self, handle, stream):
        handle.stream = stream

    def pygraph(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type == compute_data_type == "FLOAT"
        return Graph(self, handle, io=io_data_type)


def in_place(patch):
    """The front end as installed, on a CPU in place of a GPU; `patch` is pytest's monkeypatch."""
    package = Package()
    forget()
    fake_packages.in_place(patch, cudnn_frontend, {"cudnn": package}, VERSION)
    patch.setitem(cudnn_frontend._IO_TYPES, torch.float64, "DOUBLE")
    patch.setattr(cudnn_frontend, "current_stream", lambda device: STREAM)
    return package


def forget():
    """Drop what was kept of another front end."""
    asked = (cudnn_frontend._package, cudnn_frontend._version_in_use, cudnn_frontend._handle)
    for kept in (*asked, attention_cudnn_frontend._graph, attention_cudnn_frontend._graphs):
        kept.cache_clear()
