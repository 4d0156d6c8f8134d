"""PyTorch's blocked attention for the CPU against the op's own math."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.base import OpCall, Spec
from tests.kernels.attention.cases import (
    CPU,
    LAYOUTS,
    MASKS,
    PACKINGS,
    assert_matches,
    boolean_mask,
    by_op,
    by_provider,
    make,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cpu_flash(layout, packing, kv_heads):
    for (mask, kind), (dim, samples) in itertools.product(MASKS, ((5, 2), (8, 1), (16, 2), (33, 2))):
        op, x, dy = make(kv_heads=kv_heads, dim=dim, samples=samples, mask=mask, layout=layout, packing=packing)
        assert CPU.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is None
        assert_matches(CPU, op, x, dy, None if kind is None else boolean_mask(kind, samples))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cpu_flash_errs_no_more_than_twice_pytorch(dtype, kv_heads):
    for mask, packing in itertools.product(("none", "causal"), PACKINGS):
        op, x, dy = make(kv_heads=kv_heads, dim=16, positions=130, dtype=dtype, mask=mask, packing=packing)
        ours = by_provider(CPU, op, x, dy)
        exact = by_op(op, x.double(), dy.double())
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
    op, x, dy = make(mask="given")
    mask = boolean_mask("some")
    with torch.device("meta"):
        assert_matches(CPU, op, x, dy, mask)


def test_cpu_flash_and_the_op_share_their_logsumexp():
    for layout, packing, kv_heads, mask in itertools.product(LAYOUTS, PACKINGS, (4, 2), ("causal", "given")):
        op, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing, mask=mask)
        given = boolean_mask("some") if mask == "given" else None
        call = OpCall({"attention_mask": given})
        y = op.op_forward(call, x)
        _, saved = CPU.forward(op.settings(), {"input": x, "attention_mask": given})
        torch.testing.assert_close(saved["logsumexp"], call.emitted["logsumexp"])
        assert not saved["logsumexp"]._is_view()
        want = op.op_backward(OpCall({"input": x, "attention_mask": given, **call.emitted}), dy)
        crossed = op.op_backward(OpCall({"input": x, "attention_mask": given, **saved}), dy)
        torch.testing.assert_close(crossed, want)
        tensors = {"input": x, "output": y, "attention_mask": given, **call.emitted}
        torch.testing.assert_close(CPU.backward(op.settings(), tensors, dy)["input"], want)
