"""Attention by xFormers' memory-efficient kernel, as PyTorch builds it."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.conditions import DROPS_SOME, IN_GRID, ONE_SIZE, cuda_kernel, head_dim, needs
from te_fuser.kernels.attention.cuda import CudaProvider
from te_fuser.kernels.attention.provider import Saved, Speed
from te_fuser.kernels.attention.views import AttentionInputs, Gradients
from te_fuser.ops.attention.dot_product_attention import STRUCTURES
from te_fuser.ops.attention.mask import PADDED


class CudaEfficient(CudaProvider):
    """The memory-efficient attention of xFormers, as PyTorch builds it: any mask, float32 too, no grouped heads."""

    name = "cuda_efficient"
    schemas = (
        "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
        "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
        "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, "
        "Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
        "float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    )
    beyond = (*STRUCTURES, PADDED)
    emits = ("efficient_logsumexp", "efficient_seed", "efficient_offset")
    speed = Speed(
        {
            (True, False): (4.63, 5.88),
            (True, True): (7.57, 9.97),
            (False, False): (6.01, 7.42),
            (False, True): (11.8, 10.7),
        },
        {True: (1140.0, 1560.0), False: (250.0, 460.0)},
    )
    conditions = (
        *cuda_kernel(name, 7, torch.bfloat16, torch.float16, torch.float32),
        needs(
            lambda p: p.dtype != torch.bfloat16 or p.capability[0] >= 8,
            lambda p: "bfloat16 needs compute capability 8.0",
        ),
        head_dim(multiple=lambda p: 4 if p.dtype == torch.float32 else 8),
        ONE_SIZE,
        IN_GRID,
        DROPS_SOME,
    )

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        out, logsumexp, seed, offset = self._forward(
            call.q, *self._repeated(call), self._whole(call), True, settings.dropout, call.causal, scale=settings.scale
        )
        return out, self._saved(logsumexp, seed, offset)

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings = call.settings
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes its positions to be h * D apart
        dq, dk, dv, _ = self._backward(
            *(dout, call.q, *self._repeated(call), self._whole(call), out),
            *(saved[name] for name in self.emits),
            *(settings.dropout, [True, True, True, False], call.causal),
            scale=settings.scale,
        )
        groups, per_group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
        if per_group == 1:
            return dq, dk, dv
        dk, dv = (part.unflatten(1, (groups, per_group)).sum(2) for part in (dk, dv))
        return dq, dk, dv

    def _repeated(self, call: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for each query head; of one group a view with stride 0."""
        per_group = call.q.shape[1] // call.k.shape[1]
        if per_group == 1:
            return call.k, call.v
        k, v = (part[:, :, None].expand(-1, -1, per_group, -1, -1).flatten(1, 2) for part in (call.k, call.v))
        return k, v

    def _whole(self, call: AttentionInputs) -> torch.Tensor | None:
        """The bias with every size written out."""
        return None if call.bias is None else call.bias.expand(*call.q.shape[:3], call.keys)
