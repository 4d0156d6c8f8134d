"""Attention by FlashAttention-2, as PyTorch builds it."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.conditions import (
    DROPS_SOME,
    IN_GRID,
    NO_MASK,
    ONE_SIZE,
    SQUARE_IF_CAUSAL,
    cuda_kernel,
    head_dim,
    needs,
)
from te_fuser.kernels.attention.cuda import CudaProvider
from te_fuser.kernels.attention.provider import Saved, Speed
from te_fuser.kernels.attention.views import AttentionCall, Gradients
from te_fuser.ops.dot_product_attention import APART_KEYS


class CudaFlash(CudaProvider):
    """FlashAttention-2 as PyTorch builds it.

    Its dropout draws 8 bits: for 0.1 it drops 26/256 = 0.1016 and scales the others by 1 / (1 - 0.1), so outputs are
    0.17% small on average; multiples of 1/256 are exact.
    """

    name = "cuda_flash"
    schemas = (
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, "
        "Tensor unused, Tensor debug_attn_mask)",
        "aten::_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    )
    beyond = (APART_KEYS,)
    emits = ("flash_logsumexp", "flash_seed", "flash_offset")
    speed = Speed(
        {
            (True, False): (2.37, 2.61),
            (True, True): (2.88, 2.77),
            (False, False): (2.57, 2.78),
            (False, True): (3.40, 3.22),
        },
        {True: (1100.0, 1450.0), False: (180.0, 560.0)},
    )
    conditions = (
        *cuda_kernel(name, 8, torch.bfloat16, torch.float16),
        head_dim(256),
        IN_GRID,
        NO_MASK,
        needs(
            lambda p: p.settings.heads.head_dim <= 192 or p.capability in ((8, 0), (8, 7)) or 9 <= p.capability[0] < 12,
            lambda p: f"its backward for head_dim {p.settings.heads.head_dim} passes this GPU's shared memory",
        ),
        DROPS_SOME,
        ONE_SIZE,
        SQUARE_IF_CAUSAL,
    )

    def _run(self, call: AttentionCall) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        result = self._forward(call.q, call.k, call.v, settings.dropout, call.causal, False, scale=settings.scale)
        out, logsumexp, _, _, _, _, seed, offset, _ = result
        return out, self._saved(logsumexp, seed, offset)

    def _run_backward(self, call: AttentionCall, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings = call.settings
        logsumexp, seed, offset = (saved[name] for name in self.emits)
        no_varying_lengths = (None, None, call.positions, call.keys)
        tensors = (dout, call.q, call.k, call.v, out, logsumexp)
        draws = (settings.dropout, call.causal, seed, offset)
        return self._backward(*tensors, *no_varying_lengths, *draws, scale=settings.scale)
