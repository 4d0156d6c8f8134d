"""Products of 8 bits of quack-kernels on a GPU: values, amaxes, repeated bits, captures; and plans that have them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fusions import Cost
from te_fuser.kernels.packages import quack as products
from te_fuser.kernels.packages.quack import PACKAGE, runs
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling
from tests.float8 import OURS
from tests.gpu.captures import captured
from tests.gpu.packing_providers import installed_version
from tests.gpu.test_float8_regions import apart, compare, data, step
from tests.kernels.packages.fake_quack import gelu

VERSION = installed_version(PACKAGE.name)
pytestmark = pytest.mark.skipif(VERSION is None, reason=f"needs {PACKAGE}")
NAMES = ("float8_matmul_bias_quack", "float8_matmul_gelu_quack", "float8_matmul_gelu_quack_aux")
SUMS = ("float8_matmul_add_bias_quack", "float8_matmul_add_bias_quack_dropout")
GPU = torch.device("cuda", 0)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
EPS = 2.0**-8
SIZES = (((1,), 64, 64), ((3, 7), 144, 80), ((200,), 1008, 272), ((129, 2), 512, 2048), ((0, 4), 64, 128))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("plans have it on compute capability 9 alone")
    monkeypatch.setattr(PACKAGE, "version", lambda: VERSION)


def number(value: float) -> torch.Tensor:
    return torch.full((), value, device=GPU)


def tensors(rows: tuple[int, ...], inner: int, outer: int) -> tuple[torch.Tensor, ...]:
    """x, W, what they are multiplied by, and b: h is of both signs, some far out in GELU's negative tail."""
    rng = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*shape, generator=rng).to(GPU) for shape in ((*rows, inner), (outer, inner), (outer,)))
    return (x * 90).to(E4M3), (w * 90).to(E4M3), number(1 / 90), number(3 / (90 * inner**0.5)), b.to(BF16)


