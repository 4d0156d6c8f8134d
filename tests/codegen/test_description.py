"""A kernel's description as text, the names and decimals in it, and how PyTorch's operations run one."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from te_fuser import formula, ops
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.text import identifier, shortest, to_float32
from te_fuser.formula import concat, exp, expr, relu, row_sum, split
from tests.codegen.corpus import Kit, inputs, reference
from tests.twins import assert_as_meant, sequential, tensor

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


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("layer_norm.weight", "layer_norm_weight"), ("op._scale", "op_scale"), ("a__b", "a_b"), ("_x_", "x"),
        ("größe", "gr_e"), ("2nd", "v_2nd"), ("+", "value"),
    ],
)  # fmt: skip
def test_identifiers(role: str, name: str) -> None:
    assert identifier(role) == name


def test_float32_is_torchs() -> None:
    values = [0.1, -1 / 3, 1e300, -1e300, 3.5e38, 3.4028235e38, 1e-50, 1.401298464324817e-45, math.inf, 16777217.0]
    assert [to_float32(v) for v in values] == torch.tensor(values, dtype=torch.float64).float().tolist()
    assert math.isnan(to_float32(math.nan))


def test_the_shortest_decimal_gives_the_float32_back() -> None:
    bits = torch.randint(0, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    for single in (struct.unpack("f", struct.pack("I", b))[0] for b in [*bits, 0, 1, 0x7F7FFFFF]):
        assert to_float32(float(shortest(single))) == single
    assert [shortest(to_float32(v)) for v in (0.1, 1 / 3, 100.0, 16777216.0)] == [
        "0.1", "0.33333334", "1e+02", "16777216",
    ]  # fmt: skip


class HalfConstant(ops.RowOp):
    """One half as it is, the other a number."""

    def compute(self, x: Any) -> Any:
        return concat([split(x, 2)[1], 3.0])


class HalfSum(ops.RowOp):
    """One half as it is, the other the row's sum."""

    def compute(self, x: Any) -> Any:
        return concat([row_sum(x), split(x, 2)[0]])


@pytest.mark.parametrize("op", [HalfConstant(), HalfSum()], ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_part_without_features_fills_its_place(op: ops.RowOp, rows: int) -> None:
    y = assert_as_meant(sequential(op, ops.Bias(6)), tensor(rows, 6))[0]
    assert y.shape == (rows, 6) and torch.isfinite(y).all()
