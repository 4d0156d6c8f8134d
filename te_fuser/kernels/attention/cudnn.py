"""Attention by cuDNN, as PyTorch calls it and by NVIDIA's front end."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from te_fuser.kernels.attention.lengths import Blank, Sides, blank_by_torch
from te_fuser.kernels.attention.problem import (
    DROPS_SOME,
    IN_GRID,
    NO_MASK,
    ONE_SIZE,
    ONE_STRIDE,
    SQUARE_IF_CAUSAL,
    AttentionProblem,
    Condition,
    capability,
    cuda_kernel,
    head_dim,
    needs,
)
from te_fuser.kernels.attention.provider import CudaProvider, Saved, Speed
from te_fuser.kernels.attention.qkv_views import (
    AttentionInputs,
    Gradients,
    HeadsCall,
    Tensors,
    output_form,
    packed_forms,
)
from te_fuser.kernels.packages import cudnn_frontend
from te_fuser.kernels.packages.cudnn_frontend import AttentionBackward, BackwardGraph, Banded, CudnnGraph
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads, inputs_of
from te_fuser.ops.attention.mask import BY_OFFSETS, PADDED
from te_fuser.ops.sizes import asked


class CudnnProvider(CudaProvider):
    """Forward by PyTorch's operator; backward is what a provider adds."""

    schemas = (
        "aten::_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
        "aten::_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor)",
    )
    beyond: ClassVar[tuple[str, ...]] = (*STRUCTURES, PADDED)
    emits = ("cudnn_logsumexp", "cudnn_seed", "cudnn_offset")
    speed = Speed(
        {
            (True, False): (1.18, 1.32),
            (True, True): (2.67, 1.73),
            (False, False): (1.63, 1.62),
            (False, True): (4.29, 2.34),
        },
        {True: (730.0, 1320.0), False: (220.0, 550.0)},
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        *cuda_kernel("cuda_cudnn", 8, torch.bfloat16, torch.float16),
        head_dim(128),
        IN_GRID,
        needs(lambda p: p.cudnn >= 90000, lambda p: f"it needs cuDNN 9.0, found {p.cudnn}"),
        needs(lambda p: 1 not in (p.positions, p.key_positions), lambda p: "it takes no sequence of length 1"),
        ONE_SIZE,
        SQUARE_IF_CAUSAL,
        needs(lambda p: not p.deterministic, lambda p: "its backward does not repeat bit for bit"),
        needs(
            lambda p: p.settings.dropout == 0.0 or not 91100 < p.cudnn < 91400,
            lambda p: f"cuDNN {p.cudnn} has no dropout in attention",
        ),
        DROPS_SOME,
    )

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        result = self._forward(
            call.q, call.k, call.v, call.bias, True, settings.dropout, call.causal, False, scale=settings.scale
        )
        out, logsumexp, _, _, _, _, seed, offset, _ = result
        return out, self._saved(logsumexp, seed, offset)


