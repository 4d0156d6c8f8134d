"""Attention's own math: values and gradients against float64, for every layout, packing, mask and grouping."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_fuser.formula import random
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.heads import Apart
from te_fuser.ops.attention.mask import MASKS
from te_fuser.ops.base import OpCall
from tests.kernels.attention.cases import LAYOUTS, PACKINGS, boolean_mask
from tests.ops import attention_cases
from tests.ops.attention_cases import STREAM
from tests.ops.check import spec
from tests.presets.plain import Call, attend
from tests.refused import raises

SAMPLES, POSITIONS = 2, 7


def packed_by_hand(q, k, v, layout, packing):
    """[B, H, S, D], [B, G, S, D] twice -> the packed tensor, head by head."""
    per_group = q.shape[1] // k.shape[1]
    groups = range(k.shape[1])
    if packing == "blocked":
        order = [*q.unbind(1), *k.unbind(1), *v.unbind(1)]
    else:
        order = [t for g in groups for t in (*(q[:, g * per_group + r] for r in range(per_group)), k[:, g], v[:, g])]
    batch_first = torch.cat(order, -1)
    return batch_first if layout == "batch_first" else batch_first.transpose(0, 1)


def separate(heads, kv_heads, dim, dtype=torch.float64, seed=0, samples=SAMPLES, positions=POSITIONS):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(samples, n, positions, dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def run(op, x, dy, mask=None, stream=None):
    """y and dx."""
    return attention_cases.run(op, x, dy, {} if mask is None else {"attention_mask": mask}, stream)[:2]


def expected(op, q, k, v, dy, mask=None, factors=None):
    """y and dx in float64 by autograd, from the plain formula and the packing by hand."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    positions = torch.arange(q.shape[2])
    hidden = (positions[None] > positions[:, None]) & MASKS[op.mask][0]
    heads = attend(*leaves, Call(hidden if mask is None else hidden | mask), op.scale, factors)
    y = attention_cases.in_layout(heads, op.layout)
    grads = torch.autograd.grad(y, leaves, dy.double())
    return y.detach(), packed_by_hand(*grads, op.layout, op.packing)


