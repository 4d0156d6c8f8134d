"""Attention that hides by structure: windows, both corners, lengths, sequences one behind the other, by the formula."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from te_fuser import ops
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import OpCall
from tests.ops import attention_cases
from tests.ops.attention_cases import by_formula, in_layout, run, tensor
from tests.ops.check import spec
from tests.refused import raises

WINDOWS = [None, (2, 1), (0, 0), (None, 2), (3, None)]


def keys_seen(mask, queries, keys):
    """The keys that query i of a sequence of so many queries and keys sees."""
    shift = keys - queries if mask.corner == "bottom_right" else 0
    left, right = mask.window or (None, None)
    right = 0 if mask.causal else right

    def seen(i):
        low = 0 if left is None else max(0, i + shift - left)
        high = keys if right is None else min(keys, i + shift + right + 1)
        return range(low, max(low, high))

    return seen


def masks(**names):
    for causal, corner, window in itertools.product((False, True), ("top_left", "bottom_right"), WINDOWS):
        yield AttentionMask(causal=causal, corner=corner, window=window, **names)


def check(op, q, k, v, inputs, seen, layout):
    """Forward, backward and reference of `op` against the formula."""
    want = in_layout(by_formula(q, k, v, seen, scale=op.scale), layout)
    dy = tensor(*want.shape, seed=4)
    given, wanted = (
        {name: in_layout(t, layout) for name, t in zip(("input", "key", "value"), ts, strict=True)}
        for ts in ((q.detach(), k.detach(), v.detach()), torch.autograd.grad(want, (q, k, v), dy))
    )
    if op.packing == "blocked":
        given, wanted = ({"input": torch.cat([*ts.values()], -1)} for ts in (given, wanted))
    attention_cases.check(op, given.pop("input"), {**given, **inputs}, want, wanted, dy)


def parts(queries, keys, samples=2, heads=2, dim=3):
    q = tensor(samples, heads, queries, dim, seed=1).requires_grad_()
    return q, *(tensor(samples, heads, keys, dim, seed=n).requires_grad_() for n in (2, 3))


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (4, 4)])
def test_windows_and_corners(sizes):
    for mask in masks():
        op = DotProductAttention(2, 3, mask=mask, packing="apart", layout="batch_first")
        seen = keys_seen(mask, *sizes)
        check(op, *parts(*sizes), {}, lambda b, i, seen=seen: seen(i), "batch_first")


@pytest.mark.parametrize("packing", ["apart", "blocked"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_lie_anywhere(packing, causal):
    """In front, behind, in between, everywhere: it sees nothing, and nothing sees it."""
    sizes = (5, 7) if packing == "apart" else (5, 5)
    pads = [tensor(3, 1, 1, size, seed=k) > 0.2 for k, size in enumerate(sizes)]
    pads[0][1], pads[1][1] = True, packing == "blocked"
    if packing == "blocked":
        pads[1] = pads[0]
    key_padding = {"key_padding": "theirs"} if packing == "apart" else {}
    mask = AttentionMask(causal=causal, padding="ours", **key_padding)
    op = DotProductAttention(2, 3, mask=mask, packing=packing, layout="batch_first")

    def seen(b, i):
        last = i + 1 if causal else sizes[1]
        return [k for k in range(last) if not pads[0][b, 0, 0, i] and not pads[1][b, 0, 0, k]]

    named = {"padding": pads[0], "key_padding": pads[1]} if packing == "apart" else {"padding": pads[0]}
    check(op, *parts(*sizes, samples=3), named, seen, "batch_first")


@pytest.mark.parametrize("sides", ["both", "keys"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
def test_the_last_that_is_no_padding_is_the_corner(window, sides):
    """Padding that a boolean tensor says, in front, behind or in between; where all is, nothing is seen."""
    sizes = (5, 7)
    pads = [tensor(4, 1, 1, size, seed=k) > 0.2 for k, size in enumerate(sizes)]
    pads[0][1], pads[1][2], pads[1][3] = True, True, torch.arange(7) >= 3
    if sides == "keys":
        pads[0].fill_(False)
    names = {"padding": "ours", "key_padding": "theirs"} if sides == "both" else {"key_padding": "theirs"}
    mask = AttentionMask(causal=window is None, corner="bottom_right", window=window, **names)
    op = DotProductAttention(2, 3, mask=mask, packing="apart", layout="batch_first")

    def seen(b, i):
        ours, theirs = ([n for n in range(size) if not pad[b, 0, 0, n]] for size, pad in zip(sizes, pads, strict=True))
        if i not in ours or not theirs:
            return ()
        near = keys_seen(mask, ours[-1] + 1, theirs[-1] + 1)(i)
        return [k for k in near if k in theirs]

    named = {"padding": pads[0], "key_padding": pads[1]} if sides == "both" else {"key_padding": pads[1]}
    check(op, *parts(*sizes, samples=4), named, seen, "batch_first")


def test_masks_that_cannot_be_and_padding_that_does_not_fit():
    op = DotProductAttention(2, 3, mask=AttentionMask(padding="ours"), layout="batch_first")
    x = spec(2, 5, 18)
    for shape, dtype, error, words in (
        ((2, 5), torch.bool, ValueError, r"takes \[batch, 1, 1, positions\] = \[2, 1, 1, 5\]; give mask\[:, None"),
        ((2, 1, 1, 5), torch.float32, TypeError, "takes booleans, True = padding"),
    ):
        raises(error, words, op.check_inputs, x, {"padding": spec(*shape, dtype=dtype)})
    raises(ValueError, "reads padding from 'ours'", op.check_inputs, x, {})
    raises(ValueError, r"window is \(left, right\).*got \(-1, 0\)", AttentionMask, window=(-1, 0))
    raises(ValueError, "corner='left' is unknown; use one of 'top_left', 'bottom_right'", AttentionMask, corner="left")
    raises(ValueError, "keyword argument", AttentionMask, lengths="my lengths")


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
def test_packed_heads_have_windows(layout):
    for window in WINDOWS:
        mask = AttentionMask(causal=True, window=window)
        op = DotProductAttention(2, 3, mask=mask, packing="blocked", layout=layout)
        seen = keys_seen(mask, 6, 6)
        check(op, *parts(6, 6), {}, lambda b, i, seen=seen: seen(i), layout)


def test_lengths_by_sample():
    lengths = torch.tensor([5, 0, 1, 7])
    for mask in masks(lengths="lengths"):
        op = DotProductAttention(2, 3, mask=mask, packing="blocked", layout="batch_first")

        def seen(b, i, mask=mask):
            n = int(lengths[b])
            return keys_seen(mask, n, n)(i) if i < n else ()

        check(op, *parts(7, 7, samples=4), {"lengths": lengths}, seen, "batch_first")


@pytest.mark.parametrize("named", [("lengths", "key_lengths"), ("key_lengths",), ("lengths",)])
def test_lengths_of_both_sides(named):
    counts = {"lengths": torch.tensor([3, 0, 6], dtype=torch.int32), "key_lengths": torch.tensor([4, 2, 0])}
    given = {name: counts[name] for name in named}
    for mask in masks(**{name: name for name in named}):
        op = DotProductAttention(2, 3, mask=mask, packing="apart", layout="sequence_first")

        def seen(b, i, mask=mask):
            n = int(given["lengths"][b]) if "lengths" in given else 6
            m = int(given["key_lengths"][b]) if "key_lengths" in given else 4
            return keys_seen(mask, n, m)(i) if i < n else ()

        check(op, *parts(6, 4, samples=3), given, seen, "sequence_first")


@pytest.mark.parametrize("packing", ["blocked", "apart"])
def test_sequences_one_behind_the_other(packing):
    """The third is empty, and behind the last there are two tokens of none."""
    offsets = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
    for mask in masks(offsets="cu_seqlens"):
        op = DotProductAttention(2, 3, mask=mask, packing=packing, layout="tokens")

        def seen(b, i, mask=mask):
            n = int((offsets[1:] <= i).sum())
            if n == 4:
                return ()
            first, count = int(offsets[n]), int(offsets[n + 1] - offsets[n])
            return [first + j for j in keys_seen(mask, count, count)(i - first)]

        check(op, *parts(11, 11, samples=1), {"offsets": offsets}, seen, "tokens")


@pytest.mark.parametrize("padded", [False, True])
def test_sequences_of_keys_have_offsets_of_their_own(padded):
    starts = {"offsets": torch.tensor([0, 2, 5, 8]), "key_offsets": torch.tensor([0, 4, 5, 7])}
    counts = {"lengths": torch.tensor([2, 1, 0]), "key_lengths": torch.tensor([3, 0, 2])} if padded else {}
    given = {**starts, **counts}
    for mask in masks(**{name: name for name in given}):
        op = DotProductAttention(2, 3, mask=mask, packing="apart", layout="tokens")

        def seen(b, i, mask=mask):
            n = int((starts["offsets"][1:] <= i).sum())
            firsts = [int(starts[name][n]) for name in ("offsets", "key_offsets")]
            sizes = [int(t.diff()[n]) for t in starts.values()]
            if padded:
                sizes = [int(t[n]) for t in counts.values()]
            place = i - firsts[0]
            return [firsts[1] + j for j in keys_seen(mask, *sizes)(place)] if place < sizes[0] else ()

        check(op, *parts(8, 7, samples=1), given, seen, "tokens")


def test_a_given_mask_hides_too():
    hidden = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    lengths = torch.tensor([4, 5])
    mask = AttentionMask(causal=True, corner="bottom_right", given="hide", lengths="lengths")
    op = DotProductAttention(2, 3, mask=mask, packing="apart", layout="batch_first")

    def seen(b, i):
        n = int(lengths[b])
        return [j for j in keys_seen(mask, n, 7)(i) if not hidden[b, 0, i, j]] if i < n else ()

    check(op, *parts(5, 7), {"attention_mask": hidden, "lengths": lengths}, seen, "batch_first")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": AttentionMask(key_lengths="n")}, "for keys that are apart"),
        ({"mask": AttentionMask(offsets="n")}, r"layout='sequence_first' with offsets='n'.*need both"),
        ({"layout": "tokens"}, r"layout='tokens' with offsets=None.*need both"),
        ({"mask": AttentionMask(given="n", lengths="n")}, "two inputs are called 'n'"),
    ],
)
def test_arguments(arguments, words):
    raises(ValueError, words, DotProductAttention, 2, 4, **{"mask": "none", "layout": "sequence_first", **arguments})


def test_inputs():
    counts = partial(spec, dtype=torch.int32)
    op = DotProductAttention(2, 4, mask=AttentionMask(lengths="n"), layout="batch_first")
    x = spec(3, 7, 24)
    op.check_inputs(x, {"lengths": counts(3)})
    for given, kind, words in (
        ({}, ValueError, "reads lengths from 'n': call the model with n="),
        ({"lengths": counts(4)}, ValueError, r"'n' has shape \[4\]; DotProductAttention takes lengths \[3\]"),
        ({"lengths": spec(3)}, TypeError, r"'n' is torch.float32; .* whole numbers"),
    ):
        raises(kind, words, op.check_inputs, x, given)
    names = {name: name for name in ("lengths", "key_lengths", "offsets", "key_offsets")}
    op = DotProductAttention(2, 4, mask=AttentionMask(**names), layout="tokens", packing="apart")
    x = spec(7, 8)
    others = {"key": x, "value": x, "lengths": counts(3), "key_lengths": counts(3)}
    op.check_inputs(x, {**others, "offsets": counts(4), "key_offsets": counts(4)})
    with pytest.raises(ValueError, match=r"say \[4, 5\]; DotProductAttention takes as many of both"):
        op.check_inputs(x, {**others, "key_lengths": counts(4), "offsets": counts(4), "key_offsets": counts(5)})
    raises(ValueError, r"takes \[tokens, features\], got 3 dimensions", op.infer, spec(1, 7, 8))
    assert op.infer(x) == x


def test_a_plain_mask_is_what_its_name_says():
    for name in ("none", "causal", "given", "causal_and_given"):
        assert DotProductAttention(2, 4, mask=name, layout="sequence_first").hides == AttentionMask(
            causal=name.startswith("causal"), given="attention_mask" if name.endswith("given") else None
        )
    assert ops.AttentionMask(causal=True).beyond == ()
    asked = ops.AttentionMask(causal=True, corner="bottom_right", window=(1, 1), lengths="n", offsets="o")
    assert asked.beyond == (
        "lengths of samples",
        "sequences one behind the other",
        "a window",
        "a diagonal from the bottom right",
    )


BOUNDED = AttentionMask(offsets="cu", longest=4)
BETWEEN = AttentionMask(offsets="cu", lengths="n")
BOTH = AttentionMask(lengths="n", key_lengths="m")


@pytest.mark.parametrize(
    ("mask", "counts", "words"),
    [
        (AttentionMask(lengths="n"), {"n": [7, 8]}, r"'n' says that sample 1 has 8 positions, .* room for 7: give"),
        (AttentionMask(lengths="n"), {"n": [-1, 7]}, r"'n' says that sample 0 has -1 positions"),
        (AttentionMask(offsets="cu"), {"cu": [0, 3, 8]}, r"'cu' go from 0 to 8 .* there are 7 tokens: offsets begin"),
        (AttentionMask(offsets="cu"), {"cu": [1, 3, 7]}, r"'cu' go from 1 to 7"),
        (AttentionMask(offsets="cu"), {"cu": [0, 5, 3]}, r"'cu' go from 0 to 3 with steps of at least -2"),
        (BOUNDED, {"cu": [0, 2, 7]}, r"'cu' says that sequence 1 has 5 tokens .* longest=4: give a longest that"),
        (BETWEEN, {"cu": [0, 2, 7], "n": [3, 5]}, r"'n' says that sequence 0 has 3 positions, .* room for 2"),
        (BOTH, {"n": [7, 7], "m": [5, 6]}, r"'m' says that sample 1 has 6 positions, and there is room for 5"),
    ],
)
def test_what_lies_outside_is_refused_on_a_cpu(mask: AttentionMask, counts: dict[str, list[int]], words: str) -> None:
    packing = "apart" if mask is BOTH else "interleaved"
    op = DotProductAttention(2, 4, mask=mask, layout="tokens" if mask.offsets else "batch_first", packing=packing)
    x = tensor(*((7,) if mask.offsets else (2, 7)), op.packed.features)
    given = {argument: torch.tensor(counts[name]) for argument, name in mask.names.items()}
    given |= {name: tensor(2, 5, 8) for name in ("key", "value")} if mask is BOTH else {}
    raises(ValueError, words, run, op, x, torch.ones_like(x[..., :8]), given)
    raises(ValueError, words, op.reference, OpCall(given), x)
