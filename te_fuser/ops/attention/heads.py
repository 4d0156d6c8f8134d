"""Layouts of the heads of queries, keys and values: packed in one tensor, or apart in several.

Shapes in this file: B samples, S positions, G key/value heads, R query heads of each, H = G * R query heads, D the
size of a head, E that of a value's. Query head g * R + r reads key/value head g.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from te_fuser.ops.base import Spec
from te_fuser.ops.checks import meant, whole_number

# Name of a layout -> the dimensions of x that count positions and samples.
LAYOUTS = {"sequence_first": (0, 1), "batch_first": (1, 0)}

# The layouts in words, for who gives none; Transformer Engine's words and what they are here.
SAYS_LAYOUT = (
    '"batch_first" for [batch, sequence, features], "sequence_first" for [sequence, batch, features], or "tokens" for '
    "[tokens, features] of sequences one behind the other"
)
THEIR_LAYOUTS = {"bshd": '"batch_first"', "sbhd": '"sequence_first"', "thd": '"tokens", with AttentionMask(offsets=..)'}

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ORDER = {"sequence_first": "[sequence, batch, features]", "batch_first": "[batch, sequence, features]"}

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def one_of(argument: str, value: str, names: Collection[str], theirs: Mapping[str, str] | None = None) -> str:
    """`value`, or an error with what it could be; `theirs` are others' words."""
    if not isinstance(value, str) or value not in names:
        said = meant(value, names) if isinstance(value, str) else ""
        if theirs and isinstance(value, str) and value in theirs:
            said = f"; {value!r} is {theirs[value]} here"
        raise ValueError(f"{argument}={value!r} is unknown; use one of {', '.join(map(repr, names))}{said}")
    return value


PACKINGS = ("interleaved", "blocked")


