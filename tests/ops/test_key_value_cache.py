"""KeyValueCache: what goes where, and attention over it as over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.ops.check import normal
from tests.refused import raises

H, G, D, L, B = 4, 2, 3, 9, 3


def model(layout: str, packing: str, **options: Any) -> te_fuser.Sequential:
    how = {"heads": H, "kv_heads": G, "layout": layout}
    mask = ops.AttentionMask(causal=True, corner="bottom_right", lengths="counts", key_lengths="filled")
    attention = ops.DotProductAttention(head_dim=D, mask=mask, packing=ops.Apart("key_cache", "value_cache"), **how)
    return te_fuser.Sequential(ops.KeyValueCache(D, packing=packing, **how), attention, **options)


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"kernels": "reference"}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
def test_steps_are_as_the_whole(layout: str, packing: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Steps of several lengths, each sample at a place of its own."""
    lead = 0 if layout == "sequence_first" else 1
    x = normal(L, B, (H + 2 * G) * D).to(dtype).transpose(0, lead).contiguous()
    whole = ops.DotProductAttention(H, D, kv_heads=G, mask="causal", layout=layout, packing=packing)(x)
    caches = [torch.full((L + 1, B, G * D), torch.nan, dtype=dtype).nan_to_num(7.0).transpose(0, lead) for _ in "kv"]
    stepping, starts = model(layout, packing, **options), torch.zeros(B, dtype=torch.long)
    for counts in ([4, 1, 2], [1, 1, 1], [3, 2, 0], [1, 5, 4]):
        steps = torch.tensor(counts)
        rows = starts + torch.arange(int(steps.max()))[:, None]  # [S, B]
        by = rows.clamp(max=L - 1)[..., None].expand(-1, -1, x.shape[-1])
        new = x.transpose(0, lead).gather(0, by).transpose(0, lead)
        given = {"key_cache": caches[0], "value_cache": caches[1], "starts": starts, "counts": steps}
        with torch.no_grad():
            y = stepping(new, filled=starts + steps, **given).transpose(0, lead)
        for b, count in enumerate(counts):
            want = whole.transpose(0, lead)[starts[b] : starts[b] + count, b]
            torch.testing.assert_close(y[:count, b], want)
            assert not y[count:, b].any()
        starts = starts + steps
    assert starts.tolist() == [9, 9, 7]


def test_what_does_not_fit() -> None:
    op, x = ops.KeyValueCache(D, heads=H, kv_heads=G), normal(2, B, (H + 2 * G) * D)
    cache, whole = torch.zeros(L + 1, B, G * D).double(), torch.zeros(B, dtype=torch.int32)
    given = {"key_cache": cache, "value_cache": cache.clone(), "starts": whole, "counts": whole}
    for name, other, error, words in (
        ("key_cache", cache[:, :2], ValueError, "a key_cache has 3 samples of 6 features"),
        ("value_cache", cache.float(), TypeError, "the value_cache is torch.float32, and what is new torch.float64"),
        ("starts", whole[:2], ValueError, r"starts are whole numbers \[3\]"),
        ("counts", whole.double(), ValueError, r"counts are whole numbers \[3\], got torch.float64"),
    ):
        raises(error, words, op, x, **{**given, name: other})
    leaf = x.detach().requires_grad_()
    y = op(leaf, **given)
    raises(RuntimeError, r"has no gradient: call the model under torch.no_grad\(\)", lambda: y.sum().backward())


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
def test_more_than_a_cache_holds(layout: str) -> None:
    """The last position is nobody's: a CPU refuses, and no more is written."""
    shape, batch = ((2, B), 1) if layout == "sequence_first" else ((B, 2), 0)
    op, x = ops.KeyValueCache(D, heads=H, kv_heads=G, layout=layout), normal(*shape, (H + 2 * G) * D)
    cache = torch.zeros((L + 1, B, G * D) if batch else (B, L + 1, G * D)).double()
    starts, counts = torch.tensor([0, L - 1, 5]), torch.tensor([2, 1, 0])
    given = {"key_cache": cache, "value_cache": cache.clone(), "starts": starts, "counts": counts}
    with torch.no_grad():
        op(x, **given)
        written = cache.clone()
        for start, count in ((L, 1), (L - 1, 2), (L + 7, 1)):
            starts[1], counts[1] = start, count
            words = rf"sample 1 begins at position {start} and adds {count}, and its caches have room for {L} and one"
            raises(ValueError, words, op, x, **given)
            assert torch.equal(cache, written)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@torch.no_grad()
def test_what_padding_holds_reaches_nobody(layout: str) -> None:
    """NaN and infinity behind a sample's tokens."""
    lead = 0 if layout == "sequence_first" else 1
    x, counts = normal(4, B, (H + 2 * G) * D), torch.tensor([4, 1, 0])
    x[1:, 1], x[:, 2] = torch.nan, torch.inf
    caches = [torch.zeros(L + 1, B, G * D).double().transpose(0, lead).contiguous() for _ in "kv"]
    given = {"key_cache": caches[0], "value_cache": caches[1], "counts": counts, "filled": counts}
    for way in (te_fuser.Sequential.forward, te_fuser.Sequential.reference):
        y = way(model(layout, "blocked"), x.transpose(0, lead), starts=torch.zeros(B, dtype=torch.long), **given)
        whole = ops.DotProductAttention(H, D, kv_heads=G, mask="causal", layout=layout, packing="blocked")
        y, want = y.transpose(0, lead), whole(x.nan_to_num(posinf=0.0).transpose(0, lead)).transpose(0, lead)
        torch.testing.assert_close(y[:, 0], want[:, 0])
        torch.testing.assert_close(y[:1, 1], want[:1, 1])
        assert all(t.isfinite().all() for t in caches)
