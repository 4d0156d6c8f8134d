"""main_grad of parameters that an op reads as one: one product where they lie together, else one for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions.cublaslt import put_weight_gradient
from te_fuser.kernels.cublaslt import products
from te_fuser.ops import matmul
from te_fuser.params import concatenated_parameter
from tests.ops.check import normal

IN, ROWS = 6, {"query": 4, "key": 3, "value": 5}
NAMES = [f"{name}_weight" for name in ROWS]
OUT = sum(ROWS.values())


class Projection(ops.Together, te_fuser.Sequential):
    """GELU(x [Wq; Wk; Wv]^T), whose gradients go to main_grad."""

    def __init__(self, together: bool = True, over: bool = False) -> None:
        product = ops.MatMul(IN, OUT, accumulate_into_main_grad=True, overwrite_main_grad=over, device="meta")
        super().__init__(ops.Bound(product, self, weight=NAMES), ops.GELU())
        for k, (name, rows) in enumerate(zip(NAMES, ROWS.values(), strict=True)):
            self.register_parameter(name, torch.nn.Parameter(normal(rows, IN, seed=k).float()))
        if together:
            self.keep_together(*NAMES)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [self.get_parameter(name) for name in NAMES]


def in_one_buffer(weights: list[torch.nn.Parameter], fill: float) -> None:
    buffer = torch.full((OUT, IN), fill)
    for weight, piece in zip(weights, buffer.split(list(ROWS.values())), strict=True):
        weight.main_grad = piece


def in_reverse(weights: list[torch.nn.Parameter], fill: float) -> None:
    """As Megatron lays them out: the last parameter first."""
    in_one_buffer_backwards = torch.full((OUT, IN), fill).split(list(ROWS.values())[::-1])
    for weight, piece in zip(weights, in_one_buffer_backwards[::-1], strict=True):
        weight.main_grad = piece


def apart(weights: list[torch.nn.Parameter], fill: float) -> None:
    for weight in weights:
        weight.main_grad = torch.full_like(weight, fill)


def looked_up(weights: list[torch.nn.Parameter], fill: float) -> None:
    for weight in weights:
        held = torch.full(weight.shape, fill, dtype=torch.float64)
        weight.get_main_grad = lambda held=held: held


LAYOUTS: dict[str, Callable[..., None]] = {
    "one buffer": in_one_buffer,
    "reverse": in_reverse,
    "apart": apart,
    "looked up": looked_up,
}


def main_grad(weight: Any) -> torch.Tensor:
    return (weight.get_main_grad() if hasattr(weight, "get_main_grad") else weight.main_grad).float()


def wanted(m: Projection, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(m.reference(x).sum(), [x, *m.weights])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_values(layout: str, together: bool, over: bool, verify: bool) -> None:
    m, x = Projection(together, over), normal(2, 3, IN).float().requires_grad_()
    m.verify = verify
    dx, *dw = wanted(m, x)
    LAYOUTS[layout](m.weights, 1.0)
    for times in (1, 2):
        x.grad = None
        m(x).sum().backward()
        torch.testing.assert_close(x.grad, dx)
        for weight, want in zip(m.weights, dw, strict=True):
            assert weight.grad is None
            torch.testing.assert_close(main_grad(weight), want if over else 1 + times * want)


@pytest.mark.parametrize(("layout", "count"), [("one buffer", 1), ("reverse", 3), ("apart", 3), ("looked up", 3)])
def test_how_many_products(layout: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    m, x, seen = Projection(), normal(3, IN).float(), list[torch.Size]()
    LAYOUTS[layout](m.weights, 0.0)
    right = matmul.weight_gradient_of
    monkeypatch.setattr(matmul, "weight_gradient_of", lambda dy, x: seen.append(dy.shape) or right(dy, x))
    m(x).sum().backward()
    assert len(seen) == count and sum(shape[-1] for shape in seen) == OUT


def test_zeros_where_hooks_are_to_run() -> None:
    m, x, ran = Projection(), normal(3, IN).float(), list[int]()
    _, *dw = wanted(m, x.requires_grad_())
    in_one_buffer(m.weights, 0.0)
    for k, weight in enumerate(m.weights):
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda p, k=k: ran.append(k))
    m(x).sum().backward()
    assert sorted(ran) == [0, 1, 2]
    for weight, want in zip(m.weights, dw, strict=True):
        assert weight.grad_added_to_main_grad and not weight.grad.any()
        torch.testing.assert_close(weight.main_grad, want)


def test_zeros_for_some() -> None:
    m, x = Projection(), normal(3, IN).float()
    in_one_buffer(m.weights, 0.0)
    m.key_weight.grad_added_to_main_grad = False
    with pytest.raises(RuntimeError, match="1 of 3 weights that are joined have grad_added_to_main_grad: give"):
        m(x).sum().backward()


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_frozen_parts(has: bool, verify: bool) -> None:
    """Frozen parts need no main_grad, and one that is there stays as it is."""
    m, x = Projection(), normal(3, IN).float().requires_grad_()
    m.verify = verify
    dx, *dw = wanted(m, x)
    in_one_buffer(m.weights, 1.0)
    m.key_weight.requires_grad_(False)
    if not has:
        del m.key_weight.main_grad
    m(x).sum().backward()
    torch.testing.assert_close(x.grad, dx)
    for name, weight, want in zip(ROWS, m.weights, dw, strict=True):
        if name != "key":
            torch.testing.assert_close(weight.main_grad, 1 + want)
        elif has:
            assert (weight.main_grad == 1).all()


def test_micro_batches_in_flight() -> None:
    """Each weight is written over where it is first met in a backward, also by another op."""
    first, later = Projection(over=True), Projection()
    for name in NAMES:
        setattr(later, name, first.get_parameter(name))
    xs = [normal(3, IN, seed=k).float() for k in range(2)]
    in_one_buffer(first.weights, torch.nan)
    ys = [first(xs[0]), later(xs[1])]
    for y in ys:
        y.sum().backward()
    want = [torch.autograd.grad(first.reference(x).sum(), first.weights) for x in xs]
    for weight, one, other in zip(first.weights, *want, strict=True):
        torch.testing.assert_close(weight.main_grad, one + other)


def test_a_part_that_another_op_wrote_over() -> None:
    """A tied part has its gradient already: it is added to, while the others are written over."""
    m, x = Projection(over=True), normal(3, IN).float()
    product = ops.MatMul(IN, ROWS["key"], accumulate_into_main_grad=True, overwrite_main_grad=True)
    behind = te_fuser.Sequential(product)
    product.weight = m.key_weight
    in_one_buffer(m.weights, torch.nan)
    behind(m(x)[..., :IN]).sum().backward()
    want = torch.autograd.grad(behind.reference(m.reference(x)[..., :IN]).sum(), m.weights)
    for weight, one in zip(m.weights, want, strict=True):
        torch.testing.assert_close(weight.main_grad, one)


def test_products_of_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fusion's body cuts what arrives into what each part's product takes."""
    m, seen = Projection(), list[tuple[Any, ...]]()
    whole = concatenated_parameter.JoinedBinding(m, tuple(NAMES)).taken()
    monkeypatch.setattr(products, "put_weight_gradient", lambda dy, x, onto, add: seen.append((dy, onto, add)))
    dy, x = normal(2, 3, OUT).float(), normal(2, 3, IN).float()
    body = put_weight_gradient
    in_one_buffer(m.weights, 0.0)
    body(dy, x, whole)
    apart(m.weights, 0.0)
    body(dy, x, whole)
    assert [onto.shape for _, onto, _ in seen] == [(OUT, IN), *((rows, IN) for rows in ROWS.values())]
    assert torch.equal(seen[0][0], dy) and torch.equal(torch.cat([dy for dy, *_ in seen[1:]], -1), dy)
    assert all(add for *_, add in seen)
