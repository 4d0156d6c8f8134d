"""Attention of one query a sample, as its kernel is called, and what it is to give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_fuser.kernels.decode_attention import OneQuery, attend


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
