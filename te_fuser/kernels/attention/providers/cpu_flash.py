"""Attention by PyTorch's blocked kernel for the CPU."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.conditions import NO_DROPOUT, ONE_SIZE, SEVERAL_POSITIONS, runs_on, takes
from te_fuser.kernels.attention.provider import Heads, Provider, Saved, Speed
from te_fuser.kernels.attention.views import AttentionInputs, Gradients, Views
from te_fuser.ops.attention.dot_product_attention import STRUCTURES
from te_fuser.ops.attention.mask import PADDED
from te_fuser.ops.products import half_gains


class CpuFlash(Provider):
    """PyTorch's blocked attention for the CPU; grouped heads, -inf and rows that see nothing are its own business.

    `logsumexp` is the op's, so that the op's own backward could take it.
    """

    name = "cpu_flash"
    schemas = (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor output, Tensor logsumexp)",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
        "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    )
    beyond = (*STRUCTURES, PADDED)
    emits = ("logsumexp",)
    calls = (25.0, 40.0)
    speed = Speed.constant(0.6, 0.5)
    conditions = (
        runs_on("cpu"),
        takes(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        NO_DROPOUT,
        SEVERAL_POSITIONS,
        ONE_SIZE,
    )

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        out, logsumexp = self._forward(
            call.q, call.k, call.v, 0.0, call.causal, attn_mask=call.bias, scale=call.settings.scale
        )
        heads = call.settings.heads.heads
        shape = [logsumexp.shape[0] * logsumexp.shape[1] // heads, heads, call.positions]
        return out, {"logsumexp": torch.ops.aten._unsafe_view.default(logsumexp.contiguous(), shape)}

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        logsumexp = saved["logsumexp"].view(call.q.shape[:3])
        inputs = (dout, call.q, call.k, call.v, out, logsumexp, 0.0, call.causal)
        return self._backward(*inputs, attn_mask=call.bias, scale=call.settings.scale)

    def _bias(self, views: Views, mask: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, bool]:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        return qkv.new_zeros(mask.shape).masked_fill_(mask, -torch.inf), views.settings.causal

    def _bias_for(self, hidden: torch.Tensor, heads: Heads) -> torch.Tensor:
        return heads[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        # In float16 the kernel is several times slower than in float32; in bfloat16 too, where products in it are.
        slow = x.dtype == torch.float16 or x.dtype == torch.bfloat16 and torch.bfloat16 not in half_gains()
        x = x.float() if slow else x
        return x if x.stride(-1) == 1 else x.contiguous()