def make(heads=4, kv_heads=4, dim=8, seed=0, dtype=torch.float64, **arguments):
    op = DotProductAttention(heads, dim, kv_heads=kv_heads, **{"mask": "none", "layout": "sequence_first", **arguments})
    q, k, v = separate(heads, kv_heads, dim, dtype, seed)
    x = packed_by_hand(q, k, v, op.layout, op.packing).contiguous()
    rng = torch.Generator().manual_seed(seed + 1)
    dy = torch.randn((*x.shape[:2], heads * dim), generator=rng, dtype=torch.float64).to(dtype)
    return op, (q, k, v), x, dy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_values_and_gradients(layout, packing, kv_heads):
    masks = [("none", None), ("causal", None)]
    masks += [
        (name, kind) for name in ("given", "causal_and_given") for kind in ("padding", "some", "square", "column")
    ]
    for (mask, kind), dim in itertools.product(masks, (5, 16)):
        how = {"layout": layout, "packing": packing, "scale": 0.7 if dim == 16 else None}
        op, parts, x, dy = make(kv_heads=kv_heads, dim=dim, mask=mask, **how)
        given = None if kind is None else boolean_mask(kind)
        y, dx = run(op, x, dy, given)
        want_y, want_dx = expected(op, *parts, dy, given)
        torch.testing.assert_close(y, want_y, rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, want_dx, rtol=0, atol=1e-12)
        call = OpCall({"attention_mask": given})
        leaf = x.clone().requires_grad_()
        reference = op.reference(call, leaf)
        torch.testing.assert_close(reference.detach(), want_y, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(reference, leaf, dy)[0], want_dx, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errs_no_more_than_twice_pytorch(packing, causal, dtype):
    op, parts, x, dy = make(kv_heads=2, dim=16, dtype=dtype, mask="causal" if causal else "none", packing=packing)
    y, dx = run(op, x, dy)
    assert y.dtype == dx.dtype == dtype
    want_y, want_dx = expected(op, *parts, dy)
    leaves = [t.clone().requires_grad_() for t in parts]
    torch_heads = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    torch_y = attention_cases.in_layout(torch_heads, op.layout)
    torch_dx = packed_by_hand(*torch.autograd.grad(torch_y, leaves, dy), op.layout, packing)
    for ours, theirs, want in ((y, torch_y, want_y), (dx, torch_dx, want_dx)):
        ulp = torch.finfo(dtype).eps * want.abs().max()
        for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
            assert measure(ours.double() - want) <= 2 * measure(theirs.detach().double() - want) + ulp


def test_large_scores_do_not_overflow():
    op, (q, k, v), _, dy = make(dtype=torch.float32)
    x = packed_by_hand(q * 300, k * 300, v, op.layout, op.packing)
    y, dx = run(op, x, dy)
    assert y.isfinite().all() and dx.isfinite().all()


def test_a_row_that_sees_nothing_is_zero_and_moves_nothing():
    mask = torch.zeros(SAMPLES, 1, POSITIONS, POSITIONS, dtype=torch.bool)
    mask[1, 0, 3] = True
    mask[0] = True
    op, _, x, dy = make(mask="given")
    y, dx = run(op, x, dy, mask)
    assert (y[:, 0] == 0).all() and (y[3, 1] == 0).all() and not (y[2, 1] == 0).any()
    assert (dx[:, 0] == 0).all() and dx.isfinite().all()
    queries = op.packed.split(dx)[0]
    assert (queries[1, :, :, 3] == 0).all()
    dy_there = torch.zeros_like(dy)
    dy_there[3, 1] = 1.0
    assert (run(op, x, dy_there, mask)[1] == 0).all()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_dropout_is_the_stream_s(packing, kv_heads):
    p = 0.3
    op, parts, x, dy = make(kv_heads=kv_heads, dropout=p, packing=packing, mask="causal")
    assert op.draws()
    factors = torch.empty(SAMPLES, op.heads, POSITIONS, POSITIONS, dtype=torch.float64)
    for b, h, query in itertools.product(range(SAMPLES), range(op.heads), range(POSITIONS)):
        row = torch.tensor([(b * op.heads + h) * POSITIONS + query])
        bits = random.keep_bits(row, POSITIONS, STREAM.seed, STREAM.offset, STREAM.stream)
        factors[b, h, query] = (bits >= random.threshold(p)).double()[0] / (1 - p)
    assert 0 < (factors == 0).double().mean() < 0.6
    want_y, want_dx = expected(op, *parts, dy, factors=factors)
    y, dx = run(op, x, dy, stream=STREAM)
    torch.testing.assert_close(y, want_y)
    torch.testing.assert_close(dx, want_dx)
    leaf = x.clone().requires_grad_()
    reference = op.reference(OpCall(random=STREAM), leaf)
    torch.testing.assert_close(reference.detach(), want_y)
    torch.testing.assert_close(torch.autograd.grad(reference, leaf, dy)[0], want_dx)


def test_dropout_draws_in_pieces_as_in_one_and_of_everything_gives_zeros(monkeypatch):
    op, _, x, dy = make(dropout=0.5)
    whole = run(op, x, dy, stream=STREAM)
    monkeypatch.setattr("te_fuser.ops.attention.math._ROWS_AT_ONCE", 5)
    for one, other in zip(whole, run(op, x, dy, stream=STREAM), strict=True):
        assert torch.equal(one, other)
    op, _, x, dy = make(dropout=1.0)
    y, dx = run(op, x, dy, stream=STREAM)
    assert (y == 0).all() and (dx == 0).all()


def test_draws_only_in_training():
    op, _, x, dy = make(dropout=0.5)
    raises(RuntimeError, "random stream", op.op_forward, OpCall(), x)
    assert op.settings().dropout == 0.5
    op.eval()
    assert not op.draws() and op.settings().dropout == 0.0
    torch.testing.assert_close(run(op, x, dy)[0], run(make()[0], x, dy)[0])
    assert not DotProductAttention(2, 4, mask="none", layout="sequence_first").draws()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_strided_inputs_and_gradients(layout, kv_heads):
    for packing in PACKINGS:
        op, _, x, dy = make(kv_heads=kv_heads, layout=layout, packing=packing)
        y, dx = run(op, x, dy)
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        sliced = torch.cat((x, x), -1)[..., : x.shape[-1]]
        spread = torch.stack((x, x), -1)[..., 0]
        for strided in (transposed, sliced, spread):
            for one, other in zip(run(op, strided, dy), (y, dx), strict=True):
                torch.testing.assert_close(one, other)
        for few in (dy[:1, :1, :1], dy[:1], dy[:, :1], dy[..., :1]):
            broadcast = few.expand(dy.shape)
            torch.testing.assert_close(run(op, x, broadcast)[1], run(op, x, broadcast.contiguous())[1])


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    for layout, packing in itertools.product(LAYOUTS, PACKINGS):
        op = DotProductAttention(4, 8, kv_heads=2, mask="causal", layout=layout, packing=packing)
        x = torch.randn(*shape, 64)
        y, dx = run(op, x, torch.randn(*shape, 32))
        assert y.shape == (*shape, 32) and dx.shape == x.shape and y.isfinite().all() and dx.isfinite().all()


def test_logsumexp_is_of_the_masked_scores():
    op, (q, k, _), x, _ = make(kv_heads=2, mask="given", dtype=torch.bfloat16)
    mask = boolean_mask("some")
    call = OpCall({"attention_mask": mask})
    op.op_forward(call, x)
    scores = torch.einsum("bhqd,bhkd->bhqk", q.float(), k.float().repeat_interleave(2, 1)) * op.scale
    want = scores.masked_fill(mask, -torch.inf).logsumexp(-1)
    assert call.emitted["logsumexp"].dtype == torch.float32
    torch.testing.assert_close(call.emitted["logsumexp"], want.masked_fill(want == -torch.inf, 0.0))
    call = OpCall({"attention_mask": mask})
    op.op_forward(call, x.double())
    assert call.emitted["logsumexp"].dtype == torch.float64


def test_outputs_own_their_storage():
    for layout, packing in itertools.product(LAYOUTS, PACKINGS):
        op, _, x, dy = make(kv_heads=2, layout=layout, packing=packing)
        for made in run(op, x, dy):
            assert made.is_contiguous() and not made._is_view()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


def test_infer_and_flops():
    op = DotProductAttention(4, 8, kv_heads=2, mask="none", layout="sequence_first")
    assert op.infer(spec(7, 2, 64)) == spec(7, 2, 32)
    raises(ValueError, r"\(4 \+ 2 \* 2\) \* 8 = 64 features, got 63", op.infer, spec(7, 2, 63))
    raises(ValueError, r"\[sequence, batch, features\], got 2 dimensions: \[7, 64\]", op.infer, spec(7, 64))
    with pytest.raises(ValueError, match=r"\[batch, sequence, features\], got 4 dimensions"):
        DotProductAttention(4, 8, layout="batch_first", mask="none").infer(spec(1, 2, 3, 96))
    raises(TypeError, r"got torch\.int64: convert", op.infer, spec(7, 2, 64, dtype=torch.int64))
    assert op.flops(spec(10, 2, 64), {}) == 4 * 2 * 4 * 100 * 8
    assert (
        DotProductAttention(4, 8, kv_heads=2, mask="causal", layout="sequence_first").flops(spec(10, 2, 64), {})
        == 4 * 2 * 4 * 55 * 8
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads, got heads=4, kv_heads=3"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"mask": "banded"}, "mask='banded' is unknown; use one of 'none', 'causal', 'given', 'causal_and_given'"),
        ({"mask_name": "a mask"}, "keyword argument"),
        ({"layout": "bshd"}, "layout='bshd' is unknown; use one of 'sequence_first', 'batch_first'"),
        ({"packing": "qkv"}, "packing='qkv' is unknown; use one of 'interleaved', 'blocked'"),
        ({"mask": "casual"}, r"mask='casual' is unknown; use one of .*; did you mean 'causal'\?"),
        ({"dropout": 1.5}, r"lies in \[0, 1\], got 1\.5"),
    ],
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        DotProductAttention(**{"mask": "none", "layout": "sequence_first", "heads": 4, "head_dim": 8, **arguments})


@pytest.mark.parametrize("value", ["4", 4.0, None])
@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "value_dim"])
def test_sizes_are_whole_numbers(name, value):
    if value is None and name in ("kv_heads", "value_dim"):
        value = [4]
    with pytest.raises(TypeError, match=f"takes a whole number as {name}, got"):
        Apart(value_dim=value) if name == "value_dim" else DotProductAttention(
            **{"mask": "none", "layout": "batch_first", "heads": 4, "head_dim": 8, name: value}
        )


