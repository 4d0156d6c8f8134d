"""Expressions: shared by construction, simplified without changing their value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from te_fuser import formula as f
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import ONE, ZERO, Expr, const
from te_fuser.formula.reductions import substitute
from te_fuser.formula.traversal import topological
from tests.refused import refusals

ROWS, WIDTH = 4, 12


def full(name: str = "x", width: int = WIDTH) -> Expr:
    return expr.leaf(name, Axes.FULL, width)


def per_row(name: str = "m") -> Expr:
    return expr.leaf(name, Axes.ROWS)


def feature(name: str = "w", width: int = WIDTH) -> Expr:
    return expr.leaf(name, Axes.FEATURE, width)


def value_of(e: Expr) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    shapes = {"x": (ROWS, WIDTH), "y": (ROWS, WIDTH), "m": (ROWS,), "k": (ROWS,), "w": (WIDTH,)}
    tensors = {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    return Interpreter(tensors, {}, ROWS, tensors["x"]).run([e])[0]


# ------------------------------------------------------------------------------------------- sharing


def test_equal_expressions_are_one_object() -> None:
    x, y = full(), full("y")
    assert x is full() and (x + y) is (y + x) and (x * y) is (y * x)
    assert f.exp(x * y + 1) is f.exp(1 + y * x)
    assert (x - y) is not (y - x)
    assert full("x", 4) is not full("x", 8)


def test_nodes_nobody_holds_are_dropped() -> None:
    e = f.exp(full() * 17.25 + 3)
    held = weakref.ref(e)
    assert held() in expr._interned.values()
    del e
    assert held() is None


def test_digest_is_of_the_meaning_alone() -> None:
    """Digests are equal in every process: kernel caches on disk go by them."""
    assert full("x", 8).digest == expr.leaf("x", Axes.FULL, 8).digest == "2d3a32e16b35c1664ef8"


# ------------------------------------------------------------------------------------- simplification

NO_NUMBER = 0.0  # what is no number stays that: on tensors x * 0 and x - x are NaN where x is not finite

SAME: dict[str, Callable[[], tuple[Expr, Any]]] = {
    "plus_zero": lambda: (full() + 0, full()),
    "zero_minus": lambda: (0 - full(), -full()),
    "times_one": lambda: (full() * 1.0, full()),
    "times_zero": lambda: (full() * 0, full() * NO_NUMBER),
    "minus_itself": lambda: (full() - full(), full() * NO_NUMBER),
    "minus_itself_scaled": lambda: (2 * full() * 3 - 6 * full(), 6 * full() * NO_NUMBER),
    "twice": lambda: (full() + full(), 2 * full()),
    "numbers_meet": lambda: (2 * (full() * 0.5), full()),
    "minus_negative": lambda: (full() - (-1 * full("y")), full() + full("y")),
    "plus_negative": lambda: (full() + (-2 * full("y")), full() - 2 * full("y")),
    "negative_plus": lambda: (-full() + full("y"), full("y") - full()),
    "negative_twice": lambda: (-1 * (-full()), full()),
    "divide_by_number": lambda: (full() / 4, full() * Fraction(1, 4)),
    "exact_count": lambda: (WIDTH * f.row_mean(full()), f.row_sum(full())),
    "mean_of_what_a_row_shares": lambda: (f.row_mean(per_row()), per_row()),
    "mean_of_shared_and_features": lambda: (f.row_mean(per_row() * full()), per_row() * f.row_mean(full())),
    "factor_leaves_a_sum": lambda: (f.row_sum(full() * per_row()), per_row() * f.row_sum(full())),
    "divisor_leaves_a_sum": lambda: (f.row_sum(full() / per_row()), 1 / per_row() * f.row_sum(full())),
    "number_leaves_a_sum": lambda: (f.row_sum(3 * full()), 3 * f.row_sum(full())),
    "centered_sums_to_zero": lambda: (f.row_sum(full() - f.row_mean(full())), ZERO),
    "where_of_equals": lambda: (f.where(full() > 0, full("y"), full("y")), full("y")),
    "where_of_constant": lambda: (f.where(const(1), full(), full("y")), full()),
    "parts_of_concat": lambda: (f.split(f.concat([full(), full("y")]), 2)[1], full("y")),
    "concat_of_concat": lambda: (
        f.concat([f.concat([full(), full("y")]), full()]),
        f.concat([full(), full("y"), full()]),
    ),
    "pointwise_enters_concat": lambda: (
        f.exp(f.concat([full(), full("y")])),
        f.concat([f.exp(full()), f.exp(full("y"))]),
    ),
    "sum_of_concat": lambda: (f.row_sum(f.concat([full(), full("y")])), f.row_sum(full()) + f.row_sum(full("y"))),
    "part_reaches_the_leaf": lambda: (f.split(f.exp(full() * 2), 3)[2], f.exp(f.split(full(), 3)[2] * 2)),
    "part_of_a_part": lambda: (f.split(f.split(full(), 2)[1], 3)[0], f.split(full(), 6)[3]),
    "built_in_abs": lambda: (abs(full()), f.absolute(full())),
    "power": lambda: (full() ** 2, full() * full()),
    "inverse_root": lambda: (full() ** -0.5, expr.unary("rsqrt", full())),
}


@pytest.mark.parametrize("name", SAME)
def test_simplified_to_the_same_object(name: str) -> None:
    found, wanted = SAME[name]()
    assert found is wanted, f"{found} is not {wanted}"


def test_whole_and_rational_numbers_are_exact() -> None:
    assert const(3.0) is const(3) and const(True) is ONE
    assert (const(Fraction(1, 3)) * 3) is ONE
    assert (full() / 3 * 3) is full()


SUMS: dict[str, Callable[[], Expr]] = {
    "features_minus_row": lambda: full() - f.row_mean(full("y")),
    "product_with_centered": lambda: full("y") * (full() - f.row_mean(full())),
    "row_plus_features": lambda: per_row() + full(),
    "rows_below_a_function": lambda: f.exp(per_row() + full()),
    "two_factors": lambda: per_row() * (full() * (per_row("k") * full("y"))) / per_row("k"),
    "difference_of_scaled": lambda: per_row() * full() - per_row("k") * full(),
    "concatenated": lambda: f.concat([full() * per_row(), full("y") - f.row_mean(full())]),
    "weights_only": lambda: feature() * feature() + 1,
}


@pytest.mark.parametrize("name", SUMS)
def test_a_simplified_sum_has_the_same_value_and_no_more_stages(name: str) -> None:
    inner = SUMS[name]()
    plain, found = expr.make("row_sum", (inner,), (), inner.axes & ~Axes.FEATURE, 1), f.row_sum(inner)
    torch.testing.assert_close(value_of(found), value_of(plain), rtol=1e-12, atol=1e-12)
    assert found.depth <= plain.depth


# Written with features, and simplified to what has none: on tensors a row has them all the same.
VANISHED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "minus_itself": lambda x, m, w: x - x + m,
    "itself_from_it": lambda x, m, w: m - (x - x),
    "times_zero": lambda x, m, w: m * (0 * x + 3),
    "zero_over": lambda x, m, w: (x * 0) / (x + 9) - m,
    "like_terms": lambda x, m, w: 2 * x - (x + x) + m * m,
    "weights": lambda x, m, w: m + (w - w),
    "a_function_of_it": lambda x, m, w: f.exp(x - x) * m,
    "the_larger": lambda x, m, w: f.maximum(x - x, m),
    "chosen": lambda x, m, w: f.where(x > 0, m, m),
    "in_a_part": lambda x, m, w: f.split(x - x + m, 3)[1],
    "beside": lambda x, m, w: f.concat([x - x + m, x]),
    "with_the_rest": lambda x, m, w: x * ((w - w) + m) + m,
}


@pytest.mark.parametrize("reduction", [f.row_sum, f.row_mean, f.row_max])
@pytest.mark.parametrize("name", VANISHED)
def test_what_vanishes_leaves_its_features(name: str, reduction: Callable[[Any], Any]) -> None:
    formula = VANISHED[name]
    tensors = {n: value_of(e).requires_grad_() for n, e in (("x", full()), ("m", per_row()))}
    weights = value_of(feature()).requires_grad_()
    y = reduction(formula(tensors["x"], tensors["m"], weights)) * tensors["x"]
    e = reduction(formula(full(), per_row(), feature())) * full()
    torch.testing.assert_close(value_of(e), y.detach(), rtol=1e-12, atol=1e-12)
    dy = value_of(full("y"))
    want = torch.autograd.grad(y, [*tensors.values()], dy)
    adjoints = differentiate({e: full("y")}, [full(), per_row()])
    for adjoint, gradient in zip(adjoints.values(), want, strict=True):
        torch.testing.assert_close(value_of(adjoint).expand(gradient.shape), gradient, rtol=1e-11, atol=1e-11)


def test_a_sum_is_spread_when_that_saves_a_stage_or_a_term_only() -> None:
    x, y = full(), full("y")
    assert f.row_sum(x + y).op == "row_sum"  # one sum stays one
    assert f.row_sum(x * y - y * f.row_mean(x)).depth == 1  # both sums run together
    both = f.row_sum(x) + f.row_sum(x - f.row_mean(y))
    assert sum(n.op == "row_sum" for n in topological([both])) == 2


def test_depth_counts_dependent_reductions() -> None:
    x = full()
    centered = x - f.row_mean(x)
    variance = f.row_mean(centered * centered)
    assert (x.depth, f.row_mean(x).depth, variance.depth, f.row_max(x * variance).depth) == (0, 1, 2, 3)


def test_numbers_of_numpy_are_numbers() -> None:
    x = expr.leaf("x", Axes.FULL, 8)
    for kind in (np.float32, np.float64, np.int64, np.float16):
        assert x * kind(3) is x * 3.0 and kind(3) * x is x * 3.0 and x ** kind(3) is x**3
        assert f.maximum(x, kind(0)) is f.maximum(x, 0.0)


def test_values_stop_simplification_and_carry_parts() -> None:
    x = full()
    marked = expr.value("out", -x)
    assert (marked + x) is not ZERO
    part = f.split(marked, 2)[1]
    assert part.op == "value" and part.attrs == ("out", WIDTH // 2, WIDTH) and part.args[0] is f.split(-x, 2)[1]
    assert expr.value("out", x) is x


# --------------------------------------------------------------------------------------------- extents


def test_extents_join() -> None:
    assert (feature() * per_row()).axes == Axes.FULL
    assert f.row_sum(full()).axes == Axes.ROWS and f.row_sum(feature()).axes == Axes.NONE
    sample = expr.leaf("s", Axes.SAMPLE_FEATURES, WIDTH)
    assert f.row_sum(sample).axes == Axes.BATCH and (sample * per_row()).axes == Axes.FULL
    assert (full() * feature()).width == WIDTH and f.row_sum(full()).width == 1


def test_concat_of_different_part_counts_is_cut_finer() -> None:
    x, y = full(), full("y")
    halves, thirds = f.concat(f.split(x, 2)[::-1]), f.concat(f.split(y, 3)[::-1])
    e = halves * thirds
    assert e.op == "concat" and len(e.args) == 6 and e.width == WIDTH
    a = value_of(x)
    b = value_of(y)
    want = a.roll(WIDTH // 2, -1) * torch.cat(b.chunk(3, -1)[::-1], -1)
    torch.testing.assert_close(value_of(e), want)


def test_a_substitution_that_takes_the_features_away_keeps_the_count() -> None:
    """x replaced by one number a row: the sum over 12 features is 12 times that number."""
    m = per_row()
    (found,) = substitute([f.row_sum(f.exp(full()))], lambda e: m if e.op == "exp" else None)
    assert found is WIDTH * m
    (found,) = substitute(
        [f.concat([f.exp(full()), f.relu(full())])], lambda e: m if e.args else None if e.op != "x" else e
    )
    assert found is m


def test_parts_of_a_deep_formula_are_made_once_each() -> None:
    """Every step uses its input four times: without sharing, cutting it would take 4**40 steps."""
    e = full()
    for _ in range(40):
        e = e * f.relu(e + e * e * 0.5)
    assert len(topological(f.split(e, 2))) < 2 * len(topological([e])) + 2


DEEP = 1500  # operations one above the other: more than Python's own stack holds


def deep_chains() -> dict[str, tuple[Expr, torch.Tensor]]:
    """Name -> a long formula, and its value in float64."""
    x, w = full(), feature()
    tx, tw = value_of(x), value_of(w)
    chain, product, total = x, x, x
    tchain, tproduct, ttotal = tx, tx, tx
    for k in range(DEEP):
        chain, tchain = f.tanh(chain), torch.tanh(tchain)
        product, tproduct = product * (w if k % 2 else 1 / w), tproduct * (tw if k % 2 else 1 / tw)
        total, ttotal = total + f.tanh(x * (k + 1)), ttotal + torch.tanh(tx * (k + 1))
    return {"chain": (chain, tchain), "product": (product, tproduct), "sum": (total, ttotal)}


def test_formulas_may_be_deeper_than_pythons_stack() -> None:
    for name, (e, exact) in deep_chains().items():
        torch.testing.assert_close(value_of(e), exact, msg=name)
        torch.testing.assert_close(value_of(f.row_sum(e)), exact.sum(-1, keepdim=True), msg=name)
        torch.testing.assert_close(value_of(f.split(e, 2)[1]), exact[:, WIDTH // 2 :], msg=name)
        (swapped,) = substitute([e], lambda n: full("y") if n is full() else None)
        assert {n.attrs[0] for n in topological([swapped]) if n.op == "input"} <= {"y", "w"}
        assert str(e), name


def test_sums_of_what_is_used_again_and_again_are_made_once() -> None:
    """Every step uses the one before it twice: without sharing, the sums would take 2**40 steps."""
    power, mixed = full(), full()
    for _ in range(40):
        power = power * power
        mixed = (mixed + feature()) + (mixed - feature() * 0.5)
    assert f.row_sum(power).op == "row_sum"
    assert f.row_sum(mixed).depth == 1


# ---------------------------------------------------------------------------------------------- errors

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "branch": (lambda: 1 if full() > 0 else 2, TypeError, "cannot branch"),
    "equality_with_a_number": (lambda: full() == 0, TypeError, "no =="),
    "power": (lambda: full() ** full("y"), TypeError, r"exp\(y \* log\(x\)\)"),
    "foreign": (lambda: full() + "a", TypeError, "not str"),
    "widths": (lambda: full("x", 4) + full("y", 6), ValueError, "widths 4 and 6"),
    "uneven_split": (lambda: f.split(full("x", 7), 2), ValueError, "cannot split 7 features into 2"),
    "concat_widths": (lambda: f.concat([full("x", 4), full("y", 6)]), ValueError, r"one feature width, got \[4, 6\]"),
    "concat_of_rows": (lambda: f.concat([per_row("a"), per_row("b")]), ValueError, "none with features"),
    "sum_of_a_constant": (lambda: f.row_sum(const(2)), ValueError, "feature count"),
}


test_wrong_formulas_are_refused_in_words = refusals(WRONG)


# ------------------------------------------------------------------------------------------------ text


def test_text_of_a_short_expression_is_its_formula() -> None:
    e = f.exp(full() * feature()) / (1 + per_row())
    assert str(e) in ("(exp((w * x)) / (1 + m))", "(exp((x * w)) / (1 + m))")
    assert str(f.split(full(), 2)[1]) == "x[6:12]"
    assert str(f.clamp(full(), -1, 2)) == "clamp(x, -1.0, 2.0)"


def test_text_of_a_long_expression_names_what_it_repeats() -> None:
    e = full()
    for _ in range(30):
        e = e * f.relu(e + e * e)
    assert "t0 = " in str(e) and len(str(e)) < 3000
