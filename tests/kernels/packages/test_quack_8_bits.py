"""Products of 8 bits of quack-kernels, with a package that computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.packages import quack
from tests.kernels.packages import fake_quack_float8
from tests.kernels.packages.fake_packages import behind, odd, turned

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = (((1,), 64, 64), ((3, 7), 144, 80), ((), 16, 32), ((129,), 16, 48), ((0, 4), 64, 128), ((2, 0), 32, 16))


@pytest.fixture
def package(monkeypatch):
    """A package in place."""
    yield fake_quack_float8.in_place(monkeypatch)
    fake_quack_float8.forget()


def tensors(rows, inner, outer):
    """x, W, what they are multiplied by, and b."""
    rng = torch.Generator().manual_seed(3)
    x, w, b = (torch.randn(*shape, generator=rng) for shape in ((*rows, inner), (outer, inner), (outer,)))
    a = torch.tensor(1 / 90)
    return (x * 90).to(E4M3), (w * 90).to(E4M3), a, a * inner**-0.5, b.to(BF16)


def gelu(h):
    return torch.nn.functional.gelu(h, approximate="tanh")


@pytest.mark.parametrize(("rows", "inner", "outer"), SIZES)
def test_values(rows, inner, outer, package):
    given, scale, amax = tensors(rows, inner, outer), torch.tensor(300.0), torch.tensor(0.5)
    x, w, a, b, bias = (t.double() for t in given)
    exact = x @ w.t() * (a * b) + bias
    h = quack.linear_bias_8(*given)
    assert h.dtype == BF16 and torch.equal(h, exact.bfloat16())
    addend = 10 * torch.randn(h.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    total = quack.linear_bias_add_8(*given, addend)
    assert total.dtype == BF16 and torch.equal(total, (exact + addend.double()).bfloat16())
    y, before = quack.linear_bias_gelu_aux_8(*given, scale, amax)
    assert torch.equal(before, h) and y.dtype == E4M3 and y.shape == h.shape
    wanted = gelu(h.double())
    assert torch.equal(y.float(), (wanted * scale).float().clamp(-448, 448).to(E4M3).float())
    assert torch.equal(quack.linear_bias_gelu_8(*given, scale).float(), y.float())
    assert amax == max([0.5, *wanted.abs().flatten().tolist()]) or torch.isclose(amax.double(), wanted.abs().max())
    assert all(t.is_contiguous() for t in (h, total, y, before)) and len(package.calls) == (4 if h.numel() else 0)


def test_a_form_is_planned_once_whatever_lies_in_it(package):
    given, scale = tensors((5, 3), 64, 48), torch.tensor(1.0)
    for _ in range(2):
        quack.linear_bias_8(*given)
        quack.linear_bias_add_8(*given, torch.zeros(5, 3, 48, dtype=BF16))
        quack.linear_bias_gelu_8(*given, scale)
        quack.linear_bias_gelu_aux_8(*given, scale, torch.zeros(()))
    first = ["sum_with_bias", "sum_with_bias_and_addend", "gelu_in_8_bits_alone", "gelu_in_8_bits"]
    assert package.plans == first
    quack.linear_bias_8(*tensors((5, 4), 64, 48))
    assert len(package.plans) == 5


@pytest.mark.parametrize("change", [odd, behind, turned])
def test_what_loads_cannot_read_is_copied(change, package):
    x, w, a, b, bias = tensors((48, 3), 144, 80)
    want = quack.linear_bias_8(x, w, a, b, bias)
    for given in ((change(x), w, bias), (x, change(w), bias), (x, w, change(bias))):
        assert torch.equal(quack.linear_bias_8(*given[:2], a, b, given[2]), want)
    assert len(package.calls) == 4
    addend = torch.randn(48, 3, 80).bfloat16()
    both = quack.linear_bias_add_8(x, w, a, b, bias, addend)
    assert torch.equal(quack.linear_bias_add_8(x, w, a, b, bias, change(addend)), both)


def test_an_error_of_the_packages_says_what_plans_without_it(package):
    package.fails = ValueError("no such kernel")
    with pytest.raises(RuntimeError, match=r"product x W\^T \+ b failed for .*float8_matmul_bias_quack"):
        quack.linear_bias_8(*tensors((2,), 16, 16))


def test_a_package_that_has_changed_is_refused(package, monkeypatch):
    assert quack.unusable_8() is None
    host = package.modules[quack._HOST]
    for change, words in (
        (lambda: monkeypatch.delattr(host, "run_gemm_epi_plan"), "it has no run_gemm_epi_plan"),
        (lambda: setattr(host, "run_gemm_epi_plan", lambda plan, A, B, D, C: None), "takes no epi_values"),  # noqa: N803
    ):
        change()
        quack.unusable_8.cache_clear()
        assert words in quack.unusable_8()
    host.run_gemm_epi_plan = package.run_gemm_epi_plan

    class Kernels:
        def __init__(self, fp8_fast_accum=False):
            self.fast = fp8_fast_accum

    package.modules[quack._HOPPER].GemmSm90 = Kernels
    quack.unusable_8.cache_clear()
    assert "has no fp8_slow_accum" in quack.unusable_8()
