"""Attention with explicit scores: what the op computes where no library's kernel does.

Shapes in this file: B samples, S queries, K keys, G key/value heads, R query heads of each, H = G * R query heads, D
the size of a head, E that of a value's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_fuser.formula import random
from te_fuser.ops.attention.heads import Parts
from te_fuser.ops.attention.scores import Places
from te_fuser.ops.dropout import kept_scale

_ROWS_AT_ONCE = 4096  # draws are 64-bit numbers on the way: this many rows of them at a time stay in the cache


@dataclass(frozen=True)
class Terms:
    """What makes scores of q k^T, all broadcastable to [B, H, S, K]: `sink` is [H], `shows_all` says none is blind.

    `places` are those of queries and keys in their sequences, where a bias goes by them.
    """

    scale: float
    hidden: torch.Tensor | None = None
    added: torch.Tensor | None = None
    soft_cap: float = 0.0
    sink: torch.Tensor | None = None
    shows_all: bool = True
    places: Places | None = None


@dataclass(frozen=True)
class AttentionGradients:
    """Those of queries, keys and values; of what was added to the scores [B, H, S, K]; of the sinks [H]."""

    parts: Parts
    added: torch.Tensor | None
    sink: torch.Tensor | None


def kept(stream: random.RandomStream, shape: tuple[int, int, int, int], like: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout's factors for probabilities [B, H, queries, keys]: row (b * H + h) * queries + query of the stream.

    Where a rank has some of the heads or samples, these are rows of the whole; its heads are the stream's columns.
    """
    samples, heads, queries, keys = shape
    count, drop_below = samples * heads * queries, random.threshold(p)
    factors = like.new_empty(count, keys)
    for first in range(0, count, _ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + _ROWS_AT_ONCE, count), device=like.device)
        if stream.placed is not None:
            rows = stream.placed.of_blocks(rows, heads * queries, samples)
        bits = random.keep_bits(rows, keys, stream.seed, stream.offset, stream.stream)
        torch.mul(bits >= drop_below, kept_scale(p), out=factors[first : first + len(rows)])
    return factors.view(shape)


def raised(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that attention is computed in: float32, or float64 for float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, factors: torch.Tensor | None
) -> torch.Tensor:
    """The output's heads [B, G, R, S, E], recorded by autograd; factors are dropout's."""
    scores = _scores(q, k, terms.scale)
    if terms.soft_cap:
        scores = terms.soft_cap * (scores / terms.soft_cap).tanh()
    if terms.added is not None:
        scores = scores + terms.added
    if terms.hidden is not None:
        scores = scores.masked_fill(terms.hidden, -torch.inf)
    blind = None
    if not terms.shows_all:
        # A row with nothing to see is left open and then zeroed: softmax of -inf alone would be NaN.
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
    if terms.sink is not None:
        column = terms.sink[:, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    if blind is not None:
        probabilities = probabilities.masked_fill(blind, 0.0)
    if factors is not None:
        probabilities = probabilities * factors
    return _weighted(probabilities, v)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output's heads [B, G, R, S, E], and logsumexp [B, H, S], which is 0 for a row with nothing to see."""
    scores = _finished(_capped(_scores(q, k, terms.scale), terms), terms)
    logsumexp = scores.logsumexp(-1)
    if terms.sink is not None:
        logsumexp = torch.logaddexp(logsumexp, terms.sink[:, None])
        probabilities = scores.sub_(logsumexp[..., None]).exp_()
    else:
        probabilities = scores.softmax(-1)
    if not terms.shows_all:
        blind = logsumexp == -torch.inf
        logsumexp.masked_fill_(blind, 0.0)
        probabilities.masked_fill_(blind[..., None], 0.0)
    if factors is not None:
        probabilities.mul_(factors)
    return _weighted(probabilities, v), logsumexp


def backward(
    parts: Parts, output: torch.Tensor, logsumexp: torch.Tensor, terms: Terms, factors: torch.Tensor | None
) -> AttentionGradients:
    """The gradients for that of the output's heads, with the probabilities recomputed.

    P = exp(scores - logsumexp), M dropout's factors, c the soft cap, s the scores that it bounded:
    dv = (P M)^T dy,  dP = M (dy v^T),  dscores = P (dP - sum(P dP)),  dsink = -sum over rows exp(sink - logsumexp)
    sum(P dP),  ds = dscores (1 - (s / c)^2),  dq = ds k * scale,  dk likewise.
    """
    q, k, v = parts
    capped = _capped(_scores(q, k, terms.scale), terms)
    finished = _finished(capped.clone() if terms.soft_cap else capped, terms)
    probabilities = finished.sub_(logsumexp[..., None]).exp_()
    if terms.added is not None and terms.sink is None:
        # Where something huge was added to all scores of a row, as masks do, logsumexp has lost how many there are.
        total = probabilities.sum(-1, keepdim=True)
        probabilities.div_(total.masked_fill_(total == 0, 1.0))
    dprobabilities = _scores(output, v, 1.0)
    dropped = probabilities
    if factors is not None:
        dropped = probabilities * factors
        dprobabilities.mul_(factors)
    dv = _summed_over_queries(dropped, output)
    mean = (probabilities * dprobabilities).sum(-1, keepdim=True)
    dscores = dprobabilities.sub_(mean).mul_(probabilities)
    dsink = None
    if terms.sink is not None:
        rows = torch.exp(terms.sink[:, None] - logsumexp) * mean.squeeze(-1)
        dsink = rows.sum((0, 2)).neg_()
    added = None if terms.added is None else dscores.clone()
    if terms.soft_cap:
        dscores.mul_(capped.div_(terms.soft_cap).square_().neg_().add_(1.0))
    dscores.mul_(terms.scale)
    return AttentionGradients((_weighted(dscores, k), _summed_over_queries(dscores, q), dv), added, dsink)


def _capped(scores: torch.Tensor, terms: Terms) -> torch.Tensor:
    return scores.div_(terms.soft_cap).tanh_().mul_(terms.soft_cap) if terms.soft_cap else scores


def _finished(scores: torch.Tensor, terms: Terms) -> torch.Tensor:
    if terms.added is not None:
        scores = scores.add_(terms.added)
    return scores if terms.hidden is None else scores.masked_fill_(terms.hidden, -torch.inf)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q k^T * scale: [B, G, R, S, D] and [B, G, K, D] -> [B, H, S, K]; the R query heads of a group are one product."""
    samples, groups, per_group, positions, _ = q.shape
    scores = (q.flatten(2, 3) * scale) @ k.mT
    return scores.view(samples, groups * per_group, positions, k.shape[2])


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [B, H, S, K] @ values [B, G, K, E] -> [B, G, R, S, E]."""
    samples, heads, queries, keys = weights.shape
    groups = values.shape[1]
    grouped = weights.view(samples, groups, heads // groups * queries, keys)
    return (grouped @ values).view(samples, groups, heads // groups, queries, values.shape[3])


def _summed_over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weights^T @ rows over all queries of a group: [B, H, S, K] and [B, G, R, S, E] -> [B, G, K, E]."""
    samples, groups, per_group, queries, _ = rows.shape
    grouped = weights.view(samples, groups, per_group * queries, weights.shape[3])
    return grouped.mT @ rows.flatten(2, 3)
