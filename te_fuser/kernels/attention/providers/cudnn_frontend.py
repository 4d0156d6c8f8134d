"""Attention by cuDNN: forward as PyTorch calls it, backward by NVIDIA's front end, which packs the gradient itself.

Where heads lie apart, samples have lengths or windows hide, both directions are the front end's.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_fuser.kernels.attention.blank_rows import Blank, by_torch
from te_fuser.kernels.attention.conditions import NO_MASK, ONE_STRIDE, capability, needs
from te_fuser.kernels.attention.cudnn_base import CudnnProvider
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Saved
from te_fuser.kernels.attention.separate import Separate, Targets, Tensors
from te_fuser.kernels.attention.structure import Sides
from te_fuser.kernels.attention.views import output_form, packed_forms
from te_fuser.kernels.packages import cudnn_attention, cudnn_frontend
from te_fuser.kernels.packages.cudnn_attention import Banded
from te_fuser.kernels.packages.cudnn_frontend import AttentionBackward, BackwardGraph, CudnnGraph
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.mask import BY_OFFSETS
from te_fuser.ops.sizes import asked

_GRAPHS_KEPT = 512
# cuDNN 9.19 gave NaN for queries that see nothing.
_SEES_SOMETHING = needs(
    lambda p: (
        not isinstance(p.settings.heads, ApartHeads)
        or (p.settings.mask.key_lengths in (None, p.settings.mask.lengths))
        and (not p.settings.mask.is_banded or p.positions == p.key_positions and p.settings.mask.keys_alike)
    ),
    lambda p: "queries and keys that are apart may differ in number or lengths, so that a query could see nothing",
)
# On an H200, 16384 positions, 512 shown on each side: 21 ms, where a window of 1024 before the query takes 1.8 ms.
_NO_RIGHT_BOUND = needs(
    lambda p: p.settings.mask.sides[1] in (None, 0),
    lambda p: "the window bounds later positions without hiding all of them, for which its backward is slow",
)
_NO_DROPOUT_APART = needs(
    lambda p: not p.settings.beyond or p.settings.dropout == 0.0,
    lambda p: f"it is called without dropout for {' and '.join(p.settings.beyond)}",
)


class CudaCudnnFrontend(CudnnProvider):
    """cuDNN's attention, whose backward stores the gradients of queries, keys and values where they lie packed."""

    name = "cuda_cudnn_frontend"
    packs = True
    beyond = tuple(words for words in STRUCTURES if words != BY_OFFSETS)
    by_structure = True
    # On an H200 (batch 4, 32 heads of 128 features, S 2048, lengths from 5/8 to all), beside FlashAttention-4 told the
    # same, and over what it takes beside it without lengths: 1.4 and 1.6 forward, 1.2 backward.
    by_lengths = (1.5, 1.22)
    calls = (30.0, 23.0)
    # Backward beside PyTorch's call of the same kernels, in a layer on an H200: 0.907 to 0.934 ms, with dropout
    # 1.131 to 1.146.
    speed = CudnnProvider.speed.times(1.0, 0.98)
    conditions = (
        *CudnnProvider.conditions,
        lambda p: cudnn_frontend.PACKAGE.missing(),
        NO_MASK,
        capability(9),
        ONE_STRIDE,
        _SEES_SOMETHING,
        _NO_RIGHT_BOUND,
        _NO_DROPOUT_APART,
    )

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why not; cuDNN itself is asked of a GPU at hand that is to run the backward."""
        reason, p = super().reason_not(problem), problem
        device = p.at_hand if p.settings.beyond else p.backward_on
        if reason is not None or device is None or not p.samples * p.positions * p.key_positions:
            return reason
        reason = cudnn_frontend.unusable(problem.cudnn)
        if reason is not None:
            return reason
        if p.settings.beyond:
            return asked(_why_none, _graphs, p.settings, p.samples, p.positions, p.key_positions, p.dtype, device)
        return asked(_why_none, _graph, p.settings, p.samples, p.positions, p.dtype, p.backward_on)

    def backward(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the packed input, in one pass.

        Raises:
            RuntimeError: when cuDNN takes no such problem, or fails.
        """
        x, y, *saved = (tensors[name] for name in ("input", "output", *self.emits))
        assert x is not None and y is not None
        if not x.numel():
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        graph = _graph(settings, *settings.heads.lengths(x.shape), x.dtype, x.device.index)
        if isinstance(graph, str):
            raise RuntimeError(f"{graph}; te_fuser.fusions.disabled('attention_{self.name}') plans without it")
        x, y, dy = (self._readable(tensor.contiguous()) for tensor in (x, y, dy))
        return graph.run(x, y, dy, tuple(tensor for tensor in saved if tensor is not None))

    def forward_separate(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank | None = by_torch
    ) -> tuple[torch.Tensor, Saved]:
        """The output, stored where it belongs, and the log of sums of exponentials.

        Raises:
            RuntimeError: when cuDNN takes no such problem, or fails.
        """
        call, tensors = _contiguous(self, settings, tensors)
        if call.is_empty:
            return self.nothing(call)
        sides, y, (q, k, v) = Sides.of(call, tensors), call.memory(), call.heads
        logsumexp = q.new_empty((*q.shape[:3], 1), dtype=torch.promote_types(q.dtype, torch.float32))
        graph = self._graphs_of(call)[0]
        graph.run_on([q, k, v, *_lengths(call, sides), call.split_output(y), logsumexp])
        sides.blank({"input": y}, blank)
        return y, self._saved(logsumexp, None, None)

    def backward_separate(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = by_torch
    ) -> Saved:
        """The gradients by input, stored where they belong.

        Raises:
            RuntimeError: when cuDNN takes no such problem, or fails.
        """
        call, tensors = _contiguous(self, settings, tensors)
        if call.is_empty:
            return call.zeros()
        y, logsumexp = tensors["output"], tensors["cudnn_logsumexp"]
        assert y is not None and logsumexp is not None
        out, dout = (call.split_output(self._readable(t.contiguous())) for t in (y, dy))
        sides, targets = Sides.of(call, tensors), Targets.of(call)
        graph = self._graphs_of(call)[1]
        graph.run_on([*call.heads, out, dout, logsumexp.contiguous(), *_lengths(call, sides), *targets.heads])
        found = targets.stored()
        sides.blank(found, blank)
        return found

    def _graphs_of(self, call: Separate) -> tuple[CudnnGraph, CudnnGraph]:
        q, k, _ = call.heads
        graphs = _graphs(call.settings, q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device.index)
        if isinstance(graphs, str):
            raise RuntimeError(f"{graphs}; te_fuser.fusions.disabled('attention_{self.name}') plans without it")
        return graphs


