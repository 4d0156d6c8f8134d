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

from te_fuser.kernels.packages import quack_matmul
from tests.kernels.packages import fake_packages

VERSION = "0.6.5"
MULTIPLE = 8  # elements of bfloat16 in 16 bytes


def check_layout(name, matrix, shape):
    """What its loads and stores need: that shape, one stride of 1, the other and the address in steps of 16 bytes."""
    assert matrix.shape == shape, f"{name} is {list(matrix.shape)}, not {list(shape)}"
    along, across = sorted(range(2), key=lambda k: (matrix.stride(k), -matrix.shape[k]))
    assert matrix.stride(along) == 1 and not matrix.shape[along] % MULTIPLE, name
    assert matrix.stride(across) >= matrix.shape[along] and not matrix.stride(across) % MULTIPLE, name
    assert not matrix.data_ptr() % 16, name


def gelu(h):
    """In the tanh form."""
    return torch.nn.functional.gelu(h, approximate="tanh")


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
    """How a product is cut into tiles."""

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


class Package:
    """The package's modules, and the one of te_fuser that is written in its terms.

    Attributes:
        modules: those that stand in the place of real ones, by name.
        calls: what was computed and the tensors of each call, by their names.
        fails: what to raise in a call.
    """

    def __init__(self):
        self.calls, self.fails, self.config = [], None, None
        self.modules = {
            name: types.ModuleType(name)
            for name in ("quack.activation", "quack.epilogue.frontend", "quack.epilogue.ops")
        }
        self.interface, config = (types.ModuleType(n) for n in (quack_matmul._INTERFACE, quack_matmul._CONFIG))
        self.modules |= {module.__name__: module for module in (self.interface, config)}
        self.modules["quack.activation"].dgelu_tanh_approx = dgelu_tanh_approx
        self.modules["quack.activation"].dswiglu = dswiglu
        self.modules["quack.epilogue.frontend"].gemm_epilogue = self.gemm_epilogue
        self.modules["quack.epilogue.ops"].ColVecReduce = ColVecReduce
        self.interface.gemm_act, config.GemmConfig = self.gemm_act, GemmConfig

    def gemm_act(
        self,
        A,  # noqa: N803
        B,  # noqa: N803
        C=None,  # noqa: N803
        bias=None,
        activation=None,
        preact_out=None,
        postact_out=None,
        store_preact=True,
        tuned=True,
        config=None,
    ):
        """postact_out = gelu(A B + bias), and preact_out = A B + bias."""
        assert C is None and activation == "gelu_tanh_approx" and store_preact == (preact_out is not None)
        assert bias.shape == B.shape[1:] and bias.is_contiguous() and not bias.data_ptr() % 16
        outs = {"postact_out": postact_out} | ({"preact_out": preact_out} if store_preact else {})
        self._begin("gemm_act", A, B, outs, tuned, config, bias=bias)
        h = A.double() @ B.double() + bias.double()
        for name, out in outs.items():
            out.copy_(h if name == "preact_out" else gelu(h))
        return preact_out, postact_out

    def gemm_epilogue(self, outputs, reduces=None):
        """A product whose epilogue is a function of the accumulator, of C and of tiles, element by element."""
        reduces = reduces or {}
        assert all(reduce == ColVecReduce(name) for name, reduce in reduces.items())

        def declare(body):
            def product(A, B, C=None, *, out=None, config=None, tuned=True, **operands):  # noqa: N803
                assert out.keys() == {"D", *outputs}
                assert {"c", *operands} == set(inspect.signature(body).parameters) - {"acc"}
                self._begin(body.__name__, A, B, {"C": C, **operands, **out}, tuned, config)
                loaded = {name: tile.double() for name, tile in {"c": C, **operands}.items()}
                made = body(A.double() @ B.double(), **loaded)
                for name, stored in out.items():
                    stored.copy_(made[name])
                exact = torch.float64 if A.dtype == torch.float64 else torch.float32  # of float64 in tests
                return out | {name: made[name].sum(1).to(exact) for name in reduces}

            return product

        return declare

    def _begin(self, name, a, b, outs, tuned, config, **others):
        if self.fails is not None:
            raise self.fails
        self.config = self.config or config
        assert config is self.config and isinstance(config, GemmConfig) and not tuned  # known again by identity
        (m, k), n = a.shape, b.shape[1]
        shapes = {"A": (m, k), "B": (k, n)} | dict.fromkeys(outs, (m, n))
        tensors = {"A": a, "B": b, **outs}
        for label, tensor in tensors.items():
            check_layout(label, tensor, shapes[label])
        dtypes = {tensor.dtype for tensor in (tensors | others).values()}
        assert len(dtypes) == 1 and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()))
        self.calls.append((name, tensors | others))


def in_place(patch):
    """The package as installed, on a CPU in place of a GPU; `patch` is pytest's monkeypatch."""
    package = Package()
    forget()
    fake_packages.in_place(patch, quack_matmul, package.modules, VERSION)
    # Written in the package's terms, so they are made anew from this one.
    for name in (quack_matmul._EPILOGUES, quack_matmul._GATED_EPILOGUES):
        spec = importlib.util.find_spec(name)
        package.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package.modules[name])
        patch.setitem(sys.modules, name, package.modules[name])
    return package


def forget():
    """Drop what was kept of another package."""
    for kept in (quack_matmul._module, quack_matmul._config, quack_matmul.unusable, quack_matmul.unusable_by_gates):
        kept.cache_clear()
    quack_matmul.runs.forget()
