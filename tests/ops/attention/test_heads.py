"""Keys and values apart from queries: values and all gradients against the formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser import ops
from te_fuser.formula import random
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.heads import Apart, ApartHeads
from te_fuser.ops.attention.math import kept
from te_fuser.ops.base import Spec
from tests.ops.attention_cases import by_formula, check, in_layout, run, tensor
from tests.refused import raises

LAYOUTS = ("sequence_first", "batch_first")
STREAM = random.RandomStream(seed=0x1234_5678_9ABC, offset=5, stream=3)


def packed_key_value(k, v, layout, packing):
    """[B, G, K, D] and [B, G, K, E] in one tensor."""
    if packing == "interleaved":
        return in_layout(torch.cat((k, v), -1), layout)
    return torch.cat((in_layout(k, layout), in_layout(v, layout)), -1)


def parts_of(heads, kv_heads, queries, keys, dim, value_dim, samples=2):
    q = tensor(samples, heads, queries, dim, seed=1).requires_grad_()
    k = tensor(samples, kv_heads, keys, dim, seed=2).requires_grad_()
    return q, k, tensor(samples, kv_heads, keys, value_dim, seed=3).requires_grad_()


def causal(corner, queries, keys):
    shift = keys - queries if corner == "bottom_right" else 0
    return lambda b, i: range(min(keys, max(0, i + shift + 1)))


SIZES = [(5, 7, 8, 8), (7, 3, 5, 13), (1, 9, 3, 1), (6, 1, 4, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packing", [None, "interleaved", "blocked"])
def test_values_and_gradients(layout, kv_heads, packing):
    for k, (queries, keys, dim, value_dim) in enumerate(SIZES * 2):
        corner = (None, "top_left", "bottom_right")[k % 3]
        mask = "none" if corner is None else ops.AttentionMask(causal=True, corner=corner)
        apart = Apart(value_dim=value_dim) if packing is None else Apart("a", "b", "both", packing, value_dim)
        op = DotProductAttention(4, dim, kv_heads=kv_heads, mask=mask, layout=layout, packing=apart)
        q, k, v = parts_of(4, kv_heads, queries, keys, dim, value_dim)
        x = in_layout(q, layout)

        def others_of(k, v, layout=layout, packing=packing):
            if packing is None:
                return {"key": in_layout(k, layout), "value": in_layout(v, layout)}
            return {"key_value": packed_key_value(k, v, layout, packing)}

        inputs = others_of(k, v)
        seen = (lambda b, i, keys=keys: range(keys)) if corner is None else causal(corner, queries, keys)
        want = in_layout(by_formula(q, k, v, seen, scale=dim**-0.5), layout)
        dy = tensor(*want.shape, seed=4)
        gq, gk, gv = torch.autograd.grad(want, (q, k, v), dy)
        wanted = {"input": in_layout(gq, layout), **others_of(gk, gv)}
        check(op, x.detach(), {n: t.detach() for n, t in inputs.items()}, want, wanted, dy)


def test_the_given_names_are_read():
    named = DotProductAttention(
        2, 4, packing=Apart("memory_key", "memory_value"), mask="none", layout="sequence_first"
    ).named_inputs()
    assert {a: g.name for a, g in named.items()} == {"key": "memory_key", "value": "memory_value"}
    assert all(g.gradient for g in named.values())
    assert DotProductAttention(2, 4, packing="apart", mask="none", layout="sequence_first").packed == ApartHeads(
        2, 2, 4
    )


def test_dropout_and_a_given_mask():
    op = DotProductAttention(2, 4, mask="given", packing="apart", dropout=0.4, layout="batch_first")
    q, k, v = parts_of(2, 2, 5, 7, 4, 4)
    hidden = torch.rand(2, 2, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden[1, 0, 2] = True
    factors = kept(STREAM, (2, 2, 5, 7), q.detach(), 0.4)
    out = []
    for h in range(2):
        seen = lambda b, i, h=h: (~hidden[b, h, i]).nonzero().flatten().tolist()  # noqa: E731
        rows = (q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1])
        out.append(by_formula(*rows, seen, scale=0.5, factors=factors[:, h : h + 1]))
    want = in_layout(torch.cat(out, 1), "batch_first")
    assert (want[1, 2, :4] == 0).all()
    dy = tensor(*want.shape, seed=4)
    names, grads = ("input", "key", "value"), torch.autograd.grad(want, (q, k, v), dy)
    x, *others = (in_layout(t, "batch_first").detach() for t in (q, k, v))
    wanted = {name: in_layout(g, "batch_first") for name, g in zip(names, grads, strict=True)}
    check(op, x, {**dict(zip(names[1:], others, strict=True)), "attention_mask": hidden}, want, wanted, dy, STREAM)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("packing", [Apart(), Apart(key_value="both")])
def test_nothing_to_attend_to_gives_zeros(sizes, packing):
    queries, keys, samples = sizes
    op = DotProductAttention(2, 4, packing=packing, layout="batch_first", mask="none")
    q, k, v = (in_layout(t, "batch_first").detach() for t in parts_of(2, 2, queries, keys, 4, 4, samples))
    inputs = {"key_value": torch.cat((k, v), -1)} if packing.key_value else {"key": k, "value": v}
    y, dx, others = run(op, q, torch.ones_like(q), inputs)
    assert y.shape == q.shape and (y == 0).all() and (dx == 0).all()
    assert all((t == 0).all() and t.shape == inputs[n].shape for n, t in others.items())


def test_outputs_own_their_storage_and_have_their_inputs_dtypes():
    for layout, packing in itertools.product(LAYOUTS, (Apart(), Apart(key_value="both", packing="blocked"))):
        op = DotProductAttention(2, 4, kv_heads=1, layout=layout, packing=packing, mask="none")
        q, k, v = (in_layout(t, layout).detach() for t in parts_of(2, 1, 5, 3, 4, 4))
        inputs = {"key_value": torch.cat((k, v), -1)} if packing.key_value else {"key": k, "value": v.bfloat16()}
        y, dx, others = run(op, q.half(), q.half(), inputs)
        assert y.dtype == dx.dtype == torch.float16
        assert {n: t.dtype for n, t in others.items()} == {n: t.dtype for n, t in inputs.items()}
        for made in (y, dx, *others.values()):
            assert made.is_contiguous() and not made._is_view()
            assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


def spec(*shape, dtype=torch.float32):
    return Spec(shape, dtype, torch.device("cpu"))


def test_what_cannot_be_is_refused():
    op = DotProductAttention(4, 8, kv_heads=2, packing=Apart(value_dim=5), mask="none", layout="sequence_first")
    assert op.infer(spec(7, 2, 32)) == spec(7, 2, 20)
    raises(ValueError, r"queries of heads \* head_dim = 4 \* 8 = 32 features, got 64", op.infer, spec(7, 2, 64))
    x, key, value = spec(7, 2, 32), spec(3, 2, 16), spec(3, 2, 10)
    op.check_inputs(x, {"key": key, "value": value})
    for inputs, words in (
        ({"key": key}, "reads values from 'value': call the model with value="),
        (
            {"key": spec(3, 2, 15), "value": value},
            r"'key' has 15 features; DotProductAttention takes 2 heads, that is 16",
        ),
        ({"key": key, "value": spec(4, 2, 10)}, "'value' has 4 positions, 'key' has 3"),
        ({"key": spec(3, 1, 16), "value": value}, "'key' has 1 samples, the queries 2"),
        ({"key": spec(3, 16), "value": value}, r"input 'key', takes \[sequence, batch, features\], got 2 dimensions"),
    ):
        raises(ValueError, words, op.check_inputs, x, inputs)
    with pytest.raises(TypeError, match="'value', takes float32"):
        op.check_inputs(x, {"key": key, "value": spec(3, 2, 10, dtype=torch.int64)})
    with pytest.raises(ValueError, match="two inputs are called 'key'"):
        DotProductAttention(2, 4, packing=Apart(value="key"), mask="none", layout="sequence_first")
    raises(ValueError, "value_dim is 0", Apart, value_dim=0)
    with pytest.raises(ValueError, match="packing='both' is unknown"):
        DotProductAttention(2, 4, packing="both", mask="none", layout="sequence_first")
