"""Kernels of sequences of several lengths, in PyTorch, one sequence after the other.

They count from the last query and the last key, and leave alone what is in no sequence: here that stays NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kernel:
    """Rules by which scores are computed.

    `window` is (left, right), None or a negative number for no bound; `blind` is the lse of a query that sees nothing.
    """

    scale: float
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float = 0.0
    blind: float = torch.inf
    corner: str = "bottom_right"

    def scores(self, q, k):
        """Finished scores [H, Q, K] and those that the cap bounded."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        capped = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.soft_cap:
            capped = self.soft_cap * (capped / self.soft_cap).tanh()
        queries, keys = capped.shape[1:]
        distance = torch.arange(keys) - torch.arange(queries)[:, None]
        distance -= (keys - queries) * (self.corner == "bottom_right")
        left, right = (None if side is None or side < 0 else side for side in self.window)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= distance > right if right is not None else hidden
        hidden |= distance < -left if left is not None else hidden
        return capped.masked_fill(hidden, -torch.inf), capped

    def forward(self, q, k, v, sink=None):
        """Output [Q, H, E] and lse [H, Q] of one sequence."""
        q, k, v = _wide(q, k, v)
        scores, _ = self.scores(q, k)
        lse = scores.logsumexp(-1) if k.shape[0] else scores.new_full(scores.shape[:2], -torch.inf)
        if sink is not None:
            lse = torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        blind = lse == -torch.inf
        p = (scores - lse.masked_fill(blind, 0.0)[..., None]).exp()
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return torch.einsum("hqk,khe->qhe", p, v), lse.masked_fill(blind, self.blind)

    def backward(self, q, k, v, out, dout, lse, sink=None):
        """dq, dk, dv and the part of the sinks' gradient."""
        q, k, v, out, dout = _wide(q, k, v, out, dout)
        scores, capped = self.scores(q, k)
        p = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        group = q.shape[1] // k.shape[1]
        dp = torch.einsum("qhe,khe->hqk", dout, v.repeat_interleave(group, 1))
        mean = (out * dout).sum(-1).mT
        ds = p * (dp - mean[..., None])
        if self.soft_cap:
            ds = ds * (1 - (capped / self.soft_cap) ** 2)
        dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, 1)) * self.scale
        dk = torch.einsum("hqk,qhd->khd", ds, q) * self.scale
        dv = torch.einsum("hqk,qhe->khe", p, dout)
        dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
        dsink = None if sink is None else -((sink[:, None] - lse).exp() * mean).sum(1)
        return dq, dk, dv, dsink


def _wide(*tensors):
    """In float32 at least."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


@dataclass(frozen=True)
class Spans:
    """Rows of q [B, S, H, D] or [T, H, D] and of k that are one sequence."""

    tokens: bool
    offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None

    def of(self, q, k) -> Iterator[tuple[object, object, object]]:
        """Places of its queries, of its keys, and of its lse."""
        for n in range(len(self.offsets) - 1 if self.tokens else q.shape[0]):
            rows = self._rows(n, q, self.offsets, self.lengths)
            keys = self._rows(n, k, self.key_offsets, self.key_lengths)
            if self.tokens:
                yield rows, keys, (slice(None), rows)
            else:
                yield (n, rows), (n, keys), (n, slice(None), rows)

    def _rows(self, n, t, offsets, lengths):
        first, last = (0, t.shape[1]) if offsets is None else (int(offsets[n]), int(offsets[n + 1]))
        assert last - first >= 0 and last <= t.shape[0 if self.tokens else 1]
        return slice(first, last if lengths is None else first + int(lengths[n]))


def forward(kernel, spans, q, k, v, sink=None):
    """Output and lse, NaN where no sequence is."""
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    for rows, keys, places in spans.of(q, k):
        out[rows], lse[places] = kernel.forward(q[rows], k[keys], v[keys], sink)
    return out, lse


def backward(kernel, spans, q, k, v, out, dout, lse, sink=None):
    """dq, dk, dv, NaN where no sequence is, and the sinks' gradient."""
    dq, dk, dv = (torch.full_like(t, torch.nan, memory_format=torch.contiguous_format) for t in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink)
    for rows, keys, places in spans.of(q, k):
        made = kernel.backward(q[rows], k[keys], v[keys], out[rows], dout[rows], lse[places], sink)
        dq[rows], dk[keys], dv[keys] = made[:3]
        if dsink is not None:
            dsink += made[3]
    return dq, dk, dv, dsink
