"""Scaled dot-product attention on queries, keys and values (Vaswani et al., "Attention Is All You Need", 2017).

    y = dropout(softmax(q k^T * scale, masked)) v        for each head

Grouped-query attention (Ainslie et al., "GQA", 2023) is the same with fewer key and value heads than query heads. Where
heads lie is in `heads.py`, what is hidden in `mask.py`, and what is done to scores in `math.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch

from te_fuser.ops import op_table
from te_fuser.ops.attention import math as attention_math
from te_fuser.ops.attention.head_parallel import SharedAttention, own_sinks, whole_sinks
from te_fuser.ops.attention.heads import (
    LAYOUTS,
    PACKINGS,
    SAYS_LAYOUT,
    THEIR_LAYOUTS,
    AnyHeads,
    Apart,
    ApartHeads,
    HeadLayout,
    PackedHeads,
    Parts,
    inputs_of,
    of_layout,
    one_of,
    pack_gradients,
    split_inputs,
)
from te_fuser.ops.attention.mask import COUNTS, HIDDEN_BY, PADDINGS, SAYS_MASK, AttentionMask, Band
from te_fuser.ops.attention.math import (
    AttentionScores,
    Places,
    Terms,
    alibi_slopes,
    at_places,
    kept,
    raised,
    summed_by_place,
)
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_name, check_probability, finite_number, may_look, must_say
from te_fuser.ops.construction import empty, fill

TOKENS, APART = "tokens", "apart"
# What settings may ask for beyond packed heads, later positions and a given mask, apart from what is done to scores.
APART_KEYS = "keys and values apart from queries"
STRUCTURES = (APART_KEYS, *HIDDEN_BY)


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of one attention, as a kernel is told them; `dropout` is 0 where nothing is drawn.

    `mask` and `scores` say what is asked for beyond `causal` and `masked`; `beyond` says that in words, and whether
    heads are apart.
    """

    heads: AnyHeads
    causal: bool
    masked: bool
    dropout: float
    scale: float
    # Views are looked up by settings in each call: the hash stays short.
    mask: AttentionMask = field(default=AttentionMask(), hash=False)
    scores: AttentionScores = field(default=AttentionScores(), hash=False)
    beyond: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        apart = (APART_KEYS,) * isinstance(self.heads, ApartHeads)
        object.__setattr__(self, "beyond", (*apart, *self.mask.beyond, *self.scores.beyond))

    @property
    def packed(self) -> PackedHeads:
        """Layout of packed heads. TypeError for heads that are apart."""
        if not isinstance(self.heads, PackedHeads):
            raise TypeError(f"these heads are not packed: {self.heads}")
        return self.heads

    @property
    def is_causal(self) -> bool:
        """True where later positions, counted from the first, are all that is hidden."""
        return self.causal and not self.masked and not self.mask.beyond


