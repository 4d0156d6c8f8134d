"""cuDNN's attention as PyTorch calls it forward, and when: what its providers have in common."""

from __future__ import annotations

from typing import ClassVar

import torch

from te_fuser.kernels.attention.conditions import (
    DROPS_SOME,
    IN_GRID,
    ONE_SIZE,
    SQUARE_IF_CAUSAL,
    Condition,
    cuda_kernel,
    head_dim,
    needs,
)
from te_fuser.kernels.attention.cuda import CudaProvider
from te_fuser.kernels.attention.provider import Saved, Speed
from te_fuser.kernels.attention.views import AttentionInputs
from te_fuser.ops.attention.dot_product_attention import STRUCTURES
from te_fuser.ops.attention.mask import PADDED


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
