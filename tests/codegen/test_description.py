"""A kernel's description as text: what it says is what it computes, and nothing is written twice."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_fuser import formula
from te_fuser.codegen.description import KernelDescription
from te_fuser.formula import exp, expr, relu, row_sum, split
from tests.codegen.corpus import Kit, inputs, reference

WIDTH = 6


def deep(steps: int) -> KernelDescription:
    """Every step uses the one before it four times, and two outputs share all of them."""
    kit = Kit()
    x = kit.full("x", 2 * WIDTH)
    first, second = split(x, 2)
    e = first * second
    for _ in range(steps):
        e = e * 0.5 + relu(e) - e * e * 0.01
    return kit.forward("deep", {"a": (e + row_sum(e), WIDTH), "b": (exp(-e * e), WIDTH)})


def meaning(text: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values of a description's lines, read as Python."""
    env: dict[str, Any] = {**vars(formula), "x": x}
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 2 and words[1] == "=":
            name, _, body = line.strip().partition(" = ")
            env[name] = eval(body.replace("x[", "x[:, "), env)
        elif words[0] == "store":
            found[words[1].rstrip(":")] = eval(line.partition(" = ")[2].replace("x[", "x[:, "), env)
    return found


def test_a_deep_description_is_short_and_says_what_is_computed() -> None:
    d = deep(30)
    text = str(d)
    assert len(text) < 100 * len(d.nodes)
    tensors = inputs(d, rows=5)
    found = meaning(text, tensors["x"].double())
    assert list(found) == ["a", "b"]
    for got, want in zip(found.values(), reference(d, tensors, 5), strict=True):
        torch.testing.assert_close(got, want)


def test_what_cancels_across_outputs_is_no_number_where_its_terms_are_none() -> None:
    """x + y where an op before gave y = -x: NaN where x is infinite, and read, stored and computed for that."""
    kit = Kit()
    x = kit.full("x", WIDTH)
    d = kit.forward("cancels", {"y": (x + expr.value("scale.output", -x), WIDTH)})
    tensors = {"x": torch.tensor([[0.5, math.inf, -math.inf, math.nan, -2.0, 0.0]])}
    (y,) = reference(d, tensors, 1)
    assert y.isnan().tolist() == [[False, True, True, True, False, False]] and y.nan_to_num().abs().max() == 0.0
