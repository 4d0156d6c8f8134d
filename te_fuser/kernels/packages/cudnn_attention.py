"""Attention as graphs of NVIDIA's Python front end of cuDNN that are told lengths of samples, and which band shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.kernels.packages.cudnn_frontend import _IO_TYPES, CudnnGraph, made

# Sizes and strides of heads [b, h, S, D].
Form = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Banded:
    """What both directions are built for.

    Attributes:
        q, k, v, out: where heads lie, and their gradients in theirs.
        band: (left, right), how many positions before and after its own a query sees; None: all of them.
        from_the_end: whether positions are counted from the last query and key.
        lengths: whether int32 lengths [b] of queries and of keys are given.
        device: the GPU's index.
    """

    q: Form
    k: Form
    v: Form
    out: Form
    dtype: torch.dtype
    scale: float
    band: tuple[int | None, int | None]
    from_the_end: bool
    lengths: bool
    device: int


def graphs_for(problem: Banded) -> tuple[CudnnGraph, CudnnGraph] | str:
    """Forward and backward, or why cuDNN does not take it.

    Forward runs on q, k, v, lengths of queries and keys if there are any, the output, and the log of sums of
    exponentials [b, h, S, 1]; backward on q, k, v, the output, its gradient, that log, the lengths, dq, dk, dv.
    """

    def of(described: Callable[[Any, Banded, Any], tuple[Any, tuple[int, ...]]], direction: str) -> CudnnGraph | str:
        what = f"{direction} of attention"
        return made(
            problem, lambda p: CudnnGraph(p, lambda cudnn, handle: described(cudnn, p, handle), what), direction
        )

    forward, backward = of(_forward, "forward"), of(_backward, "backward")
    if isinstance(forward, str) or isinstance(backward, str):
        return forward if isinstance(forward, str) else str(backward)
    return forward, backward


class _Description:
    """A graph in the making; tensors are numbered in the order in which they are added."""

    def __init__(self, cudnn: Any, p: Banded, handle: Any) -> None:
        self.kinds, self.p, self.cudnn = cudnn.data_type, p, cudnn
        self.io = getattr(self.kinds, _IO_TYPES[p.dtype])
        wide = self.kinds.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.io, intermediate_data_type=wide, compute_data_type=wide, handle=handle
        )
        self.uids: list[int] = []

    def add(self, name: str, form: Form, kind: Any = None) -> Any:
        """A tensor that is read."""
        sizes, strides = form
        kind = self.io if kind is None else kind
        return self.graph.tensor(name=name, dim=sizes, stride=strides, data_type=kind, uid=self._next())

    def give(self, tensor: Any, form: Form, kind: Any = None) -> None:
        """One that is written."""
        sizes, strides = form
        tensor.set_output(True).set_uid(self._next()).set_dim(sizes).set_stride(strides)
        tensor.set_data_type(self.io if kind is None else kind)

    @property
    def stats(self) -> Form:
        """Where the log of sums lies."""
        b, h, length, _ = self.p.q[0]
        return (b, h, length, 1), (h * length, length, 1, 1)

    def choices(self) -> dict[str, Any]:
        """Scale, band and lengths, as both nodes take them."""
        p, corners = self.p, self.cudnn.diagonal_alignment
        found: dict[str, Any] = {"attn_scale": p.scale}
        left, right = p.band
        if p.band != (None, None):
            found["diagonal_alignment"] = corners.BOTTOM_RIGHT if p.from_the_end else corners.TOP_LEFT
        if left is not None:
            found["diagonal_band_left_bound"] = left + 1  # it counts the query's own position
        if right is not None:
            found["diagonal_band_right_bound"] = right
        if p.lengths:
            ones = ((p.q[0][0], 1, 1, 1), (1, 1, 1, 1))
            given = {name: self.add(name, ones, self.kinds.INT32) for name in ("seq_len_q", "seq_len_kv")}
            found |= {"use_padding_mask": True, **given}
        return found

    def _next(self) -> int:
        self.uids.append(len(self.uids) + 1)
        return self.uids[-1]


def _forward(cudnn: Any, p: Banded, handle: Any) -> tuple[Any, tuple[int, ...]]:
    d = _Description(cudnn, p, handle)
    read = {name: d.add(name, form) for name, form in (("q", p.q), ("k", p.k), ("v", p.v))}
    out, stats = d.graph.sdpa(**read, **d.choices(), generate_stats=True)
    d.give(out, p.out)
    d.give(stats, d.stats, d.kinds.FLOAT)
    return d.graph, tuple(d.uids)


def _backward(cudnn: Any, p: Banded, handle: Any) -> tuple[Any, tuple[int, ...]]:
    d = _Description(cudnn, p, handle)
    read = {name: d.add(name, form) for name, form in zip(("q", "k", "v"), (p.q, p.k, p.v), strict=True)}
    read |= {name: d.add(name, p.out) for name in ("o", "dO")}
    read["stats"] = d.add("stats", d.stats, d.kinds.FLOAT)
    gradients = d.graph.sdpa_backward(**read, **d.choices())
    for gradient, form in zip(gradients, (p.q, p.k, p.v), strict=True):
        d.give(gradient, form)
    return d.graph, tuple(d.uids)
