"""PyTorch's blocked attention for the CPU against the op's own math, and packed heads as kernels take them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.kernels.attention.qkv_views import Views, has_one_stride
from te_fuser.ops.base import OpCall, Spec
from tests.kernels.attention import cases


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("packing", cases.PACKINGS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cpu_flash(layout, packing, kv_heads):
    for (mask, kind), (dim, samples) in itertools.product(cases.MASKS, ((5, 2), (8, 1), (16, 2), (33, 2))):
        op, x, dy = cases.make(kv_heads=kv_heads, dim=dim, samples=samples, mask=mask, layout=layout, packing=packing)
        assert cases.CPU.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is None
        cases.assert_matches(cases.CPU, op, x, dy, None if kind is None else cases.boolean_mask(kind, samples))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cpu_flash_errs_no_more_than_twice_pytorch(dtype, kv_heads):
    for mask, packing in itertools.product(("none", "causal"), cases.PACKINGS):
        op, x, dy = cases.make(kv_heads=kv_heads, dim=16, positions=130, dtype=dtype, mask=mask, packing=packing)
        ours = cases.by_provider(cases.CPU, op, x, dy)
        exact = cases.by_op(op, x.double(), dy.double())
        leaf = x.clone().requires_grad_()
        q, k, v = op.packed.split(leaf)
        heads = F.scaled_dot_product_attention(
            q.flatten(1, 2), k, v, is_causal=mask == "causal", enable_gqa=kv_heads != op.heads
        )
        y = op.packed.merge_output(heads.unflatten(1, (kv_heads, -1)))
        for one, other, want in zip(ours, (y.detach(), torch.autograd.grad(y, leaf, dy)[0]), exact, strict=True):
            ulp = torch.finfo(dtype).eps * want.abs().max()
            for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
                assert measure(one.double() - want) <= 2 * measure(other.double() - want) + ulp


def test_the_mask_lies_where_the_input_does():
    op, x, dy = cases.make(mask="given")
    mask = cases.boolean_mask("some")
    with torch.device("meta"):
        cases.assert_matches(cases.CPU, op, x, dy, mask)


def test_cpu_flash_and_the_op_share_their_logsumexp():
    for layout, packing, kv_heads, mask in itertools.product(
        cases.LAYOUTS, cases.PACKINGS, (4, 2), ("causal", "given")
    ):
        op, x, dy = cases.make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = cases.boolean_mask("some") if mask == "given" else None
        call = OpCall({"attention_mask": given})
        y = op.op_forward(call, x)
        _, saved = cases.CPU.forward(op.settings(), {"input": x, "attention_mask": given})
        torch.testing.assert_close(saved["logsumexp"], call.emitted["logsumexp"])
        assert not saved["logsumexp"]._is_view()
        want = op.op_backward(OpCall({"input": x, "attention_mask": given, **call.emitted}), dy)
        crossed = op.op_backward(OpCall({"input": x, "attention_mask": given, **saved}), dy)
        torch.testing.assert_close(crossed, want)
        tensors = {"input": x, "output": y, "attention_mask": given, **call.emitted}
        torch.testing.assert_close(cases.CPU.backward(op.settings(), tensors, dy)["input"], want)


def test_heads_are_read_where_they_lie():
    for layout, packing, kv_heads, samples in itertools.product(cases.LAYOUTS, cases.PACKINGS, (4, 2, 1), (1, 2)):
        op, x, _ = cases.make(kv_heads=kv_heads, layout=layout, packing=packing, samples=samples)
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
    for layout, packing, kv_heads in itertools.product(cases.LAYOUTS, cases.PACKINGS, (4, 2, 1)):
        op, x, _ = cases.make(kv_heads=kv_heads, layout=layout, packing=packing, mask="given", samples=2)
        assert op.settings().masked
        q, k, v = Views(op.settings(), 2, 7).split(x)
        assert q.shape[:2] == (2, 4) and k.shape[:2] == v.shape[:2] == (2, kv_heads)
        apart = packing == "interleaved" and kv_heads == 2
        assert has_one_stride(op.settings(), 2) is not apart
        assert torch.equal(q.unflatten(1, (kv_heads, -1)), op.packed.split(x)[0])


def test_a_contiguous_part_of_a_larger_tensor_is_read_where_it_begins():
    op, x, _ = cases.make(kv_heads=2, samples=2)
    whole = torch.cat((x.new_zeros(3, *x.shape[1:]), x))
    for got, want in zip(Views(op.settings(), 2, 7).split(whole[3:]), Views(op.settings(), 2, 7).split(x), strict=True):
        assert torch.equal(got, want)


def test_results_own_their_storage():
    for layout, packing, kv_heads, mask in itertools.product(cases.LAYOUTS, cases.PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = cases.make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        for made in cases.by_provider(cases.CPU, op, x, dy, cases.boolean_mask("padding") if mask == "given" else None):
            assert made.is_contiguous() and not made._is_view()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_strided_inputs_and_gradients(layout):
    for packing, kv_heads, mask in itertools.product(cases.PACKINGS, (4, 2), ("none", "given")):
        op, x, dy = cases.make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = cases.boolean_mask("some") if mask == "given" else None
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        for strided in (transposed, torch.cat((x, x), -1)[..., : x.shape[-1]], torch.stack((x, x), -1)[..., 0]):
            cases.assert_matches(cases.CPU, op, strided, dy, given)
        for few in (dy[:1, :1, :1], dy[:1], dy[:, :1], dy[..., :1]):
            cases.assert_matches(cases.CPU, op, x, few.expand(dy.shape), given)
