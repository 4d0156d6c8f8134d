"""Kernels that store 8 bits transposed, by the families that a model has them in, and what is right of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from te_fuser.codegen.description import KernelDescription, Store, Target, describe, is_transposed
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, quantize
from te_fuser.formula import functions as f
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.random import threshold
from tests.codegen.corpus import Kit, reference
from tests.codegen.cuda_calls import complaints, streams
from tests.float8 import codes

Family = Callable[[Kit, int, str], KernelDescription]
WIDE = {"dtype": "float32"}


def _both(kit: Kit, name: str, value: Expr, width: int, dtype: str) -> list[Target]:
    """A value times a scale in 8 bits, by rows and transposed."""
    y = quantize(value, kit.leaf("scale", Axes.NONE, **WIDE), FLOAT8[dtype])
    return [
        Target(name, y, Axes.FULL, width, dtype),
        Target(f"{name}_transposed", y, Axes.FULL, width, dtype, "transposed"),
    ]


def _made(
    kit: Kit, name: str, stores: Sequence[Target], value: Expr, width: int, sums: dict[str, Expr] | None = None
) -> KernelDescription:
    """With the largest magnitude of a value, and sums over the rows."""
    totals = [Target(n, e, Axes.FEATURE, width, "float32") for n, e in (sums or {}).items()]
    return describe(name, stores, totals, kit.tensors, [Target("amax", value, Axes.FULL, width, "float32")])


def _gelu(x: Expr) -> Expr:
    return 0.5 * x * (1 + f.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def plain(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """y = x s."""
    x = kit.full("x", width)
    return _made(kit, "quantize", _both(kit, "y", x, width, dtype), x, width)


def gelu(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """y = GELU(x + bias) s."""
    y = _gelu(kit.full("x", width) + kit.feature("bias", width))
    return _made(kit, "gelu_quantize", _both(kit, "y", y, width, dtype), y, width)


def gelu_slope(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """dx of GELU(x), and its sum over the rows."""
    x = kit.full("x", width)
    dx = differentiate({_gelu(x): kit.full("dy", width)}, [x])[x]
    return _made(kit, "gelu_slope_quantize", _both(kit, "dx", dx, width, dtype), dx, width, {"dbias": dx})


def swiglu_slope(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """Two parts side by side, and the sum of both."""
    x = kit.full("x", 2 * width)
    gate, up = f.split(x, 2)
    dx = differentiate({gate * f.sigmoid(gate) * up: kit.full("dy", width)}, [x])[x]
    return _made(kit, "swiglu_slope_quantize", _both(kit, "dx", dx, 2 * width, dtype), dx, 2 * width, {"dbias": dx})


def dropout(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """Random draws; what is dropped is not scaled, and summed with the rest."""
    y = kit.full("x", width) * expr.keep_leaf("dropout", threshold(0.25), Axes.FULL, width) * (4 / 3)
    return _made(kit, "dropout_quantize", _both(kit, "y", y, width, dtype), y, width, {"total": y})


def normed(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """Normed rows from given row numbers; one number a row is stored, and one of all is summed."""
    rstd, shift = kit.leaf("rstd", Axes.ROWS), kit.leaf("shift", Axes.SAMPLE_FEATURES, width)
    y = kit.full("x", width) * rstd * kit.feature("weight", width) + shift
    stores = [*_both(kit, "y", y, width, dtype), Target("square", rstd * rstd, Axes.ROWS, 1, "float32")]
    return describe("normed_quantize", stores, [Target("sum", rstd, Axes.NONE, 1, "float32")], kit.tensors)


def turned(kit: Kit, width: int, dtype: str) -> KernelDescription:
    """8 bits the other way round, and nothing else."""
    x = kit.leaf("x", Axes.FULL, width, dtype)
    return describe("turn", [Target("y", x, Axes.FULL, width, dtype, "transposed")], (), kit.tensors)


FAMILIES: tuple[Family, ...] = (plain, gelu, gelu_slope, swiglu_slope, dropout, normed, turned)
READ = ("float32", "bfloat16", "float16")
WIDTHS = (1, 6, 16, 33, 72, 200)


def cases() -> dict[str, KernelDescription]:
    """Each family in each width, which turn through the dtypes; the plain one in all of these."""
    listed = [(plain, read, dtype, width) for read in READ for dtype in FLOAT8 for width in (33, 72)]
    for number, family in enumerate(FAMILIES, -1):
        for k, width in enumerate(WIDTHS):
            listed.append((family, READ[(k + number) % 3], tuple(FLOAT8)[(k + number) % 2], width))
    found = {}
    for family, read, dtype, width in listed:
        d = family(Kit(read, read), width, dtype)
        found[f"{family.__name__}-{width}-{read}-{dtype}"] = d
    return found


def check(
    d: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    made: Sequence[torch.Tensor],
    largest: Sequence[float],
    rows: int,
    batch: tuple[int, int] = (1, 1),
) -> None:
    """Assert what a kernel stored of these tensors, all on the CPU, and what it raised from 0."""
    assert not complaints(d, tensors, made, rows, batch)
    if d.maxima:
        (amax,) = d.maxima
        store = Store("amax", amax.parts, Axes.FULL, amax.width, "float32")
        only = dataclasses.replace(d, stores=(store,), sums=(), maxima=())
        (exact,) = reference(only, tensors, rows, batch=batch, streams=streams(d))
        assert largest == pytest.approx([exact.abs().max().item() if rows else 0.0], rel=1e-5)
    for s, t in zip(d.stores, made, strict=False):
        if is_transposed(s):  # the bytes of what lies by rows, and zeros behind them
            by_rows = [o for o, other in zip(made, d.stores, strict=False) if f"{other.name}_transposed" == s.name]
            (other,) = by_rows or [tensors["x"]]
            assert torch.equal(codes(t)[:, :rows], codes(other).mT)
            assert t.shape[1] % 16 == 0 and not codes(t)[:, rows:].any()
