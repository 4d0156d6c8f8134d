"""Products of rows: the same numbers by either library, and the slower one wherever the faster cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_fuser.ops import products

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
