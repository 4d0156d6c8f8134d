"""Attention by FlashAttention-4, where it is installed: its backward packs the gradient itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.kernels.attention.conditions import (
    IN_GRID,
    NO_DROPOUT,
    NO_MASK,
    ONE_STRIDE,
    head_dim,
    needs,
    runs_on,
    switched_on,
    takes,
)
from te_fuser.kernels.attention.cuda import CudaProvider
from te_fuser.kernels.attention.cudnn_base import CudnnProvider
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Saved
from te_fuser.kernels.attention.views import views_of
from te_fuser.kernels.packages import flash_attn_4
from te_fuser.ops.dot_product_attention import AttentionSettings


class CudaFlashAttn4(CudaProvider):
    """FlashAttention-4, which stores the gradients of queries, keys and values where they lie packed.

    It is priced by its time over that of cuDNN through PyTorch: 0.292 to 0.298 ms forward, 0.800 to 0.915 ms backward
    on an H200 (bfloat16, batch 4, 32 heads of 128 features, S 2048, causal, no dropout; in a loop, alternating). No
    other attention was measured. The package has forward for compute capability 8 to 12, backward for 9 to 12, heads of
    up to 256 features on 9, and a flag for backward to repeat its bits: none of that was measured, and it says no.
    """

    name = "cuda_flash_attn_4"
    packs = True
    emits = ("flash4_logsumexp",)
    calls = (42.0, 42.0)
    speed = CudnnProvider.speed.times(0.292 / 0.298, 0.800 / 0.915)
    conditions = (
        runs_on("cuda"),
        lambda p: flash_attn_4.missing(),
        switched_on("cuda_flash"),
        takes(torch.bfloat16, torch.float16),
        needs(
            lambda p: p.capability[0] == 9,
            lambda p: f"it is meant for compute capability 9 alone, this GPU has {p.capability[0]}.{p.capability[1]}",
        ),
        head_dim(128),
        IN_GRID,
        NO_MASK,
        NO_DROPOUT,
        needs(lambda p: not p.deterministic, lambda p: "its backward is called without what makes it repeat its bits"),
        ONE_STRIDE,
    )

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why not; on a machine with a GPU the package is imported for it."""
        reason = super().reason_not(problem)
        return flash_attn_4.unusable() if reason is None and torch.cuda.is_available() else reason

    def forward(
        self,
        settings: AttentionSettings,
        qkv: torch.Tensor,
        mask: torch.Tensor | None = None,
        random: RandomStream | None = None,
    ) -> tuple[torch.Tensor, Saved]:
        """The output, stored where it belongs, and the log of sums of exponentials.

        Raises:
            RuntimeError: when the package fails.
        """
        views = views_of(settings, qkv.shape)
        y = qkv.new_empty(views.output_shape)
        if not qkv.numel():
            return y, {"flash4_logsumexp": qkv.new_empty(0, dtype=torch.float32)}
        heads = views.by_position(self._readable(qkv.contiguous()))
        out, causal, scale = views.output_by_position(y), settings.causal, settings.scale
        return y, {"flash4_logsumexp": flash_attn_4.forward(*heads, out, causal=causal, scale=scale)}

    def backward(
        self, settings: AttentionSettings, tensors: Mapping[str, torch.Tensor | None], dy: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the packed input, which no pass has to pack.

        Raises:
            RuntimeError: when the package fails.
        """
        x, y, logsumexp = (tensors[name] for name in ("input", "output", *self.emits))
        assert x is not None and y is not None and logsumexp is not None
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.numel():
            return dx
        views = views_of(settings, x.shape)
        q, k, v = views.by_position(self._readable(x.contiguous()))
        out, dout = (views.output_by_position(self._readable(t)) for t in (y, dy))
        made, causal, scale = views.by_position(dx), settings.causal, settings.scale
        flash_attn_4.backward(q, k, v, out, dout, logsumexp.contiguous(), made, causal=causal, scale=scale)
        return dx
