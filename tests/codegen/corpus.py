"""Kernel descriptions for the tests of every target, with inputs and float64 results for them.

Each family is one function that writes a formula with `te_fuser.formula` and derives its backward from it; the table
`CASES` says in which widths and dtypes it is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fuser.codegen.description import (
    KernelDescription,
    Store,
    Sum,
    Target,
    describe,
    elements,
    is_in_blocks,
    is_transposed,
    padded,
    sizes_in_blocks,
)
from te_fuser.formula import expr
from te_fuser.formula import functions as f
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.random import RandomStream, threshold
from te_fuser.formula.reductions import substitute

Pair = tuple[KernelDescription, ...]


@dataclass
class Kit:
    """Makes leaves and remembers their shapes; `main` is the dtype of activations, `param` that of parameters."""

    main: str = "float32"
    param: str = "float32"
    tensors: dict[str, tuple[Axes, int, str]] = field(default_factory=dict)

    def leaf(self, name: str, axes: Axes, width: int = 1, dtype: str | None = None) -> Expr:
        default = self.main if axes & Axes.OUTER else self.param
        self.tensors[name] = (axes, width, dtype or ("float32" if axes == Axes.ROWS else default))
        return expr.leaf(name, axes, width)

    def full(self, name: str, width: int) -> Expr:
        return self.leaf(name, Axes.FULL, width)

    def feature(self, name: str, width: int) -> Expr:
        return self.leaf(name, Axes.FEATURE, width)

    def target(self, name: str, e: Expr, axes: Axes, width: int = 1, dtype: str | None = None) -> Target:
        default = self.main if axes & Axes.OUTER else self.param
        return Target(name, e, axes, width, dtype or ("float32" if axes == Axes.ROWS else default))

    def forward(
        self, name: str, outputs: Mapping[str, tuple[Expr, int]], statistics: Sequence[Expr] = ()
    ) -> KernelDescription:
        """A kernel that stores full-size outputs, and the given named values as one number a row."""
        stores = [self.target(n, e, Axes.FULL, w) for n, (e, w) in outputs.items()]
        stores += [self.target(e.attrs[0], e, Axes.ROWS) for e in statistics]
        return describe(name, stores, (), self.tensors)

    def backward(
        self,
        name: str,
        outputs: Mapping[str, tuple[Expr, int]],
        wanted: Sequence[Expr],
        statistics: Sequence[Expr] = (),
    ) -> KernelDescription:
        """The adjoints of the wanted leaves; `statistics` are read instead of being computed again."""
        seeds = {e: self.full("d" + n, w) for n, (e, w) in outputs.items()}
        kept = {id(same): self.leaf(e.attrs[0], Axes.ROWS) for e in statistics for same in (e, e.args[0])}
        adjoints = differentiate(seeds, wanted)
        stores, sums = [], []
        for leaf, adjoint in adjoints.items():
            (adjoint,) = substitute([adjoint], lambda node: kept.get(id(node)))
            leaf_name, _, width = leaf.attrs
            target = self.target("d" + leaf_name, adjoint, leaf.axes, width)
            (stores if leaf.axes & Axes.OUTER else sums).append(target)
        return describe(name, stores, sums, self.tensors)


def _keep(name: str, probability: float, width: int) -> Expr:
    scale = expr.const(1 / (1 - probability))
    return expr.keep_leaf(name, threshold(probability), Axes.FULL, width) * scale


def _layer_norm(x: Expr, weight: Expr, bias: Expr) -> tuple[Expr, list[Expr]]:
    mean = expr.value("mean", f.row_mean(x))
    centered = x - mean
    rstd = expr.value("rstd", f.rsqrt(f.row_mean(centered * centered) + 1e-5))
    return centered * rstd * weight + bias, [mean, rstd]


def _gelu_tanh(x: Expr) -> Expr:
    return 0.5 * x * (1 + f.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _silu(x: Expr) -> Expr:
    return x * f.sigmoid(x)


def layer_norm(kit: Kit, width: int) -> Pair:
    x = kit.full("x", width)
    weight, bias = kit.feature("layer_norm.weight", width), kit.feature("layer_norm.bias", width)
    y, statistics = _layer_norm(x, weight, bias)
    out = {"y": (y, width)}
    fwd = kit.forward("layer_norm_fwd", out, statistics)
    return fwd, kit.backward("layer_norm_bwd", out, [x, weight, bias], statistics)


def rms_norm(kit: Kit, width: int) -> Pair:
    x, weight = kit.full("x", width), kit.feature("rms_norm.weight", width)
    rstd = expr.value("rstd", f.rsqrt(f.row_mean(x * x) + 1e-6))
    out = {"y": (x * rstd * weight, width)}
    return kit.forward("rms_norm_fwd", out, [rstd]), kit.backward("rms_norm_bwd", out, [x, weight], [rstd])


def rms_norm_recomputed(kit: Kit, width: int) -> Pair:
    x, weight = kit.full("x", width), kit.feature("rms_norm.weight", width)
    out = {"y": (x * f.rsqrt(f.row_mean(x * x) + 1e-6) * weight, width)}
    return (kit.backward("rms_norm_recomputed_bwd", out, [x, weight]),)


def bias_gelu(kit: Kit, width: int) -> Pair:
    x, bias = kit.full("x", width), kit.feature("bias", width)
    out = {"y": (_gelu_tanh(x + bias), width)}
    return kit.forward("bias_gelu_fwd", out), kit.backward("bias_gelu_bwd", out, [x, bias])


def gelu_erf(kit: Kit, width: int) -> Pair:
    x = kit.full("x", width)
    out = {"y": (0.5 * x * (1 + f.erf(x * math.sqrt(0.5))), width)}
    return kit.forward("gelu_erf_fwd", out), kit.backward("gelu_erf_bwd", out, [x])


def swiglu(kit: Kit, width: int) -> Pair:
    x = kit.full("x", 2 * width)
    gate, up = f.split(x, 2)
    out = {"y": (_silu(gate) * up, width)}
    return kit.forward("swiglu_fwd", out), kit.backward("swiglu_bwd", out, [x])


def layer_norm_swiglu(kit: Kit, width: int) -> Pair:
    """A norm over two parts at once, and a bias as wide as both."""
    x = kit.full("x", 2 * width)
    weight, bias = kit.feature("layer_norm.weight", 2 * width), kit.feature("layer_norm.bias", 2 * width)
    normed, statistics = _layer_norm(x, weight, bias)
    gate, up = f.split(normed, 2)
    out = {"y": (_silu(gate) * up, width)}
    fwd = kit.forward("layer_norm_swiglu_fwd", out, statistics)
    return fwd, kit.backward("layer_norm_swiglu_bwd", out, [x, weight, bias], statistics)


def dropout_add_layer_norm(kit: Kit, width: int) -> Pair:
    x, bias, skip = kit.full("x", width), kit.feature("bias", width), kit.full("skip", width)
    weight, shift = kit.feature("layer_norm.weight", width), kit.feature("layer_norm.bias", width)
    total = skip + (x + bias) * _keep("dropout", 0.1, width)
    y, statistics = _layer_norm(total, weight, shift)
    out = {"y": (y, width), "total": (total, width)}
    fwd = kit.forward("dropout_add_layer_norm_fwd", out, statistics)
    wanted = [x, bias, skip, weight, shift]
    return fwd, kit.backward("dropout_add_layer_norm_bwd", out, wanted, statistics)


def gelu_dropout_add(kit: Kit, width: int) -> Pair:
    x, bias, skip = kit.full("x", width), kit.feature("bias", width), kit.full("skip", width)
    out = {"y": (_gelu_tanh(x + bias) * _keep("dropout", 0.1, width) + skip, width)}
    return kit.forward("gelu_dropout_add_fwd", out), kit.backward("gelu_dropout_add_bwd", out, [x, bias])


def dropout_swiglu(kit: Kit, width: int) -> Pair:
    """A mask over the whole row, read in parts; and a second stream."""
    x = kit.full("x", 2 * width)
    gate, up = f.split(x * _keep("dropout", 0.5, 2 * width), 2)
    out = {"y": (_silu(gate) * up * _keep("dropout.1", 0.25, width), width)}
    return kit.forward("dropout_swiglu_fwd", out), kit.backward("dropout_swiglu_bwd", out, [x])


def softmax(kit: Kit, width: int) -> Pair:
    x = kit.full("x", width)
    e = f.exp(x - f.row_max(x))
    out = {"y": (e / f.row_sum(e), width)}
    return kit.forward("softmax_fwd", out), kit.backward("softmax_bwd", out, [x])


def log_softmax(kit: Kit, width: int) -> Pair:
    """By a shift that has no gradient."""
    x = kit.full("x", width)
    z = x - f.detach(f.row_max(x))
    out = {"y": (z - f.log(f.row_sum(f.exp(z))), width)}
    return kit.forward("log_softmax_fwd", out), kit.backward("log_softmax_bwd", out, [x])


def scale_shift(kit: Kit, width: int) -> Pair:
    x = kit.full("x", width)
    scale, shift = (kit.leaf(n, Axes.SAMPLE_FEATURES, width) for n in ("scale", "shift"))
    out = {"y": (x * (1 + scale) + shift, width)}
    return kit.forward("scale_shift_fwd", out), kit.backward("scale_shift_bwd", out, [x, scale, shift])


def drop_path(kit: Kit, width: int) -> Pair:
    x, skip = kit.full("x", width), kit.full("skip", width)
    keep = expr.keep_leaf("drop_path", threshold(0.2), Axes.BATCH, 1) * expr.const(1 / 0.8)
    out = {"y": (x * keep + skip, width)}
    return kit.forward("drop_path_fwd", out), kit.backward("drop_path_bwd", out, [x])


def prelu(kit: Kit, width: int) -> Pair:
    x, slope = kit.full("x", width), kit.leaf("slope", Axes.NONE)
    out = {"y": (f.where(x > 0, x, slope * x), width)}
    return kit.forward("prelu_fwd", out), kit.backward("prelu_bwd", out, [x, slope])


def gains(kit: Kit, width: int) -> Pair:
    """A number for each row and a number for each sample, and their gradients."""
    x, row_gain, gain = kit.full("x", width), kit.leaf("row_gain", Axes.ROWS), kit.leaf("gain", Axes.BATCH)
    out = {"y": (x * row_gain + f.tanh(x * gain), width)}
    return kit.forward("gains_fwd", out), kit.backward("gains_bwd", out, [x, row_gain, gain])


def cast(kit: Kit, width: int) -> Pair:
    x = kit.leaf("x", Axes.FULL, width, "bfloat16")
    return (kit.forward("cast", {"y": (x, width)}),)


def first_half(kit: Kit, width: int) -> Pair:
    """A part that nobody reads: its gradient is a stored zero."""
    x = kit.full("x", 2 * width)
    out = {"y": (f.absolute(f.split(x, 2)[0]), width)}
    return kit.forward("first_half_fwd", out), kit.backward("first_half_bwd", out, [x])


def choices(kit: Kit, width: int) -> Pair:
    x, other, limit = kit.full("x", width), kit.full("other", width), kit.feature("limit", width)
    capped = f.clamp(x, -0.75, 0.5) + f.maximum(x, other) * f.minimum(x, limit)
    chosen = f.where(x >= other, f.relu(capped), f.absolute(x - limit))
    out = {"y": (chosen, width)}
    return kit.forward("choices_fwd", out), kit.backward("choices_bwd", out, [x, other, limit])


POWERS = (4, -2, 7, -3.0, 1.5, -1.5, 0.375, -0.3125, 2.5, 40, 2.0**-10, -1001)  # exact in float32


def every_function(kit: Kit, width: int) -> Pair:
    """Each unary function, stored on its own: where rare values are looked at."""
    x = kit.full("x", width)
    unary = (
        f.exp, f.log, f.log1p, f.softplus, f.sin, f.cos, f.tanh, f.erf, f.sigmoid, f.sqrt, f.rsqrt, f.absolute, f.relu
    )  # fmt: skip
    out = {fn.__name__: (fn(x), width) for fn in unary}
    out |= {f"power_{k}": (x**p, width) for k, p in enumerate(POWERS)}
    return (kit.forward("every_function", out),)


def waves(kit: Kit, width: int) -> Pair:
    x, weight = kit.full("x", width), kit.feature("weight", width)
    y = f.sin(x * weight) * f.softplus(x) + f.cos(x) * f.log1p(x * x) - f.row_min(x)
    out = {"y": (y, width)}
    return kit.forward("waves_fwd", out), kit.backward("waves_bwd", out, [x, weight])


def two_operands(kit: Kit, width: int) -> Pair:
    """Each function of two numbers, stored on its own."""
    x, other = kit.full("x", width), kit.full("other", width)
    values = {
        "quotient": x / other, "largest": f.maximum(x, other), "smallest": f.minimum(x, other),
        "below": x < other, "at_most": x <= other, "above": x > other, "at_least": x >= other,
        "clamped": f.clamp(x, -1.0, 2.0), "low": f.clamp(x, low=0.25), "picked": f.where(x < other, x, other),
        "row_largest": f.row_max(x) + (x > x), "row_smallest": f.row_min(x) + (x > x), "difference": x - other,
    }  # fmt: skip
    return (kit.forward("two_operands", {n: (e, width) for n, e in values.items()}),)


# By name a function of one number that kinks, or multiplies by what is extreme; as torch computes it.
KINKS: dict[str, Callable[[Any], Any]] = {
    "relu": f.relu,
    "srelu": lambda x: f.relu(x) * f.relu(x),
    "magnitude": f.absolute,
    "limited": lambda x: f.clamp(x, -1.0, 2.0),
    "enlarged": lambda x: x * 1e20 * 1e20,
    "enlarged_sum": lambda x: 3.0 * (x * 1e20) * 1e20 + x,
    "lessened": lambda x: x * 1e-30 * 1e-15,
    "divided": lambda x: x / 1e30 / 1e15,
    "nothing": lambda x: x * 0,
    "itself": lambda x: x - x,
}


def kinks(kit: Kit, width: int) -> Pair:
    """Values and slopes where functions kink, tie or meet extreme numbers."""
    x, other, limit = kit.full("x", width), kit.full("other", width), kit.feature("limit", width)
    values = {name: fn(x) for name, fn in KINKS.items()}
    slopes = {f"d_{name}": differentiate({y: other}, [x])[x] for name, y in values.items()}
    for name, y in {"largest": f.maximum(x, other), "smallest": f.minimum(x, other)}.items():
        slopes |= {f"d_{name}_{leaf.attrs[0]}": g for leaf, g in differentiate({y: limit}, [x, other]).items()}
    slopes["d_floor"] = differentiate({f.maximum(x, 0.0): other}, [x])[x]
    return (kit.forward("kinks", {n: (e, width) for n, e in (values | slopes).items()}),)


def geglu_chain(kit: Kit, width: int) -> Pair:
    """Expensive values that are needed before and after a row sum."""
    x, bias, weight = kit.full("x", 2 * width), kit.feature("bias", 2 * width), kit.feature("rms_norm.weight", width)
    gate, up = f.split(x + bias, 2)
    hidden = _gelu_tanh(gate) * up
    rstd = expr.value("rstd", f.rsqrt(f.row_mean(hidden * hidden) + 1e-6))
    out = {"y": (hidden * rstd * weight, width)}
    return kit.forward("geglu_chain_fwd", out, [rstd]), kit.backward("geglu_chain_bwd", out, [x, bias, weight], [rstd])


_F32, _BF16, _F16, _MIXED = ("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")
Family = Callable[[Kit, int], Pair]

# family, width of one part, (dtype of activations, dtype of parameters)
CASES: tuple[tuple[Family, int, tuple[str, str]], ...] = (
    (layer_norm, 1, _F32),
    (layer_norm, 40, _BF16),
    (layer_norm, 257, _F32),
    (layer_norm, 1024, _MIXED),
    (rms_norm, 3, _F32),
    (rms_norm, 1024, _BF16),
    (rms_norm_recomputed, 257, _F32),
    (bias_gelu, 16, _F32),
    (bias_gelu, 257, _F16),
    (gelu_erf, 40, _F32),
    (gelu_erf, 3, _BF16),
    (swiglu, 3, _F32),
    (swiglu, 1024, _BF16),
    (layer_norm_swiglu, 40, _F32),
    (dropout_add_layer_norm, 257, _F32),
    (dropout_add_layer_norm, 1024, _MIXED),
    (gelu_dropout_add, 40, _F32),
    (dropout_swiglu, 3, _F32),
    (dropout_swiglu, 40, _F16),
    (softmax, 40, _F32),
    (softmax, 1024, _BF16),
    (log_softmax, 257, _F32),
    (log_softmax, 1024, _BF16),
    (scale_shift, 17, _F32),
    (scale_shift, 1024, _MIXED),
    (drop_path, 40, _BF16),
    (prelu, 257, _F32),
    (gains, 40, _F32),
    (cast, 257, _F32),
    (first_half, 16, _F32),
    (choices, 40, _F32),
    (every_function, 40, _F32),
    (waves, 257, _F32),
    (waves, 40, _BF16),
    (two_operands, 16, _F32),
    (kinks, 16, _F32),
    (geglu_chain, 257, _F32),
)


def descriptions() -> dict[str, KernelDescription]:
    """Every description, by a name that says kernel, width and dtypes."""
    found: dict[str, KernelDescription] = {}
    for family, width, dtypes in CASES:
        for kernel in family(Kit(*dtypes), width):
            short = "-".join(dict.fromkeys(d.replace("float", "f") for d in dtypes))
            found[f"{kernel.name}-{width}-{short}"] = kernel
    return found


# ------------------------------------------------------------------------------------ inputs and results

RARE = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 0.5, -2.0, 88.8, -103.9)


def rare_inputs(description: KernelDescription) -> dict[str, torch.Tensor]:
    """Every pair of rare values in x and other, in as many rows as there are."""
    x = torch.tensor(RARE).repeat(3)[: description.width].repeat(len(RARE), 1)
    other = torch.tensor(RARE)[:, None].expand(-1, description.width).contiguous()
    tensors = {"x": x, "other": other, "limit": x[0].flip(0)}
    return {load.name: tensors[load.name] for load in description.loads}


def shape(axes: Axes, width: int, rows: int, samples: int) -> tuple[int, ...]:
    """The shape of a tensor of this extent."""
    count = elements(axes, 1, rows, samples)
    lead = (count,) if axes & Axes.ROWS else ()
    return (*lead, width) if axes & Axes.FEATURE else lead or (1,)


def shape_of(target: Store | Sum, rows: int, samples: int) -> tuple[int, ...]:
    """The shape of what is written."""
    if isinstance(target, Store) and is_in_blocks(target):
        return sizes_in_blocks(target.layout, rows, target.width)
    if is_transposed(target):
        return target.width, padded(rows)
    return shape(target.axes, target.width, rows, samples)


def inputs(description: KernelDescription, rows: int, samples: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random tensor for each load, on the CPU; statistics are consistent with nothing, but positive for `rstd`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for load in description.loads:
        tensor = torch.randn(shape(load.axes, load.width, rows, samples), generator=generator)
        found[load.name] = (tensor.abs() + 0.1 if load.name.endswith("rstd") else tensor).to(getattr(torch, load.dtype))
    return found


def outputs(description: KernelDescription, rows: int, samples: int = 1, device: str = "cpu") -> list[torch.Tensor]:
    """An unwritten tensor (NaN) for each store and each sum."""
    return [
        torch.full(shape_of(t, rows, samples), math.nan, dtype=getattr(torch, t.dtype), device=device)
        for t in (*description.stores, *description.sums)
    ]


def reference(
    description: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    rows: int,
    *,
    batch: tuple[int, int] = (1, 1),
    streams: Mapping[str, RandomStream] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Stores and sums of the kernel, by the interpreter in `dtype`, not rounded to the stores' dtypes.

    Args:
        batch: (batch_inner, batch_size); the sample of row r is (r // batch_inner) % batch_size.
    """
    run = Interpreter(tensors, streams or {}, rows, torch.empty(0, dtype=dtype), batch)
    found = []
    for target in (*description.stores, *description.sums):
        width = description.width if target.axes & Axes.FEATURE else 1
        whole = torch.cat([piece.expand(rows, width) for piece in run.run(target.parts)], -1)
        if not target.axes & Axes.OUTER:
            whole = _sum_rows(whole, target.axes, rows, batch)
        if is_transposed(target):
            whole = torch.nn.functional.pad(whole.mT, (0, padded(rows) - rows))
        found.append(whole.reshape(shape_of(target, rows, batch[1])))
    return found


def _sum_rows(values: torch.Tensor, axes: Axes, rows: int, batch: tuple[int, int]) -> torch.Tensor:
    if not axes & Axes.BATCH:
        return values.sum(0)
    sample = (torch.arange(rows) // batch[0]) % batch[1]
    return values.new_zeros(batch[1], values.shape[-1]).index_add_(0, sample, values)
