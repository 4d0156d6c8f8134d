"""Collective: an op that the ranks of a group run together, and what they exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from te_fuser.dtypes import FLOAT8
from te_fuser.ops import telling
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.checks import check_floating
from te_fuser.ops.group import Group, OfRanks
from te_fuser.ops.spread import FEATURES, GATHERED, PARTIAL, WHOLE, Spread, Told, rows
from te_fuser.ops.unfused_operation import UnfusedOperation


class Work(Protocol):
    """An exchange that was started."""

    def wait(self) -> object:
        """Have the current stream wait until it is done."""


class UnderWay(NamedTuple):
    """A tensor that other ranks send, and the work that ends when it is there."""

    arriving: torch.Tensor
    work: Work


class Transport(Protocol):
    """A way to move tensors between ranks, whose blocks lie one behind the other; each method starts to fill `made`."""

    def gather(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """Every rank's tensor."""

    def scatter(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """The sum of every rank's block for this one."""

    def swap(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        """Every rank's block for this one."""


class ByProcessGroup:
    """Collectives of torch.distributed."""

    def __init__(self, group: Group) -> None:
        telling.start(group)
        self._ranks = group.process_group()

    def gather(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        return self._ranks._allgather_base(made, sent)

    def scatter(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        return self._ranks._reduce_scatter_base(made, sent, torch.distributed.ReduceScatterOptions())

    def swap(self, sent: torch.Tensor, made: torch.Tensor) -> Work:
        return self._ranks.alltoall_base(made, sent, [], [])

    def add_up(self, summed: torch.Tensor) -> Work:
        """The sum of every rank's tensor, in the place of this one's."""
        return self._ranks.allreduce([summed])


@dataclass(frozen=True)
class Exchange:
    """What ranks do with a tensor of each, all of one shape.

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
        """That of the gradient, of the sum of all ranks' losses: where it cuts, what comes back is joined."""
        return Exchange(self.join, self.cut, self.parts, self.balanced)

    def shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The shape of what a rank has in the end.

        Raises:
            ValueError: when its own cannot be cut or joined so.
        """
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
        """The bytes that a rank sends of its own, of `size`; where all get the sum, in two rounds."""
        if self.cut is None and self.join is not None:
            return size * (ranks - 1)
        return size * (ranks - 1) / ranks * (2 if self.cut is None else 1)

    def _blocks_of_a_rank(self, dim: int) -> int:
        if dim == -1:
            return sum(self.parts) // math.gcd(*self.parts)
        return 2 if self.balanced else 1

    def start(self, x: torch.Tensor, group: Group, by: Transport | None = None) -> UnderWay:
        """Send x; what comes back is there when `wait` has waited for it.

        Args:
            by: what moves it; None: the ProcessGroup.
        """
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
        """Wait for what `start` gave, and join it.

        Args:
            dtype: of 8 bits, which are sent as bytes.
        """
        started.work.wait()
        y = started.arriving
        y = y if self.join is None else self._join(y, self.join, group.size)
        return y if dtype is None else y.view(dtype)

    def _cut(self, x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        if dim == -1 and len(self.parts) > 1:
            return _blocks_of_parts(x, self.parts, n)
        return _blocks(_in_turns(x, dim, n) if dim != -1 and self.balanced else x, dim, n)

    def _join(self, blocks: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        if dim == -1 and len(self.parts) > 1:
            return _joined_parts(blocks, self.parts, n)
        y = _joined(blocks, dim, n)
        return _in_order(y, dim, n) if dim != -1 and self.balanced else y

    def run(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Both at once."""
        return self.wait(self.start(x, group), group)


def _blocks(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """[.., n s, ..] -> [n .., s, ..]: the n blocks along a dimension, one behind the other along the first."""
    if dim % x.dim() == 0:
        return x
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim % x.dim(), 0).flatten(0, 1)


def _joined(blocks: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """[n .., s, ..] -> [.., n s, ..]: the same the other way round."""
    at = dim % blocks.dim()
    if at == 0:
        return blocks
    return blocks.unflatten(0, (n, blocks.shape[0] // n)).movedim(0, at).flatten(at, at + 1)


def _in_turns(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Of 2 n blocks along a dimension the first and the last, the second and the last but one, and so on."""
    blocks = x.chunk(2 * n, dim)
    return torch.cat([blocks[k] for rank in range(n) for k in (rank, 2 * n - 1 - rank)], dim)


def _in_order(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """The same the other way round."""
    blocks = x.chunk(2 * n, dim)
    return torch.cat((*blocks[::2], *blocks[::-2]), dim)


def _sizes(parts: tuple[int, ...], features: int) -> list[int]:
    return [features * part // sum(parts) for part in parts]


def _blocks_of_parts(x: torch.Tensor, parts: tuple[int, ...], n: int) -> torch.Tensor:
    """[.., F] -> [n .., F / n]: a block for each rank, of each of the parts of the features its block."""
    *rows, features = x.shape
    made = x.new_empty(n, *rows, features // n)
    targets = made.split(_sizes(parts, features // n), -1)
    for target, part in zip(targets, x.split(_sizes(parts, features), -1), strict=True):
        target.copy_(part.unflatten(-1, (n, part.shape[-1] // n)).movedim(-2, 0))
    return made.flatten(0, 1)


def _joined_parts(blocks: torch.Tensor, parts: tuple[int, ...], n: int) -> torch.Tensor:
    """[n .., F / n] -> [.., F]: the same the other way round."""
    apart = blocks.unflatten(0, (n, blocks.shape[0] // n))
    features = n * blocks.shape[-1]
    made = blocks.new_empty(*apart.shape[1:-1], features)
    sources = apart.split(_sizes(parts, blocks.shape[-1]), -1)
    for part, source in zip(made.split(_sizes(parts, features), -1), sources, strict=True):
        part.unflatten(-1, (n, part.shape[-1] // n)).copy_(source.movedim(0, -2))
    return made


def _along(dim: int) -> Spread:
    """What is cut along a dimension."""
    return FEATURES if dim == -1 else rows(dim)


class Carried(NamedTuple):
    """What an op exchanges where that is of 8 bits in one direction, which is joined there and not added up.

    Attributes:
        values: the dtype of x and y.
        gradients: that of dy and dx.
    """

    values: torch.dtype
    gradients: torch.dtype


class Collective(OfRanks, UnfusedOperation):
    """An op that the ranks of a group run together, each on an x of the same shape and dtype.

    Every rank has to run it, in the same place among the collectives that they run. It starts and waits in steps of its
    own, so that what does not need it runs in between. In a group of one rank, y = x.

    Args:
        group: a dimension of a DeviceMesh (`mesh["tp"]`), a ProcessGroup, or a `Group`; it may be set later, too.

    Attributes:
        group: the same as a `Group`.
        carried: the dtypes of what it exchanges where x or dy comes in 8 bits; None: x's, both ways.

    Raises:
        TypeError: for anything else as a group.
        ValueError: for a mesh of several dimensions, a group that this process is not in, and, when a call is planned,
            an x that cannot be cut so.
        RuntimeError: in a call, when torch.distributed does not know the group.
    """

    family = True
    carried: Carried | None = None
    reads = ()
    prototype_arguments = {"group": Group()}

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    @property
    def forth(self) -> Exchange | None:
        """What is exchanged of x; None: y = x."""
        raise NotImplementedError(f"{type(self).__name__} must say what it exchanges")

    @property
    def back(self) -> Exchange | None:
        """The same of dy; None: dx = dy."""
        raise NotImplementedError(f"{type(self).__name__} must say what it exchanges in backward")

    def runs_with(self) -> Group | None:
        return self.group if self.group.size > 1 else None

    def spread(self, x: Spread, told: Told) -> Spread:
        """What is joined was cut so, what is added up were terms; those of another group change nothing."""
        forth = self.forth
        if self.group != told.group or self.group.size == 1:
            return x
        takes = WHOLE if forth is None else PARTIAL if forth.join is None else _along(forth.join)
        if x != takes:
            raise ValueError(
                f"{type(self).__name__} takes what is {takes} in the ranks of {self.group.title}, and x is {x}: put it "
                "elsewhere, or leave it to the products, which by their parallel_mode have what they need"
            )
        if forth is not None and forth.cut is not None:
            return _along(forth.cut)
        return WHOLE if self.back is None else GATHERED

    @property
    def ranks(self) -> int:  # type: ignore[override]
        return self.group.size

    @property
    def views(self) -> str:  # type: ignore[override]
        return "input" if self._way(self.forth) is None else ""

    @property
    def gathers(self) -> bool:  # type: ignore[override]
        forth = self._way(self.forth)
        return forth is not None and forth.cut is None and forth.join is not None

    @property
    def input_dtypes(self) -> tuple[torch.dtype, ...]:  # type: ignore[override]
        return () if self.carried is None else (self.carried.values,)

    @property
    def takes_gradients_in(self) -> tuple[torch.dtype, ...]:  # type: ignore[override]
        return () if self.carried is None else (self.carried.gradients,)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.carried is None else self.carried.gradients

    def _way(self, exchange: Exchange | None) -> Exchange | None:
        return None if self.group.size == 1 else exchange

    @property
    def op_wait(self) -> Callable[..., Any] | None:  # type: ignore[override]
        return None if self._way(self.forth) is None else self.wait

    def infer(self, x: Spec) -> Spec:
        if x.dtype not in self.input_dtypes:
            check_floating(x)
        if self.forth is None:
            return x
        try:
            return Spec(self.forth.shape(x.shape, self.group.size), x.dtype, x.device)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} on {self.group}: {error}") from error

    def sent_bytes(self, x: Spec, back: bool) -> float:
        forth, way, ranks = self.forth, self._way(self.back if back else self.forth), self.group.size
        if way is None:
            return 0.0
        if not back:
            return way.sent(x.nbytes, ranks)
        grown = 1.0 if forth is None else (ranks if forth.join is not None else 1) / (1 if forth.cut is None else ranks)
        wider = self.gradient_dtype(x.dtype).itemsize / x.dtype.itemsize
        return way.sent(x.nbytes * grown * wider, ranks)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        if self._way(self.back) is None:
            return (Gradient(("input",), (), "pass_gradient"),)
        return (Gradient(("input",), (), "start_gradient", wait="wait_gradient"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor | UnderWay:  # type: ignore[override]
        forth = self._way(self.forth)
        return x.view_as(x) if forth is None else forth.start(x, self._known(), call.transport)

    def wait(self, call: OpCall, started: UnderWay) -> torch.Tensor:
        """y of what came back."""
        assert self.forth is not None
        return self.forth.wait(started, self.group, _bits(self.carried and self.carried.values))

    def pass_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        """dx = dy."""
        return {"input": dy}

    def start_gradient(self, call: OpCall, dy: torch.Tensor) -> UnderWay:
        """Send dy."""
        assert self.back is not None
        return self.back.start(dy, self._known(), call.transport)

    def wait_gradient(self, call: OpCall, started: UnderWay) -> dict[str, torch.Tensor]:
        """dx of what came back."""
        assert self.back is not None
        return {"input": self.back.wait(started, self.group, _bits(self.carried and self.carried.gradients))}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return exchanged(x, self._way(self.forth), self._way(self.back), self._known())

    def reading(self, x: Spec) -> str:
        forth, at = self.forth, f"each of {self.group.size} ranks ({self.group.title})"
        if forth is None or self.group.size == 1:
            return ""
        given = f"{list(x.shape)} of {at}"
        cut = "" if forth.cut is None else f", cut along dimension {forth.cut}"
        return f"{given}{cut}, {'added up' if forth.join is None else f'joined along dimension {forth.join}'}"

    def _known(self) -> Group:
        """The group, of which torch.distributed knows."""
        if self.group.size > 1:
            try:
                self.group.process_group()
            except RuntimeError as error:
                raise RuntimeError(f"{type(self).__name__}: {error}") from error
        return self.group

    def extra_repr(self) -> str:
        return f"group={self.group.title!r}, ranks={self.group.size}"


def _bits(dtype: torch.dtype | None) -> torch.dtype | None:
    """A dtype of 8 bits; None of another one."""
    return dtype if dtype in FLOAT8.values() else None


def exchanged(x: torch.Tensor, forth: Exchange | None, back: Exchange | None, group: Group) -> torch.Tensor:
    """x exchanged so, as autograd and transforms of torch.func follow it: its gradient is exchanged the other way."""
    return _Exchanged.apply(x, forth, back, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """It is linear, so its derivatives are exchanges, too."""

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
