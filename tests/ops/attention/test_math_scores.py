"""Soft cap, bias, ALiBi and sinks: values and all gradients against the formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.math import AttentionScores, alibi_slopes, at_places, kept
from te_fuser.ops.base import OpCall
from tests.ops import attention_cases
from tests.ops.attention_cases import STREAM, by_formula, close, in_layout, run, tensor
from tests.ops.check import spec
from tests.refused import raises

SAMPLES, HEADS, QUERIES, KEYS, DIM = 2, 4, 5, 7, 3
BIASES = [(SAMPLES, HEADS, QUERIES, KEYS), (1, HEADS, 1, KEYS), (QUERIES, KEYS), (SAMPLES, 1, QUERIES, 1), ()]


def distances(corner):
    shift = KEYS - QUERIES if corner == "bottom_right" else 0
    return (torch.arange(KEYS)[None] - torch.arange(QUERIES)[:, None] - shift).double()


def check(scores, added, inputs, *, bias=None, corner="top_left", dropout=0.0, causal=True):
    """The op with these scores against the formula; `added` is what is added to the scores."""
    mask = ops.AttentionMask(causal=causal, corner=corner)
    op = DotProductAttention(
        HEADS, DIM, kv_heads=2, mask=mask, packing="apart", layout="batch_first", scores=scores, dropout=dropout
    ).double()
    q = tensor(SAMPLES, HEADS, QUERIES, DIM, seed=1).requires_grad_()
    k, v = (tensor(SAMPLES, 2, KEYS, DIM, seed=n).requires_grad_() for n in (2, 3))
    sink = {"none": None, "zero": torch.zeros(HEADS).double(), "learned": tensor(HEADS, seed=5)}[scores.sink]
    if scores.sink == "learned":
        with torch.no_grad():
            op.sink.copy_(sink)
        sink.requires_grad_()
    shift = KEYS - QUERIES if corner == "bottom_right" else 0
    factors = kept(STREAM, (SAMPLES, HEADS, QUERIES, KEYS), q.detach(), dropout) if dropout else None
    seen = lambda b, i: range(min(KEYS, i + shift + 1) if causal else KEYS)  # noqa: E731
    options = {"scale": DIM**-0.5, "cap": scores.soft_cap, "added": added, "sink": sink, "factors": factors}
    want = in_layout(by_formula(q, k, v, seen, **options), "batch_first")
    dy = tensor(*want.shape, seed=4)
    others = {n: t for n, t in (("attention_bias", bias), ("sink", sink)) if t is not None and t.requires_grad}
    grads = torch.autograd.grad(want, (q, k, v, *others.values()), dy)
    wanted = dict(zip(("input", "key", "value"), (in_layout(g, "batch_first") for g in grads), strict=False))
    wanted |= dict(zip(others, grads[3:], strict=True))
    x, key, value = (in_layout(t, "batch_first").detach() for t in (q, k, v))
    given = {"key": key, "value": value, **{n: t.detach() for n, t in inputs.items()}}
    attention_cases.check(op, x, given, want, wanted, dy, STREAM if dropout else None)


@pytest.mark.parametrize("shape", BIASES)
def test_bias(shape):
    bias = tensor(*shape, seed=6).requires_grad_()
    added = bias.expand(SAMPLES, HEADS, QUERIES, KEYS)
    for cap, dropout in itertools.product((0.0, 2.0), (0.0, 0.3)):
        check(AttentionScores(cap, bias="bias"), added, {"attention_bias": bias}, bias=bias, dropout=dropout)


@pytest.mark.parametrize("sink", ["none", "zero", "learned"])
@pytest.mark.parametrize("corner", ["top_left", "bottom_right"])
def test_sinks_caps_and_alibi(sink, corner):
    for cap, dropout, causal in ((0.0, 0.0, False), (0.7, 0.0, True), (0.0, 0.3, True), (0.7, 0.3, False)):
        slopes = alibi_slopes(HEADS, torch.device("cpu"))
        added = (-slopes[:, None, None] * distances(corner).abs()).expand(SAMPLES, -1, -1, -1)
        options = {"corner": corner, "dropout": dropout, "causal": causal}
        check(AttentionScores(cap, alibi=True, sink=sink), added, {}, **options)
        check(AttentionScores(cap, sink=sink), None, {}, **options)


@pytest.mark.parametrize("shape", [(HEADS,), (SAMPLES, HEADS), (1, HEADS)])
def test_slopes_that_are_given(shape):
    slopes = tensor(*shape, seed=7).abs()
    by_head = slopes.expand(SAMPLES, HEADS)[:, :, None, None]
    check(AttentionScores(alibi="slopes"), -by_head * distances("top_left").abs(), {"alibi_slopes": slopes})


@pytest.mark.parametrize("shape", [(1, HEADS, 6, 8), (1, 5, 7), (HEADS, 1, 7), (HEADS, 5, 1), (5, 7)])
@pytest.mark.parametrize("padded", [False, True])
def test_biases_by_position(shape, padded):
    """Of sequences one behind the other; each has the bias from its first query and key on."""
    ends, key_ends = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 7, 9, 11])
    mask = ops.AttentionMask(True, "top_left", offsets="cu", key_offsets="keys", lengths="n" if padded else None)
    scores = AttentionScores(0.7, "bias", True, by_position=True)
    op = DotProductAttention(
        HEADS, DIM, mask=mask, packing="apart", layout="tokens", scores=scores, kv_heads=HEADS
    ).double()
    model, n = te_fuser.Sequential(op), torch.tensor([2, 0, 5]) if padded else ends.diff()
    q, k, v = (tensor(count, HEADS * DIM, seed=count).requires_grad_() for count in (9, 11, 12))
    v, bias = v[:11], tensor(*shape, seed=6).requires_grad_()
    parts = []
    for b in range(3):
        own, theirs = slice(ends[b], ends[b] + n[b]), slice(key_ends[b], key_ends[b + 1])
        heads = [t.unflatten(-1, (HEADS, DIM)).transpose(0, 1) for t in (q[own], k[theirs], v[theirs])]
        at = bias[..., : max(n[b], 1) if bias.shape[-2] > 1 else 1, : theirs.stop - theirs.start]
        d = (torch.arange(heads[1].shape[1])[None] - torch.arange(int(n[b]))[:, None]).double()
        added = at.reshape(-1, *at.shape[-2:]) - alibi_slopes(HEADS, q.device)[:, None, None] * d.abs()
        raw = heads[0] @ heads[1].mT * DIM**-0.5
        weights = (0.7 * torch.tanh(raw / 0.7) + added[:, : max(int(n[b]), 1)]) if n[b] else raw
        weights = weights.masked_fill(d > 0, -torch.inf).softmax(-1)
        whole = q.new_zeros(int(ends[b + 1] - ends[b]), HEADS * DIM)
        parts.append(torch.cat(((weights @ heads[2]).transpose(0, 1).flatten(1), whole[int(n[b]) :])))
    want = torch.cat([*parts, q.new_zeros(1, HEADS * DIM)])
    given = {"key": k, "value": v, "bias": bias, "cu": ends, "keys": key_ends, **({"n": n} if padded else {})}
    dy = tensor(*want.shape, seed=4)
    leaves = [q, k, bias]
    grads = torch.autograd.grad(want, leaves, dy)
    for y in (model(q, **given), model.reference(q, **given)):
        close(y.detach(), want.detach())
        for ours, theirs in zip(torch.autograd.grad(y, leaves, dy), grads, strict=True):
            close(ours, theirs)


def test_a_bias_by_position_that_is_too_small():
    mask = ops.AttentionMask(offsets="cu")
    op = DotProductAttention(2, 4, mask=mask, layout="tokens", scores=AttentionScores(bias="b", by_position=True))
    x, cu = tensor(7, 24), torch.tensor([0, 2, 7])
    with pytest.raises(ValueError, match="'b' has 4 queries, and a sequence has 5: give .* of the longest sequence"):
        te_fuser.Sequential(op)(x, cu=cu, b=torch.zeros(2, 4, 5).double())
    with pytest.raises(ValueError, match=r"'b' has shape \[3, 5, 5\], which does not broadcast"):
        te_fuser.Sequential(op)(x, cu=cu, b=torch.zeros(3, 5, 5).double())
    with pytest.raises(ValueError, match='by_position=True is for layout="tokens"'):
        DotProductAttention(2, 4, scores=AttentionScores(bias="b", by_position=True), layout="batch_first", mask="none")
    raises(ValueError, "by_position says how a bias lies, and bias is None", AttentionScores, by_position=True)
    places = torch.arange(3), torch.arange(3)
    found = at_places(torch.ones(1, 1, 2, 3), places)  # as on a GPU, where nobody looks
    assert found[..., 2, :].isnan().all() and (found[..., :2, :] == 1).all()


def test_slopes_of_the_paper():
    assert alibi_slopes(8, torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]
    want = [2 ** (-2.0 * i) for i in range(1, 5)] + [2**-1.0, 2**-3.0]
    torch.testing.assert_close(alibi_slopes(6, torch.device("cpu")), torch.tensor(want, dtype=torch.float64))
    assert len(alibi_slopes(1, torch.device("cpu"))) == 1


def test_a_row_that_a_bias_hides_altogether_is_zero():
    for sink in ("none", "zero", "learned"):
        scores = AttentionScores(bias="bias", sink=sink)
        op = DotProductAttention(2, 4, scores=scores, layout="batch_first", mask="none").double()
        x, bias = tensor(1, 3, 24), torch.zeros(3, 3).double()
        bias[1] = -torch.inf
        y, dx, made = run(op, x, torch.ones(1, 3, 8).double(), {"attention_bias": bias})
        assert (y[0, 1] == 0).all() and dx.isfinite().all() and (made["attention_bias"][1] == 0).all()
        reference = op.reference(OpCall({"attention_bias": bias, **dict(op.named_parameters())}), x)
        torch.testing.assert_close(reference.detach(), y)


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9])
def test_a_row_that_a_huge_bias_hides_altogether_has_equal_probabilities(huge):
    """As masks by addition do it; the row's gradients too are those of equal probabilities."""
    op = DotProductAttention(1, DIM, layout="batch_first", scores=ops.AttentionScores(bias="bias"), mask="none")
    x, bias = tensor(1, 5, 3 * DIM).float().requires_grad_(), torch.zeros(5, 5)
    bias[0], bias[1, :3] = huge, huge
    q, k, v = x.split(DIM, -1)
    want = (q @ k.mT * DIM**-0.5 + bias).softmax(-1) @ v
    dy = tensor(*want.shape, seed=4).float()
    y, dx, _ = run(op, x.detach(), dy, {"attention_bias": bias})
    torch.testing.assert_close(y, want.detach())
    torch.testing.assert_close(dx, torch.autograd.grad(want, x, dy)[0])


