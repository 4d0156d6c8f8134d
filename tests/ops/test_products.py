"""Products of rows: the same numbers by either library, and the slower one wherever the faster cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.ops import products

HALF = (torch.bfloat16, torch.float16)
LARGE, SMALL = (96, 160, 192), (3, 5, 7)  # rows, inner, columns: beyond and below what is worth oneDNN


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_as_exact(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    exact = a.double() @ b.double() + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert found.is_contiguous()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every call of oneDNN's way, on machines that do not take it too."""
    seen: list[tuple[int, ...]] = []

    def pointwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: object) -> torch.Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(products, "_onednn", lambda: pointwise)
    monkeypatch.setattr(products, "half_gains", lambda: dict.fromkeys(HALF, 2.0))
    return seen


@pytest.mark.parametrize("sizes", [LARGE, SMALL, (0, 5, 7), (3, 0, 7)])
@torch.no_grad()
def test_products_are_exact_enough(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    x, weight, bias = numbers(rows, inner), numbers(columns, inner, seed=1), numbers(columns, seed=2)
    dy = numbers(rows, columns, seed=3)
    assert_as_exact(products.linear(x, weight), x, weight.t())
    assert_as_exact(products.linear(x, weight, bias), x, weight.t(), bias)
    assert_as_exact(products.product(dy, weight), dy, weight)
    assert_as_exact(products.product(dy.t(), x), dy.t(), x)


@torch.no_grad()
def test_large_float32_products_take_onednn(calls: list[tuple[int, ...]]) -> None:
    rows, inner, columns = LARGE
    x, weight, dy = numbers(rows, inner), numbers(columns, inner), numbers(rows, columns)
    products.linear(x, weight)
    products.product(dy, weight)
    products.product(dy.t(), x)
    assert calls == [(rows, inner, columns), (rows, columns, inner), (columns, rows, inner)]


_OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: products.linear(numbers(3, 5), numbers(7, 5)),
    "bfloat16": lambda: products.linear(numbers(96, 160).bfloat16(), numbers(192, 160).bfloat16()),
    "float64": lambda: products.product(numbers(96, 160).double(), numbers(160, 192).double()),
    "every other column": lambda: products.linear(numbers(96, 320)[:, ::2], numbers(192, 160)),
    "broadcast": lambda: products.product(numbers(1, 160).expand(96, 160), numbers(160, 192)),
    "meta": lambda: products.linear(torch.empty(96, 160, device="meta"), torch.empty(192, 160, device="meta")),
}


@pytest.mark.parametrize("name", _OTHERS)
@torch.no_grad()
def test_others_do_not(calls: list[tuple[int, ...]], name: str) -> None:
    _OTHERS[name]()
    assert not calls


def test_autograd_records_the_usual_way(calls: list[tuple[int, ...]]) -> None:
    x, weight = numbers(96, 160).requires_grad_(), numbers(192, 160)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(96, 160))
    assert not calls


def test_the_default_device_does_not_choose_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "_is_amd", lambda: True)
    found = products._onednn.__wrapped__()
    with torch.device("meta"):
        assert products._onednn.__wrapped__() is found


@pytest.mark.filterwarnings("ignore:TF32")
@torch.no_grad()
def test_onednn_can_be_switched_off(calls: list[tuple[int, ...]]) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        products.linear(numbers(96, 160), numbers(192, 160))
    assert not calls


# ------------------------------------------------------------------------------------------------ half precision

INSTRUCTIONS = {
    "amx": ({"amx_bf16": True, "avx512_bf16": True, "amx_fp16": False, "architecture": "x86_64"}, {"bfloat16": 8.0}),
    "avx512": ({"avx512_bf16": True, "avx512_fp16": True}, {"bfloat16": 2.5, "float16": 2.0}),
    "avx512 of old": ({"avx512_f": True, "avx512_bf16": False}, {}),
    "avx2": ({"avx2": True, "f16c": True}, {}),
    "arm": ({"bf16": True, "fp16_arith": True, "sve_max_length": 16}, {"bfloat16": 2.0, "float16": 2.0}),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_cpu_has_products_in_half_precision_by_its_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, gains = INSTRUCTIONS[name]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: there, raising=False)
    assert products.half_gains.__wrapped__() == {getattr(torch, dtype): gain for dtype, gain in gains.items()}


def test_a_pytorch_that_does_not_name_instructions_is_asked_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for name, there in (("amx_tile", False), ("avx512_bf16", True), ("amx_fp16", True)):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda there=there: there, raising=False)
    assert products.half_gains.__wrapped__() == {torch.bfloat16: 2.5, torch.float16: 8.0}


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that PyTorch's products see, on a CPU without instructions for half precision."""
    seen: list[torch.dtype] = []

    def seeing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda a, *others: seen.append(a.dtype) or function(a, *others)  # type: ignore[func-returns-value]

    monkeypatch.setattr(products, "half_gains", dict)
    monkeypatch.setattr(products, "_onednn", lambda: None)
    monkeypatch.setattr(torch.nn.functional, "linear", seeing(torch.nn.functional.linear))
    monkeypatch.setattr(torch, "mm", seeing(torch.mm))
    return seen


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sizes", [LARGE, SMALL, (0, 5, 7), (3, 0, 7)])
def test_without_instructions_products_are_rounded_once(
    multiplied: list[torch.dtype], dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, inner, columns = sizes
    x, weight, bias, dy = (
        numbers(*s, seed=k).to(dtype)
        for k, s in enumerate(((rows, inner), (columns, inner), (columns,), (rows, columns)))
    )
    x.requires_grad_(), weight.requires_grad_()
    y = products.linear(x, weight, bias)
    for found, exact in (
        (y, x.double() @ weight.double().t() + bias.double()),
        (products.product(dy, weight), dy.double() @ weight.double()),
        (products.product(dy.t(), x), dy.t().double() @ x.double()),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    y.backward(dy)  # autograd records the same
    torch.testing.assert_close(x.grad, (dy.double() @ weight.double()).to(dtype), rtol=0.01, atol=0.01)
    assert multiplied and set(multiplied) == {torch.float32}


def test_one_row_is_multiplied_as_it_is(multiplied: list[torch.dtype]) -> None:
    products.linear(numbers(1, 5).bfloat16(), numbers(7, 5).bfloat16())
    products.linear(numbers(3, 5), numbers(7, 5))
    products.product(numbers(3, 5).double(), numbers(5, 7).double())
    assert multiplied == [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", HALF)
def test_a_model_without_instructions_is_right_in_both_directions(
    multiplied: list[torch.dtype], dtype: torch.dtype
) -> None:
    model = te_fuser.Sequential(ops.LayerNorm(16), ops.Linear(16, 24), ops.GELU(), ops.Linear(24, 16)).to(dtype)
    te_fuser.verify(model, numbers(2, 7, 16).to(dtype))
    assert set(multiplied) <= {torch.float32, torch.float64}
