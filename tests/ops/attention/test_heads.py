"""Keys and values apart from queries, by the formula and in lists; norms of heads."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.pipeline import make_plan
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.heads import Apart, ApartHeads
from te_fuser.ops.attention.math import kept
from tests.ops.attention_cases import STREAM, by_formula, check, in_layout, run, tensor
from tests.ops.check import normal, spec
from tests.refused import raises
from tests.twins import assert_as_meant, assert_same, sequential
from tests.twins import tensor as draw

LAYOUTS = ("sequence_first", "batch_first")


def parts_of(heads, kv_heads, queries, keys, dim, value_dim, samples=2):
    q = tensor(samples, heads, queries, dim, seed=1).requires_grad_()
    k = tensor(samples, kv_heads, keys, dim, seed=2).requires_grad_()
    return q, k, tensor(samples, kv_heads, keys, value_dim, seed=3).requires_grad_()


def causal_seen(corner, queries, keys):
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
            if packing == "interleaved":
                return {"key_value": in_layout(torch.cat((k, v), -1), layout)}
            return {"key_value": torch.cat((in_layout(k, layout), in_layout(v, layout)), -1)}

        inputs = others_of(k, v)
        seen = (lambda b, i, keys=keys: range(keys)) if corner is None else causal_seen(corner, queries, keys)
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


def test_what_cannot_be_is_refused():
    op = DotProductAttention(4, 8, kv_heads=2, packing=Apart(value_dim=5), mask="none", layout="sequence_first")
    assert op.infer(spec(7, 2, 32)) == spec(7, 2, 20)
    raises(ValueError, r"queries of heads \* head_dim = 4 \* 8 = 32 features, got 64", op.infer, spec(7, 2, 64))
    x, key, value = spec(7, 2, 32), spec(3, 2, 16), spec(3, 2, 10)
    op.check_inputs(x, {"key": key, "value": value})
    for inputs, words in (
        ({"key": key}, "reads values from 'value': call the model with value="),
        ({"key": spec(3, 2, 15), "value": value},
         r"'key' has 15 features; DotProductAttention takes 2 heads, that is 16"),
        ({"key": key, "value": spec(4, 2, 10)}, "'value' has 4 positions, 'key' has 3"),
        ({"key": spec(3, 1, 16), "value": value}, "'key' has 1 samples, the queries 2"),
        ({"key": spec(3, 16), "value": value}, r"input 'key', takes \[sequence, batch, features\], got 2 dimensions"),
    ):  # fmt: skip
        raises(ValueError, words, op.check_inputs, x, inputs)
    with pytest.raises(TypeError, match="'value', takes float32"):
        op.check_inputs(x, {"key": key, "value": spec(3, 2, 10, dtype=torch.int64)})
    with pytest.raises(ValueError, match="two inputs are called 'key'"):
        DotProductAttention(2, 4, packing=Apart(value="key"), mask="none", layout="sequence_first")
    raises(ValueError, "value_dim is 0", Apart, value_dim=0)
    with pytest.raises(ValueError, match="packing='both' is unknown"):
        DotProductAttention(2, 4, packing="both", mask="none", layout="sequence_first")


def cross(**options):
    packing = ops.Apart(value_dim=5)
    op = ops.DotProductAttention(
        2, 4, **{"mask": "none", "kv_heads": 1, "packing": packing, "layout": "batch_first", **options}
    )
    return sequential(ops.Linear(6, 8), op, ops.Linear(10, 6))


def given(queries=7, keys=5, samples=3, dtype=torch.float64):
    shapes = {"key": (samples, keys, 4), "value": (samples, keys, 5)}
    inputs = {name: draw(*shape, seed=n, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return draw(samples, queries, 6, dtype=dtype), inputs


def everything():
    """An op that asks for all there is, with its inputs."""
    mask = ops.AttentionMask(True, "bottom_right", (3, 2), "hide", "lengths", "key_lengths")
    scores = ops.AttentionScores(2.0, "bias", "slopes", "learned")
    inputs = {
        "hide": torch.rand(3, 1, 7, 5, generator=torch.Generator().manual_seed(0)) < 0.2,
        "lengths": torch.tensor([7, 0, 4]),
        "key_lengths": torch.tensor([5, 3, 0], dtype=torch.int32),
        "bias": draw(1, 2, 7, 5, seed=3),
        "slopes": draw(2, grad=False, seed=4).abs(),
    }
    return {"mask": mask, "scores": scores, "dropout": 0.25}, inputs


@pytest.mark.parametrize("size", [(7, 5, 3), (1, 5, 3), (7, 1, 3), (0, 5, 3), (7, 0, 3), (7, 5, 0), (13, 11, 1)])
def test_keys_and_values_get_gradients(size):
    x, inputs = given(*size)
    for mask in ("none", ops.AttentionMask(causal=True, corner="bottom_right")):
        assert_as_meant(cross(mask=mask), x, tolerance=1e-10, **inputs)


def test_everything_at_once():
    options, others = everything()
    x, inputs = given()
    model = cross(**options)
    y = assert_as_meant(model, x, tolerance=1e-10, **inputs, **others)[0]
    model.eval()
    assert not torch.equal(assert_as_meant(model, x, tolerance=1e-10, **inputs, **others)[0], y)
    with torch.no_grad():
        torch.testing.assert_close(model(x, **inputs, **others), model.reference(x, **inputs, **others))


def test_copies_and_strided_inputs():
    options, others = everything()
    x, inputs = given()
    model = cross(**{**options, "dropout": 0.0})
    want = model(x, **inputs, **others)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x, **inputs, **others), want)
        assert twin[1].mask == model[1].mask and twin[1].scores == model[1].scores
    spread = {n: torch.stack((t, t), -1)[..., 0] if t.dim() > 1 else t for n, t in {**inputs, **others}.items()}
    torch.testing.assert_close(model(x.transpose(0, 1).contiguous().transpose(0, 1), **spread), want)


def test_keys_and_values_from_forks():
    """Both are named by ops before: a cross attention inside one list."""
    op = ops.DotProductAttention(2, 4, packing="apart", layout="batch_first", mask="causal")
    model = sequential(ops.Linear(6, 8), ops.Fork("key"), ops.GELU(), ops.Fork("value"), ops.Linear(8, 8), op)
    assert_as_meant(model, draw(3, 7, 6), tolerance=1e-10)


@pytest.mark.parametrize("packing", ["interleaved", "apart"])
def test_sequences_one_behind_the_other(packing):
    mask = ops.AttentionMask(causal=True, offsets="cu_seqlens")
    op = ops.DotProductAttention(2, 4, mask=mask, layout="tokens", packing=packing)
    model = sequential(ops.Linear(6, op.packed.features), op, ops.Linear(8, 6))
    inputs = {n: draw(11, 8, seed=k) for k, n in enumerate(("key", "value"))} if packing == "apart" else {}
    offsets = torch.tensor([0, 3, 3, 8, 10], dtype=torch.int32)
    x = draw(11, 6)
    y = assert_as_meant(model, x, tolerance=1e-10, cu_seqlens=offsets, **inputs)[0]
    # The plan holds for other sequences, and each is attended to by itself.
    other = torch.tensor([0, 3, 5, 8, 10], dtype=torch.int32)
    changed = assert_as_meant(model, x, tolerance=1e-10, cu_seqlens=other, **inputs)[0]
    assert torch.equal(changed[:3], y[:3]) and not torch.equal(changed[5:8], y[5:8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(dtype):
    options, others = everything()
    options["dropout"] = 0.0
    x, inputs = given()
    exact, model = cross(**options), cross(**options).to(dtype)
    exact.load_state_dict(model.state_dict())
    low = {n: t.to(dtype) if t.is_floating_point() else t for n, t in {**inputs, **others}.items()}
    high = {n: t.double() if t.is_floating_point() else t for n, t in low.items()}
    model[1].sink.data = model[1].sink.data.float()  # sinks may stay in float32
    y = model(x.to(dtype), **low)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(x.to(dtype).double(), **high), rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert model[1].sink.grad.dtype == torch.float32


def test_autocast_and_verified():
    options, others = everything()
    x, inputs = given(dtype=torch.float32)
    model = cross(**{**options, "dropout": 0.0}).float()
    others = {n: t.float() if t.is_floating_point() else t for n, t in others.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, **inputs, **others)
        want = model.reference(x, **inputs, **others)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert inputs["key"].grad.dtype == torch.float32 and inputs["key"].grad.isfinite().all()
    assert te_fuser.verify(model, x, **inputs, **others).passed


@pytest.mark.parametrize("scores", [None, ops.AttentionScores(soft_cap=1.0, alibi=True)])
def test_one_plan_for_many_lengths(scores, monkeypatch):
    """Nothing that is asked of sizes ties a plan to one of them."""
    made = []
    monkeypatch.setattr(pipeline, "make_plan", lambda *given: made.append(0) or make_plan(*given))
    apart = ops.AttentionMask(causal=True, corner="bottom_right", key_lengths="n")
    models = {
        "apart": ops.DotProductAttention(2, 4, packing="apart", mask=apart, layout="batch_first", scores=scores),
        "packed": ops.DotProductAttention(
            2, 4, mask=ops.AttentionMask(lengths="n"), layout="batch_first", scores=scores
        ),
        "tokens": ops.DotProductAttention(2, 4, mask=ops.AttentionMask(offsets="n"), layout="tokens", scores=scores),
    }
    for name, op in models.items():
        model = sequential(op)
        made.clear()
        for length in (64, 61, 57, 40):
            x = draw(3, length, 8 if name == "apart" else 24)
            others = {n: draw(3, length - 5, 8) for n in ("key", "value")} if name == "apart" else {}
            model(x[0] if name == "tokens" else x, n=torch.arange(3), **others).sum().backward()
        assert len(made) == 1, name


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
def test_norms_of_heads(packing: str, norm: str, heads: int, kv_heads: int | None) -> None:
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