def _contiguous(provider: CudaCudnnFrontend, settings: AttentionSettings, tensors: Tensors) -> tuple[Separate, Tensors]:
    """The call of inputs that lie as graphs were told, and its tensors."""
    heads = Separate.of(settings, tensors).inputs
    found = {**tensors, **{name: provider._readable(t.contiguous()) for name, t in heads.items()}}
    return Separate.of(settings, found), found


def _lengths(call: Separate, sides: Sides) -> list[torch.Tensor]:
    """Lengths of queries and of keys, where graphs are told any."""
    if not call.settings.mask.counts:
        return []
    q = call.heads[0]
    return [
        q.new_full((q.shape[0],), side.positions, dtype=torch.int32) if side.lengths is None else side.lengths
        for side in sides.clamped()
    ]


@functools.lru_cache(maxsize=_GRAPHS_KEPT)
def _graphs(
    settings: AttentionSettings, samples: int, positions: int, keys: int, dtype: torch.dtype, device: int
) -> tuple[CudnnGraph, CudnnGraph] | str:
    """Both graphs of a problem beyond packed heads, made once; or why there are none."""
    mask = settings.mask
    call = Separate.on_meta(settings, samples, positions, keys, dtype)
    q, k, v, out = ((tuple(t.shape), t.stride()) for t in (*call.heads, call.split_output(call.memory())))
    ends = mask.corner == "bottom_right"
    return cudnn_attention.graphs_for(
        Banded(q, k, v, out, dtype, settings.scale, mask.sides, ends, mask.counts, device)
    )


@functools.lru_cache(maxsize=_GRAPHS_KEPT)
def _graph(
    settings: AttentionSettings, samples: int, positions: int, dtype: torch.dtype, device: int
) -> BackwardGraph | str:
    """The graph of a problem, made once; or why there is none."""
    forms = *packed_forms(settings, samples, positions), output_form(settings, samples, positions)
    choices = settings.causal, settings.dropout, settings.scale
    return cudnn_frontend.graph_for(AttentionBackward(*forms, dtype, *choices, device))


def _why_none(graph_of: Callable[..., Any], *problem: Any) -> str | None:
    """Why cuDNN takes no such problem; None if it does."""
    found = graph_of(*problem)
    return found if isinstance(found, str) else None


atexit.register(_graphs.cache_clear)
atexit.register(_graph.cache_clear)  # the front end's bindings print what outlives the interpreter, line by line
