"""Attention of one query a sample, and what writes its caches: run on the CPU by an emulated driver."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels import decode_attention
from te_fuser.kernels.decode_attention import CacheWrite
from te_fuser.ops import KeyValueCache
from te_fuser.ops.base import OpCall
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.kernels.one_query_cases import CASES
from tests.needs import needs_compiler

CPU = torch.device("cpu")


@needs_compiler
@pytest.mark.parametrize("room", [1, 40])
@pytest.mark.parametrize("name", CASES)
def test_one_query(name: str, room: int, emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in one part, and in several."""
    monkeypatch.setattr(decode_attention, "_room", lambda device, heads: room)
    assert CASES[name].complaint(CPU) is None


@needs_compiler
def test_what_is_behind_the_keys_is_not_read(emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_room", lambda device, heads: 4)
    case = CASES["groups"]
    query, key, value = case.inputs(CPU)
    want = case.run(query, key, value)
    for t in (key, value):
        t[70:, 2] = torch.nan
        t[1:, 1] = torch.inf
    assert torch.equal(case.run(query, key, value), want)
    key[69, 2, :64] = torch.nan
    found = case.run(query, key, value)
    assert found[0, 2, :256].isnan().all() and torch.equal(found[0, 2, 256:], want[0, 2, 256:])


def test_heads_that_one_query_does_not_take() -> None:
    assert decode_attention.why_not_one_query(128, torch.bfloat16) is None
    assert "multiple of 8 features up to 256, these have 264" in str(
        decode_attention.why_not_one_query(264, torch.bfloat16)
    )
    assert "bfloat16 and float16, there is torch.float32" in str(decode_attention.why_not_one_query(64, torch.float32))


# head_dim, kv_heads, per_group, packing, dtype, whole
KERNELS = {
    "group by group": CacheWrite(8, 2, 3, "interleaved", torch.bfloat16, torch.int64),
    "all queries first": CacheWrite(16, 3, 1, "blocked", torch.float16, torch.int32),
    "many tiles": CacheWrite(128, 8, 4, "blocked", torch.float32, torch.int64),
}
ROOM = 6

emulated = emulating(lambda: [*(case.kernel for case in CASES.values()), *KERNELS.values()])


def call(
    made: CacheWrite, positions: int, sequence_first: bool, starts: list[int], counts: list[int]
) -> tuple[torch.Tensor, ...]:
    """x, caches of one sample more, starts, counts."""
    rng = torch.Generator().manual_seed(positions)
    samples, wide = len(starts), made.kv_heads * made.head_dim

    def rows(count: int, batch: int, features: int) -> torch.Tensor:
        shape = (count, batch) if sequence_first else (batch, count)
        return torch.randn(*shape, features, generator=rng).to(made.dtype)

    caches = (rows(ROOM + 1, samples + 1, wide).narrow(int(sequence_first), 0, samples) for _ in range(2))
    whole = (torch.tensor(numbers, dtype=made.whole) for numbers in (starts, counts))
    return rows(positions, samples, wide * (made.per_group + 2)), *caches, *whole


def plain(made: CacheWrite, sequence_first: bool, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """By the op, which takes places that are no place where it does not look at them."""
    op = KeyValueCache(
        made.head_dim,
        heads=made.kv_heads * made.per_group,
        kv_heads=made.kv_heads,
        layout="sequence_first" if sequence_first else "batch_first",
        packing=made.packing,
    )
    op.__dict__["_check_room"] = lambda *found: None  # as on a GPU, nobody waits for them
    names = ("key_cache", "value_cache", "starts", "counts")
    return op.op_forward(OpCall(dict(zip(names, given, strict=True))), x)


def by_kernel(made: CacheWrite, sequence_first: bool, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """By the kernel."""
    key_cache, value_cache, starts, counts = given
    return decode_attention.put(made, x, key_cache, value_cache, starts, counts, sequence_first)


@needs_compiler
@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_written_caches(name: str, sequence_first: bool, emulated: FakeDriver) -> None:
    """Tokens, padding, and places that are none; the last position, that of padding, becomes zeros."""
    made = KERNELS[name]
    for positions, starts, counts in (
        (1, [0, 5, 2], [1, 1, 0]),
        (4, [0, 2, 3], [4, 4, 2]),
        (3, [4, -1, 6], [3, 1, 1]),
        (0, [0, 0, 0], [0, 0, 0]),
    ):
        x, *ours = call(made, positions, sequence_first, starts, counts)
        theirs = [t.clone() for t in ours]
        want = plain(made, sequence_first, x, *theirs)
        versions = [t._version for t in ours[:2]]
        found = by_kernel(made, sequence_first, x, *ours)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            last = a.select(1 - int(sequence_first), ROOM)
            assert [not row.any() for row in last] == [positions > count for count in counts] or max(starts) > 5
        assert positions == 0 or all(t._version > v for t, v in zip(ours[:2], versions, strict=True))


def test_caches_that_it_cannot_reach() -> None:
    cache = torch.zeros(5, 2, 16, dtype=torch.bfloat16)
    assert decode_attention.can_reach(cache, cache.clone())
    assert not decode_attention.can_reach(cache, torch.zeros(5, 3, 16, dtype=torch.bfloat16)[:, :2])
    for apart in (torch.zeros(5, 2, 20).bfloat16()[..., :16], torch.zeros(161).bfloat16()[1:].view(5, 2, 16)):
        assert not decode_attention.can_reach(apart, apart)


def test_heads_that_are_not_cached() -> None:
    assert decode_attention.why_not_cached(64, torch.bfloat16) is None
    assert decode_attention.why_not_cached(4, torch.bfloat16) == "it moves 16 bytes at once, and a head has 8"
    assert "there is torch.float64" in str(decode_attention.why_not_cached(64, torch.float64))
