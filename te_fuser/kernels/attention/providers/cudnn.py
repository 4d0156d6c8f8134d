"""Attention by cuDNN, as PyTorch calls it."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.cudnn_base import CudnnProvider
from te_fuser.kernels.attention.provider import Saved
from te_fuser.kernels.attention.views import AttentionInputs, Gradients


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
