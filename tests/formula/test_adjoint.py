"""Derivatives of compositions are autograd's, values that kink or tie included."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from te_fuser import formula as f
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import Expr, is_const

ROWS, WIDTH, INNER, SAMPLES = 6, 12, 1, 3
SHAPES = {
    Axes.FULL: (ROWS, WIDTH),
    Axes.ROWS: (ROWS, 1),
    Axes.FEATURE: (WIDTH,),
    Axes.SAMPLE_FEATURES: (SAMPLES, WIDTH),
    Axes.BATCH: (SAMPLES, 1),
    Axes.NONE: (),
}
LEAVES = {
    "x": Axes.FULL,
    "z": Axes.FULL,
    "weight": Axes.FEATURE,
    "row": Axes.ROWS,
    "sample": Axes.SAMPLE_FEATURES,
    "per_sample": Axes.BATCH,
    "scalar": Axes.NONE,
}
SAMPLE_OF_ROW = (torch.arange(ROWS) // INNER) % SAMPLES

Formula = Callable[..., Any]


def randoms(axes: Mapping[str, Axes], seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(SHAPES[a], generator=rng, dtype=torch.float64) for n, a in axes.items()}


def spread(tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
    """As a formula sees it: [rows, ...], [width] or a scalar."""
    return tensor[SAMPLE_OF_ROW] if axes & Axes.BATCH and not axes & Axes.OUTER else tensor


def sum_over_rows(adjoint: torch.Tensor, axes: Axes) -> torch.Tensor:
    adjoint = adjoint.expand(ROWS, WIDTH if axes & Axes.FEATURE else 1)
    if axes & Axes.OUTER:
        return adjoint
    if axes & Axes.BATCH:
        return torch.zeros(SAMPLES, adjoint.shape[1], dtype=torch.float64).index_add(0, SAMPLE_OF_ROW, adjoint)
    return adjoint.sum(0)


def check(formula: Formula, axes: Mapping[str, Axes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Value and all gradients of `formula` on symbols against itself on tensors with autograd."""
    given = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    y = formula(**{n: spread(t, axes[n]) for n, t in given.items()})
    y = y.expand(ROWS, y.shape[-1])
    leaves = {n: expr.leaf(n, a, WIDTH if a & Axes.FEATURE else 1) for n, a in axes.items()}
    e = expr.lift(formula(**leaves))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    seed = expr.leaf("dy", Axes.FULL if y.shape[-1] > 1 else Axes.ROWS, y.shape[-1])
    adjoints = differentiate({e: seed}, leaves.values())
    runner = Interpreter({**tensors, "dy": dy}, {}, ROWS, dy, (INNER, SAMPLES))
    (value,) = runner.run([e])
    same(value.expand_as(y), y.detach())
    wants = (
        torch.autograd.grad(y, list(given.values()), dy, allow_unused=True) if y.requires_grad else [None] * len(given)
    )
    for (name, leaf), want in zip(leaves.items(), wants, strict=True):
        if want is None:
            assert is_const(adjoints[leaf], 0)
            continue
        (got,) = runner.run([adjoints[leaf]])
        same(sum_over_rows(got, axes[name]).reshape(want.shape), want)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11 * max(scale, 1.0))


# ----------------------------------------------------------------------------------- random compositions


def _rotate(a: Any) -> Any:
    first, second, third = f.split(a, 3)
    return f.concat([third * first, first, second])


def _gate(a: Any) -> Any:
    first, second = f.split(a, 2)
    return f.concat([f.sigmoid(first) * second, second])


def _sum_of_half(a: Any) -> Any:
    first, second = f.split(a, 2)
    return f.concat([first * f.row_sum(second), first])


# Written so that values stay moderate and off poles, whatever they are applied to.
UNARY: dict[str, Formula] = {
    "exp": lambda a: f.exp(f.tanh(a)),
    "log": lambda a: f.log(1.5 + a * a),
    "log1p": lambda a: f.log1p(a * a),
    "softplus": f.softplus,
    "sin": f.sin,
    "cos": f.cos,
    "tanh": f.tanh,
    "erf": f.erf,
    "sigmoid": f.sigmoid,
    "sqrt": lambda a: f.sqrt(a * a + 0.5),
    "rsqrt": lambda a: f.rsqrt(a * a + 0.5),
    "reciprocal": lambda a: 1.0 / (2.0 + f.tanh(a)),
    "abs": f.absolute,
    "relu": f.relu,
    "clamp": lambda a: f.clamp(a, -0.5, 0.75),
    "negate": lambda a: -a,
    "double": lambda a: a + a,
    "square": lambda a: f.tanh(a) ** 2,
    "shift": lambda a: a - 0.25,
    "row_sum": lambda a: 0.25 * f.row_sum(a),
    "row_mean": f.row_mean,
    "row_max": f.row_max,
    "row_min": f.row_min,
    "center": lambda a: a - f.row_mean(a),
    "normalize": lambda a: a * f.rsqrt(f.row_mean(a * a) + 0.1),
}
FEATURED: dict[str, Formula] = {
    "swap": lambda a: f.concat(f.split(a, 2)[::-1]),
    "rotate": _rotate,
    "gate": _gate,
    "sum_of_half": _sum_of_half,
}
BINARY: dict[str, Formula] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: f.tanh(a) * b,
    "div": lambda a, b: a / (1.5 + f.tanh(b)),
    "maximum": f.maximum,
    "minimum": f.minimum,
    "where": lambda a, b: f.where(a < b, a * 0.5, f.tanh(b)),
    "where_at_least": lambda a, b: f.where(a >= b, b, f.relu(a)),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*UNARY, *FEATURED, *BINARY, *BINARY]), st.integers(0, 3), st.integers(0, 6 + len(LEAVES))
    ),
    min_size=1,
    max_size=7,
)