def test_check_inputs():
    op = DotProductAttention(4, 8, mask="given", mask_name="padding", layout="sequence_first")
    x = spec(7, 2, 96)
    assert op.named_inputs()["attention_mask"].name == "padding"
    assert not op.named_inputs()["attention_mask"].gradient
    for shape in ((2, 4, 7, 7), (2, 1, 1, 7), (7, 7), (4, 7, 7), (7,), (), (1, 1, 7, 1)):
        op.check_inputs(x, {"attention_mask": spec(*shape, dtype=torch.bool)})
    raises(ValueError, "boolean tensor 'padding': call the model with padding=", op.check_inputs, x, {})
    words = r"'padding' is torch\.float32.*True = masked.*padding < 0"
    raises(TypeError, words, op.check_inputs, x, {"attention_mask": spec(7, 7)})
    for device, shape, words in (
        ("cpu", (7, 6), r"\[7, 6\], which does not broadcast to .* = \[2, 4, 7, 7\]"),
        ("cpu", (2, 7, 7), r"does not broadcast.*mask\[:, None\]"),
        ("cpu", (2, 7), r"\[2, 7\], which does not broadcast.*give mask\[:, None, None, :\]"),
        ("cpu", (8, 7, 7), r"\[8, 7, 7\], which does not.*give mask\.view\(2, 4, 7, 7\)"),
        ("cpu", (1, 2, 4, 7, 7), "does not broadcast"),
        ("meta", (7, 7), "on meta, the input on cpu"),
    ):
        raises(ValueError, words, op.check_inputs, x, {"attention_mask": spec(*shape, dtype=torch.bool, device=device)})
    causal = DotProductAttention(4, 8, mask="causal", layout="sequence_first")
    assert causal.named_inputs() == {}
    causal.check_inputs(x, {})


