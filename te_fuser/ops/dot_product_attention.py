"""Scaled dot-product attention on a projection's packed output (Vaswani et al., "Attention Is All You Need", 2017).

    y = dropout(softmax(q k^T * scale, masked)) v        for each head

Grouped-query attention (Ainslie et al., "GQA", 2023) is the same with fewer key and value heads than query heads.

Shapes in this file: B samples, S positions, G key/value heads, R query heads of each, H = G * R query heads, D the
size of a head. Query head g * R + r reads key/value head g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from te_fuser.formula import random
from te_fuser.ops.base import FusableOperation, Gradient, NamedInput, OpCall, Spec, UnfusedOperation
from te_fuser.ops.checks import check_name, check_probability
from te_fuser.ops.dropout import kept_scale
from te_fuser.ops.parameters import alike

# Name of a mask -> (hides later positions, is given a boolean tensor).
MASKS = {
    "none": (False, False),
    "causal": (True, False),
    "given": (False, True),
    "causal_and_given": (True, True),
}
# Name of a layout -> the dimensions of x that count positions and samples.
LAYOUTS = {"sequence_first": (0, 1), "batch_first": (1, 0)}

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ROWS_AT_ONCE = 4096  # draws are 64-bit numbers on the way: this many rows of them at a time stay in the cache


def one_of(argument: str, value: str, names: Mapping[str, object]) -> str:
    """`value`, or an error that lists what it could be."""
    if value not in names:
        raise ValueError(f"{argument}={value!r} is unknown; use one of {', '.join(map(repr, names))}")
    return value


def _split_interleaved(x: torch.Tensor, heads: PackedHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, per_group, dim = heads.kv_heads, heads.per_group, heads.head_dim
    parts = x.view(*x.shape[:2], groups, per_group + 2, dim)
    return parts[..., :per_group, :], parts[..., per_group, :], parts[..., per_group + 1, :]


def _split_blocked(x: torch.Tensor, heads: PackedHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, per_group, dim = heads.kv_heads, heads.per_group, heads.head_dim
    q, k, v = x.split((heads.heads * dim, groups * dim, groups * dim), -1)
    rows = x.shape[:2]
    return q.view(*rows, groups, per_group, dim), k.view(*rows, groups, dim), v.view(*rows, groups, dim)


# Name of a packing -> how it is taken apart.
PACKINGS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "interleaved": _split_interleaved,
    "blocked": _split_blocked,
}


@dataclass(frozen=True)
class PackedHeads:
    """Where the heads of queries, keys and values lie in one tensor.

    `packing`: "interleaved" is, for each key/value head, [its query heads..., key, value]; "blocked" is
    [all query heads | all key heads | all value heads]. `layout`: [S, B, features] or [B, S, features].
    """

    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "sequence_first"
    packing: str = "interleaved"

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        one_of("layout", self.layout, LAYOUTS)
        one_of("packing", self.packing, PACKINGS)

    @property
    def per_group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads

    @property
    def features(self) -> int:
        """The packed size."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def lengths(self, shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
        """(samples, positions) of a tensor of this layout."""
        sequence, batch = LAYOUTS[self.layout]
        return shape[batch], shape[sequence]

    def leading(self, samples: int, positions: int) -> tuple[int, int]:
        """The sizes before the features of a tensor of this layout: `lengths` the other way."""
        return (positions, samples) if self.layout == "sequence_first" else (samples, positions)

    def check(self, op: str, x: Spec) -> None:
        """Raise, in words, when x cannot be packed heads.

        Raises:
            ValueError: wrong number of dimensions or features.
            TypeError: not a floating-point tensor.
        """
        order = {"sequence_first": "[sequence, batch, features]", "batch_first": "[batch, sequence, features]"}
        if len(x.shape) != 3:
            raise ValueError(f"{op} takes {order[self.layout]}, got {len(x.shape)} dimensions: {list(x.shape)}")
        if x.features != self.features:
            raise ValueError(
                f"{op} takes packed queries, keys and values of (heads + 2 * kv_heads) * head_dim = "
                f"({self.heads} + 2 * {self.kv_heads}) * {self.head_dim} = {self.features} features, got {x.features}: "
                f"give the projection before it {self.features} output features"
            )
        if x.dtype not in _FLOATS:
            raise TypeError(f"{op} takes float32, float64, bfloat16 or float16, got {x.dtype}: convert the input")

    def reading(self, x: Spec) -> str:
        """Which dimension of x is which, and how its features are packed."""
        samples, positions = self.lengths(x.shape)
        sizes = {"batch": samples, "sequence": positions}
        order = reversed(sizes) if self.layout == "sequence_first" else sizes
        lead = ", ".join(f"{name} {sizes[name]}" for name in order)
        many = "a query" if self.per_group == 1 else f"{self.per_group} queries"
        packed = {
            "interleaved": f"{self.kv_heads} x [{many}, a key, a value]",
            "blocked": f"[{self.heads} queries | {self.kv_heads} keys | {self.kv_heads} values]",
        }
        return (
            f"[{lead}, features {x.features}] (layout={self.layout!r}), features as {packed[self.packing]} "
            f"of {self.head_dim} (packing={self.packing!r})"
        )

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, G, R, S, D], keys and values [B, G, S, D], all views of x."""
        sequence, batch = LAYOUTS[self.layout]
        q, k, v = PACKINGS[self.packing](x, self)
        return (
            q.permute(batch, 2, 3, sequence, 4),
            k.permute(batch, 2, sequence, 3),
            v.permute(batch, 2, sequence, 3),
        )

    def pack(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The inverse of `split`, in a new tensor."""
        samples, positions = dq.shape[0], dq.shape[3]
        packed = dq.new_empty((*self.leading(samples, positions), self.features), dtype=dtype)
        for part, source in zip(self.split(packed), (dq, dk, dv), strict=True):
            part.copy_(source)
        return packed

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output's heads [B, G, R, S, D], a view."""
        sequence, batch = LAYOUTS[self.layout]
        heads = y.view(*y.shape[:2], self.kv_heads, self.per_group, self.head_dim)
        return heads.permute(batch, 2, 3, sequence, 4)

    def merge_output(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, G, R, S, D] as an output of this layout, copied only where it does not lie that way already."""
        in_order = heads.permute((3, 0, 1, 2, 4) if self.layout == "sequence_first" else (0, 3, 1, 2, 4))
        # Unlike a view, the result of _unsafe_view stands for its own storage, as an output of an op must.
        return torch.ops.aten._unsafe_view.default(
            in_order.contiguous(), [*in_order.shape[:2], self.heads * self.head_dim]
        )

    def like(self, features: int, smallest: int = 1) -> PackedHeads:
        """Heads much like these whose packed size is `features`, with head_dim >= `smallest`.

        Raises:
            ValueError: when no number of heads gives that size.
        """
        dims = [dim for dim in range(smallest, features // 3 + 1) if features % dim == 0]
        group = self.per_group + 2
        for dim in sorted(dims, key=lambda dim: (features // dim % group != 0, abs(dim - self.head_dim))):
            total = features // dim
            per_group, groups = (self.per_group, total // group) if total % group == 0 else (total - 2, 1)
            return replace(self, heads=per_group * groups, kv_heads=groups, head_dim=dim)
        raise ValueError(
            f"no packed queries, keys and values have {features} features: that is (heads + 2 * kv_heads) * head_dim "
            f"with head_dim >= {smallest}; take a multiple of {3 * smallest}"
        )


@dataclass(frozen=True)
class AttentionSettings:
    """What one attention computes, as a kernel is told it; `dropout` is 0 where nothing is drawn."""

    heads: PackedHeads
    causal: bool
    masked: bool
    dropout: float
    scale: float


def kept(stream: random.RandomStream, shape: tuple[int, int, int, int], like: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout's factors for probabilities [B, H, queries, keys]: row (b * H + h) * queries + query of the stream."""
    samples, heads, queries, keys = shape
    count, drop_below = samples * heads * queries, random.threshold(p)
    factors = like.new_empty(count, keys)
    for first in range(0, count, _ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + _ROWS_AT_ONCE, count), device=like.device)
        bits = random.keep_bits(rows, keys, stream.seed, stream.offset, stream.stream)
        torch.mul(bits >= drop_below, kept_scale(p), out=factors[first : first + len(rows)])
    return factors.view(shape)


