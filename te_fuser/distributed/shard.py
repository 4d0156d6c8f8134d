"""Share: which part of a whole value the ranks of a group have each, and what each of them draws for it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from te_fuser.distributed.group import Group
from te_fuser.formula.evaluate import batch_layout
from te_fuser.formula.random import RandomStream, RankPlacement, Shared


@dataclass(frozen=True)
class Share:
    """Share of a value that this rank has.

    Attributes:
        rows: the groups whose ranks share the rows, each what the one before it leaves a rank; none: they are whole.
        dim: the dimension of the value that is cut for it; a negative one counts from the end.
        columns: the same of the features.
        parts: the features are so many tensors side by side (a gate and what it gates, say), each of them cut.
    """

    rows: tuple[Group, ...] = ()
    dim: int = 0
    columns: tuple[Group, ...] = ()
    parts: int = 1

    def shared(self, batch_dim: int | None, dimensions: int) -> Shared:
        """Sizes of the share without ranks, for an op with such a `batch_dim` and input."""
        dim = self.dim % dimensions
        samples = batch_dim is not None and bool(self.rows) and batch_dim % dimensions == dim
        return Shared(_size(self.rows), dim > 0, samples, _size(self.columns), self.parts)

    @property
    def ranks(self) -> tuple[int, int]:
        """Place among the ranks that share rows, and among those that share columns."""
        return _rank(self.rows), _rank(self.columns)

    @property
    def ranks_draw_apart(self) -> bool:
        """True where ranks have different parts, for which they draw different numbers."""
        return max(_size(self.rows), _size(self.columns)) > 1

    def placed(self, shape: tuple[int, ...], batch_dim: int | None = None) -> RankPlacement:
        """Placement in the whole of the rows and columns of a value of this shape."""
        block = max(math.prod(shape[self.dim % len(shape) : -1]), 1)
        return RankPlacement(self.shared(batch_dim, len(shape)), *self.ranks, block)


def _size(groups: tuple[Group, ...]) -> int:
    return math.prod(group.size for group in groups)


def _rank(groups: tuple[Group, ...]) -> int:
    """The place among the ranks of all these."""
    return functools.reduce(lambda place, group: place * group.size + group.rank, groups, 0)


def stream_of(
    seed: torch.Tensor, number: int, shape: tuple[int, ...], batch_dim: int | None = None, share: Share | None = None
) -> RandomStream:
    """The random stream `number` of a call by its (seed, offset), for an op."""
    value, offset = seed.tolist()
    placed = None if share is None else share.placed(shape, batch_dim)
    return RandomStream(value, offset, number, *batch_layout(shape, batch_dim), placed)


@contextlib.contextmanager
def own_state(stream: Callable[[], RandomStream], device: torch.device) -> Iterator[None]:
    """Context in which a device's generator draws by a rank's place and a stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a library draws for what ranks share, and its stream is being captured into a CUDA graph: replays would "
            "draw the same on all ranks. Set the dropout of attention to 0, or call the model without a graph"
        )
    found = stream()
    at = (0, 0) if found.placed is None else (found.placed.row_rank, found.placed.column_rank)
    text = repr((found.seed, found.offset, found.stream, at))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    generator = torch.default_generator if device.type != "cuda" else torch.cuda.default_generators[index]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
