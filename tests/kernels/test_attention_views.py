"""How packed heads become what a kernel takes, and what comes back the op's output and gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention_views import Views
from tests.kernels.attention_cases import CPU, LAYOUTS, PACKINGS, assert_matches, boolean_mask, by_provider, make


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
        assert views.split_output(torch.empty(*x.shape[:2], 32)).shape == parts[0].shape


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