def hidden_positions(causal: bool, mask: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor | None:
    """Boolean mask, True = hidden, broadcastable to [B, H, queries, keys], if anything is hidden."""
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
    """Refuse PyTorch's context_parallel, which replaces torch's attention alone."""
    found = torch.nn.functional.scaled_dot_product_attention
    if found is not _PLAIN_ATTENTION and found.__module__.startswith("torch.distributed.tensor.experimental"):
        raise RuntimeError(
            "DotProductAttention: inside torch's context_parallel each process holds a part of the sequence, and this "
            "op would attend to that part alone; call it outside of context_parallel, or use "
            "torch.nn.functional.scaled_dot_product_attention in its place"
        )


def switches() -> tuple[bool, ...]:
    """Deterministic mode, and PyTorch's switches for attention kernels, as they are now."""
    refuse_context_parallel()
    return (torch.are_deterministic_algorithms_enabled(), *[enabled() for enabled in KERNEL_SWITCHES.values()])


@op_table.reading.row(lambda op, x: op.packed.reading(op._lifted(x)))
@op_table.global_state.row(switches)
class DotProductAttention(SharedAttention):
    """Attention of queries, keys and values, packed or apart: softmax(q k^T * scale) v for each head.

    Packed, the input is [S, B, F] or [B, S, F] with F = (heads + 2 * kv_heads) * head_dim as a projection gives it, and
    the output has heads * head_dim features. Apart, the input is the queries, of heads * head_dim features, keys and
    values are named inputs, and the output has heads * value_dim. A row whose keys are all masked gives zeros.

    Args:
        heads: query heads.
        head_dim: features of one head.
        kv_heads: key/value heads, a divisor of `heads`; None: as many.
        mask: "none"; "causal": position i sees 0..i; "given": a boolean tensor (True = masked), broadcastable to
            [batch, heads, queries, keys], is an extra input; "causal_and_given"; or an `AttentionMask`. It has no
            default.
        mask_name: the name of that extra input.
        dropout: the probability that a softmax probability is dropped, in training.
        scale: the factor on the scores; None: head_dim ** -0.5.
        layout: "sequence_first" [S, B, F], "batch_first" [B, S, F], or "tokens" [T, F]: sequences one behind the
            other, which the mask's `offsets` tell apart. It has no default.
        packing: "interleaved" or "blocked", see `PackedHeads`; "apart", or an `Apart`.
        scores: an `AttentionScores`: soft cap, bias, ALiBi, sinks.

    Attributes:
        context: the ranks over which the sequence is sharded: x and the output are then this rank's part.
    """

    # f() -> a context in which a library that draws by itself does so; None: PyTorch's generator as it is.
    random_state: Callable[[], AbstractContextManager[Any]] | None = None
    reads = ("input", "logsumexp")
    emits = ("logsumexp",)

    @must_say(mask=SAYS_MASK, layout=SAYS_LAYOUT)
    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        mask: str | AttentionMask,
        layout: str,
        kv_heads: int | None = None,
        mask_name: str = "attention_mask",
        dropout: float = 0.0,
        scale: float | None = None,
        packing: str | Apart = "interleaved",
        scores: AttentionScores | None = None,
    ) -> None:
        super().__init__()
        sizes = HeadLayout(heads, heads if kv_heads is None else kv_heads, head_dim)
        self.heads = heads
        self.kv_heads = sizes.kv_heads
        self.head_dim = head_dim
        self.mask = mask
        self.mask_name = check_name(mask_name)
        self.dropout = check_probability(dropout)
        self.scale = head_dim**-0.5 if scale is None else finite_number(type(self).__name__, "scale", scale)
        self.layout = one_of("layout", layout, (*LAYOUTS, TOKENS), THEIR_LAYOUTS)
        self.packing = packing if isinstance(packing, Apart) else one_of("packing", packing, (*PACKINGS, APART))
        if not isinstance(scores, (AttentionScores, type(None))):
            raise TypeError(f"scores is an AttentionScores, as AttentionScores(alibi=True), got {scores!r}")
        self.scores = scores or AttentionScores()
        self.sink = empty(heads, dtype=None, device=None) if self.scores.sink == "learned" else None
        self._check_sides()
        self.reset_parameters()

    def _check_sides(self) -> None:
        """Refuse arguments that contradict each other."""
        mask, apart = self.hides, isinstance(self.packed, ApartHeads)
        if not apart and (mask.key_lengths or mask.key_offsets or mask.key_padding):
            raise ValueError(
                "key_lengths, key_offsets and key_padding are for keys that are apart: packed ones are their queries'"
            )
        if bool(mask.offsets) != (self.layout == TOKENS):
            raise ValueError(
                f"layout={self.layout!r} with offsets={mask.offsets!r}: sequences one behind the other need both "
                'layout="tokens" and mask=AttentionMask(offsets=...)'
            )
        if self.scores.by_position and self.layout != TOKENS:
            raise ValueError(
                f'by_position=True is for layout="tokens", got {self.layout!r}: a bias of samples is [batch, heads, '
                "queries, keys] in any case"
            )
        shared = (COUNTS, PADDINGS)  # of queries and keys they may be one
        said = [{getattr(mask, name) for name in kind} - {None} for kind in shared]
        others = [given.name for name, given in self.named_inputs().items() if name not in sum(shared, ())]
        names = [*others, *(name for kind in said for name in kind)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two inputs are called {twice[0]!r}; give each a name of its own")

    def reset_parameters(self) -> None:
        """Sinks begin at 0."""
        fill(self.sink, 0.0)

    @property
    def packed(self) -> AnyHeads:
        """Layout of the heads."""
        layout = "batch_first" if self.layout == TOKENS else self.layout
        if isinstance(self.packing, str) and self.packing != APART:
            return PackedHeads(self.heads, self.kv_heads, self.head_dim, layout, self.packing)
        apart = self.packing if isinstance(self.packing, Apart) else Apart()
        return ApartHeads(self.heads, self.kv_heads, self.head_dim, layout, apart)

    @property
    def hides(self) -> AttentionMask:
        """Mask of the hidden positions."""
        return AttentionMask.of(self.mask, self.mask_name)

    def settings(self) -> AttentionSettings:
        """Settings of this op as it is now (training or not), for a kernel."""
        mask, dropout = self.hides, self.dropout if self.draws() else 0.0
        masked = mask.given is not None
        return AttentionSettings(self.packed, mask.causal, masked, dropout, self.scale, mask, self.scores)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """Keys and values that are apart, a given mask, lengths, a bias, slopes: whatever is asked for."""
        heads = self.packed
        floats = heads.apart.names if isinstance(heads, ApartHeads) else {}
        found = {argument: NamedInput(name, axes=None) for argument, name in floats.items()}
        for argument, name in {**self.hides.names, **self.scores.names}.items():
            found[argument] = NamedInput(name, axes=None, gradient=argument == "attention_bias")
        return found

    def extra_repr(self) -> str:
        said = {name: value for name in ("mask", "packing", "scores") if is_dataclass(value := getattr(self, name))}
        return ", ".join([super().extra_repr(), *(f"{k}={v}" for k, v in said.items() if v != AttentionScores())])

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of the sinks."""
        return {} if self.sink is None else {"sink": (self.heads * self._heads_of.size,)}

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """One node, from x, the named inputs, the parameters and the rows' logsumexp."""
        able = {name for name, given in self.named_inputs().items() if given.gradient} | {"sink"}
        produces = ("input", *(name for name in names if name in able))
        return (Gradient(produces, (*self.reads, *names), "whole_backward", work=2.5),)

    def emitted_bytes(self, x: Spec) -> Mapping[str, int]:
        """One number for each row of scores, in the dtype that they are computed in."""
        samples, positions = self._lengths(x)
        return {"logsumexp": samples * self.heads * positions * (8 if x.dtype == torch.float64 else 4)}

    def draws(self) -> bool:
        """True where probabilities are dropped."""
        return self.training and self.dropout > 0.0

    def infer(self, x: Spec) -> Spec:
        """[.., heads * value_dim]."""
        refuse_context_parallel()
        self.packed.check(type(self).__name__, self._lifted(x))
        return x.with_features(self.heads * self.packed.value_dim)

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        """Dtypes, devices and shapes of all named inputs."""
        if not self.named_inputs():
            return
        op, heads = f"{type(self).__name__}(mask={self.mask!r})", self.packed
        keys = samples, positions = self._lengths(x)
        if isinstance(heads, ApartHeads):
            others = {name: self._lifted(inputs[name]) for name in heads.apart.names if name in inputs}
            heads.check_others(type(self).__name__, self._lifted(x), others)
            keys = heads.lengths(next(iter(others.values())).shape)
        full = (samples, self.heads, positions, keys[1])
        self._check_given(op, x, inputs.get("attention_mask"), full)
        self.hides.check(type(self).__name__, samples, inputs, self.layout == TOKENS)
        self.hides.check_padding(type(self).__name__, full, inputs)
        self.scores.check(type(self).__name__, full, inputs)

    def _check_given(self, op: str, x: Spec, mask: Spec | None, full: tuple[int, int, int, int]) -> None:
        name = self.hides.given
        if name is None:
            return
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
        """Two products of queries x keys for each head; half of them where later positions are hidden."""
        samples, positions = self._lengths(x)
        pairs = positions * (positions + 1) / 2 if self.hides.causal else positions**2
        return 2.0 * samples * self.heads * pairs * (self.head_dim + self.packed.value_dim)

    def scratch_bytes(self, x: Spec) -> int:
        """The scores, the same masked, their exponentials, and the probabilities."""
        samples, positions = self._lengths(x)
        return 4 * 4 * samples * self.heads * positions**2

    def explicit_bytes(self, x: Spec, inputs: Mapping[str, Spec]) -> int:
        """Bytes of the scores."""
        samples, positions = self._lengths(x)
        heads, keys = self.packed, positions
        if isinstance(heads, ApartHeads):
            keys = heads.lengths(self._lifted(inputs[next(iter(heads.apart.names))]).shape)[1]
        return (8 if x.dtype == torch.float64 else 4) * self.heads * samples * positions * keys

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """An explicit softmax, recorded by autograd."""
        refuse_context_parallel()
        parts = self._parts(call, x)
        heads = attention_math.reference(*parts, self._terms(call, parts), self._kept(call, parts))
        return self._output(heads, x)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The output; gives logsumexp [B, H, S], which is 0 for a row with nothing to see."""
        parts = self._parts(call, x)
        heads, logsumexp = attention_math.forward(*parts, self._terms(call, parts), self._kept(call, parts))
        call.emit("logsumexp", logsumexp)
        return self._output(heads, x)

    def op_backward(
        self, call: OpCall, dy: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """dx and the gradients of keys, values, bias and sinks, with the probabilities recomputed."""
        heads, inputs = self.packed, {name: call[name] for name in inputs_of(self.packed)}
        dy = raised(dy)
        parts = self._parts(call, inputs["input"])
        output = heads.split_output(dy[None] if self.layout == TOKENS else dy)
        terms, factors = self._terms(call, parts), self._kept(call, parts)
        made = attention_math.backward(parts, output, call["logsumexp"], terms, factors)
        found = pack_gradients(heads, made.parts, inputs)
        bias, sink = call.get("attention_bias"), call.get("sink")
        if bias is not None and made.added is not None:
            whole, places = _of_four(bias), terms.places
            summed = (
                made.added.sum_to_size(whole.shape) if places is None else summed_by_place(made.added, whole, places)
            )
            found["attention_bias"] = summed.reshape(bias.shape).to(bias.dtype)
        if sink is not None and made.sink is not None:
            found["sink"] = whole_sinks(made.sink.to(sink.dtype), self._heads_of)
        dx = found.pop("input")
        return (dx, found) if found else dx

    def _lifted(self, x: Spec) -> Spec:
        """Tokens as one sample. ValueError when they have another number of dimensions."""
        if self.layout != TOKENS:
            return x
        if len(x.shape) != 2:
            raise ValueError(
                f"{type(self).__name__} takes [tokens, features], got {len(x.shape)} dimensions: {[*x.shape]}"
            )
        return replace(x, shape=(1, *x.shape))

    def _lengths(self, x: Spec) -> tuple[int, int]:
        return self.packed.lengths(self._lifted(x).shape)

    def _parts(self, call: OpCall, x: torch.Tensor) -> Parts:
        heads = self.packed
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return split_inputs(heads, [t.to(wide) for t in (x, *(call[name] for name in inputs_of(heads)[1:]))])

    def _output(self, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return of_layout(self.packed.merge_output(heads.to(x.dtype)), x.dim())

    def _terms(self, call: OpCall, parts: Parts) -> Terms:
        q, k, _ = parts
        mask, scores = self.hides, self.scores
        given = call["attention_mask"] if mask.given is not None else None
        if not (mask.beyond or scores.beyond) and isinstance(self.packed, PackedHeads):
            hidden = hidden_positions(mask.causal, given, q.shape[3], q.device)
            return Terms(self.scale, hidden, shows_all=mask.shows_all)
        band = Band.of(mask, call.tensors, (q.shape[3], k.shape[2]), isinstance(self.packed, ApartHeads), q.device)
        hidden = band.with_given(given)
        sink = None
        if scores.sink != "none":
            learned = scores.sink == "learned"
            sink = own_sinks(call["sink"], self._heads_of).to(q.dtype) if learned else q.new_zeros(self.heads)
        places = self._places(call, band) if scores.by_position else None
        added = self._added(call, band, q, places)
        return Terms(self.scale, hidden, added, scores.soft_cap, sink, shows_all=False, places=places)

    def _places(self, call: OpCall, band: Band) -> Places:
        """Places of queries and keys in their sequences, checked on a CPU."""
        sizes = _of_four(call["attention_bias"]).shape[2:]
        for side, what, size in zip((band.queries, band.keys), ("queries", "keys"), sizes, strict=True):
            longest = side.table if size > 1 and may_look(side.place.device) else 0
            if isinstance(longest, torch.Tensor) and int(longest.max()) > size:
                raise ValueError(
                    f"{self.scores.bias!r} has {size} {what}, and a sequence has {int(longest.max())}: give [.., "
                    "queries, keys] of the longest sequence"
                )
        return band.queries.place[0], band.keys.place[0]

    def _added(self, call: OpCall, band: Band, q: torch.Tensor, places: Places | None) -> torch.Tensor | None:
        """Terms that are added to the scores: the bias, and the penalty of ALiBi."""
        added = _of_four(call["attention_bias"]).to(q.dtype) if self.scores.bias is not None else None
        if added is not None and places is not None:
            added = at_places(added, places)
        if not self.scores.alibi:
            return added
        given = isinstance(self.scores.alibi, str)
        slopes = call["alibi_slopes"] if given else alibi_slopes(self.heads, q.device)
        slopes = slopes.view((1,) * (2 - slopes.dim()) + slopes.shape).to(q.dtype)
        taken = slopes[:, :, None, None] * band.distance().abs()[:, None].to(q.dtype)
        return -taken if added is None else added - taken

    def _kept(self, call: OpCall, parts: Parts) -> torch.Tensor | None:
        """Dropout's factors; where nothing is dropped, forward gave no stream."""
        if call.random is None:
            if self.draws():
                raise RuntimeError("dropout needs a random stream (OpCall.random); call the op or the model")
            return None
        if self.dropout == 0.0:
            return None
        q, k, _ = parts
        return kept(call.random, (q.shape[0], self.heads, q.shape[3], k.shape[2]), q.detach(), self.dropout)


def _mask_hint(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Hint for a mask of another shape that is meant as [batch, heads, queries, keys] = full."""
    batch, heads, queries, keys = full
    if shape == (batch, keys):
        return "; of padding give mask[:, None, None, :]"
    if shape == (batch * heads, queries, keys) and heads > 1:
        return f"; of all heads give mask.view({batch}, {heads}, {queries}, {keys})"
    return "; put the head dimension in: mask[:, None]" if len(shape) == 3 else ""


def _of_four(t: torch.Tensor) -> torch.Tensor:
    """View with sizes 1 in front, as [batch, heads, queries, keys]."""
    return t.view((1,) * (4 - t.dim()) + t.shape)
