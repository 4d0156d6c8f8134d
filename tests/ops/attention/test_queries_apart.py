"""QueriesApart: an attention that reads what it takes apart gives what one of packed heads gives."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.ops.check import normal

D = 8


def lists(heads: int, kv_heads: int, packing: str) -> tuple[te_fuser.Sequential, te_fuser.Sequential]:
    how = {"kv_heads": kv_heads, "mask": "causal", "layout": "batch_first"}
    apart = ops.Apart(key_value="key_value", packing=packing)
    return (
        te_fuser.Sequential(
            ops.QueriesApart(D, heads=heads, kv_heads=kv_heads, packing=packing),
            ops.DotProductAttention(heads, D, packing=apart, **how),
        ),
        te_fuser.Sequential(ops.DotProductAttention(heads, D, packing=packing, **how)),
    )


@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_values_and_gradients(packing: str, heads: int, kv_heads: int) -> None:
    apart, packed = lists(heads, kv_heads, packing)
    for shape in ((2, 7), (1, 1), (2, 0)):
        x = normal(*shape, (heads + 2 * kv_heads) * D).requires_grad_()
        y, want = apart(x), packed(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(apart.reference(x), want)
        dy = normal(*y.shape, seed=1)
        torch.testing.assert_close(*(torch.autograd.grad(t, x, dy)[0] for t in (y, want)))


def test_one_of_both_may_be_all_that_is_read() -> None:
    op, x = ops.QueriesApart(D, heads=4, kv_heads=2), normal(3, 2, 8 * D).requires_grad_()
    heads = x.unflatten(-1, (2, 4, D))
    for model, want in (
        (te_fuser.Sequential(op, ops.Take("key_value")), heads[..., 2:, :]),
        (te_fuser.Sequential(op, ops.Fork("q"), ops.Take("key_value"), ops.Take("q")), heads[..., :2, :]),
    ):
        y, want = model(x), want.flatten(-3)
        torch.testing.assert_close(y, want)
        dy = normal(*y.shape, seed=2)
        torch.testing.assert_close(*(torch.autograd.grad(t, x, dy, retain_graph=True)[0] for t in (y, want)))


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="was made for 64 features, got 24"):
        ops.QueriesApart(D, heads=4, kv_heads=2)(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        ops.QueriesApart(D, heads=3, kv_heads=2)
