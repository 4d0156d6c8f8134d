"""Collectives of a process group as ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_fuser.distributed.exchange import Exchange, UnderWay, exchanged
from te_fuser.distributed.group import Group, OfRanks
from te_fuser.dtypes import FLOAT8
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.checks import check_floating, count, whole_number, yes_or_no
from te_fuser.ops.operations import UnfusedOperation


class Carried(NamedTuple):
    """Dtypes of what an op joins in 8 bits: `values` are x and y, `gradients` dy and dx."""

    values: torch.dtype
    gradients: torch.dtype


def _gradient_dtype(op: Collective, dtype: torch.dtype) -> torch.dtype:
    return dtype if op.carried is None else op.carried.gradients


def _reading(op: Collective, x: Spec) -> str:
    forth, at = op.forth, f"each of {op.group.size} ranks ({op.group.title})"
    if forth is None or op.group.size == 1:
        return ""
    given = f"{list(x.shape)} of {at}"
    cut = "" if forth.cut is None else f", cut along dimension {forth.cut}"
    return f"{given}{cut}, {'added up' if forth.join is None else f'joined along dimension {forth.join}'}"


@op_table.reading.row(_reading)
@op_table.gradient_dtype.row(_gradient_dtype)
class Collective(OfRanks, UnfusedOperation):
    """An op that the ranks of a group run together, each on an x of the same shape and dtype.

    All ranks have to run their collectives in the same order. It starts and waits in separate steps, between which
    independent steps run. In a group of one rank, y = x.

    Args:
        group: a dimension of a DeviceMesh (`mesh["tp"]`), a ProcessGroup, or a `Group`; it may be set later, too.

    Attributes:
        group: the same as a `Group`.
        carried: the dtypes that it sends, forward and backward, in FP8; None: x's, both ways.

    Raises:
        TypeError: for anything else as a group.
        ValueError: for a mesh of several dimensions, a group that this process is not in, and, when a call is planned,
            an x that cannot be cut so.
        RuntimeError: in a call, when torch.distributed does not know the group.
    """

    family = True
    carried: Carried | None = None
    reads = ()

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    @property
    def forth(self) -> Exchange | None:
        """Exchange of x; None: y = x."""
        raise NotImplementedError(f"{type(self).__name__} must say what it exchanges")

    @property
    def back(self) -> Exchange | None:
        """Exchange of dy; None: dx = dy."""
        raise NotImplementedError(f"{type(self).__name__} must say what it exchanges in backward")

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

    def _way(self, exchange: Exchange | None) -> Exchange | None:
        return None if self.group.size == 1 else exchange

    @property
    def op_wait(self) -> Callable[..., Any] | None:  # type: ignore[override]
        return None if self._way(self.forth) is None else self.wait

    def exchange(self, back: bool) -> Exchange | None:
        begins = "start_gradient" if back else "op_forward"
        if getattr(type(self), begins) is not getattr(Collective, begins):  # a subclass may do something else
            return None
        return self._way(self.back if back else self.forth)

    def infer(self, x: Spec) -> Spec:
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
        wider = _gradient_dtype(self, x.dtype).itemsize / x.dtype.itemsize
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


class AllGather(Collective):
    """Concatenate the x of all ranks along a dimension: y = [x of rank 0; x of rank 1; ..], equal on all ranks.

    dx is this rank's block of the sum of all dy, as by `ReduceScatter`: later ops may differ between ranks (a weight
    sharded by its outputs, say), and the loss is the sum over the ranks.

    Args:
        group: the ranks; see `Collective`.
        dim: the dimension to concatenate along; negative ones count from the end.

    Raises:
        ValueError: when x has no such dimension.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
    """

    def __init__(self, group: Any, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = whole_number("AllGather", "dim", dim)

    @property
    def forth(self) -> Exchange:
        return Exchange(join=self.dim)

    @property
    def back(self) -> Exchange:
        return Exchange(cut=self.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


class AllReduce(Collective):
    """Add up the x of all ranks: y = sum(x), dx = dy.

    Later ops are the same on all ranks, and so is dy: the loss is that of any one of them. The sum is in x's dtype.

    Args:
        group: the ranks; see `Collective`.

    Source: g in Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism"
    (2019).
    """

    @property
    def forth(self) -> Exchange:
        return Exchange()

    @property
    def back(self) -> None:
        return None


class AllReduceGradient(Collective):
    """Return x, and add up the gradients of all ranks: y = x, dx = sum(dy).

    x is the same on all ranks; later ops compute this rank's share (a weight sharded by its outputs, say). The sum is
    in dy's dtype.

    Args:
        group: the ranks; see `Collective`.

    Source: f in Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism"
    (2019).
    """

    @property
    def forth(self) -> None:
        return None

    @property
    def back(self) -> Exchange:
        return Exchange()


class AllToAll(Collective):
    """Send each rank its block of x along `cut`, and concatenate the received blocks along `join`.

    A value sharded along `join` becomes one sharded along `cut`: by heads in place of positions, say. dx is dy sent
    back, with the dimensions exchanged; the loss is the sum over the ranks.

    Args:
        group: the ranks; see `Collective`.
        cut: the dimension to divide into equal parts, one a rank; negative ones count from the end.
        join: the dimension to concatenate along.
        parts: relative sizes of parts along the last dimension, as (4, 2, 2) of queries, keys and values: each is
            divided and joined by itself.
        balanced: ranks have two blocks of each sequence, as `cut_sequence(balanced=True)` gives them.

    Raises:
        ValueError: when x has no such dimensions, or the first cannot be cut so.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    def __init__(self, group: Any, cut: int, join: int, parts: tuple[int, ...] = (1,), balanced: bool = False) -> None:
        super().__init__(group)
        self.cut = whole_number("AllToAll", "cut", cut)
        self.join = whole_number("AllToAll", "join", join)
        self.parts = tuple(count("AllToAll", "a size of parts", size) for size in parts)
        self.balanced = yes_or_no("AllToAll", "balanced", balanced)

    @property
    def forth(self) -> Exchange:
        return Exchange(self.cut, self.join, self.parts, self.balanced)

    @property
    def back(self) -> Exchange:
        return self.forth.back

    def extra_repr(self) -> str:
        parts = f", parts={self.parts}" * (len(self.parts) > 1)
        balanced = ", balanced=True" * self.balanced
        return f"{super().extra_repr()}, cut={self.cut}, join={self.join}{parts}{balanced}"


class ReduceScatter(Collective):
    """Add up the x of all ranks, of which each gets its block along a dimension: y = block of rank in sum(x).

    dx are the dy of all ranks joined, as `AllGather` gives them; the loss is the sum of all ranks'. The sum is taken in
    x's dtype.

    Args:
        group: the ranks; see `Collective`.
        dim: the dimension that is cut into as many equal parts as there are ranks; a negative one counts from the end.

    Raises:
        ValueError: when x has no such dimension, or it cannot be cut so.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
    """

    def __init__(self, group: Any, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = whole_number("ReduceScatter", "dim", dim)

    @property
    def forth(self) -> Exchange:
        return Exchange(cut=self.dim)

    @property
    def back(self) -> Exchange:
        return Exchange(join=self.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"