def raised(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that attention is computed in: float32, or float64 for float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def hidden_positions(causal: bool, mask: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor | None:
    """What is masked, True = hidden, broadcastable to [B, H, queries, keys]; None when nothing is."""
    if mask is not None:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if not causal:
        return mask
    later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return later[None, None] if mask is None else later | mask


# Which of PyTorch's attention kernels -> whether PyTorch may use it (torch.nn.attention.sdpa_kernel sets these).
KERNEL_SWITCHES: dict[str, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}


_PLAIN_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def refuse_context_parallel() -> None:
    """Refuse to run where PyTorch's context_parallel is on: it replaces torch's attention alone.

    Raises:
        RuntimeError: inside of it.
    """
    found = torch.nn.functional.scaled_dot_product_attention
    if found is not _PLAIN_ATTENTION and found.__module__.startswith("torch.distributed.tensor.experimental"):
        raise RuntimeError(
            "DotProductAttention: inside torch's context_parallel each process holds a part of the sequence, and this "
            "op would attend to that part alone; call it outside of context_parallel, or use "
            "torch.nn.functional.scaled_dot_product_attention in its place"
        )


def switches() -> tuple[bool, ...]:
    """Deterministic mode, and PyTorch's switches for attention kernels, as they are now; asked at each call.

    Raises:
        RuntimeError: inside torch's context_parallel.
    """
    refuse_context_parallel()
    return (torch.are_deterministic_algorithms_enabled(), *[enabled() for enabled in KERNEL_SWITCHES.values()])


class DotProductAttention(UnfusedOperation):
    """Attention of packed queries, keys and values: softmax(q k^T * scale) v for each head.

    The input is [S, B, F] or [B, S, F] with F = (heads + 2 * kv_heads) * head_dim as a projection gives it, the output
    has heads * head_dim features. A row whose keys are all masked gives zeros.

    Args:
        heads: query heads.
        head_dim: features of one head.
        kv_heads: key/value heads, a divisor of `heads`; None: as many.
        mask: "none"; "causal": position i sees 0..i; "given": a boolean tensor (True = masked), broadcastable to
            [batch, heads, queries, keys], is an extra input; "causal_and_given".
        mask_name: the name of that extra input.
        dropout: the probability that a softmax probability is dropped, in training.
        scale: the factor on the scores; None: head_dim ** -0.5.
        layout: "sequence_first" [S, B, F] or "batch_first" [B, S, F].
        packing: "interleaved" or "blocked", see `PackedHeads`.
    """

    reads = ("input", "logsumexp")
    emits = ("logsumexp",)
    global_state = staticmethod(switches)
    prototype_arguments = {"heads": 2, "head_dim": 8}
    other_choices = {"mask": "causal", "layout": "batch_first", "packing": "blocked"}

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        mask: str = "none",
        mask_name: str = "attention_mask",
        dropout: float = 0.0,
        scale: float | None = None,
        layout: str = "sequence_first",
        packing: str = "interleaved",
    ) -> None:
        super().__init__()
        packed = PackedHeads(heads, heads if kv_heads is None else kv_heads, head_dim, layout, packing)
        self.heads = heads
        self.kv_heads = packed.kv_heads
        self.head_dim = head_dim
        self.mask = one_of("mask", mask, MASKS)
        self.mask_name = check_name(mask_name)
        self.dropout = check_probability(dropout)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.layout = layout
        self.packing = packing

    @property
    def packed(self) -> PackedHeads:
        """Where the heads lie."""
        return PackedHeads(self.heads, self.kv_heads, self.head_dim, self.layout, self.packing)

    def settings(self) -> AttentionSettings:
        """What this op computes as it is now (training or not), for a kernel."""
        causal, masked = MASKS[self.mask]
        return AttentionSettings(self.packed, causal, masked, self.dropout if self.draws() else 0.0, self.scale)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """The mask, where one is given."""
        if not MASKS[self.mask][1]:
            return {}
        return {"attention_mask": NamedInput(self.mask_name, axes=None, gradient=False)}

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """One node: dx, from x, the mask and the rows' logsumexp."""
        return (Gradient(("input",), (*self.reads, *self.named_inputs()), "whole_backward", work=2.5),)

    def emitted_bytes(self, x: Spec) -> Mapping[str, int]:
        """One number for each row of scores, in the dtype that they are computed in."""
        samples, positions = self.packed.lengths(x.shape)
        return {"logsumexp": samples * self.heads * positions * (8 if x.dtype == torch.float64 else 4)}

    def draws(self) -> bool:
        """Whether probabilities are dropped."""
        return self.training and self.dropout > 0.0

    def infer(self, x: Spec) -> Spec:
        """[.., heads * head_dim]."""
        refuse_context_parallel()
        self.packed.check(type(self).__name__, x)
        return x.with_features(self.heads * self.head_dim)

    def reading(self, x: Spec) -> str:
        return self.packed.reading(x)

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        """The mask's dtype, device and shape."""
        if not MASKS[self.mask][1]:
            return
        mask = inputs.get("attention_mask")
        name, op = self.mask_name, f"{type(self).__name__}(mask={self.mask!r})"
        samples, positions = self.packed.lengths(x.shape)
        full = (samples, self.heads, positions, positions)
        if mask is None:
            raise ValueError(f"{op} reads a boolean tensor {name!r}: call the model with {name}=..., True = masked")
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{name!r} is {mask.dtype}; {op} takes booleans, True = masked: "
                f"for an additive mask of 0 and -inf give {name} < 0, for one where 1 means seen give {name} == 0"
            )
        if mask.device != x.device:
            raise ValueError(f"{name!r} is on {mask.device}, the input on {x.device}: move it there")
        sizes = (1,) * (4 - len(mask.shape)) + mask.shape
        if len(sizes) > 4 or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
            hint = _mask_hint(mask.shape, full)
            raise ValueError(
                f"{name!r} has shape {list(mask.shape)}, which does not broadcast to "
                f"[batch, heads, queries, keys] = {list(full)}{hint}"
            )

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        """Two products of queries x keys x head_dim for each head; half of them where later positions are hidden."""
        samples, positions = self.packed.lengths(x.shape)
        pairs = positions * (positions + 1) / 2 if MASKS[self.mask][0] else positions**2
        return 4.0 * samples * self.heads * pairs * self.head_dim

    def scratch_bytes(self, x: Spec) -> int:
        """The scores, the same masked, their exponentials, and the probabilities."""
        samples, positions = self.packed.lengths(x.shape)
        return 4 * 4 * samples * self.heads * positions**2

    def example(self, features: int, rng: torch.Generator) -> FusableOperation:
        """The same attention with other heads; a given mask becomes a causal one, since an example has one input.

        Raises:
            ValueError: fewer than 3 features.
        """
        packed, causal = self.packed.like(features), {"given": "causal", "causal_and_given": "causal"}
        heads = {"heads": packed.heads, "kv_heads": packed.kv_heads, "head_dim": packed.head_dim}
        return alike(self, features, **heads, mask=causal.get(self.mask, self.mask), scale=None)

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """An explicit softmax, recorded by autograd."""
        refuse_context_parallel()
        q, k, v = self.packed.split(raised(x))
        scores = _scores(q, k, self.scale)
        hidden = self._hidden(call, scores)
        if hidden is None:
            probabilities = scores.softmax(-1)
        else:
            # A row with nothing to see is left open and then zeroed: softmax of -inf alone would be NaN.
            blind = hidden.all(-1, keepdim=True)
            probabilities = scores.masked_fill(hidden & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)
        factors = self._kept(call, scores)
        if factors is not None:
            probabilities = probabilities * factors
        return self.packed.merge_output(_weighted(probabilities, v)).to(x.dtype)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The output; gives logsumexp [B, H, S], which is 0 for a row with nothing to see."""
        q, k, v = self.packed.split(raised(x))
        scores = self._masked_scores(call, q, k)
        logsumexp, probabilities = scores.logsumexp(-1), scores.softmax(-1)
        if MASKS[self.mask][1]:
            blind = logsumexp == -torch.inf
            logsumexp.masked_fill_(blind, 0.0)
            probabilities.masked_fill_(blind[..., None], 0.0)
        factors = self._kept(call, scores)
        if factors is not None:
            probabilities.mul_(factors)
        call.emit("logsumexp", logsumexp)
        return self.packed.merge_output(_weighted(probabilities, v).to(x.dtype))

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        """dx, with the probabilities recomputed.

        P = exp(scores - logsumexp), M dropout's factors:
        dv = (P M)^T dy,  dP = M (dy v^T),  dscores = P (dP - sum(P dP)),  dq = dscores k * scale,  dk likewise.
        """
        x = call["input"]
        q, k, v = self.packed.split(raised(x))
        output = self.packed.split_output(raised(dy))  # [B, G, R, S, D]
        probabilities = self._masked_scores(call, q, k).sub_(call["logsumexp"][..., None]).exp_()
        dprobabilities = _scores(output, v, 1.0)
        factors = self._kept(call, probabilities)
        dropped = probabilities
        if factors is not None:
            dropped = probabilities * factors
            dprobabilities.mul_(factors)
        dv = _summed_over_queries(dropped, output)
        mean = (probabilities * dprobabilities).sum(-1, keepdim=True)
        dscores = dprobabilities.sub_(mean).mul_(probabilities).mul_(self.scale)
        return self.packed.pack(_weighted(dscores, k), _summed_over_queries(dscores, q), dv, x.dtype)

    def _masked_scores(self, call: OpCall, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = _scores(q, k, self.scale)
        hidden = self._hidden(call, scores)
        return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

    def _hidden(self, call: OpCall, scores: torch.Tensor) -> torch.Tensor | None:
        causal, masked = MASKS[self.mask]
        return hidden_positions(causal, call["attention_mask"] if masked else None, scores.shape[-1], scores.device)

    def _kept(self, call: OpCall, scores: torch.Tensor) -> torch.Tensor | None:
        """Dropout's factors; whether something is dropped is what the forward said, by giving a stream."""
        if call.random is None:
            if self.draws():
                raise RuntimeError("dropout needs a random stream (OpCall.random); call the op or the model")
            return None
        if self.dropout == 0.0:
            return None
        samples, heads, queries, keys = scores.shape
        return kept(call.random, (samples, heads, queries, keys), scores.detach(), self.dropout)