@dataclass(frozen=True)
class HeadLayout:
    """Number of heads, their size, and the order of the dimensions of their tensors."""

    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "sequence_first"

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if (value if type(value) is int else whole_number("an op with heads", name, value)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads}, kv_heads={self.kv_heads}")
        one_of("layout", self.layout, LAYOUTS)

    @property
    def per_group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """The size of a head of values, and of the output."""
        return self.head_dim

    def lengths(self, shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
        """(samples, positions) of a tensor of this layout."""
        sequence, batch = LAYOUTS[self.layout]
        return shape[batch], shape[sequence]

    def leading(self, samples: int, positions: int) -> tuple[int, int]:
        """The sizes before the features of a tensor of this layout: `lengths` the other way."""
        return (positions, samples) if self.layout == "sequence_first" else (samples, positions)

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output's heads [B, G, R, S, E], a view."""
        return self._heads_in(y, self.per_group)

    def merge_output(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, G, R, S, E] as an output of this layout."""
        in_order = heads.permute((3, 0, 1, 2, 4) if self.layout == "sequence_first" else (0, 3, 1, 2, 4))
        features = heads.shape[1] * heads.shape[2] * heads.shape[4]
        # Unlike a view, the result of _unsafe_view stands for its own storage, as an output of an op must.
        return torch.ops.aten._unsafe_view.default(in_order.contiguous(), [*in_order.shape[:2], features])

    def _heads_in(self, t: torch.Tensor, per_group: int) -> torch.Tensor:
        """Features that are heads, group by group, as [B, G, per_group, S, size]."""
        sequence, batch = LAYOUTS[self.layout]
        heads = t.view(*t.shape[:2], self.kv_heads, per_group, t.shape[-1] // (self.kv_heads * per_group))
        return heads.permute(batch, 2, 3, sequence, 4)

    @property
    def features(self) -> int:
        """Number of features of the main input."""
        raise NotImplementedError

    def _taken(self) -> tuple[str, str]:
        """Texts of what the main input holds, its size, and what to do with others."""
        raise NotImplementedError

    def check(self, op: str, x: Spec) -> None:
        """Refuse x as main input by dimensions, features or dtype."""
        self._check_rows(op, x)
        if x.features != self.features:
            takes, do = self._taken()
            raise ValueError(f"{op} takes {takes} = {self.features} features, got {x.features}: {do}")
        self._check_dtype(op, x)

    def _check_rows(self, op: str, x: Spec) -> None:
        if len(x.shape) != 3:
            raise ValueError(f"{op} takes {_ORDER[self.layout]}, got {len(x.shape)} dimensions: {list(x.shape)}")

    def _check_dtype(self, op: str, x: Spec) -> None:
        if x.dtype not in _FLOATS:
            raise TypeError(f"{op} takes float32, float64, bfloat16 or float16, got {x.dtype}: convert the input")

    def _lead(self, x: Spec) -> str:
        samples, positions = self.lengths(x.shape)
        sizes = {"batch": samples, "sequence": positions}
        order = reversed(sizes) if self.layout == "sequence_first" else sizes
        return ", ".join(f"{name} {sizes[name]}" for name in order)


@dataclass(frozen=True)
class PackedHeads(HeadLayout):
    """Layout of heads of queries, keys and values that are packed in one tensor.

    `packing`: "interleaved" is, for each key/value head, [its query heads..., key, value]; "blocked" is
    [all query heads | all key heads | all value heads]. `layout`: [S, B, features] or [B, S, features].
    """

    packing: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("packing", self.packing, PACKINGS)

    @property
    def features(self) -> int:
        """The packed size."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def _taken(self) -> tuple[str, str]:
        sizes = f"({self.heads} + 2 * {self.kv_heads}) * {self.head_dim}"
        takes = f"packed queries, keys and values of (heads + 2 * kv_heads) * head_dim = {sizes}"
        return takes, f"give the projection before it {self.features} output features"

    def reading(self, x: Spec) -> str:
        """Text that names the dimensions of x and says how its features are packed."""
        many = "a query" if self.per_group == 1 else f"{self.per_group} queries"
        packed = {
            "interleaved": f"{self.kv_heads} x [{many}, a key, a value]",
            "blocked": f"[{self.heads} queries | {self.kv_heads} keys | {self.kv_heads} values]",
        }
        return (
            f"[{self._lead(x)}, features {x.features}] (layout={self.layout!r}), features as {packed[self.packing]} "
            f"of {self.head_dim} (packing={self.packing!r})"
        )

    def split(self, x: torch.Tensor) -> Parts:
        """Queries [B, G, R, S, D], keys and values [B, G, S, D], all views of x."""
        sequence, batch = LAYOUTS[self.layout]
        rows, groups, per_group, dim = x.shape[:2], self.kv_heads, self.per_group, self.head_dim
        if self.packing == "interleaved":
            parts = x.view(*rows, groups, per_group + 2, dim)
            q, k, v = parts[..., :per_group, :], parts[..., per_group, :], parts[..., per_group + 1, :]
        else:
            q, k, v = x.split((self.heads * dim, groups * dim, groups * dim), -1)
            q, k, v = q.view(*rows, groups, per_group, dim), k.view(*rows, groups, dim), v.view(*rows, groups, dim)
        return (q.permute(batch, 2, 3, sequence, 4), k.permute(batch, 2, sequence, 3), v.permute(batch, 2, sequence, 3))

    def pack(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The inverse of `split`, in a new tensor."""
        samples, positions = dq.shape[0], dq.shape[3]
        packed = dq.new_empty((*self.leading(samples, positions), self.features), dtype=dtype)
        for part, source in zip(self.split(packed), (dq, dk, dv), strict=True):
            part.copy_(source)
        return packed


@dataclass(frozen=True)
class Apart:
    """Setting of an attention with keys and values in named inputs, and queries alone in the main one.

    Attributes:
        key, value: names of inputs [.., G * D] and [.., G * E] for G heads, in the queries' layout; the length may
            differ.
        key_value: name of one input [.., G * (D + E)] in place of both.
        packing: of `key_value`: "interleaved", for each head [a key, a value], or "blocked", [all keys | all values].
        value_dim: E, the features of a head of values; None: D, those of queries and keys.
    """

    key: str = "key"
    value: str = "value"
    key_value: str | None = None
    packing: str = "interleaved"
    value_dim: int | None = None

    def __post_init__(self) -> None:
        one_of("packing", self.packing, PACKINGS)
        if self.value_dim is not None and whole_number("Apart", "value_dim", self.value_dim) < 1:
            raise ValueError(f"value_dim is {self.value_dim}; it must be at least 1")

    @property
    def names(self) -> dict[str, str]:
        """Argument -> the name of the input that it reads."""
        return {"key": self.key, "value": self.value} if self.key_value is None else {"key_value": self.key_value}


@dataclass(frozen=True)
class ApartHeads(HeadLayout):
    """Layout of heads with queries in one tensor, and keys and values in others."""

    apart: Apart = Apart()

    @property
    def value_dim(self) -> int:
        return self.apart.value_dim or self.head_dim

    @property
    def features(self) -> int:
        """Number of features of the queries."""
        return self.heads * self.head_dim

    def features_of(self, argument: str) -> int:
        """Number of features of "key", "value" or "key_value"."""
        sizes = {"key": self.head_dim, "value": self.value_dim, "key_value": self.head_dim + self.value_dim}
        return self.kv_heads * sizes[argument]

    def _taken(self) -> tuple[str, str]:
        takes = f"queries of heads * head_dim = {self.heads} * {self.head_dim}"
        return takes, "keys and values are inputs of their own"

    def check_others(self, op: str, x: Spec, others: Mapping[str, Spec]) -> None:
        """Refuse named inputs that cannot be keys and values for queries x."""
        samples, _ = self.lengths(x.shape)
        first: tuple[str, int] | None = None
        for argument, name in self.apart.names.items():
            spec = others.get(argument)
            if spec is None:
                raise ValueError(f"{op} reads {argument}s from {name!r}: call the model with {name}=...")
            self._check_rows(f"{op}, input {name!r},", spec)
            self._check_dtype(f"{op}, input {name!r},", spec)
            if spec.features != self.features_of(argument):
                raise ValueError(
                    f"{name!r} has {spec.features} features; {op} takes {self.kv_heads} heads, that is "
                    f"{self.features_of(argument)}"
                )
            batch, positions = self.lengths(spec.shape)
            if batch != samples:
                raise ValueError(f"{name!r} has {batch} samples, the queries {samples}: {list(spec.shape)}")
            first = first or (name, positions)
            if positions != first[1]:
                raise ValueError(f"{name!r} has {positions} positions, {first[0]!r} has {first[1]}: give as many")

    def reading(self, x: Spec) -> str:
        """Text that names the dimensions of x and says where keys and values are."""
        names = " and ".join(map(repr, self.apart.names.values()))
        return (
            f"[{self._lead(x)}, features {x.features}] (layout={self.layout!r}), features as {self.heads} queries of "
            f"{self.head_dim}; keys and values from {names}"
        )

    def split(self, x: torch.Tensor, *others: torch.Tensor) -> Parts:
        """Queries [B, G, R, S, D], keys [B, G, K, D] and values [B, G, K, E], all views."""
        return self._heads_in(x, self.per_group), *self._split_others(*others)

    def _split_others(self, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(others) == 2:
            key, value = (self._heads_in(t, 1).squeeze(2) for t in others)
            return key, value
        (both,) = others
        sizes = (self.head_dim, self.value_dim)
        if self.apart.packing == "interleaved":
            key, value = self._heads_in(both, 1).squeeze(2).split(sizes, -1)
            return key, value
        return self._split_others(*both.split([self.kv_heads * size for size in sizes], -1))

    def pack(self, parts: Parts, dtypes: Sequence[torch.dtype]) -> tuple[torch.Tensor, ...]:
        """The inverse of `split`: new tensors, of a dtype each."""
        queries = self.merge_output(parts[0]).to(dtypes[0])
        if self.apart.key_value is None:
            pairs = zip(parts[1:], dtypes[1:], strict=True)
            return queries, *(self.merge_output(part.unsqueeze(2)).to(dtype) for part, dtype in pairs)
        samples, _, positions, _ = parts[1].shape
        shape = (*self.leading(samples, positions), self.features_of("key_value"))
        both = parts[1].new_empty(shape, dtype=dtypes[1])
        for part, source in zip(self._split_others(both), parts[1:], strict=True):
            part.copy_(source)
        return queries, both


AnyHeads = PackedHeads | ApartHeads


def inputs_of(heads: AnyHeads) -> tuple[str, ...]:
    """The arguments that queries, keys and values come in, the main input first."""
    return ("input", *heads.apart.names) if isinstance(heads, ApartHeads) else ("input",)


def split_inputs(heads: AnyHeads, tensors: Sequence[torch.Tensor]) -> Parts:
    """Queries [B, G, R, S, D], keys [B, G, K, D], values [B, G, K, E]; tokens are one sample."""
    return heads.split(*(t[None] if t.dim() == 2 else t for t in tensors))


def pack_gradients(heads: AnyHeads, parts: Parts, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse: new tensors of the inputs' shapes and dtypes, by name."""
    dtypes = [t.dtype for t in inputs.values()]
    packed = isinstance(heads, PackedHeads)
    made = (heads.pack(*parts, dtypes[0]),) if packed else heads.pack(parts, dtypes)  # type: ignore[call-arg,arg-type]
    return {name: of_layout(t, inputs[name].dim()) for name, t in zip(inputs, made, strict=True)}


def of_layout(t: torch.Tensor, dims: int) -> torch.Tensor:
    """[B, S, F] as it is, or of tokens [S, F]; it stands for its own storage, unlike a view."""
    return t if t.dim() == dims else torch.ops.aten._unsafe_view.default(t, [*t.shape[1:]])
