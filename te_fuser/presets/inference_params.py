"""InferenceParams: keys and values of earlier calls, kept while a sequence is continued step by step."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from te_fuser.presets.keyword_arguments import check_size

_PAGES = ("total_num_pages", "page_size", "custom_cache_manager")
# Keys of a layer whose calls begin at `sequence_len_offset` -> behind which position of each row only zeros lie.
_ENDS: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class CacheRequest:
    """The caches that an attention wants.

    Attributes:
        who: what errors call it.
        key: what they are kept by: the number of its layer, or itself.
        features: those of keys, and of values, in a row.
        positions_first: whether they are [L + 1, B, features], else [B, L + 1, features].
    """

    who: str
    key: Hashable
    writer: torch.nn.Module
    features: tuple[int, int]
    dtype: torch.dtype
    positions_first: bool


class InferenceParams:
    """Caches of keys and values, for all layers of a model, to continue sequences step by step.

    Call `pre_step` before each step, with the sequences to continue and their numbers of tokens; row n of the batch is
    the n-th sequence, its tokens first and padding behind. Without `pre_step` all samples of a call begin at position
    `sequence_len_offset`, as in Megatron. Lengths stay on the device: a step makes no new plan and waits for nothing,
    and a captured step can be replayed.

    Args:
        max_batch_size: sequences at a time.
        max_sequence_length: positions of each.
        num_heads_kv, head_dim_k, head_dim_v, dtype: of the caches; None: taken from the model's first call.
        is_paged: False: te_fuser has no pages.
        qkv_format, max_ctx_len: change nothing: caches have the format of the layers' calls.

    Raises:
        NotImplementedError: for pages, and managers of caches.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        **others: Any,
    ) -> None:
        self.max_batch_size = check_size("max_batch_size", max_batch_size)
        self.max_sequence_length = check_size("max_sequence_length", max_sequence_length)
        self.is_paged = False
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        asked = ["is_paged"] * bool(is_paged) + [name for name in _PAGES if others.get(name) is not None]
        if asked:
            raise NotImplementedError(f"InferenceParams: {asked[0]} asks for pages, which te_fuser does not have")
        unknown = [name for name in others if name not in (*_PAGES, "max_ctx_len", "qkv_format")]
        if unknown:
            raise TypeError(f"InferenceParams() takes no argument {unknown[0]!r}")
        self.sequence_len_offset, self.batch_size_offset = 0, 0
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()  # with what the step adds
        self.key_value_memory_dict: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: list[int] = []
        self._by_steps = False  # whether `pre_step` says which sequences there are
        self._lengths: dict[torch.device, torch.Tensor] = {}  # starts, counts, lengths behind the step; they stay there
        self._batch_dim: dict[Hashable, int] = {}
        self._told = 0  # how often somebody said what is next
        self._writers: dict[Hashable, tuple[weakref.ref[torch.nn.Module], Hashable]] = {}  # with the step of each

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lengths": {}, "_writers": {}}

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Set the sequences of the next step: {sequence: number of tokens}, in the order of the batch's rows.

        A new key begins a sequence; a sequence that is left out has ended, and its place is free.

        Raises:
            TypeError: for what is no dict of whole numbers.
            ValueError: for too many sequences, or one that gets too long; nothing changes then.
        """
        steps = _whole_numbers(step_dict)
        if len(steps) > self.max_batch_size:
            new = [name for name in steps if name not in self.sequences]
            some = ", ".join(map(repr, new[:4])) + ", .." * (len(new) > 4)
            raise ValueError(
                f"pre_step: {len(steps)} sequences, of which {len(new)} are new ({some}), and max_batch_size="
                f"{self.max_batch_size}: leave out those that have ended, begin fewer, or enlarge it"
            )
        lengths = OrderedDict((name, self.sequences.get(name, 0) + count) for name, count in steps.items())
        for name, length in lengths.items():
            if length > self.max_sequence_length:
                has = f"has {length - steps[name]} positions" if name in self.sequences else "is new"
                raise ValueError(
                    f"pre_step: sequence {name!r} {has} and would have {length} by {steps[name]} more, and "
                    f"max_sequence_length={self.max_sequence_length}: leave it out to end it, or enlarge that"
                )
        self._move(list(self.sequences), list(lengths))
        self._clear(list(self.sequences), list(lengths))
        self.sequences, self._steps, self._by_steps = lengths, list(steps.values()), True
        self._told += 1
        for rows in self._lengths.values():
            _put_lengths(rows, list(lengths.values()), self._steps)

    def reset(self) -> None:
        """End all sequences; the caches' memory stays allocated."""
        self.sequences, self._steps, self._by_steps = OrderedDict(), [], False
        self._told += 1
        self.sequence_len_offset = self.batch_size_offset = 0
        for keys, _ in self.key_value_memory_dict.values():
            _ENDS.pop(keys, None)
        for rows in self._lengths.values():
            _put_lengths(rows, [], [])

    def goes_on(self) -> bool:
        """True where a sequence of the step has tokens of earlier steps."""
        return any(length > count for length, count in zip(self.sequences.values(), self._steps, strict=True))

    def _move(self, before: list[Hashable], now: list[Hashable]) -> None:
        """Bring the caches of sequences that go on to their new rows."""
        moved = [
            (before.index(name), row) for row, name in enumerate(now) if name in before and before.index(name) != row
        ]
        if not moved:
            return
        for key, caches in self.key_value_memory_dict.items():
            old, new = (_sent(rows, caches[0].device) for rows in zip(*moved, strict=True))
            for cache in caches:
                cache.index_copy_(self._batch_dim[key], new, cache.index_select(self._batch_dim[key], old))

    def _clear(self, before: list[Hashable], now: list[Hashable]) -> None:
        """Zero the caches in rows that no sequence goes on in: hidden ones may be multiplied by 0."""
        going_on = {row for row, name in enumerate(now) if name in self.sequences}
        ended = [row for row in range(len(before)) if row not in going_on]
        longest = max((self.sequences[before[row]] for row in ended), default=0)
        for key, caches in self.key_value_memory_dict.items():
            rows = _sent(ended, caches[0].device)
            for cache in caches:
                if not self._by_steps:  # what was before a reset, or calls by offsets, may have written anywhere
                    cache.zero_()
                elif longest:
                    cache.narrow(1 - self._batch_dim[key], 0, longest).index_fill_(self._batch_dim[key], rows, 0.0)

    def rows(self, wanted: CacheRequest, batch: int, positions: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Starts, counts and lengths behind the step, whole numbers [batch] on the device, by `pre_step`."""
        told, longest = len(self._steps), max(self._steps, default=0)
        if not told:
            raise ValueError(
                f"{wanted.who}: pre_step was told no sequence, and the call has {batch} samples: name them, or reset() "
                "and say sequence_len_offset"
            )
        if not told <= batch <= self.max_batch_size or longest > positions:
            raise ValueError(
                f"{wanted.who}: pre_step was told {told} sequences with {longest} tokens at most, and the call has "
                f"{batch} samples of {positions} (max_batch_size={self.max_batch_size}): give a row for each sequence, "
                f"from {told} to {self.max_batch_size}, with room for {longest} tokens or more, or tell pre_step what "
                "this step has"
            )
        if device not in self._lengths:
            with torch.inference_mode(False):
                self._lengths[device] = torch.zeros(3, self.max_batch_size, dtype=torch.int32, device=device)
            _put_lengths(self._lengths[device], list(self.sequences.values()), self._steps)
        return self._lengths[device][:, :batch].unbind()

    def check_writer(self, wanted: CacheRequest) -> None:
        """Refuse an attention whose caches another one writes in this step."""
        step = self._told, *(() if self._by_steps else (int(self.sequence_len_offset), int(self.batch_size_offset)))
        writer, last = self._writers.get(wanted.key, (None, None))
        other = None if writer is None or last != step else writer()
        if not (other is None or other is wanted.writer):
            raise ValueError(
                f"{wanted.who}: layer_number={wanted.key} is that of another attention, too, which wrote its keys and "
                "values under it in this step: give each layer a layer_number of its own"
            )
        self._writers[wanted.key] = weakref.ref(wanted.writer), step

    def check(self, wanted: CacheRequest, heads: int) -> None:
        """Refuse an attention whose heads are not those that the caches were announced for."""
        channels = [features // heads for features in wanted.features]
        said = (self.num_heads_kv, self.head_dim_k, self.head_dim_v)
        for name, given, is_now in zip(
            ("num_heads_kv", "head_dim_k", "head_dim_v"), said, (heads, *channels), strict=True
        ):
            if given is not None and given != is_now:
                raise ValueError(f"InferenceParams({name}={given}), and {wanted.who} has {is_now}: leave it out")


def _whole_numbers(step_dict: Any) -> dict[Hashable, int]:
    """Argument of `pre_step` as plain integers, once checked."""
    if not isinstance(step_dict, Mapping):
        raise TypeError(f"pre_step takes a dict, sequence -> how many tokens, got {type(step_dict).__name__}")
    found = {}
    for name, count in step_dict.items():
        if isinstance(name, torch.Tensor):
            raise TypeError(
                "pre_step: a sequence is called by a tensor, and another tensor of the same value would be another "
                "sequence: call it by a number or a text, of tensors by .tolist()"
            )
        try:
            found[name] = operator.index(count)
        except TypeError:
            raise TypeError(
                f"pre_step: sequence {name!r} continues by {count!r} ({type(count).__name__}): give a whole number of "
                "tokens"
            ) from None
        if found[name] < 0:
            raise ValueError(f"pre_step: sequence {name!r} continues by {found[name]} tokens: give 0 or more")
    return found


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy of whole numbers on a device, for which nobody waits."""
    made = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def _put_lengths(rows: torch.Tensor, lengths: list[int], counts: list[int]) -> None:
    """Say lengths of sequences behind a step of so many tokens; rows without one have none."""
    most, pinned = rows.shape[1], rows.is_cuda
    table = [[a - b for a, b in zip(lengths, counts, strict=True)], counts, lengths]
    filled = torch.tensor([row + [0] * (most - len(row)) for row in table], dtype=torch.int32, pin_memory=pinned)
    rows.copy_(filled, non_blocking=pinned)


def cached(params: Any, wanted: CacheRequest, heads: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that an attention with caches reads by name, for x [positions, batch, ..] or [batch, positions, ..].

    Args:
        params: `InferenceParams`, or any object with max_batch_size, max_sequence_length, sequence_len_offset,
            batch_size_offset and key_value_memory_dict, as Megatron's.
    """
    missing = [name for name in _MEGATRONS if not hasattr(params, name)]
    if missing:
        raise TypeError(
            f"{wanted.who}: inference_params is te_fuser.InferenceParams or has {', '.join(_MEGATRONS)}, got "
            f"{type(params).__name__} without {missing[0]}"
        )
    positions, batch = x.shape[:2] if wanted.positions_first else (x.shape[1], x.shape[0])
    first = int(params.batch_size_offset)
    if first + batch > params.max_batch_size:
        raise ValueError(
            f"{wanted.who}: {first + batch} samples, and max_batch_size={params.max_batch_size}: enlarge it"
        )
    if isinstance(params, InferenceParams):
        params.check(wanted, heads)
        params.check_writer(wanted)
        params._batch_dim[wanted.key] = int(wanted.positions_first)
    by_steps = isinstance(params, InferenceParams) and params._by_steps
    if by_steps:
        rows = params.rows(wanted, batch, positions, x.device)
    else:
        rows = _alike(params, wanted, batch, positions, x.device)
    keys, values = _memory(params, wanted, x.device)
    if not by_steps:
        end = int(params.sequence_len_offset) + positions
        _clear_behind((keys, values), end, first, batch, int(wanted.positions_first))
    samples = (slice(None), slice(first, first + batch))
    index = samples if wanted.positions_first else samples[::-1]
    names = ("starts", "counts", "filled")
    return {"key_cache": keys[index], "value_cache": values[index], **dict(zip(names, rows, strict=True))}


_MEGATRONS = (
    "max_batch_size",
    "max_sequence_length",
    "sequence_len_offset",
    "batch_size_offset",
    "key_value_memory_dict",
)


def _alike(
    params: Any, wanted: CacheRequest, batch: int, positions: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Start, count and end of positions by `sequence_len_offset`, the same numbers for all samples."""
    start = int(params.sequence_len_offset)
    if start + positions > params.max_sequence_length:
        raise ValueError(
            f"{wanted.who}: {positions} positions behind {start} (sequence_len_offset), and max_sequence_length="
            f"{params.max_sequence_length}: enlarge it"
        )
    return tuple(_full(number, batch, device) for number in (start, positions, start + positions))


@functools.lru_cache(maxsize=1024)  # the layers of a step share them
def _full(number: int, batch: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), number, dtype=torch.int32, device=device)


def _memory(params: Any, wanted: CacheRequest, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches, made at the first call; their last position is for what is no token."""
    lead = (params.max_sequence_length + 1, params.max_batch_size)
    shapes = [(*(lead if wanted.positions_first else lead[::-1]), size) for size in wanted.features]
    dtype = getattr(params, "dtype", None) or wanted.dtype
    found = params.key_value_memory_dict.get(wanted.key)
    if found is None:
        if isinstance(params, InferenceParams) and params.goes_on():
            raise ValueError(
                f"{wanted.who}: sequences go on, and no earlier step has caches of this layer: begin by a step through "
                "all layers; a layer without a layer_number is known by itself, and a copy of it is another"
            )
        with torch.inference_mode(False):
            found = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        params.key_value_memory_dict[wanted.key] = found
        if not torch.compiler.is_compiling():
            _ENDS[found[0]] = [0] * params.max_batch_size
    if [t.shape for t in found] != [torch.Size(shape) for shape in shapes]:
        raise ValueError(
            f"{wanted.who}: key_value_memory_dict[{wanted.key!r}] holds {[list(t.shape) for t in found]}, and "
            f"caches of {[list(shape) for shape in shapes]} are wanted: give each layer a layer_number of its own"
        )
    return found  # type: ignore[no-any-return]


def _clear_behind(caches: tuple[torch.Tensor, torch.Tensor], end: int, first: int, batch: int, batch_dim: int) -> None:
    """Zero what longer sequences left behind `end` in the rows of a call that went back."""
    traced, keys = torch.compiler.is_compiling(), caches[0]
    unknown = [keys.shape[1 - batch_dim]] * keys.shape[batch_dim]
    ends = unknown if traced else _ENDS.setdefault(keys, unknown)
    behind = max(ends[first : first + batch], default=0) - end
    ends[first : first + batch] = [end] * batch
    if behind > 0:
        for cache in caches:
            cache.narrow(batch_dim, first, batch).narrow(1 - batch_dim, end, behind).zero_()