class CudaCudnn(CudnnProvider):
    """cuDNN's attention.

    Its dropout is unbiased (cuDNN 9.19): in 100 calls of 34 million probabilities each it dropped 0.099995 +- 0.000009
    for 0.1, 0.200010 +- 0.000014 for 0.2 and 0.500018 +- 0.000020 for 0.5, and scaled the others by 1 / (1 - p).
    """

    name = "cuda_cudnn"

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings = call.settings
        no_varying_lengths = (None, None, call.positions, call.keys)
        tensors = (dout, call.q, call.k, call.v, out, *(saved[name] for name in self.emits), call.bias)
        return self._backward(*tensors, *no_varying_lengths, settings.dropout, call.causal, scale=settings.scale)


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
    """cuDNN's attention, whose backward stores packed gradients."""

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
        """Reason against the problem; of a backward cuDNN is asked on a GPU at hand."""
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
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = blank_by_torch
    ) -> Saved:
        """The gradients by input, of packed heads in one pass."""
        if settings.beyond:
            return super().backward(settings, tensors, dy, blank)
        x, y, *saved = (tensors[name] for name in ("input", "output", *self.emits))
        assert x is not None and y is not None
        if not x.numel():
            return {"input": torch.zeros_like(x, memory_format=torch.contiguous_format)}
        graph = _graph(settings, *settings.heads.lengths(x.shape), x.dtype, x.device.index)
        if isinstance(graph, str):
            raise self._refused(graph)
        x, y, dy = (self._readable(tensor.contiguous()) for tensor in (x, y, dy))
        return {"input": graph.run(x, y, dy, tuple(tensor for tensor in saved if tensor is not None))}

    def tells(self, settings: AttentionSettings) -> bool:
        return bool(settings.beyond)

    def _call(self, settings: AttentionSettings, tensors: Tensors) -> HeadsCall:
        """The call of inputs that lie as graphs were told."""
        if not settings.beyond:
            return super()._call(settings, tensors)
        given = {name: t for name in inputs_of(settings.heads) if (t := tensors[name]) is not None}
        return HeadsCall.of(settings, {name: self._readable(t.contiguous()) for name, t in given.items()})

    def _run_told(
        self, call: HeadsCall, sides: Sides | None, tensors: Tensors, all_rows: bool
    ) -> tuple[torch.Tensor, Saved]:
        y, (q, k, v) = call.memory(), call.heads
        logsumexp = q.new_empty((*q.shape[:3], 1), dtype=torch.promote_types(q.dtype, torch.float32))
        self._graphs_of(call)[0].run_on([q, k, v, *_lengths(call, sides), call.split_output(y), logsumexp])
        return y, self._saved(logsumexp, None, None)

    def _run_told_backward(self, call: HeadsCall, sides: Sides | None, tensors: Tensors, dy: torch.Tensor) -> Saved:
        y, logsumexp = tensors["output"], tensors["cudnn_logsumexp"]
        assert y is not None and logsumexp is not None
        out, dout = (call.split_output(self._readable(t.contiguous())) for t in (y, dy))
        targets, read = call.targets(), (*call.heads, out, dout, logsumexp.contiguous(), *_lengths(call, sides))
        self._graphs_of(call)[1].run_on([*read, *targets.heads])
        return targets.stored()

    def _refused(self, why: str) -> RuntimeError:
        return RuntimeError(f"{why}; te_fuser.fusions.disabled('attention_{self.name}') plans without it")

    def _graphs_of(self, call: HeadsCall) -> tuple[CudnnGraph, CudnnGraph]:
        q, k, _ = call.heads
        graphs = _graphs(call.settings, q.shape[0], q.shape[2], k.shape[2], q.dtype, q.device.index)
        if isinstance(graphs, str):
            raise self._refused(graphs)
        return graphs


def _lengths(call: HeadsCall, sides: Sides | None) -> list[torch.Tensor]:
    """Lengths of queries and of keys, where graphs are told any."""
    if sides is None or not call.settings.mask.counts:
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
    call = HeadsCall.on_meta(settings, samples, positions, keys, dtype)
    q, k, v, out = ((tuple(t.shape), t.stride()) for t in (*call.heads, call.split_output(call.memory())))
    ends = mask.corner == "bottom_right"
    return cudnn_frontend.graphs_for(Banded(q, k, v, out, dtype, settings.scale, mask.sides, ends, mask.counts, device))


@functools.lru_cache(maxsize=_GRAPHS_KEPT)
def _graph(
    settings: AttentionSettings, samples: int, positions: int, dtype: torch.dtype, device: int
) -> BackwardGraph | str:
    """The graph of a problem, made once; or why there is none."""
    forms = *packed_forms(settings, samples, positions), output_form(settings, samples, positions)
    choices = settings.causal, settings.dropout, settings.scale
    return cudnn_frontend.graph_for(AttentionBackward(*forms, dtype, *choices, device))


def _why_none(graph_of: Callable[..., Any], *problem: Any) -> str | None:
    """Reason for which cuDNN takes no such problem; None if it does."""
    found = graph_of(*problem)
    return found if isinstance(found, str) else None


atexit.register(_graphs.cache_clear)
atexit.register(_graph.cache_clear)  # the front end's bindings print what outlives the interpreter, line by line
