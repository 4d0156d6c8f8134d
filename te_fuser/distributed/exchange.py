"""Exchange: what ranks do with tensors of each, and what moves these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from te_fuser.distributed.consistency import RankMismatchError
from te_fuser.distributed.group import Group
from te_fuser.dtypes import FLOAT8


class Work(Protocol):
    """An exchange that was started."""

    def wait(self) -> object:
        """Have the current stream wait until it is done."""


class UnderWay(NamedTuple):
    """A tensor that other ranks send, and the work that ends when it is there."""

    arriving: torch.Tensor
    work: Work


class Transport(Protocol):
    """A way to move tensors between ranks, in blocks; a method begins to fill `made`."""

    def gather(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """Gather every rank's tensor."""

    def scatter(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """The sum of every rank's block for this one."""

    def swap(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """Swap blocks: receive every rank's block for this one."""


class ByProcessGroup:
    """Collectives of torch.distributed."""

    def __init__(self, group: Group) -> None:
        self._group, self._ranks = group, group.process_group()

    def gather(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        return _CollectiveUnderWay("all_gather", sent.shape, self._group, self._ranks._allgather_base(made, sent))

    def scatter(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        started = self._ranks._reduce_scatter_base(made, sent, torch.distributed.ReduceScatterOptions())
        return _CollectiveUnderWay("reduce_scatter", sent.shape, self._group, started)

    def swap(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        return _CollectiveUnderWay("all_to_all", sent.shape, self._group, self._ranks.alltoall_base(made, sent, [], []))

    def add_up(self, summed: torch.Tensor) -> Work:
        """The sum of every rank's tensor, in the place of this one's."""
        return _CollectiveUnderWay("all_reduce", summed.shape, self._group, self._ranks.allreduce([summed]))


class _CollectiveUnderWay(NamedTuple):
    """A collective that was started; where it fails its error says who waited in what."""

    name: str
    shape: torch.Size
    group: Group
    started: Work

    def wait(self) -> None:
        try:
            self.started.wait()
        except RuntimeError as error:
            words = f"{self.group} waited in {self.name} of {list(self.shape)} for ranks that did not come to it"
            raise RankMismatchError(f"{words}: {error}") from error


@dataclass(frozen=True)
class Exchange:
    """Exchange among ranks of one tensor from each, all of one shape.

    Attributes:
        cut: the dimension along which each rank cuts its own into a block for every rank; None: all get the whole.
        join: the dimension along which what arrives is joined, in the order of ranks; None: it is added up.
        parts: sizes of what lies side by side along the last dimension, as far as they matter, each of which is cut
            and joined by itself.
        balanced: whether along the other dimension the ranks have their blocks as `Context` says of balanced ones.
    """

    cut: int | None = None
    join: int | None = None
    parts: tuple[int, ...] = (1,)
    balanced: bool = False

    @property
    def back(self) -> Exchange:
        """Exchange of the gradient: cut and join change places."""
        return Exchange(self.join, self.cut, self.parts, self.balanced)

    def shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape of what a rank has in the end; ValueError where there is none."""
        sizes = list(shape)
        for dim, what in ((self.cut, "to cut"), (self.join, "to join along")):
            if dim is not None and not -len(sizes) <= dim < len(sizes):
                raise ValueError(f"an input of shape {list(shape)} has no dimension {dim} {what}: give another one")
        if self.cut is not None:
            least = ranks * self._blocks_of_a_rank(self.cut)
            if sizes[self.cut] % least != 0:
                raise ValueError(
                    f"dimension {self.cut} of an input of shape {list(shape)} cannot be cut into {least} equal parts: "
                    f"pad it to a multiple of {least}, or cut another one"
                )
            sizes[self.cut] //= ranks
        if self.join is not None:
            own = self._blocks_of_a_rank(self.join)
            if sizes[self.join] % own != 0:
                raise ValueError(
                    f"dimension {self.join} of an input of shape {list(shape)} are no {own} equal blocks, which each "
                    f"rank has: pad what ranks cut to a multiple of {own * ranks}"
                )
            sizes[self.join] *= ranks
        return tuple(sizes)

    def sent(self, size: float, ranks: int) -> float:
        """Bytes that a rank sends of its own, of `size`; a sum takes two rounds."""
        if self.cut is None and self.join is not None:
            return size * (ranks - 1)
        return size * (ranks - 1) / ranks * (2 if self.cut is None else 1)

    def _blocks_of_a_rank(self, dim: int) -> int:
        if dim == -1:
            return sum(self.parts) // math.gcd(*self.parts)
        return 2 if self.balanced else 1

    def start(self, x: torch.Tensor, group: Group, by: Transport | None = None) -> UnderWay:
        """Send x, by default by the ProcessGroup; `wait` gives what comes back."""
        n, x = group.size, x.detach()
        x = x.view(torch.uint8) if x.dtype in FLOAT8.values() else x  # of which not every backend knows
        sent = (x if self.cut is None else self._cut(x, self.cut, n)).contiguous()
        if self.cut is None and self.join is None:
            summed = sent.clone()
            return UnderWay(summed, ByProcessGroup(group).add_up(summed))
        rows = sent.shape[0] * (1 if self.join is None else n) // (1 if self.cut is None else n)
        made = sent.new_empty(rows, *sent.shape[1:])
        by = by or ByProcessGroup(group)
        return UnderWay(
            made, (by.gather if self.cut is None else by.scatter if self.join is None else by.swap)(sent, made)
        )

    def wait(self, started: UnderWay, group: Group, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Wait for what `start` gave, and join it; `dtype` of 8 bits is sent as bytes."""
        started.work.wait()
        y = started.arriving
        y = y if self.join is None else self._join(y, self.join, group.size)
        return y if dtype is None else y.view(dtype)

    def _cut(self, x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        """[.., n s, ..] -> [n .., s, ..]: n blocks along a dimension, along the first one."""
        if dim == -1 and len(self.parts) > 1:
            *rows, features = x.shape
            made = x.new_empty(n, *rows, features // n)
            targets = made.split(_sizes(self.parts, features // n), -1)
            for target, part in zip(targets, x.split(_sizes(self.parts, features), -1), strict=True):
                target.copy_(part.unflatten(-1, (n, part.shape[-1] // n)).movedim(-2, 0))
            return made.flatten(0, 1)
        if dim != -1 and self.balanced:  # of 2 n blocks the first and the last, the second and the last but one, ...
            halves = x.chunk(2 * n, dim)
            x = torch.cat([halves[k] for rank in range(n) for k in (rank, 2 * n - 1 - rank)], dim)
        at = dim % x.dim()
        return x.unflatten(at, (n, x.shape[at] // n)).movedim(at, 0).flatten(0, 1) if at else x

    def _join(self, blocks: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        """[n .., s, ..] -> [.., n s, ..]: the same the other way round."""
        if dim == -1 and len(self.parts) > 1:
            return _joined_parts(blocks, self.parts, n)
        at = dim % blocks.dim()
        y = blocks.unflatten(0, (n, blocks.shape[0] // n)).movedim(0, at).flatten(at, at + 1) if at else blocks
        if dim != -1 and self.balanced:
            halves = y.chunk(2 * n, dim)
            y = torch.cat((*halves[::2], *halves[::-2]), dim)
        return y

    def run(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Start the exchange and wait for it."""
        return self.wait(self.start(x, group), group)


def _sizes(parts: tuple[int, ...], features: int) -> list[int]:
    return [features * part // sum(parts) for part in parts]


def _joined_parts(blocks: torch.Tensor, parts: tuple[int, ...], n: int) -> torch.Tensor:
    """[n .., F / n] -> [.., F]: of each rank's block, its share of each of the parts."""
    apart = blocks.unflatten(0, (n, blocks.shape[0] // n))
    features = n * blocks.shape[-1]
    made = blocks.new_empty(*apart.shape[1:-1], features)
    sources = apart.split(_sizes(parts, blocks.shape[-1]), -1)
    for part, source in zip(made.split(_sizes(parts, features), -1), sources, strict=True):
        part.unflatten(-1, (n, part.shape[-1] // n)).copy_(source.movedim(0, -2))
    return made


def exchanged(x: torch.Tensor, forth: Exchange | None, back: Exchange | None, group: Group) -> torch.Tensor:
    """x exchanged so for autograd and torch.func: its gradient is exchanged the other way."""
    return _Exchanged.apply(x, forth, back, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """Function of an exchange, which is linear, so its derivatives are exchanges, too."""

    @staticmethod
    def forward(x: torch.Tensor, forth: Exchange | None, back: Exchange | None, group: Group) -> torch.Tensor:
        return x.view_as(x) if forth is None else forth.run(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.way = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        forth, back, group = ctx.way
        return exchanged(gradients[0], back, forth, group), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return exchanged(tangents[0], *ctx.way)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *way: Any) -> tuple[torch.Tensor, int]:
        return torch.stack([exchanged(one, *way) for one in x.unbind(in_dims[0])]), 0
