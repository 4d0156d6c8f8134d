"""Packed heads as a kernel takes them, and its results as the op's output and gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention.qkv_views import Views, has_one_stride
from tests.kernels.attention.cases import CPU, LAYOUTS, PACKINGS, assert_matches, boolean_mask, by_provider, make


def test_heads_are_read_where_they_lie():
    for layout, packing, kv_heads, samples in itertools.product(LAYOUTS, PACKINGS, (4, 2, 1), (1, 2)):
        op, x, _ = make(kv_heads=kv_heads, layout=layout, packing=packing, samples=samples)
        views = Views(op.settings(), samples, 7)
        parts = views.split(x)
        where = x.untyped_storage().data_ptr()
        copied = [part.untyped_storage().data_ptr() != where for part in parts]
        # Query heads of groups have no common stride, and batch-first samples none with the groups.
        unavoidable = packing == "interleaved" and layout == "batch_first" and kv_heads in (2,) and samples > 1
        assert copied == [unavoidable, False, False]
        assert has_one_stride(op.settings(), samples) is not unavoidable
        heads = op.packed.split(x)
        assert all(torch.equal(part.reshape(want.shape), want) for part, want in zip(parts, heads, strict=True))
        y = torch.randn(*x.shape[:2], 32)
        got = views.split_output(y)
        assert got.shape == parts[0].shape and got.data_ptr() == y.data_ptr()
        assert torch.equal(got.reshape(heads[0].shape), op.packed.split_output(y))


def test_a_mask_keeps_samples_and_heads_apart():
    """So that query heads of groups have no common stride then, wherever samples lie."""
    for layout, packing, kv_heads in itertools.product(LAYOUTS, PACKINGS, (4, 2, 1)):
        op, x, _ = make(kv_heads=kv_heads, layout=layout, packing=packing, mask="given", samples=2)
        assert op.settings().masked
        q, k, v = Views(op.settings(), 2, 7).split(x)
        assert q.shape[:2] == (2, 4) and k.shape[:2] == v.shape[:2] == (2, kv_heads)
        apart = packing == "interleaved" and kv_heads == 2
        assert has_one_stride(op.settings(), 2) is not apart
        assert torch.equal(q.unflatten(1, (kv_heads, -1)), op.packed.split(x)[0])


def test_a_contiguous_part_of_a_larger_tensor_is_read_where_it_begins():
    op, x, _ = make(kv_heads=2, samples=2)
    whole = torch.cat((x.new_zeros(3, *x.shape[1:]), x))
    for got, want in zip(Views(op.settings(), 2, 7).split(whole[3:]), Views(op.settings(), 2, 7).split(x), strict=True):
        assert torch.equal(got, want)


def test_results_own_their_storage():
    for layout, packing, kv_heads, mask in itertools.product(LAYOUTS, PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        for made in by_provider(CPU, op, x, dy, boolean_mask("padding") if mask == "given" else None):
            assert made.is_contiguous() and not made._is_view()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_gradients(layout):
    for packing, kv_heads, mask in itertools.product(PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = boolean_mask("some") if mask == "given" else None
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        for strided in (transposed, torch.cat((x, x), -1)[..., : x.shape[-1]], torch.stack((x, x), -1)[..., 0]):
            assert_matches(CPU, op, strided, dy, given)
        for few in (dy[:1, :1, :1], dy[:1], dy[:, :1], dy[..., :1]):
            assert_matches(CPU, op, x, few.expand(dy.shape), given)
