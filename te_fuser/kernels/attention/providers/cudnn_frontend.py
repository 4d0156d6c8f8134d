"""Attention by cuDNN: forward as PyTorch calls it, backward by NVIDIA's front end, which packs the gradient itself."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping

import torch

from te_fuser.kernels.attention.conditions import NO_MASK, ONE_STRIDE, capability
from te_fuser.kernels.attention.cudnn_base import CudnnProvider
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.views import output_form, packed_forms
from te_fuser.kernels.packages import cudnn_frontend
from te_fuser.kernels.packages.cudnn_frontend import AttentionBackward, BackwardGraph
from te_fuser.ops.dot_product_attention import AttentionSettings
from te_fuser.ops.sizes import asked

_GRAPHS_KEPT = 512


class CudaCudnnFrontend(CudnnProvider):
    """cuDNN's attention, whose backward stores the gradients of queries, keys and values where they lie packed."""

    name = "cuda_cudnn_frontend"
    packs = True
    beyond = ()
    calls = (30.0, 23.0)
    # Backward beside PyTorch's call of the same kernels, in a layer on an H200: 0.907 to 0.934 ms, with dropout
    # 1.131 to 1.146.
    speed = CudnnProvider.speed.times(1.0, 0.98)
    conditions = (
        *CudnnProvider.conditions,
        lambda p: cudnn_frontend.missing(),
        NO_MASK,
        capability(9),
        ONE_STRIDE,
    )

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why not; cuDNN itself is asked of a GPU at hand that is to run the backward."""
        reason = super().reason_not(problem)
        if reason is not None or problem.backward_on is None or not problem.samples * problem.positions:
            return reason
        reason = cudnn_frontend.unusable(problem.cudnn)
        if reason is not None:
            return reason
        p = problem
        return asked(_why_no_graph, p.settings, p.samples, p.positions, p.dtype, p.backward_on)

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


@functools.lru_cache(maxsize=_GRAPHS_KEPT)
def _graph(
    settings: AttentionSettings, samples: int, positions: int, dtype: torch.dtype, device: int
) -> BackwardGraph | str:
    """The graph of a problem, made once; or why there is none."""
    forms = *packed_forms(settings, samples, positions), output_form(settings, samples, positions)
    choices = settings.causal, settings.dropout, settings.scale
    return cudnn_frontend.graph_for(AttentionBackward(*forms, dtype, *choices, device))


def _why_no_graph(
    settings: AttentionSettings, samples: int, positions: int, dtype: torch.dtype, device: int
) -> str | None:
    """Why cuDNN takes no such problem; None if it does."""
    graph = _graph(settings, samples, positions, dtype, device)
    return graph if isinstance(graph, str) else None


atexit.register(_graph.cache_clear)  # the front end's bindings print what outlives the interpreter, line by line
