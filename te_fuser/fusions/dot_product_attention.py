"""DotProductAttention by library kernels, one joint fusion for each of them: attention_<provider>; and decoding.

The CUDA providers take the ops before attention into their backward: what the library returns apart is packed, turned
back by RotaryEmbedding, added up for the gradient of a projection's Bias and quantized in one pass. One whose backward
packs by itself leaves nothing for such a pass, and those ops are planned by themselves.

Decoding on CUDA is KeyValueCache as one kernel, and DotProductAttention of one position to keys that are apart. What no
call changes is asked while planning. Caches that the kernel cannot reach are written by PyTorch's operations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch

from te_fuser.codegen.cuda_source_kernel import WrittenKernel
from te_fuser.distributed.group import Group
from te_fuser.dtypes import text_of
from te_fuser.fusions import rotary
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Body, Cost, FusionCall, InBlocks, Match
from te_fuser.fusions.pattern import Optional
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels import decode_attention, packed_heads, packed_tiles
from te_fuser.kernels.attention import PROVIDERS, AttentionProblem, Provider, lengths, padding
from te_fuser.kernels.attention.padding import Padded
from te_fuser.kernels.decode_attention import CacheWrite, OneQuery
from te_fuser.ops.attention.dot_product_attention import APART_KEYS, AttentionSettings, DotProductAttention
from te_fuser.ops.attention.head_parallel import own_sinks, whole_sinks
from te_fuser.ops.attention.heads import ApartHeads, inputs_of
from te_fuser.ops.attention.mask import HIDDEN_BY
from te_fuser.ops.base import OpCall
from te_fuser.ops.key_value_cache import KeyValueCache
from te_fuser.ops.rotary_embedding import RotaryEmbedding

_MADE = 5  # times that the bytes of a dense bias are moved to make it
_MOVING = (8.0, 14.0)  # calls of PyTorch that finding and moving tokens takes the host as long as, each way
_FILLED = 7 / 12  # the mean of the squares of shares between 1/2 and 1
_READ_APART = ("key", "value", "key_value")
_TURNED, _BLOCKS = "input.transposed", ("input.blocks", "input.transposed_blocks")


def _op(m: Match) -> DotProductAttention:
    return cast(DotProductAttention, m[len(m) - 1].op)


def _rotary(m: Match) -> RotaryEmbedding | None:
    """The rotation just before attention, if it is part of the match."""
    op = m[len(m) - 2] if len(m) > 1 else None
    return cast(RotaryEmbedding, op) if op is not None and op.kind is RotaryEmbedding else None


def _rotation(m: Match) -> packed_heads.Rotation | None:
    turn = _rotary(m)
    return None if turn is None else rotary.rotation_of(turn)


def _why_not_the_ops_before(m: Match) -> str | None:
    """Reason why ops before attention, if any, cannot be part of its backward."""
    if len(m) == 1:
        return None
    if _op(m).settings().beyond:
        return "its gradients are packed by themselves here, and ops before attention are planned alone"
    turn, heads = _rotary(m), _op(m).packed
    if turn is not None and turn.packed != heads:
        return f"it turns heads that lie as {turn.packed}, attention reads them as {heads}"
    return rotary.why_no_kernel(m)


class _Attention:
    """Attention of a match by a provider: what no call changes is asked while planning.

    Of the ops it keeps what they said then, and no size.

    Args:
        settings: of the op, with the dropout of one that draws.
        names: the inputs and parameters that it reads beside its main input.
        compiled: whether rows are blanked and moved by the kernels for that, which the plan has compiled.
        heads_of: the ranks of which this one runs its part of the heads, and has the sinks of all.
        rotation: that of the op before it, if there is one.
        last: the place of attention in the match.
        bias: that of the bias before it, if there is one.
    """

    def __init__(
        self,
        provider: Provider,
        settings: AttentionSettings,
        names: tuple[str, ...],
        compiled: bool,
        heads_of: Group,
        rotation: packed_heads.Rotation | None = None,
        last: int = 0,
        bias: int | None = None,
    ) -> None:
        self._provider, self._last, self._bias, self._heads_of = provider, last, f"{bias}.bias", heads_of
        # By whether it draws, which a call knows: the op may leave training at any time.
        self._settings = {False: replace(settings, dropout=0.0), True: settings}
        padded = Padded(provider, padding.CompactByKernel if compiled else padding.CompactByTorch)
        self._way = padded if provider.by_structure and settings.mask.padded else provider
        self._blank = lengths.blank_by_kernel if compiled else lengths.blank_by_torch
        if last:
            self._packing = packed_heads.Packing(settings.packed, rotation)
            self._tiles = packed_tiles.TilePacking(settings.packed)
        self._has_sinks = "sink" in names
        self._given = {name: f"0.{name}" for name in names}
        known = {"input": "-1.input", **{name: name for name in ("output", *provider.emits)}}
        self._read = known | {n: f"-1.{n}" if n in _READ_APART else f"{last}.{n}" for n in names}

    def forward(self, m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        """The output; of the match forward covers attention alone."""
        draws, provider = m.draws(0), self._provider
        tensors = {"input": x, **{name: m[source] for name, source in self._given.items()}}
        random = m.random(0) if provider.draws and draws else None
        self._take_own_sinks(tensors)
        state: AbstractContextManager[Any] = contextlib.nullcontext()
        if draws and not provider.draws:  # a library's: the one that the op names, the generator's, or this rank's
            named = m[0].op.random_state
            capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            state = m.drawing(0, x.device) if named is None or capturing else named()
        with state:
            y, saved = self._way.forward(self._settings[draws], tensors, self._blank, random)
        for name, tensor in saved.items():
            m.emit(name, tensor)
        return y

    def backward(self, m: FusionCall, dy: torch.Tensor) -> Any:
        """The gradients of what enters the match, and of keys, values, sinks and a bias."""
        tensors = {name: m[source] for name, source in self._read.items()}
        settings, others = self._settings[m.draws(self._last)], dict[str, torch.Tensor]()
        if self._last == 0:
            self._take_own_sinks(tensors)
            made = self._way.backward(settings, tensors, dy, self._blank)
            if self._has_sinks:
                sink = m["0.sink"]
                own = made["sink"].to(sink.dtype) if "sink" in made else torch.zeros_like(tensors["sink"])
                made["sink"] = whole_sinks(own, self._heads_of)
            first = made.pop("input")
            return (first, {f"0.{name}": tensor for name, tensor in made.items()}) if made else first
        sums = m[self._bias].dtype if m.needs(self._bias) else None
        parts, grouped = self._provider.gradients_apart(settings, tensors, dy)
        dx: torch.Tensor | None = None
        scaled = rotary.scaled_by(m)
        how: dict[str, Any] = {"sums": sums}
        if m.needs(_BLOCKS[0]):
            *both, dbias = self._tiles(parts, torch.float8_e4m3fn, grouped, **how)
            others = dict(zip(_BLOCKS, both, strict=True))
        elif scaled is not None and m.needs(_TURNED):
            dx, others[_TURNED], dbias = self._tiles(parts, scaled, grouped, **how)
        else:
            dx, dbias = self._packing(parts, grouped, scaled=scaled, **how)
        if dbias is not None:
            others[self._bias] = dbias
        return (dx, others) if others else dx

    def _take_own_sinks(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._has_sinks:
            tensors["sink"] = own_sinks(tensors["sink"], self._heads_of)


# One for all matches that are alike, so that plans of several lengths that run the same are seen to.
_attention = functools.lru_cache(maxsize=512)(_Attention)


def _choose(provider: Provider, m: Match, direction: str) -> Callable[..., Any] | Body:
    op = _op(m)
    settings = replace(op.settings(), dropout=op.dropout)
    names = (*op.named_inputs(), *op.parameter_shapes())
    before = _rotation(m), len(m) - 1, rotary.bias_of(m)
    made = _attention(provider, settings, names, _blanks(provider, m), op._heads_of, *before)
    if direction == "forward" or settings.beyond:
        return Body(getattr(made, direction))
    blocks = _packed_by_tiles(m, in_blocks=True)
    in_blocks = InBlocks(blocks, torch.float8_e4m3fn) if blocks else None
    return Body(made.backward, transposed=_packed_by_tiles(m), in_blocks=in_blocks)


def _packed_by_tiles(m: Match, in_blocks: bool = False) -> tuple[str, ...]:
    """The packed gradient, where it can be given in both layouts."""
    in_8_bits = rotary.quantizes(m) is not None
    if in_8_bits == in_blocks or len(m) == 1 or _rotary(m) is not None:
        return ()
    return () if packed_tiles.why_not(_op(m).settings().packed, m.dtype, in_blocks) else ("input",)


def _blanks(provider: Provider, m: Match) -> bool:
    """True where the plan compiles the kernels that blank and move rows."""
    mask = _op(m).hides
    told = provider.by_structure and (mask.counts or mask.padded)
    return told and m.target == "cuda" and m.device.type == "cuda" and lengths.why_not_blanked(m.dtype) is None


def declare(provider: Provider, registered: bool = True) -> Fusion:
    """The joint fusion of a provider; one of your own becomes part of plans by this call."""

    def when(m: Match) -> bool | str:
        settings, heads, inputs, keys = _op(m).settings(), _op(m).packed, m[len(m) - 1].inputs, None
        if isinstance(heads, ApartHeads):
            shape = inputs[next(iter(heads.apart.names))].shape
            keys = heads.lengths(shape if len(shape) == 3 else (1, *shape))[1]
        problem = AttentionProblem.of(settings, m.x, m.capability, m.needs_grad, keys)
        asked = padding.reason_not if provider.by_structure and settings.mask.padded else type(provider).reason_not
        if why := asked(provider, problem):
            return why
        others = [inputs[name].dtype for name in inputs_of(heads)[1:]]
        mixed = next((dtype for dtype in others if dtype != m.dtype), None)
        if mixed is not None:
            return f"queries are {text_of(m.dtype)}, keys or values {text_of(mixed)}"
        return _why_not_the_ops_before(m) or True

    def saved_bytes(m: Match) -> dict[str, int]:
        rows = m.x.rows * _op(m).heads
        wide = 8 if m.dtype == torch.float64 else 4
        calls = 2 if provider.by_structure and _op(m).hides.padded else 1
        return {name: calls * (wide * rows if name.endswith("logsumexp") else 8) for name in provider.emits}

    before = (*rotary.BEFORE, Optional(RotaryEmbedding)) if provider.on_cuda and not provider.packs else ()
    return chosen(
        f"attention_{provider.name}",
        "joint",
        [*before, DotProductAttention],
        (type(provider).__doc__ or "").strip(),
        registered,
        when=when,
        cost=lambda m: _costs(m, provider),
        reads=("-1.input", "output", *(f"-1.{name}?" for name in _READ_APART)),
        saves=provider.emits,
        saved_bytes=saved_bytes,
        choose=functools.partial(_choose, provider),
        forward_ops=slice(-1, None),
        compiles=functools.partial(_compiles, provider),
    )


def _compiles(provider: Provider, m: Match, direction: str, needed: frozenset[str]) -> Iterable[WrittenKernel]:
    """Kernels that blank rows, and pack gradients where ops before are covered."""
    if _blanks(provider, m):
        yield lengths.BlankRows(m.dtype)
        if _op(m).hides.padded:
            yield from (padding.FindTokens(), padding.MoveRows(m.dtype))
    if direction == "forward" or len(m) == 1:
        return
    bias, stored, heads = rotary.bias_of(m), rotary.quantizes(m), _op(m).settings().packed
    sums = m[bias].dtype_of("bias") if bias is not None and f"{bias}.bias" in needed else None
    if _BLOCKS[0] in needed:
        yield packed_tiles.PackedTiles(heads, m.dtype, torch.float8_e4m3fn, sums, in_blocks=True)
    elif stored is not None and _TURNED in needed:
        yield packed_tiles.PackedTiles(heads, m.dtype, stored, sums)
    else:
        given = {"sums": sums, "stored": stored}
        yield packed_heads.PackedPass.of(heads, m.dtype, _rotation(m), parts=True, back=True, **given)


def _costs(m: Match, provider: Provider) -> tuple[Cost, Cost]:
    """Costs forward and backward, two products and five, and of packing."""
    op = _op(m)
    x, y = m.x.nbytes, m.y.nbytes
    flops, settings = max(op.flops(m.x, {}), 1.0), op.settings()
    samples, positions = op.packed.lengths(m.x.shape if len(m.x.shape) == 3 else (1, *m.x.shape))
    apart = 0.0  # bytes of a bias, which is made, and read for each head
    if settings.mask.beyond and provider.by_structure:
        flops *= _seen(m) / max(settings.mask.pairs(positions, causal_alone=True), 1.0)
    elif settings.causal and (settings.masked or settings.mask.beyond):
        # The mask then holds the later positions too, and the kernel goes over all of them.
        flops, settings = 2.0 * flops, replace(settings, causal=False)
    if settings.mask.beyond and provider.on_cuda and not provider.by_structure:
        apart = samples * float(positions) ** 2 * m.dtype.itemsize * (_MADE + op.heads)
    speed = provider.speed  # the shares of the rate of large products
    if provider.by_structure and (settings.mask.lengths or settings.mask.key_lengths):
        speed = speed.times(*provider.by_lengths)
    forward, backward = speed.shares(settings, positions)
    products, (calls, calls_back) = 2.5 * flops, provider.calls
    idle = (0, 0)
    if provider.by_structure and settings.mask.padded:
        # Masks are taken for those that hide the end of samples: a second call then finds nothing to do.
        idle, calls, calls_back = (6, 11), 2.0 * calls + _MOVING[0], 2.0 * calls_back + _MOVING[1]
    ahead = Cost(x + apart, y, flops, 1 + idle[0], efficiency=forward, apart=apart, calls=calls)
    if provider.packs:
        return ahead, Cost(x + 2 * y, x, products, 1 + idle[1], efficiency=backward, calls=calls_back)
    dx = rotary.gradient_bytes(m)  # packed from what is apart
    read, written, moved = 2 * x + 2 * y + apart, x + dx, x + dx + apart
    return ahead, Cost(read, written, products, 2 + idle[1], efficiency=backward, apart=moved, calls=calls_back)


def _seen(m: Match) -> float:
    """Pairs of positions that a kernel goes over which is told the structure.

    Sequences are taken for equal ones, and lengths of samples for anything from a half to all.
    """
    mask, inputs = _op(m).hides, m[len(m) - 1].inputs
    _, positions = _op(m).packed.lengths(m.x.shape if len(m.x.shape) == 3 else (1, *m.x.shape))
    sequences = max(inputs["offsets"].shape[0] - 1, 1) if mask.offsets else 1
    filled = _FILLED if mask.lengths or mask.key_lengths or mask.padded else 1.0
    return filled * sequences * mask.pairs(max(positions // sequences, 1))


FUSIONS = tuple(declare(p) for p in PROVIDERS)


_Run = Callable[[FusionCall, torch.Tensor], torch.Tensor]
_CACHES = ("key_cache", "value_cache", "starts", "counts")
_TOLD = (APART_KEYS, HIDDEN_BY[0], HIDDEN_BY[2], HIDDEN_BY[3])  # lengths of samples, a window, a corner

# ------------------------------------------------------------------------------------------------ decoding: caches


def _cache_write(m: Match) -> CacheWrite:
    op = cast(KeyValueCache, m[0].op)
    whole = m[0].inputs["starts"].dtype
    return CacheWrite(op.head_dim, op.kv_heads, op.heads // op.kv_heads, op.packing, m.dtype, whole)


def _why_not_cached(m: Match) -> str | None:
    """Reason against the kernel for a match; None where it fits."""
    starts, counts = (m[0].inputs[name].dtype for name in ("starts", "counts"))
    why = m.why_no_cuda()
    if why is None and starts != counts:
        why = f"it takes starts and counts of one dtype, they are {text_of(starts)} and {text_of(counts)}"
    return why or decode_attention.why_not_cached(m[0].head_dim, m.dtype)


@functools.lru_cache(maxsize=512)
def _put(kernel: CacheWrite, layout: str) -> _Run:
    heads, sequence_first = kernel.kv_heads * kernel.per_group, layout == "sequence_first"
    plain = KeyValueCache(kernel.head_dim, heads=heads, kv_heads=kernel.kv_heads, layout=layout, packing=kernel.packing)

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        given = {name: m[f"0.{name}"] for name in _CACHES}
        if not decode_attention.can_reach(given["key_cache"], given["value_cache"]):
            return plain.op_forward(OpCall({**given, "input": x}), x)
        return decode_attention.put(kernel, x.detach(), **given, sequence_first=sequence_first)

    return forward


chosen(
    "key_value_cache",
    "forward",
    [KeyValueCache],
    "One pass that writes keys and values, and gives the queries.",
    when=lambda m: _why_not_cached(m) or True,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    choose=lambda m, method: _put(_cache_write(m), m[0].layout),
    compiles=lambda m, direction, needed: [_cache_write(m)],
)

# --------------------------------------------------------------------------------------------- decoding: attention


def _settings(m: Match) -> AttentionSettings:
    return cast(DotProductAttention, m[0].op).settings()


def _one_query(m: Match) -> OneQuery:
    settings = _settings(m)
    heads, (left, _) = settings.heads, settings.mask.sides
    return OneQuery(heads.head_dim, heads.kv_heads, heads.per_group, m.dtype, settings.scale, left)


def _why_not_one_query(m: Match) -> str | None:
    """Reason against the kernel for a match; None where it fits."""
    if m.needs_grad:
        return "it has no backward"
    settings = _settings(m)
    heads = settings.heads
    if not isinstance(heads, ApartHeads) or "key_value" in heads.apart.names:
        return "it reads keys and values from two inputs, and queries from a third"
    others = [words for words in settings.beyond if words not in _TOLD]
    if others or settings.masked:
        return f"it is not called for {' and '.join(others) or 'a boolean mask'}"
    if m[0].op.draws():
        return "it drops no probabilities"
    if heads.value_dim != heads.head_dim:
        return f"heads of values have {heads.value_dim} features, those of keys {heads.head_dim}"
    return decode_attention.why_not_one_query(heads.head_dim, m.dtype) or _why_not_these_sizes(m, settings)


def _why_not_these_sizes(m: Match, settings: AttentionSettings) -> str | None:
    inputs, mask = m[0].inputs, settings.mask
    apart = {inputs[name].dtype for name in ("key", "value")} - {m.dtype}
    if apart:
        return f"queries are {text_of(m.dtype)}, keys or values {', '.join(map(text_of, apart))}"
    if mask.is_banded and mask.corner != "bottom_right":
        return "its query stands at the last key: take corner='bottom_right'"
    if len(m.x.shape) != 3:
        return f"it takes [1, samples, features] or [samples, 1, features], there is {list(m.x.shape)}"
    _, positions = settings.heads.lengths(m.x.shape)
    return None if positions == 1 else "it takes one query of each sample, there are several"


@functools.lru_cache(maxsize=512)
def _attend(kernel: OneQuery, settings: AttentionSettings) -> _Run:
    mask, sequence_first = settings.mask, settings.heads.layout == "sequence_first"

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        counts = m["0.lengths"] if mask.lengths else None, m["0.key_lengths"] if mask.key_lengths else None
        return decode_attention.attend(kernel, x, m["0.key"], m["0.value"], sequence_first, *counts)

    return forward


chosen(
    "one_query_attention",
    "forward",
    [DotProductAttention],
    "Attention of one position a sample, over parts of the keys side by side.",
    when=lambda m: m.why_no_cuda() or _why_not_one_query(m) or True,
    cost=lambda m: Cost(2.0 * m[0].inputs["key"].nbytes, m.x.nbytes, launches=2),  # keys and values
    choose=lambda m, method: _attend(_one_query(m), _settings(m)),
    compiles=lambda m, direction, needed: [_one_query(m)],
)