def _mask_hint(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """What to write for a mask of another shape that is meant as [batch, heads, queries, keys] = full."""
    batch, heads, queries, keys = full
    if shape == (batch, keys):
        return "; of padding give mask[:, None, None, :]"
    if shape == (batch * heads, queries, keys) and heads > 1:
        return f"; of all heads give mask.view({batch}, {heads}, {queries}, {keys})"
    return "; put the head dimension in: mask[:, None]" if len(shape) == 3 else ""


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q k^T * scale: [B, G, R, S, D] and [B, G, S, D] -> [B, H, S, S]; the R query heads of a group are one product."""
    samples, groups, per_group, positions, _ = q.shape
    scores = (q.flatten(2, 3) * scale) @ k.mT
    return scores.view(samples, groups * per_group, positions, k.shape[2])


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [B, H, S, S] @ values [B, G, S, D] -> [B, G, R, S, D]."""
    samples, heads, queries, keys = weights.shape
    groups = values.shape[1]
    grouped = weights.view(samples, groups, heads // groups * queries, keys)
    return (grouped @ values).view(samples, groups, heads // groups, queries, values.shape[3])


def _summed_over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weights^T @ rows over all queries of a group: [B, H, S, S] and [B, G, R, S, D] -> [B, G, S, D]."""
    samples, groups, per_group, queries, _ = rows.shape
    grouped = weights.view(samples, groups, per_group * queries, weights.shape[3])
    return grouped.mT @ rows.flatten(2, 3)