REDUCTIONS = ("row_sum", "row_mean", "row_max", "row_min")


class LostFeatures(Exception):
    """x - x + row is simplified to row: what reduces over features after that cannot know that it was repeated."""


def composed(steps: list[tuple[str, int, int]]) -> Formula:
    """A formula that applies the steps, each to one of the last values and any earlier one."""

    def formula(**leaves: Any) -> Any:
        values = [(leaf, bool(LEAVES[name] & Axes.FEATURE)) for name, leaf in leaves.items()]
        for name, near, far in steps:
            (a, wide), (b, other_wide) = values[-1 - near], values[far % len(values)]
            if name in FEATURED and not wide:
                continue
            if isinstance(a, Expr) and wide and not a.axes & Axes.FEATURE and name in (*FEATURED, *REDUCTIONS):
                raise LostFeatures
            if name in BINARY:
                values.append((BINARY[name](a, b), wide or other_wide))
            else:
                values.append(((UNARY | FEATURED)[name](a), wide and name not in REDUCTIONS))
        return values[-1][0] + 0.125 * leaves["x"]

    return formula


@settings(max_examples=100, deadline=None, derandomize=True)
@given(STEPS, st.permutations(sorted(LEAVES)), st.integers(0, 3))
def test_random_compositions(steps: list[tuple[str, int, int]], order: list[str], seed: int) -> None:
    axes = {name: LEAVES[name] for name in order}
    symbols = {n: expr.leaf(n, a, WIDTH if a & Axes.FEATURE else 1) for n, a in axes.items()}
    try:
        composed(steps)(**symbols)
    except LostFeatures:
        assume(False)
    check(composed(steps), axes, randoms(axes, seed))


# --------------------------------------------------------------------------------------- chosen formulas