def test_gradients_have_their_dtypes():
    op = DotProductAttention(
        2, 4, scores=AttentionScores(bias="bias", sink="learned"), layout="batch_first", mask="none"
    )
    assert op.sink.dtype == torch.float32 and (op.sink == 0).all()
    x, bias = tensor(2, 3, 24, dtype=torch.bfloat16), tensor(1, 2, 3, 3, dtype=torch.float16)
    y, dx, made = run(op, x, torch.ones(2, 3, 8).bfloat16(), {"attention_bias": bias})
    assert y.dtype == dx.dtype == torch.bfloat16
    assert made["attention_bias"].dtype == torch.float16 and made["sink"].dtype == torch.float32


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="scale, got nan"):
        DotProductAttention(2, 3, scale=float("nan"), mask="none", layout="sequence_first")
    for bound in (float("nan"), float("inf")):
        raises(ValueError, "soft_cap is a positive bound", AttentionScores, soft_cap=bound)
    raises(ValueError, "soft_cap is a positive bound", AttentionScores, -1.0)
    raises(TypeError, "takes a number as soft_cap, got '30'", AttentionScores, "30")
    raises(ValueError, "sink='one' is unknown; use one of 'none', 'zero', 'learned'", AttentionScores, sink="one")
    op = DotProductAttention(2, 4, scores=AttentionScores(bias="b", alibi="s"), layout="batch_first", mask="none")
    x, slopes = spec(3, 7, 24), spec(2)
    op.check_inputs(x, {"attention_bias": spec(2, 7, 7), "alibi_slopes": slopes})
    for bias, slope, kind, words in (
        (spec(2, 7, 6), slopes, ValueError,
         r"'b' has shape \[2, 7, 6\], .* \[batch, heads, queries, keys\] = \[3, 2, 7, 7\]"),
        (spec(7, 7), spec(3), ValueError,
         r"'s' has shape \[3\], which does not broadcast to \[batch, heads\] = \[3, 2\]"),
        (spec(7, 7, dtype=torch.int64), slopes, TypeError, "'b' is torch.int64; .* floating-point"),
        (None, slopes, ValueError, "reads a tensor 'b': call the model with b="),
    ):  # fmt: skip
        given = {"alibi_slopes": slope} if bias is None else {"attention_bias": bias, "alibi_slopes": slope}
        raises(kind, words, op.check_inputs, x, given)
    assert AttentionScores(1.0, "b", True, "zero").beyond == ("a soft cap", "a score bias", "ALiBi", "a sink")
