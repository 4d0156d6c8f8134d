"""The functions on tensors, on numbers, of numbers that are none, and rounding to 8 bits by its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_fuser import Sequential, ops
from te_fuser import formula as f
from te_fuser.codegen import compiler
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.float8 import rounded, ties_turned
from te_fuser.formula.random import RandomStream, using
from tests.codegen.corpus import KINKS
from tests.float8 import E4M3, E5M2, FORMATS, codes, every_number, nearest_codes, numbers, telling_numbers

POINTWISE = {
    "exp": torch.exp, "log": torch.log, "log1p": torch.log1p, "softplus": torch.nn.functional.softplus,
    "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "absolute": torch.abs, "relu": torch.relu,
}  # fmt: skip
LOWEST = {"log": 1e-30, "log1p": -1 + 1e-12, "sqrt": 1e-30, "rsqrt": 1e-30}


@pytest.mark.parametrize("name", POINTWISE)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_values_and_gradients_are_float64s(name: str, data: st.DataObject) -> None:
    """By the table's row: its value is Python's own and torch's, its adjoint autograd's."""
    function, on_torch, low = getattr(f, name), POINTWISE[name], LOWEST.get(name, -300.0)
    x = torch.tensor([data.draw(st.lists(st.floats(low, 300.0), min_size=3, max_size=3))], dtype=torch.float64)
    symbol, dy = expr.leaf("x", Axes.FULL, 3), expr.leaf("dy", Axes.FULL, 3)
    roots = [function(symbol), differentiate({function(symbol): dy}, [symbol])[symbol]]
    value, gradient = Interpreter({"x": x, "dy": x.cos()}, {}, 1, x).run(roots)
    numbers = torch.tensor([[function(v) for v in x[0].tolist()]], dtype=torch.float64)
    for found in (value, numbers, function(x)):
        torch.testing.assert_close(found, on_torch(x), rtol=1e-12, atol=1e-12)
    x.requires_grad_()
    (want,) = torch.autograd.grad(on_torch(x), x, x.detach().cos())
    torch.testing.assert_close(gradient, want, rtol=1e-7, atol=1e-9)


ENDS = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.5, -2.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("p", [0, 1, 2, 3, -1, 0.5, 4, 5, -2, -3, 1.5, -1.5, 1 / 3, -0.7, Fraction(5, 2), 40.5, True])
def test_powers_are_torchs(p: Any, dtype: torch.dtype) -> None:
    """Values and gradients, at zeros and infinities and below 0 too."""
    x = torch.tensor([ENDS], dtype=dtype)
    symbol, dy = expr.leaf("x", Axes.FULL, len(ENDS)), expr.leaf("dy", Axes.FULL, len(ENDS))
    roots, g = [symbol**p, differentiate({symbol**p: dy}, [symbol])[symbol]], torch.arange(1.0, 10.0)[None]
    value, gradient = Interpreter({"x": x, "dy": g}, {}, 1, x).run(roots)
    exact = x.double().requires_grad_()
    want = exact**p
    (dx,) = torch.autograd.grad(want, exact, g.double())
    torch.testing.assert_close(value, want.to(dtype).expand_as(value), equal_nan=True)
    torch.testing.assert_close(gradient.expand_as(x), dx.to(dtype), equal_nan=True)
    signs = value.signbit() == want.signbit()
    assert (signs | value.isnan()).all()


def test_the_gradient_of_an_inverse_root_is_rsqrts() -> None:
    x = torch.tensor([[0.0, math.inf, 2.5, -1.0]], dtype=torch.float64)
    symbol = expr.leaf("x", Axes.FULL, 4)
    assert symbol**-0.5 is f.rsqrt(symbol)
    (gradient,) = Interpreter({"x": x}, {}, 1, x).run([differentiate({symbol**-0.5: expr.ONE}, [symbol])[symbol]])
    (want,) = torch.autograd.grad((x.requires_grad_() ** -0.5).sum(), x)
    torch.testing.assert_close(gradient, want, equal_nan=True)


def test_what_is_no_power() -> None:
    x = expr.leaf("x", Axes.FULL, 4)
    for exponent in (x, math.nan, math.inf, "2", torch.ones(())):
        with pytest.raises(TypeError, match=r"powers that are finite numbers, not to .*; write exp\(y \* log\(x\)\)"):
            x**exponent
    with pytest.raises(TypeError, match=r"not to x; write exp\(log\(a\) \* x\)"):
        2.0**x
    assert f.row_sum(x**0) is expr.const(4)


def test_softplus_and_log1p_lose_nothing_in_float32() -> None:
    x = torch.tensor([-80.0, -30.0, -20.0, -1e-7, 0.0, 19.0, 21.0, 1e30, math.inf, -math.inf])
    exact = torch.logaddexp(x.double(), torch.zeros(()).double())
    torch.testing.assert_close(f.softplus(x).double(), exact, rtol=3e-7, atol=0)
    torch.testing.assert_close(f.softplus(x.double()), exact, rtol=1e-15, atol=0)
    small = torch.tensor([1e-30, -1e-20, 1e-8, -1e-4])
    torch.testing.assert_close(f.log1p(small).double(), torch.log1p(small.double()), rtol=3e-7, atol=0)


def test_everything_public_is_exported() -> None:
    assert all(hasattr(f, name) for name in f.__all__)


def test_reductions_keep_one_column() -> None:
    x = torch.randn(3, 4)
    for function, want in (
        (f.row_sum, x.sum(1)),
        (f.row_mean, x.mean(1)),
        (f.row_max, x.amax(1)),
        (f.row_min, x.amin(1)),
    ):
        assert torch.equal(function(x), want[:, None])


def test_numbers_beside_tensors() -> None:
    x = torch.tensor([-2.0, 0.5, 9.0], dtype=torch.float64)
    assert torch.equal(f.maximum(x, 0), x.clamp(min=0)) and torch.equal(f.minimum(1, x), x.clamp(max=1))
    assert f.maximum(1.0, 2.0) == 2.0
    with torch.device("meta"):  # a number is one wherever new tensors are made
        assert f.maximum(1.0, 2.0).item() == 2.0
    assert f.maximum(0, x.to("meta")).is_meta
    assert torch.equal(f.clamp(x, high=1.0), x.clamp(max=1))
    assert torch.equal(f.where(x > 0, x, 0.0), x.relu()) and f.where(x > 0, x, 0.0).dtype == torch.float64


def test_a_condition_may_be_numbers() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
    assert torch.equal(f.where(mask, x, -x), torch.tensor([-1.0, 2.0, 3.0]))


def test_split_and_concat() -> None:
    x = torch.randn(3, 6)
    first, second, third = f.split(x, 3)
    assert torch.equal(second, x[:, 2:4]) and torch.equal(f.concat([first, second, third]), x)
    row = torch.randn(3, 1)
    assert torch.equal(f.concat([row, first]), torch.cat([row, row, first], 1))
    assert torch.equal(f.concat([0.0, first])[:, :2], torch.zeros(3, 2))
    with pytest.raises(ValueError, match="cannot split 6 features into 4"):
        f.split(x, 4)
    assert f.split(torch.randn(0, 6), 2)[1].shape == (0, 3)


def test_keep_mask_needs_a_stream() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="random stream"):
        f.keep_mask(x, 0.5)
    with using(RandomStream(1, 0, 0)):
        assert f.keep_mask(x, 0.0).min() == 1 and f.keep_mask(x, 1.0).max() == 0
        with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
            f.keep_mask(x, 1.5)


# ------------------------------------------------------------ numbers that are none, ties and extreme sizes


NAN, INF = math.nan, math.inf
NUMBERS = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-38, 2.0)
FIRST = torch.tensor(NUMBERS).repeat_interleave(len(NUMBERS)).reshape(-1, len(NUMBERS))
SECOND = torch.tensor(NUMBERS).repeat(len(NUMBERS), 1)  # FIRST beside SECOND: every pair

PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda x, other, fn=fn: fn(x) for name, fn in KINKS.items()},  # type: ignore[misc]
    "beyond": lambda x, other: x * 1e40,
    "maximum": f.maximum,
    "minimum": f.minimum,
    "floor": lambda x, other: f.maximum(x, 0.0) + f.minimum(other, 1),
    "product": lambda x, other: (x * 1e20) * (other * 1e20),
    "quotient": lambda x, other: (x * 1e-25) / (other * 1e25),
    "row_max": lambda x, other: f.row_max(x) * other,
    "row_min": lambda x, other: f.row_min(x) * other,
    "lost": lambda x, other: 0.0 * x + other,
    "two branches": lambda x, other: (x - x) * 1e20 + f.relu(other) * 1e38,
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    given = {"x": FIRST.clone().requires_grad_(), "other": SECOND.clone().requires_grad_()}
    leaves = {n: expr.leaf(n, Axes.FULL, FIRST.shape[1]) for n in given}
    y, on_torch = PAIRS[name](*leaves.values()), PAIRS[name](*given.values())
    dy = torch.tensor((2.0, -0.5, INF, NAN)).repeat(3).expand_as(FIRST)
    seed = expr.leaf("dy", Axes.FULL, FIRST.shape[1])
    adjoints = differentiate({y: seed}, leaves.values())
    machine = Interpreter({**{n: t.detach() for n, t in given.items()}, "dy": dy}, {}, len(FIRST), FIRST)
    value, *gradients = machine.run([y, *adjoints.values()])
    wanted = torch.autograd.grad(on_torch, list(given.values()), dy, allow_unused=True)
    torch.testing.assert_close(value, on_torch.detach(), equal_nan=True)
    for leaf, found, want in zip(given, gradients, wanted, strict=True):
        if want is not None:
            text = f"gradient of {leaf}"
            torch.testing.assert_close(found, want, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}")


MODELS: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "ReLU": (ops.ReLU, torch.relu),
    "SReLU": (ops.SReLU, lambda x: torch.relu(x) * torch.relu(x)),
    "ReGLU": (ops.ReGLU, lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "Scale by nothing": (lambda: ops.Scale(value=0.0), lambda x: x * 0.0),
    "large scales": (lambda: Sequential(ops.Scale(value=1e20), ops.Scale(value=1e20)), lambda x: x * 1e20 * 1e20),
    "Dropout of all": (lambda: ops.Dropout(1.0), lambda x: x * 0.0),
}


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_models_hand_on_what_is_no_number(name: str, kernels: str) -> None:
    """With one bias before, so that there is a kernel with a sum over rows, and one after."""
    if kernels == "auto" and compiler.find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    made, on_torch = MODELS[name]
    model = Sequential(ops.Bias(12), made(), kernels=kernels)
    with torch.no_grad():
        model[0].bias.zero_()
    x, plain = (FIRST.clone().requires_grad_() for _ in range(2))
    bias = torch.zeros(12, requires_grad=True)
    y, want = model(x), on_torch(plain + bias)
    dy = torch.linspace(-1.0, 2.0, want.numel()).reshape(want.shape)
    y.backward(dy)
    want.backward(dy)
    for found, meant in ((y, want), (x.grad, plain.grad), (model[0].bias.grad, bias.grad)):
        torch.testing.assert_close(found, meant, equal_nan=True)


@pytest.mark.skipif(compiler.find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("large", [INF, -INF, 3e38])
def test_sums_over_rows_are_infinite_where_their_terms_are(large: float) -> None:
    """The rounding error that compensated sums carry is NaN then, and must not be added."""
    model = Sequential(ops.Scale(()), ops.Bias(5))
    x = torch.ones(300, 5)
    x[[3, 7, 200], 1] = large
    model(x).backward(x)
    assert torch.equal(model[1].bias.grad, torch.tensor([300.0, large if math.isinf(large) else INF, 300, 300, 300]))
    assert model[0].weight.grad == INF


formats = pytest.mark.parametrize("dtype", FORMATS)


@formats
@pytest.mark.parametrize("read", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype, read: torch.dtype) -> None:
    """Every number of 16 bits, and of wider ones those that tell."""
    x = every_number(read) if read.itemsize == 2 else telling_numbers(dtype).to(read)
    assert torch.equal(codes(rounded(x, dtype)), nearest_codes(x, dtype))


def test_float64_is_rounded_once() -> None:
    """In float32 this is the tie between 1 and 1.125, which goes to 1."""
    x = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert rounded(x, E4M3).double() == 1.125


@formats
def test_codes_are_torchs(dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        torch.arange(256, dtype=torch.uint8).view(dtype).double(), numbers(dtype), rtol=0, atol=0, equal_nan=True
    )


def test_what_lies_beyond_is_the_largest_and_nan_stays() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e30, -449.0, math.nan, -math.nan])
    assert rounded(x, E4M3).float()[:4].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert rounded(x, E5M2).float()[:4].tolist() == [57344.0, -57344.0, 57344.0, -448.0]
    assert codes(rounded(x, E4M3))[4:].tolist() == codes(rounded(x, E5M2))[4:].tolist() == [0x7F, 0x7F]


@formats
def test_quantize_is_a_product_rounded_and_its_gradient_that_of_x(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.tensor(0.3, requires_grad=True)
    y = f.quantize(x, scale, dtype)
    assert torch.equal(y.detach(), rounded(x.detach() * scale.detach(), dtype).float())
    dy = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    dx, dscale = torch.autograd.grad(y, [x, scale], dy, allow_unused=True)
    assert torch.equal(dx, dy) and dscale is None


@formats
def test_quantize_on_symbols(dtype: torch.dtype) -> None:
    x, scale, dy = expr.leaf("x", Axes.FULL, 7), expr.leaf("scale", Axes.NONE), expr.leaf("dy", Axes.FULL, 7)
    y = f.quantize(x, scale, dtype)
    adjoints = differentiate({y: dy}, [x, scale])
    tensors = {n: torch.randn(5, 7, generator=torch.Generator().manual_seed(k)) for k, n in enumerate(("x", "dy"))}
    tensors["scale"] = torch.tensor(0.3)
    value, gradient = Interpreter(tensors, {}, 5, tensors["x"]).run([y, adjoints[x]])
    assert torch.equal(value, rounded(tensors["x"] * 0.3, dtype).float())
    assert torch.equal(gradient, tensors["dy"]) and adjoints[scale] is expr.ZERO


@formats
def test_its_gradient_in_a_transformed_call(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    slopes = torch.func.vmap(torch.func.grad(lambda row: f.quantize(row, 2.0, dtype).sum()))(x)
    assert torch.equal(slopes, torch.ones_like(x))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"quantized to torch.float8_e4m3fn or torch.float8_e5m2, got torch.bfloat16"):
        f.quantize(torch.ones(2), 1.0, torch.bfloat16)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@formats
def test_ties_turned(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Numbers next to a tie are rounded to the other side, and no other numbers."""
    ties = torch.tensor([1.0 + torch.finfo(dtype).eps / 2]).to(wide)
    x = torch.cat([ties * (1 + by) for by in (-1e-6, 1e-6, -1e-4, 1e-4)]).outer(
        torch.tensor([1.0, -1.0, 0.25]).to(wide)
    )
    plain = rounded(x, dtype).float()
    with ties_turned():
        turned = rounded(x, dtype).float()
        ends = rounded(torch.tensor([math.inf, -math.inf, 0.0, math.nan]), dtype)
    assert torch.equal(turned[0], plain[1]) and torch.equal(turned[1], plain[0])
    assert torch.equal(turned[2:], plain[2:]) and (plain[0] != plain[1]).all()
    largest = torch.finfo(dtype).max
    assert ends.float()[:3].tolist() == [largest, -largest, 0.0] and ends.float()[3].isnan()
