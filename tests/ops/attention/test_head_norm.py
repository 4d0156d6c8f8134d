"""Norms of query and key heads against torch.nn's, in every packing; queries apart from keys and values as packed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from tests.ops.check import normal
from tests.refused import raises
from tests.twins import assert_same

D = 8


def normed(op: ops.HeadNorm, heads: torch.Tensor, role: str) -> torch.Tensor:
    if op.norm == "L2Normalization":
        return heads * (heads.square().sum(-1, keepdim=True) + op.eps).rsqrt()
    weight = getattr(op, f"{role}weight") + float(op.zero_centered_gamma)
    if op.norm == "LayerNorm":
        return F.layer_norm(heads, (D,), weight, getattr(op, f"{role}bias"), op.eps)
    return F.rms_norm(heads, (D,), weight, op.eps)


def meaning(op: ops.HeadNorm, x: torch.Tensor) -> torch.Tensor:
    if op.kv_heads is None:
        return normed(op, x.unflatten(-1, (op.heads, D)), "").flatten(-2)
    groups = op.kv_heads if op.packing == "interleaved" else 1
    queries, others = op.heads // groups, op.kv_heads // groups
    q, k, v = x.unflatten(-1, (groups, queries + 2 * others, D)).split([queries, others, others], -2)
    return torch.cat((normed(op, q, "") if op.heads else q, normed(op, k, "key_"), v), -2).flatten(-3)


@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2), (3, None), (0, 2)])
def test_values_and_gradients(packing: str, norm: str, heads: int, kv_heads: int | None) -> None:
    for centered in (False, True):
        op = ops.HeadNorm(D, heads=heads, kv_heads=kv_heads, norm=norm, packing=packing, zero_centered_gamma=centered)
        model, x = te_fuser.Sequential(op).double(), normal(5, 2, (heads + 2 * (kv_heads or 0)) * D).requires_grad_()
        for k, p in enumerate(model.parameters()):
            assert torch.equal(p, torch.full_like(p, p[0].item()))
            p.data += normal(D, seed=k)
        y, want = model(x), meaning(op, x)
        torch.testing.assert_close(model.reference(x), want)
        leaves = [x, *model.parameters()]
        assert_same(y, want, leaves)
    assert len(leaves) == 1 + len(op._names())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_and_empty_inputs(dtype: torch.dtype) -> None:
    model = te_fuser.Sequential(ops.HeadNorm(D, heads=2, kv_heads=1)).to(dtype)
    x = normal(3, 4 * D).to(dtype).requires_grad_()
    y = model(x)
    assert y.dtype == dtype
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), meaning(model[0].double(), x.double()), rtol=2 * ulp, atol=2 * ulp)
    model.to(dtype)(x[:0]).sum().backward()
    assert not x.grad.any() and not model[0].weight.grad.any()


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm", "L2Normalization"])
def test_verified(norm: str) -> None:
    op = ops.HeadNorm(D, heads=2, kv_heads=1, norm=norm)
    assert te_fuser.verify(te_fuser.Sequential(ops.Bias(4 * D), op, ops.SiLU()), torch.randn(5, 4 * D)).passed


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="was made for 32 features, got 24"):
        ops.HeadNorm(D, heads=2, kv_heads=1)(torch.zeros(2, 24))
    raises(ValueError, "norm", ops.HeadNorm, D, heads=2, norm="BatchNorm")
    with pytest.raises(ValueError, match="was made for 64 features, got 24"):
        ops.QueriesApart(D, heads=4, kv_heads=2)(torch.zeros(2, 24))
    raises(ValueError, "heads must be a multiple of kv_heads", ops.QueriesApart, D, heads=3, kv_heads=2)


def test_a_small_centered_weight_is_not_rounded_away() -> None:
    op = ops.HeadNorm(D, heads=2, kv_heads=1, zero_centered_gamma=True)
    op.weight.data.fill_(2.0**-9)  # 1 + that is 1 in bfloat16
    model, x = te_fuser.Sequential(op).bfloat16(), 100 * normal(64, 4 * D).bfloat16()
    share = (model(x).double() / meaning(copy.deepcopy(op).double(), x.double()))[:, : 2 * D].mean()
    assert abs(share - 1) < 2.0**-11


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
def test_queries_apart_are_as_packed(packing: str, heads: int, kv_heads: int) -> None:
    apart, packed = lists(heads, kv_heads, packing)
    for shape in ((2, 7), (1, 1), (2, 0)):
        x = normal(*shape, (heads + 2 * kv_heads) * D).requires_grad_()
        want = packed(x)
        torch.testing.assert_close(apart.reference(x), want)
        assert_same(apart(x), want, [x])


def test_one_of_both_may_be_all_that_is_read() -> None:
    op, x = ops.QueriesApart(D, heads=4, kv_heads=2), normal(3, 2, 8 * D).requires_grad_()
    heads = x.unflatten(-1, (2, 4, D))
    for model, want in (
        (te_fuser.Sequential(op, ops.Take("key_value")), heads[..., 2:, :]),
        (te_fuser.Sequential(op, ops.Fork("q"), ops.Take("key_value"), ops.Take("q")), heads[..., :2, :]),
    ):
        assert_same(model(x), want.flatten(-3), [x])
