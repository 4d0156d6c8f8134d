"""Attention with explicit scores, what the op computes where no library's kernel does, and what is done to scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fuser.formula import random
from te_fuser.ops.attention.heads import Parts, one_of
from te_fuser.ops.base import Spec
from te_fuser.ops.checks import check_name, real_number
from te_fuser.ops.dropout import kept_scale

SOFT_CAP, BIAS, ALIBI, SINK = "a soft cap", "a score bias", "ALiBi", "a sink"
SINKS = {"none": "no sink", "zero": "a logit of 0 beside the scores", "learned": "a parameter for each head"}


@dataclass(frozen=True)
class AttentionScores:
    """Terms that are added to the scores of an attention, and their bound; none by default.

    Attributes:
        soft_cap: the bound c of c * tanh(scores / c); 0: none.
        bias: the name of a floating-point input, broadcastable to [batch, heads, queries, keys], which has a gradient.
        alibi: True: the slopes of the paper, by head; a name: an input of slopes [heads] or [batch, heads], without a
            gradient.
        by_position: of layout="tokens": the bias is [.., queries, keys] of positions in a sequence, as many as the
            longest has or more, the same for each sequence. On a GPU rows that it is too small for are NaN.
        sink: "none"; "zero": a logit of 0 beside the scores of each row; "learned": the op's parameter `sink` [heads].
    """

    soft_cap: float = 0.0
    bias: str | None = None
    alibi: bool | str = False
    sink: str = "none"
    by_position: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= real_number("AttentionScores", "soft_cap", self.soft_cap) < math.inf:
            raise ValueError(f"soft_cap is a positive bound of the scores, or 0 for none; got {self.soft_cap}")
        one_of("sink", self.sink, SINKS)
        if self.by_position and self.bias is None:
            raise ValueError("by_position says how a bias lies, and bias is None: name it, or leave by_position out")
        for name in self.names.values():
            check_name(name)

    @property
    def names(self) -> dict[str, str]:
        """Argument -> the name of the input that it reads."""
        found = {"attention_bias": self.bias, "alibi_slopes": self.alibi if isinstance(self.alibi, str) else None}
        return {argument: name for argument, name in found.items() if name is not None}

    @property
    def beyond(self) -> tuple[str, ...]:
        """Terms and bound that are asked for, in words."""
        asked = {
            SOFT_CAP: self.soft_cap > 0.0,
            BIAS: self.bias is not None,
            ALIBI: bool(self.alibi),
            SINK: self.sink != "none",
        }
        return tuple(words for words, wanted in asked.items() if wanted)

    def check(self, op: str, full: tuple[int, int, int, int], others: Mapping[str, Spec]) -> None:
        """Raise, in words, when bias or slopes do not fit [batch, heads, queries, keys]."""
        for argument, name in self.names.items():
            spec = others.get(argument)
            if spec is None:
                raise ValueError(f"{op} reads a tensor {name!r}: call the model with {name}=...")
            if not spec.dtype.is_floating_point:
                raise TypeError(f"{name!r} is {spec.dtype}; {op} takes floating-point numbers: convert with .float()")
            whole = full if argument == "attention_bias" else full[:2]
            sizes = (1,) * (len(whole) - len(spec.shape)) + spec.shape
            if self.by_position and argument == "attention_bias" and len(sizes) == 4:
                whole = (*whole[:2], *sizes[2:])
            if len(sizes) > len(whole) or any(s not in (1, w) for s, w in zip(sizes, whole, strict=True)):
                axes = "[batch, heads, queries, keys]" if argument == "attention_bias" else "[batch, heads]"
                raise ValueError(
                    f"{name!r} has shape {list(spec.shape)}, which does not broadcast to {axes} = {[*whole]}"
                )


Places = tuple[torch.Tensor, torch.Tensor]  # of queries [S] and keys [K] in their sequences


def at_places(bias: torch.Tensor, places: Places) -> torch.Tensor:
    """A bias of positions [B, H, P, R] for queries and keys, [B, H, S, K]."""
    found = bias[(..., *_indices(bias, places))]
    for dim, (place, size) in enumerate(zip(places, bias.shape[-2:], strict=True)):
        outside = place >= (size if size > 1 else torch.iinfo(place.dtype).max)
        found = found.masked_fill(outside[None, :] if dim else outside[:, None], torch.nan)
    return found


def summed_by_place(gradient: torch.Tensor, bias: torch.Tensor, places: Places) -> torch.Tensor:
    """The gradient of the bias for that of `at_places`."""
    by_place = gradient.sum_to_size(*bias.shape[:2], *gradient.shape[2:]).permute(2, 3, 0, 1)
    made = gradient.new_zeros(*bias.shape[2:], *bias.shape[:2])
    return made.index_put_(_indices(bias, places), by_place, accumulate=True).permute(2, 3, 0, 1)


def _indices(bias: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = (place.clamp(max=size - 1) for place, size in zip(places, bias.shape[-2:], strict=True))
    return queries[:, None], keys[None, :]


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The paper's slopes [heads]: 2^(-8 i / n), n the largest power of two up to heads, then 2 n's at odd i."""
    power = 1 << (heads.bit_length() - 1)
    whole = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8.0 / power)
    between = (torch.arange(heads - power, dtype=torch.float64, device=device) * 2 + 1) * (-4.0 / power)
    return torch.cat((whole, between)).exp2()


_ROWS_AT_ONCE = 4096  # draws are 64-bit numbers on the way: this many rows of them at a time stay in the cache


@dataclass(frozen=True)
class Terms:
    """Terms that make scores of q k^T, broadcastable to [B, H, S, K]; `sink` is [H], `shows_all`: no query is blind.

    `places` are the places of queries and keys in their sequences, where a bias goes by them.
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
    """Gradients of q, k and v; of what was added to the scores [B, H, S, K]; of the sinks [H]."""

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
    """The output's heads [B, G, R, S, E], and logsumexp [B, H, S], 0 where nothing is seen."""
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
    """q k^T * scale, [B, H, S, K]: the R query heads of a group are one product."""
    samples, groups, per_group, positions, _ = q.shape
    return ((q.flatten(2, 3) * scale) @ k.mT).view(samples, groups * per_group, positions, k.shape[2])


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [B, H, S, K] @ values [B, G, K, E] -> [B, G, R, S, E]."""
    samples, heads, queries, keys = weights.shape
    groups = values.shape[1]
    grouped = weights.view(samples, groups, heads // groups * queries, keys)
    return (grouped @ values).view(samples, groups, heads // groups, queries, values.shape[3])


def _summed_over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weights^T @ rows over queries of a group: [B, H, S, K], [B, G, R, S, E] -> [B, G, K, E]."""
    samples, groups, per_group, queries, _ = rows.shape
    return weights.view(samples, groups, per_group * queries, weights.shape[3]).mT @ rows.flatten(2, 3)