FORMULAS: dict[str, tuple[Formula, str]] = {
    "broadcast_row_below_a_sum": (lambda x, row: f.row_sum(x + row) * x, "x row"),
    "broadcast_scalar_below_a_sum": (lambda x, scalar: f.row_sum(x - scalar) * x, "x scalar"),
    "where_of_rows_below_a_sum": (lambda x, row, scalar: f.row_sum(f.where(row > 0, scalar, x)) * x, "x row scalar"),
    "sum_of_one_half": (lambda x: f.row_sum(f.split(x, 2)[0]) * x, "x"),
    "sums_of_both_halves": (lambda x: f.row_sum(f.split(x, 2)[0]) * f.row_sum(f.split(x, 2)[1]) + x, "x"),
    "only_second_half": (lambda x: f.concat([f.split(x, 2)[1], f.split(x, 2)[1]]), "x"),
    "halves_and_thirds": (lambda x: f.concat(f.split(x, 2)[::-1]) * f.concat(f.split(x * x, 3)[::-1]), "x"),
    "thirds_of_halves": (lambda x: f.concat(f.split(f.concat(f.split(f.tanh(x), 2)[::-1]), 3)[::-1]), "x"),
    "row_beside_features": (lambda x, row: f.concat([row, f.split(x, 2)[0]]), "x row"),
    "weight_in_parts": (
     lambda x, weight: f.concat([a * b for a, b in zip(f.split(x, 3), f.split(weight, 3)[::-1], strict=True)]),
     "x weight"),
    "sum_of_weight": (lambda x, weight: x * f.row_sum(weight * weight), "x weight"),
    "minimum_of_weight": (lambda x, weight: x * f.row_min(weight) + f.row_min(-x), "x weight"),
    "maximum_of_weight": (lambda x, weight: x * f.row_max(weight), "x weight"),
    "unused": (lambda x, z: x + 0 * z, "x z"),
    "softmax": (lambda x: f.exp(x - f.row_max(x)) / f.row_sum(f.exp(x - f.row_max(x))), "x"),
    "detached": (lambda x: f.exp(x - f.detach(f.row_max(x))) * f.detach(x), "x"),
    "sample_scale": (lambda x, sample, per_sample: f.row_mean(x * sample) * x + per_sample * sample,
     "x sample per_sample"),
    "one_per_row": (lambda x, weight: f.row_sum(x * weight), "x weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    formula, arguments = FORMULAS[name]
    axes = {n: LEAVES[n] for n in arguments.split()}
    check(formula, axes, randoms(axes))


def halves() -> torch.Tensor:
    """Numbers on a coarse grid: many ties, zeros and values that lie on a limit."""
    rng = torch.Generator().manual_seed(4)
    return torch.randint(-2, 3, (ROWS, WIDTH), generator=rng).double() / 2


TIES: dict[str, Formula] = {
    "clamp": lambda x, z: f.clamp(x, -0.5, 0.5),
    "clamp_above": lambda x, z: f.clamp(x, high=0.5),
    "clamp_below": lambda x, z: f.clamp(x, low=0.5),
    "maximum_with_number": lambda x, z: f.maximum(x, 0.5) * f.minimum(0.0, z),
    "row_min_of_concat": lambda x, z: f.row_min(f.concat([f.split(x, 2)[0], f.split(z, 2)[1]])) * z,
    "row_max_of_concat": lambda x, z: f.row_max(f.concat([f.split(x, 2)[0], f.split(z, 2)[1]])) * z,
    "row_max_of_halves": lambda x, z: f.row_max(f.split(x, 2)[0]) * z,
    "where": lambda x, z: f.where(x > z, x, f.where(x < z, z, 2 * x)),
    "comparison_as_number": lambda x, z: (x >= z) * x + (x <= z) * z,
}


@pytest.mark.parametrize("name", TIES)
def test_subgradients_at_kinks_and_ties(name: str) -> None:
    axes = {"x": Axes.FULL, "z": Axes.FULL}
    check(TIES[name], axes, {"x": halves(), "z": halves().flip(0)})


def test_several_outputs_add_up() -> None:
    x, d1, d2 = (expr.leaf(n, Axes.FULL, WIDTH) for n in ("x", "d1", "d2"))
    inner = expr.value("inner", f.tanh(x))
    adjoint = differentiate({inner: d1, inner * inner: d2}, [x])[x]
    t = {n: torch.randn(ROWS, WIDTH, dtype=torch.float64) for n in ("x", "d1", "d2")}
    (got,) = Interpreter(t, {}, ROWS, t["x"]).run([adjoint])
    y = torch.tanh(t["x"])
    torch.testing.assert_close(got, (t["d1"] + 2 * y * t["d2"]) * (1 - y * y))


def _halves(y: Any) -> Any:
    a, b = f.split(y, 2)
    return f.concat([a * f.sigmoid(b), a + b])


def _thirds(y: Any) -> Any:
    a, b, c = f.split(y, 3)
    return f.concat([a * b, b * c, f.tanh(c)])


READERS: dict[str, Formula] = {
    "whole": lambda y: y * f.tanh(y),
    "halves": _halves,
    "thirds": _thirds,
    "itself": lambda y: y,
}


@pytest.mark.parametrize("read", list(itertools.combinations(READERS, 2)), ids=" and ".join)
def test_what_is_rounded_is_the_sum_of_what_arrives(read: tuple[str, str]) -> None:
    """By outputs that read a value as a whole, or parts of it of any size."""

    def outputs(x: Any, z: Any, scale: Any) -> list[Any]:
        inner = f.quantize_gradient(x + f.tanh(z), scale, torch.float8_e5m2)
        y = f.quantize_gradient(inner * READERS[read[0]](inner), scale, torch.float8_e5m2)
        return [READERS[name](y) for name in read]

    x, z, d1, d2 = (expr.leaf(n, Axes.FULL, WIDTH) for n in ("x", "z", "d1", "d2"))
    scale = expr.leaf("scale", Axes.NONE, 1)
    adjoints = differentiate(dict(zip(outputs(x, z, scale), (d1, d2), strict=True)), [x, z])
    t = randoms(dict.fromkeys(("x", "z", "d1", "d2"), Axes.FULL)) | {"scale": torch.tensor(64.0, dtype=torch.float64)}
    found = Interpreter(t, {}, ROWS, t["x"]).run([adjoints[x], adjoints[z]])
    leaves = [t["x"].clone().requires_grad_(), t["z"].clone().requires_grad_()]
    wanted = torch.autograd.grad(outputs(*leaves, t["scale"]), leaves, [t["d1"], t["d2"]])
    for got, want in zip(found, wanted, strict=True):
        same(got, want)


def test_what_cancels_is_no_number_where_its_terms_are_none() -> None:
    """The gradients that x and an op's output -x give x, of rows too: 0, and NaN where they are infinite or NaN."""
    x, dy = expr.leaf("x", Axes.FULL, 4), expr.leaf("dy", Axes.FULL, 4)
    r, row = expr.leaf("r", Axes.ROWS, 1), expr.leaf("row", Axes.FULL, 4)
    t = {"dy": torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan]] * ROWS), "row": torch.ones(ROWS, 4)}
    for leaf, y in ((x, x + expr.value("opposite", -x)), (r, r * row + expr.value("opposite", -r) * row)):
        (got,) = Interpreter(t, {}, ROWS, t["dy"]).run([differentiate({y: dy}, [leaf])[leaf]])
        assert got.isnan().any() and not got.nan_to_num().any()
        assert leaf is r or got[0].isnan().tolist() == [False, True, True, True]
