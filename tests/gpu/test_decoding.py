"""The kernels of a decoding step on a GPU: the caches' and attention of one query, alone and in plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.kernels.one_query_cases import CASES, Case
from tests.kernels.test_key_value_cache import KERNELS, ROOM, by_kernel, call, plain

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
LONG = {
    "a long cache": Case(128, kv_heads=8, per_group=4, samples=2, keys=5000, key_lengths=(5000, 4097)),
    "many samples": Case(64, kv_heads=4, per_group=2, samples=70, keys=300, dtype=torch.float16),
    "heads of two turns": Case(128, kv_heads=2, per_group=16, samples=2, keys=900, sequence_first=False),
}


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_one_query(name: str) -> None:
    case = {**CASES, **LONG}[name]
    assert case.complaint(GPU) is None
    given = case.inputs(GPU)
    first = case.run(*given)
    assert all(torch.equal(case.run(*given).nan_to_num(), first.nan_to_num()) for _ in range(3))


@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_caches(name: str, sequence_first: bool) -> None:
    made = KERNELS[name]
    for positions, starts, counts in ((1, [0, 5, 2], [1, 1, 0]), (4, [0, 2, 3], [4, 4, 2]), (3, [4, -1, 6], [3, 1, 1])):
        x, *ours = (t.cuda() for t in call(made, positions, sequence_first, starts, counts))
        ours = [*(torch.stack([t, t])[0] for t in ours[:2]), *ours[2:]]
        theirs = [t.clone() for t in ours]
        want = plain(made, sequence_first, x, *theirs)
        found = by_kernel(made, sequence_first, x, *ours)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(*(t.narrow(1 - int(sequence_first), 0, ROOM) for t in (a, b)), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@torch.no_grad()
def test_in_a_plan(layout: str) -> None:
    """Steps of a list that writes its keys and values, some samples of the caches alone, and one that begins later."""
    mask = ops.AttentionMask(
        causal=True, corner="bottom_right", lengths="counts", key_lengths="filled", window=(20, None)
    )
    apart = ops.Apart("key_cache", "value_cache")
    model = te_fuser.Sequential(
        ops.KeyValueCache(64, heads=8, kv_heads=2, layout=layout, packing="blocked"),
        ops.DotProductAttention(8, 64, kv_heads=2, mask=mask, layout=layout, packing=apart),
    )
    batch = int(layout == "sequence_first")
    rng = torch.Generator(GPU).manual_seed(0)
    shape = (41, 4, 128) if batch else (4, 41, 128)
    ours = [torch.zeros(shape, dtype=torch.bfloat16, device=GPU).narrow(batch, 0, 3) for _ in range(2)]
    theirs = [t.clone() for t in ours]
    for at in range(36):
        x = torch.randn((1, 3, 768) if batch else (3, 1, 768), device=GPU, generator=rng).bfloat16()
        starts = torch.tensor([at, at + 4, max(at - 9, 0)], device=GPU)
        counts = torch.tensor([1, 1, int(at >= 9)], device=GPU)
        given: dict[str, Any] = {"starts": starts, "counts": counts, "filled": starts + counts}
        y = model(x, key_cache=ours[0], value_cache=ours[1], **given)
        wide = [t.double() for t in theirs]
        exact = model.reference(x.double(), key_cache=wide[0], value_cache=wide[1], **given)
        for cache, after in zip(theirs, wide, strict=True):
            cache.copy_(after)
        torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
    found = [s.name for s in model.plan(x, key_cache=ours[0], value_cache=ours[1], **given).forward]
    assert found == ["key_value_cache", "one_query_attention"]
