"""quack-kernels' products of 8 bits for a machine without a GPU: matrices as the real ones take them, sums by PyTorch.

A test puts it in place with `in_place`.
"""

from __future__ import annotations

import dataclasses
import inspect
import types

import torch

from te_fuser.kernels.packages import quack
from tests.kernels.packages.fake_quack import RowVecLoad, forget, forms_of, installed

__all__ = ["forget"]
PIECES = "te_fuser.kernels.packages.quack_pieces"
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
TILES = {"tile_M": 128, "tile_N": 208, "cluster_M": 2, "cluster_N": 1, "pingpong": True}


def check_layout(name, matrix, shape):
    """Needs of its loads and stores: rows side by side, each and the first element in steps of 16 bytes."""
    assert matrix.shape == shape and matrix.stride(1) == 1, f"{name} is {list(matrix.shape)}, {matrix.stride()}"
    step = matrix.stride(0) * matrix.element_size()
    assert matrix.stride(0) >= shape[1] and not step % 16 and not matrix.data_ptr() % 16, name


def as_bfloat16(x):
    """x rounded as bfloat16 stores it."""
    return x.bfloat16().double()


@dataclasses.dataclass(frozen=True)
class LargestMagnitude:
    """Raises a number to the largest magnitude."""

    name: str


class GemmSm90:
    """The kernels' class."""

    def __init__(self, fp8_fast_accum=False):
        self.fp8_slow_accum = not fp8_fast_accum


@dataclasses.dataclass
class Plan:
    """A product planned for sizes and strides: tensors of others it does not know."""

    epilogue: object
    forms: dict


class Epilogue:
    """A product that ends in a body."""

    def __init__(self, package, body, outputs, ops, outs):
        self.package, self.body, self.outputs, self.ops, self.outs = package, body, outputs, ops, outs

    def gemm(self, A, B, D, C, epi_args, tile_M, tile_N, cluster_M, cluster_N, pingpong, post_init_attrs, _launch):  # noqa: N803
        """Compile it for these sizes and strides, and launch nothing."""
        tiles = {"tile_M": tile_M, "tile_N": tile_N, "cluster_M": cluster_M, "cluster_N": cluster_N}
        assert tiles | {"pingpong": pingpong} == TILES | ({} if C is None else {"tile_N": 160})
        assert post_init_attrs == (("fp8_slow_accum", False),) and not _launch
        self.package.plans.append(self.body.__name__)
        return Plan(self, forms_of({"A": A, "B": B, "D": D, "C": C, **epi_args}))


class Package:
    """The package's modules, and those of te_fuser that are written in its terms.

    Attributes:
        modules: those that stand in the place of real ones, by name.
        calls: what was computed and the tensors of each call, by their names.
        plans: what was planned.
        fails: what to raise in a call.
    """

    def __init__(self):
        self.calls, self.plans, self.fails = [], [], None
        there = {
            "quack.activation": {"sigmoid": torch.sigmoid},
            "quack.epilogue.frontend": {"gemm_epilogue": self.gemm_epilogue},
            "quack.epilogue.ops": {"RowVecLoad": RowVecLoad},
            quack._HOST: {"run_gemm_epi_plan": self.run_gemm_epi_plan},
            quack._HOPPER: {"GemmSm90": GemmSm90},
            PIECES: {"LargestMagnitude": LargestMagnitude, "as_bfloat16": as_bfloat16},
        }
        self.modules = {name: types.ModuleType(name) for name in there}
        for name, found in there.items():
            vars(self.modules[name]).update(found)

    def gemm_epilogue(self, outputs=(), ops=None, outs=None):
        """A product whose epilogue is a function of the accumulator, of numbers and of rows, element by element."""
        ops, outs = ops or {}, outs or {}
        assert all(op == RowVecLoad(name) for name, op in ops.items())
        assert all(out == LargestMagnitude(name) for name, out in outs.items())
        return lambda body: Epilogue(self, body, outputs, ops, outs)

    def run_gemm_epi_plan(self, plan, A, B, D, C, epi_values):  # noqa: N803
        """Compute it."""
        given, epilogue = {"A": A, "B": B, "D": D, "C": C, **epi_values}, plan.epilogue
        assert forms_of(given) == plan.forms, "planned for other sizes, strides or dtypes"
        if self.fails is not None:
            raise self.fails
        (m, k), n = A.shape, B.shape[0]
        check_layout("A", A, (m, k))
        check_layout("B", B, (n, k))
        assert {A.dtype, B.dtype} <= {*NARROW}
        named = [name for name in inspect.signature(epilogue.body).parameters if name != "acc"]
        assert (C is not None) == ("c" in named)
        operands = {name: epi_values[name] for name in named if name != "c"}
        loaded = {}
        if C is not None:
            check_layout("C", C, (m, n))
            assert C.dtype == torch.bfloat16
            loaded["c"] = C.double()
        stored = {name: epi_values[name] for name in epilogue.outputs} | ({} if D is None else {"D": D})
        assert epi_values.keys() == operands.keys() | set(epilogue.outputs) | set(epilogue.outs)
        for name, operand in operands.items():
            assert operand.shape == ((n,) if name in epilogue.ops else ()), name
            assert operand.dtype == (torch.bfloat16 if name in epilogue.ops else torch.float32), name
        loaded |= {name: t.double() for name, t in operands.items()}
        made = epilogue.body(A.double() @ B.double().t(), **loaded)
        assert made.keys() == stored.keys() | set(epilogue.outs)
        for name, out in stored.items():
            check_layout(name, out, (m, n))
            limit = torch.finfo(out.dtype).max if out.dtype in NARROW else torch.inf
            out.copy_(made[name].float().clamp(-limit, limit))
        for name in epilogue.outs:
            most = epi_values[name]
            assert most.shape == () and most.dtype == torch.float32
            most.copy_(torch.maximum(most, made[name].abs().max().float()))
        self.calls.append((epilogue.body.__name__, given))


def in_place(patch):
    """The package as installed, on a CPU in place of a GPU; `patch` is pytest's monkeypatch."""
    return installed(patch, Package(), quack._EPILOGUES_8)