def exact_of(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.double() @ w.double().t() * (a.double() * b.double()) + bias.double()


def assert_right(h: torch.Tensor, exact: torch.Tensor) -> None:
    """As bfloat16 has it, of sums in fewer bits than float32 has."""
    assert h.dtype == BF16 and h.shape == exact.shape
    if h.numel():
        assert (h.double() - exact).abs().max() < 2 * EPS * exact.abs().max()
        assert (h.double() - exact).norm() < EPS * exact.norm()


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_with_bias(rows: tuple[int, ...], inner: int, outer: int) -> None:
    given = tensors(rows, inner, outer)
    h = products.linear_bias_8(*given)
    assert_right(h, exact_of(*given))
    assert torch.equal(h, products.linear_bias_8(*given))


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_with_bias_and_addend(rows: tuple[int, ...], inner: int, outer: int) -> None:
    """The addend is only read, in any strides."""
    given = tensors(rows, inner, outer)
    for room in (0, 1, 8):
        wide = 10 * torch.randn(*rows, outer + room, generator=torch.Generator().manual_seed(4)).to(GPU, BF16)
        addend = wide[..., room:]
        before = addend.clone()
        y = products.linear_bias_add_8(*given, addend)
        assert_right(y, exact_of(*given) + addend.double())
        assert torch.equal(y, products.linear_bias_add_8(*given, addend)) and torch.equal(addend, before)


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=3), Float8CurrentScaling()])
@pytest.mark.parametrize("p", [None, 0.0])
@pytest.mark.parametrize("tokens", [1, 130, 384, 4099])
def test_sums_in_a_model(tokens: int, p: float | None, recipe: Any) -> None:
    """Values and gradients as where a kernel adds what a residual does, with a norm behind it and without."""
    torch.manual_seed(0)
    layers = ops.LayerNorm(256), ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)
    model = te.Sequential(te.Residual(*layers, *([] if p is None else [ops.Dropout(p)]))).to(GPU, BF16)
    twin, name = copy.deepcopy(model), SUMS[p is not None]
    free = dataclasses.replace(fusions.get(name), cost=lambda m: Cost(seconds=0.0))
    others = ("stretch", "float8_matmul_bias", "float8_matmul_backward")
    for k in range(2):
        x = data(k, tokens, 256)
        with fusions.only(free, *others):
            with te.autocast(recipe=recipe):
                assert name in {s.name for s in model.plan(x).forward}
            found = step(model, x, recipe)
            with torch.no_grad(), te.autocast(recipe=recipe):
                alone = model(x)
        with fusions.only(*others):
            compare(found, step(twin, x, recipe))
            with torch.no_grad(), te.autocast(recipe=recipe):
                assert apart(alone, twin(x)) < 0.01


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_gelu_in_8_bits(rows: tuple[int, ...], inner: int, outer: int) -> None:
    """8 bits are those of the h that is kept, next to ties apart; their amax has nothing from beyond the matrix."""
    given, scale, amax = tensors(rows, inner, outer), number(30.0), number(0.0)
    y, h = products.linear_bias_gelu_aux_8(*given, scale, amax)
    assert_right(h, exact_of(*given))
    assert torch.equal(h, products.linear_bias_8(*given)) and y.shape == h.shape and y.dtype == E4M3
    alone = products.linear_bias_gelu_8(*given, scale)
    again = products.linear_bias_gelu_aux_8(*given, scale, number(0.0))[0]
    assert all(torch.equal(y.view(torch.uint8), t.view(torch.uint8)) for t in (alone, again))
    if not y.numel():
        assert amax == 0
        return
    wanted = gelu(h.float())
    torch.testing.assert_close(amax, wanted.abs().max(), rtol=1e-5, atol=0)
    codes = (wanted * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
    apart = (y.view(torch.uint8).int() - codes.int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < 1e-3
    products.linear_bias_gelu_aux_8(*given, scale, higher := number(1e4))
    assert higher == 1e4


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite(odd: float) -> None:
    """Infinities become the largest number, NaN stays, and the amax tells."""
    *given, bias = tensors((130,), 64, 272)
    bias[7], amax = odd, number(0.0)
    y, h = products.linear_bias_gelu_aux_8(*given, bias, number(1.0), amax)
    assert torch.equal(h[:, 7].isnan(), torch.full((130,), odd != odd, device=GPU))
    if odd == torch.inf:
        assert (y[:, 7].float() == 448).all() and amax == torch.inf
    elif odd != odd:
        assert y[:, 7].float().isnan().all() and amax.isnan()


def test_captures() -> None:
    *given, bias = tensors((96,), 272, 144)
    scale, amax = number(30.0), number(0.0)
    runs.forget()
    with pytest.raises(RuntimeError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        products.linear_bias_8(*given, bias)

    def results() -> tuple[torch.Tensor, ...]:
        return *products.linear_bias_gelu_aux_8(*given, bias, scale, amax), products.linear_bias_8(*given, bias)

    want = results()
    most = amax.clone()
    graph, made = captured(results)
    amax.zero_()
    for t in made:
        t.view(torch.uint8).zero_()
    graph.replay()
    assert all(torch.equal(a.view(torch.uint8), c.view(torch.uint8)) for a, c in zip(made, want, strict=True))
    assert amax == most


@pytest.fixture
def cheap() -> Iterator[tuple[object, ...]]:
    """Its fusions at no cost."""
    yield tuple(dataclasses.replace(fusions.get(name), cost=lambda m: Cost(seconds=0.0)) for name in NAMES)


@pytest.mark.parametrize("tokens", [130, 384])
def test_in_a_model(cheap: tuple[fusions.Fusion, ...], tokens: int) -> None:
    """Values, gradients and scales of three steps against the emulation's, and a call without gradients."""
    torch.manual_seed(0)
    layers = ops.LayerNorm(256), ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)
    model = te.Sequential(*layers).to(GPU, BF16)
    twin = copy.deepcopy(model)
    recipe = DelayedScaling(amax_history_len=3)
    for k in range(3):
        x = data(k, tokens, 256) * (1.0 + k)
        with fusions.only(*cheap, "stretch", "float8_matmul_backward"):
            found = step(model, x, recipe)
        with fusions.disabled(*OURS):
            wanted = step(twin, x, recipe)
        compare(found, wanted)
    for name, (scale, history) in states(model).items():
        torch.testing.assert_close(scale, states(twin)[name][0], rtol=0.02, atol=0)
        torch.testing.assert_close(history, states(twin)[name][1], rtol=0.02, atol=1e-6)
    with fusions.only(*cheap, "stretch"), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        leaf = x.clone().requires_grad_()
        assert NAMES[2] in {s.name for s in model.plan(leaf).forward}
        with torch.no_grad():
            assert NAMES[1] in {s.name for s in model.plan(x).forward}
            torch.testing.assert_close(model(x), found["output"], rtol=0.1, atol=0.1)
