"""quack-kernels for a machine without a GPU: it takes matrices as the real one, and computes by PyTorch.

A test puts it in place with `in_place`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
import types

import torch

from te_fuser.kernels.packages import quack
from tests.kernels.packages import fake_packages

VERSION = "0.6.5"
MULTIPLE = 8  # elements of bfloat16 in 16 bytes


def check_layout(name, matrix, shape):
    """Needs of its loads and stores: that shape, one stride of 1, the other and the address in steps of 16 bytes."""
    assert matrix.shape == shape, f"{name} is {list(matrix.shape)}, not {list(shape)}"
    along, across = sorted(range(2), key=lambda k: (matrix.stride(k), -matrix.shape[k]))
    assert matrix.stride(along) == 1 and not matrix.shape[along] % MULTIPLE, name
    assert matrix.stride(across) >= matrix.shape[along] and not matrix.stride(across) % MULTIPLE, name
    assert not matrix.data_ptr() % 16, name


def gelu(h):
    """In the tanh form."""
    return torch.nn.functional.gelu(h, approximate="tanh")


def gelu_tanh_approx(x):
    """By the package's name."""
    return gelu(x)


def dgelu_tanh_approx(x, dout):
    """(dout * gelu'(x), gelu(x)) in the tanh form."""
    return torch.ops.aten.gelu_backward(dout, x, approximate="tanh"), gelu(x)


def swiglu(h):
    """Of an input whose first half is the gate."""
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def dswiglu(x, y, dout):
    """(dout * y * silu'(x), dout * silu(x), silu(x) * y)."""
    silu = torch.nn.functional.silu(x)
    return torch.ops.aten.silu_backward(dout * y, x), dout * silu, silu * y


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of a product."""

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    is_dynamic_persistent: bool


@dataclasses.dataclass(frozen=True)
class ColVecReduce:
    """A sum over the columns, one number for each row."""

    name: str


@dataclasses.dataclass(frozen=True)
class RowVecLoad:
    """A number for each column."""

    name: str


class EpiPlan:
    """A product planned for sizes and strides: tensors of others it does not know."""

    def __init__(self, product, tensors, scratch):
        self._product, self._forms, self.scratch = product, forms_of(tensors), scratch

    def run(self, A, B, C=None, *, out, scratch=None, **operands):  # noqa: N803
        scratch = self.scratch if scratch is None else scratch
        tensors = {"A": A, "B": B, "C": C, **out, **operands}
        assert forms_of(tensors) == self._forms, "planned for other sizes, strides or dtypes"
        self._product(A, B, C, out, scratch, operands)


def forms_of(tensors):
    """Forms of the tensors that a plan is made for."""
    return {name: None if t is None else (t.dtype, t.shape, t.stride()) for name, t in tensors.items()}


class Package:
    """The package's modules, and the one of te_fuser that is written in its terms.

    Attributes:
        modules: those that stand in the place of real ones, by name.
        calls: what was computed and the tensors of each call, by their names.
        plans: what was planned.
        fails: what to raise in a call.
    """

    def __init__(self):
        self.calls, self.plans, self.fails = [], [], None
        self.modules = {
            name: types.ModuleType(name)
            for name in ("quack.activation", "quack.epilogue.frontend", "quack.epilogue.ops")
        }
        config = self.modules[quack._CONFIG] = types.ModuleType(quack._CONFIG)
        config.GemmConfig = GemmConfig
        for function in (dgelu_tanh_approx, gelu_tanh_approx, dswiglu):
            setattr(self.modules["quack.activation"], function.__name__, function)
        self.modules["quack.epilogue.frontend"].gemm_epilogue = self.gemm_epilogue
        self.modules["quack.epilogue.frontend"].EpiPlan = EpiPlan
        for kind in (ColVecReduce, RowVecLoad):
            setattr(self.modules["quack.epilogue.ops"], kind.__name__, kind)

    def gemm_epilogue(self, outputs, reduces=None, ops=None):
        """A product whose epilogue is a function of the accumulator, of C, of tiles and of rows, element by element."""
        reduces, ops = reduces or {}, ops or {}
        assert all(reduce == ColVecReduce(name) for name, reduce in reduces.items())
        assert all(op == RowVecLoad(name) for name, op in ops.items())
        return lambda body: Epilogue(self, body, outputs, reduces, ops)

    def begin(self, name, a, b, outs, **others):
        """Check the tensors of a call, and note them."""
        if self.fails is not None:
            raise self.fails
        (m, k), n = a.shape, b.shape[1]
        shapes = {"A": (m, k), "B": (k, n)} | dict.fromkeys(outs, (m, n))
        tensors = {"A": a, "B": b, **outs}
        for label, tensor in tensors.items():
            check_layout(label, tensor, shapes[label])
        dtypes = {tensor.dtype for tensor in (tensors | others).values()}
        assert len(dtypes) == 1 and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()))
        self.calls.append((name, tensors | others))


class Epilogue:
    """A product that ends in a body."""

    def __init__(self, package, body, outputs, reduces, ops):
        self.package, self.body, self.outputs, self.reduces, self.ops = package, body, outputs, reduces, ops

    def plan(self, A, B, C=None, *, out, config=None, **operands):  # noqa: N803
        """Compile it for these sizes and strides, and launch nothing."""
        self.package.plans.append(self.body.__name__)
        assert isinstance(config, GemmConfig) and out.keys() - {"D"} == set(self.outputs)
        rows = A.shape[0]
        exact = torch.float64 if A.dtype == torch.float64 else torch.float32  # of float64 in tests
        # Two tiles, so that somebody has to add up.
        scratch = {name: torch.full((rows, 2), torch.nan, dtype=exact) for name in self.reduces}
        return EpiPlan(self.product, {"A": A, "B": B, "C": C, **out, **operands}, scratch)

    def product(self, a, b, c, out, scratch, operands):
        """Compute it."""
        loaded = {"c": c, **operands} if c is not None else operands
        assert set(loaded) == set(inspect.signature(self.body).parameters) - {"acc"}
        vectors = {name: operands[name] for name in self.ops}
        tiles = {
            name.replace("c", "C") if name == "c" else name: t for name, t in loaded.items() if name not in vectors
        }
        assert all(t.shape == b.shape[1:] and t.is_contiguous() and not t.data_ptr() % 16 for t in vectors.values())
        self.package.begin(self.body.__name__, a, b, tiles | out, **vectors)
        made = self.body(a.double() @ b.double(), **{name: t.double() for name, t in loaded.items()})
        for name, stored in out.items():
            stored.copy_(made[name])
        for name, partial in scratch.items():
            half = made[name].shape[1] // 2
            partial.copy_(torch.stack((made[name][:, :half].sum(1), made[name][:, half:].sum(1)), 1))


def in_place(patch):
    """The package as installed, on a CPU in place of a GPU; `patch` is pytest's monkeypatch."""
    return installed(patch, Package(), quack._EPILOGUES, quack._GATED_EPILOGUES)


def installed(patch, package, *written):
    """A package in its place, and modules that are written in its terms, made anew from this one."""
    forget()
    fake_packages.in_place(patch, quack, package.modules, VERSION)
    for name in written:
        spec = importlib.util.find_spec(name)
        package.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package.modules[name])
        patch.setitem(sys.modules, name, package.modules[name])
    return package


def forget():
    """Drop what was kept of another package."""
    for kept in (quack.module, quack._config, quack.unusable, quack.unusable_by_gates, quack.unusable_8):
        kept.cache_clear()
    quack.runs.forget()
