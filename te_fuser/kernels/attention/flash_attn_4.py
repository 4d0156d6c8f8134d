"""Attention by FlashAttention-4, where it is installed: its backward packs the gradient itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_fuser.kernels.attention.cudnn import CudnnProvider
from te_fuser.kernels.attention.lengths import Sides, counts_from_the_end
from te_fuser.kernels.attention.problem import (
    IN_GRID,
    NO_DROPOUT,
    NO_MASK,
    ONE_SIZE,
    ONE_STRIDE,
    SQUARE_IF_CAUSAL,
    AttentionProblem,
    head_dim,
    needs,
    runs_on,
    switched_on,
    takes,
)
from te_fuser.kernels.attention.provider import CudaProvider, Saved
from te_fuser.kernels.attention.qkv_views import HeadsCall, PackedCall, Tensors
from te_fuser.kernels.packages import flash_attn_4
from te_fuser.kernels.packages.flash_attn_4 import Choices
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.math import SINK, SOFT_CAP

# A sequence of queries without a key would read those of the one before.
_OWN_KEY_OFFSETS = needs(
    lambda p: not p.settings.mask.offsets or p.settings.mask.keys_alike or not isinstance(p.settings.heads, ApartHeads),
    lambda p: "sequences of keys have offsets or lengths of their own, and one without keys would read another's",
)


class CudaFlashAttn4(CudaProvider):
    """FlashAttention-4, which stores the gradients of queries, keys and values where they lie packed.

    It is priced by its time over that of cuDNN through PyTorch: 0.292 to 0.298 ms forward, 0.800 to 0.915 ms backward
    on an H200 (bfloat16, batch 4, 32 heads of 128 features, S 2048, causal, no dropout; in a loop, alternating). No
    other attention was measured. The package has forward for compute capability 8 to 12, backward for 9 to 12, heads of
    up to 256 features on 9, and a flag for backward to repeat its bits: none of that was measured, and it says no.
    """

    name = "cuda_flash_attn_4"
    packs = True
    beyond = (*STRUCTURES, SOFT_CAP, SINK)
    by_structure = True
    emits = ("flash4_logsumexp",)
    calls = (42.0, 42.0)
    speed = CudnnProvider.speed.times(0.292 / 0.298, 0.800 / 0.915)
    conditions = (
        runs_on("cuda"),
        lambda p: flash_attn_4.PACKAGE.missing(),
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
        ONE_SIZE,
        SQUARE_IF_CAUSAL,
        counts_from_the_end,
        _OWN_KEY_OFFSETS,
        ONE_STRIDE,
    )

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Reason against the problem; with a GPU the package is imported to find it."""
        reason = super().reason_not(problem)
        return flash_attn_4.unusable() if reason is None and torch.cuda.is_available() else reason

    def tells(self, settings: AttentionSettings) -> bool:
        return True

    def _call(self, settings: AttentionSettings, tensors: Tensors) -> HeadsCall:
        if settings.beyond:
            return HeadsCall.of(settings, tensors)
        return PackedCall.of(settings, tensors, lambda x: self._readable(x.contiguous()))

    def _is_empty(self, call: HeadsCall, tensors: Tensors) -> bool:
        """True where there is nothing to do, as of tokens in no sequence."""
        offsets = tensors.get("offsets")
        return call.is_empty or (offsets is not None and len(offsets) < 2)

    def _run_told(
        self, call: HeadsCall, sides: Sides | None, tensors: Tensors, all_rows: bool
    ) -> tuple[torch.Tensor, Saved]:
        y, others = call.memory(), _others(call, sides, tensors)
        q, k, v, out = (self._by_position(part, others) for part in (*call.heads, call.split_output(y)))
        return y, {"flash4_logsumexp": flash_attn_4.forward(q, k, v, out, _choices(call.settings), others)}

    def _run_told_backward(self, call: HeadsCall, sides: Sides | None, tensors: Tensors, dy: torch.Tensor) -> Saved:
        y, logsumexp, others = tensors["output"], tensors["flash4_logsumexp"], _others(call, sides, tensors)
        assert y is not None and logsumexp is not None
        out, dout = (call.split_output(self._readable(t.contiguous())) for t in (y, dy))
        read = [self._by_position(part, others) for part in (*call.heads, out, dout)]
        targets = call.targets()
        dq, dk, dv = (self._by_position(part, others) for part in targets.heads)
        read.append(logsumexp.contiguous())
        dsink = flash_attn_4.backward(read, (dq, dk, dv), _choices(call.settings), others)
        found = targets.stored()
        if dsink is not None and call.settings.scores.sink == "learned":
            found["sink"] = dsink
        return found

    def _by_position(self, heads: torch.Tensor, others: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[B, H, S, D] as the package reads it: [B, S, H, D], of tokens [S, H, D]."""
        heads = heads.transpose(1, 2)
        return self._readable(heads[0] if "cu_seqlens_q" in others else heads)


def _choices(settings: AttentionSettings) -> Choices:
    if not settings.beyond:
        return Choices(settings.scale, settings.causal)
    return Choices(settings.scale, window=settings.mask.sides, soft_cap=settings.scores.soft_cap)


def _others(call: HeadsCall, sides: Sides | None, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Offsets and lengths, and logits beside the scores [H]."""
    if sides is None:
        return {}
    queries, keys = sides.clamped()
    given = queries.offsets, keys.offsets, queries.lengths, keys.lengths
    found = {name: t for name, t in zip(flash_attn_4.RAGGED, given, strict=True) if t is not None}
    kind, q = call.settings.scores.sink, call.heads[0]
    if kind != "none":
        sink = tensors["sink"] if kind == "learned" else None
        found["learnable_sink"] = (
            q.new_zeros(q.shape[1], dtype=torch.float32) if sink is None else sink.detach().float()
        )
    return found