def test_a_changed_attribute_is_a_changed_op():
    op = DotProductAttention(4, 8, mask="none", layout="sequence_first")
    before = op.revision
    op.scale = 1.0
    assert op.revision > before
    before = op.revision
    op.settings(), op.eval()
    assert op.revision == before


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [({}, TypeError, 'give mask="none", "causal" .*; give layout="batch_first" for .batch, sequence, features.'),
     ({"mask": "causal"}, TypeError, 'has to be told: give layout="batch_first" for'),
     ({"layout": "batch_first"}, TypeError, r'has to be told: give mask="none", .* AttentionMask \(windows, lengths'),
     ({"mask": "none", "layout": "bshd"}, ValueError, "'bshd' is \"batch_first\" here"),
     ({"mask": "none", "layout": "sbhd"}, ValueError, "'sbhd' is \"sequence_first\" here"),
     ({"mask": "none", "layout": None}, ValueError, "layout=None is unknown; use one of 'sequence_first'"),
     ({"mask": "no_mask", "layout": "batch_first"}, ValueError, "'no_mask' is \"none\" here"),
     ({"mask": "padding", "layout": "batch_first"}, ValueError, r"'padding' is AttentionMask\(lengths=..\) or"),
     ({"mask": torch.ones(3, 3) > 0, "layout": "batch_first"}, TypeError, 'make it with mask="given", and call with'),
     ({"mask": ["causal"], "layout": "batch_first"}, ValueError, r"mask=\['causal'\] is unknown"),
     ({"mask": "none", "layout": "batch_first", "scores": "alibi"}, TypeError, r"AttentionScores\(alibi=True\), got"),
     ({"mask": "none", "layout": "batch_first", "scores": {}}, TypeError, "scores is an AttentionScores")],
)  # fmt: skip
def test_mask_and_layout_have_to_be_told(said: dict[str, Any], error: type[Exception], words: str) -> None:
    raises(error, words, DotProductAttention, 2, 4, **said)
    made = DotProductAttention(2, 4, mask="causal", layout="batch_first")
    assert copy.deepcopy(made).mask == pickle.loads(pickle.dumps(made)).mask == "causal"
    told = inspect.signature(DotProductAttention).parameters
    assert told["mask"].default is told["layout"].default is inspect.Parameter.empty
