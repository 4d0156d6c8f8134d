"""Attention of one query a sample, and what writes its caches: run on the CPU by an emulated driver."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from te_fuser.kernels import decode_attention
from te_fuser.kernels.decode_attention import CacheWrite, OneQuery, attend
from te_fuser.ops import KeyValueCache
from te_fuser.ops.base import OpCall
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler


@dataclass(frozen=True)
class Case:
    """Heads, and what a call says; `lengths` 0 for samples without a query."""

    head_dim: int
    kv_heads: int = 2
    per_group: int = 1
    samples: int = 3
    keys: int = 40
    dtype: torch.dtype = torch.bfloat16
    left: int | None = None
    sequence_first: bool = True
    lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    all_samples: int | None = None  # of the caches; the call reads the first ones

    @property
    def kernel(self) -> OneQuery:
        """The kernel."""
        return OneQuery(self.head_dim, self.kv_heads, self.per_group, self.dtype, self.head_dim**-0.5, self.left)

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        rng = torch.Generator().manual_seed(self.head_dim + self.keys)
        wide, batch = self.kv_heads * self.head_dim, self.all_samples or self.samples

        def rows(positions: int, samples: int, features: int) -> torch.Tensor:
            shape = (positions, samples) if self.sequence_first else (samples, positions)
            return torch.randn(*shape, features, generator=rng).to(device, self.dtype)

        key, value = (rows(self.keys, batch, wide).narrow(int(self.sequence_first), 0, self.samples) for _ in range(2))
        return rows(1, self.samples, wide * self.per_group), key, value

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """By the kernel."""
        given = (self._whole(counts, query.device) for counts in (self.lengths, self.key_lengths))
        return attend(self.kernel, query, key, value, self.sequence_first, *given)

    def _whole(self, counts: tuple[int, ...] | None, device: torch.device) -> torch.Tensor | None:
        return None if counts is None else torch.tensor(counts, device=device)

    def exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """In the dtype of what is given, sample by sample."""
        samples = range(self.samples)
        rows = [self._sample(n, *(self._of(t, n) for t in (query, key, value))) for n in samples]
        return torch.stack(rows, int(self.sequence_first)).view(query.shape) if rows else torch.zeros_like(query)

    def _of(self, t: torch.Tensor, sample: int) -> torch.Tensor:
        return t[:, sample] if self.sequence_first else t[sample]

    def _sample(self, n: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        last = len(key) if self.key_lengths is None else self.key_lengths[n]
        count = 1 if self.lengths is None else self.lengths[n]
        if not (0 <= last <= len(key) and 0 <= count <= 1):
            return torch.full_like(query, torch.nan)
        first = 0 if self.left is None else max(0, last - 1 - self.left)
        if count == 0 or last == first:
            return torch.zeros_like(query)
        q = query.view(self.kv_heads, self.per_group, self.head_dim)
        k, v = (t[first:last].view(last - first, self.kv_heads, self.head_dim) for t in (key, value))
        shares = torch.einsum("grd,kgd->grk", q, k).mul(self.head_dim**-0.5).softmax(-1)
        return torch.einsum("grk,kgd->grd", shares, v).reshape(query.shape)

    def complaint(self, device: torch.device) -> str | None:
        """Complaint about the kernel's output: it may err twice as much as PyTorch does."""
        given = self.inputs(device)
        found, want = self.run(*given).double(), self.exact(*(t.double() for t in given))
        if not want.numel():
            return None if found.shape == want.shape else f"{list(found.shape)}"
        if not torch.equal(found.isnan(), want.isnan()):
            return f"NaN in {found.isnan().sum()} places, not in {want.isnan().sum()}"
        plain = self.exact(*given).double()
        allowed = (
            2 * (plain - want).nan_to_num().abs().max() + torch.finfo(self.dtype).eps * want.nan_to_num().abs().max()
        )
        apart = (found - want).nan_to_num().abs().max()
        return None if apart <= allowed else f"{apart:.3g} off, {allowed:.3g} allowed"


CASES = {
    "several heads": Case(128),
    "groups": Case(64, kv_heads=2, per_group=4, keys=133, key_lengths=(133, 1, 70)),
    "many heads of a group": Case(16, kv_heads=1, per_group=12, keys=65),
    "odd pieces": Case(24, kv_heads=3, keys=71, dtype=torch.float16),
    "small heads": Case(8, per_group=2, keys=300, key_lengths=(300, 299, 0)),
    "wide heads": Case(256, kv_heads=1, keys=37, sequence_first=False),
    "a window": Case(32, keys=90, left=7, key_lengths=(90, 5, 33), sequence_first=False),
    "its own key alone": Case(32, keys=90, left=0, key_lengths=(90, 5, 1)),
    "samples without a query": Case(64, lengths=(1, 0, 1), key_lengths=(12, 12, 0)),
    "lengths that cannot be": Case(32, samples=5, lengths=(1, 2, 1, -1, 1), key_lengths=(3, 3, 41, 3, -1)),
    "some of the samples of caches": Case(64, samples=2, all_samples=4, keys=50),
    "one key": Case(64, keys=1),
    "no keys": Case(64, keys=0),
    "no samples": Case(64, samples=0),
}


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
    made: CacheWrite, positions: int, sequence_first: bool, starts: list[int], counts: list[int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """x, caches of one sample more, starts, counts."""
    rng = torch.Generator().manual_seed(positions)
    samples, wide = len(starts), made.kv_heads * made.head_dim

    def rows(count: int, batch: int, features: int) -> torch.Tensor:
        shape = (count, batch) if sequence_first else (batch, count)
        return torch.randn(*shape, features, generator=rng).to(device, made.dtype)

    caches = (rows(ROOM + 1, samples + 1, wide).narrow(int(sequence_first), 0, samples) for _ in range(2))
    whole = (torch.tensor(numbers, dtype=made.whole, device=device) for numbers in (starts, counts))
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


def check_caches(name: str, sequence_first: bool, device: torch.device) -> None:
    """Tokens, padding, and places that are none; the last position, that of padding, becomes zeros."""
    made = KERNELS[name]
    for positions, starts, counts in (
        (1, [0, 5, 2], [1, 1, 0]),
        (4, [0, 2, 3], [4, 4, 2]),
        (3, [4, -1, 6], [3, 1, 1]),
        (0, [0, 0, 0], [0, 0, 0]),
    ):
        x, *ours = call(made, positions, sequence_first, starts, counts, device)
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


@needs_compiler
@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_written_caches(name: str, sequence_first: bool, emulated: FakeDriver) -> None:
    check_caches(name, sequence_first, CPU)


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
