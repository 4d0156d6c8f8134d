"""Attention by FlashAttention-4, where it is installed: its backward packs the gradient itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.kernels.attention.blank_rows import Blank, by_torch
from te_fuser.kernels.attention.conditions import (
    IN_GRID,
    NO_DROPOUT,
    NO_MASK,
    ONE_SIZE,
    ONE_STRIDE,
    SQUARE_IF_CAUSAL,
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
from te_fuser.kernels.attention.separate import Separate, Targets, Tensors
from te_fuser.kernels.attention.structure import Sides, counts_from_the_end
from te_fuser.kernels.attention.views import views_of
from te_fuser.kernels.packages import flash_attn_4
from te_fuser.kernels.packages.flash_attn_4 import Choices, Ragged
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.scores import SINK, SOFT_CAP

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
        choices = Choices(settings.scale, settings.causal)
        return y, {"flash4_logsumexp": flash_attn_4.forward(*heads, views.output_by_position(y), choices)}

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
        heads = views.by_position(self._readable(x.contiguous()))
        out, dout = (views.output_by_position(self._readable(t)) for t in (y, dy))
        read, choices = (*heads, out, dout, logsumexp.contiguous()), Choices(settings.scale, settings.causal)
        flash_attn_4.backward(read, views.by_position(dx), choices)
        return dx

    def forward_separate(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank | None = by_torch
    ) -> tuple[torch.Tensor, Saved]:
        """The output, stored where it belongs, and the log of sums of exponentials.

        Raises:
            RuntimeError: when the package fails.
        """
        call = Separate.of(settings, tensors)
        if _is_empty(call, tensors):
            return self.nothing(call)
        sides, y = Sides.of(call, tensors), call.memory()
        ragged = _ragged(sides)
        q, k, v, out = (self._by_position(part, ragged) for part in (*call.heads, call.split_output(y)))
        logsumexp = flash_attn_4.forward(q, k, v, out, _choices(settings), ragged, _sink(call, tensors))
        sides.blank({"input": y}, blank)
        return y, {"flash4_logsumexp": logsumexp}

    def backward_separate(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = by_torch
    ) -> Saved:
        """The gradients by input, stored where they belong.

        Raises:
            RuntimeError: when the package fails.
        """
        call = Separate.of(settings, tensors)
        if _is_empty(call, tensors):
            return call.zeros()
        y, logsumexp = tensors["output"], tensors["flash4_logsumexp"]
        assert y is not None and logsumexp is not None
        sides = Sides.of(call, tensors)
        ragged = _ragged(sides)
        out, dout = (call.split_output(t.contiguous()) for t in (y, dy))
        read = [self._by_position(part, ragged) for part in (*call.heads, out, dout)]
        targets = Targets.of(call)
        dq, dk, dv = (self._by_position(part, ragged) for part in targets.heads)
        read, sink = [*read, logsumexp.contiguous()], _sink(call, tensors)
        dsink = flash_attn_4.backward(read, (dq, dk, dv), _choices(settings), ragged, sink)
        found = targets.stored()
        sides.blank(found, blank)
        if dsink is not None and settings.scores.sink == "learned":
            found["sink"] = dsink
        return found

    def _by_position(self, heads: torch.Tensor, ragged: Ragged) -> torch.Tensor:
        """[B, H, S, D] as the package reads it: [B, S, H, D], of tokens [S, H, D]."""
        heads = heads.transpose(1, 2)
        return self._readable(heads[0] if ragged.offsets is not None else heads)


def _is_empty(call: Separate, tensors: Tensors) -> bool:
    """Whether there is nothing to do, as of tokens in no sequence."""
    offsets = tensors.get("offsets")
    return call.is_empty or (offsets is not None and len(offsets) < 2)


def _choices(settings: AttentionSettings) -> Choices:
    return Choices(settings.scale, window=settings.mask.sides, soft_cap=settings.scores.soft_cap)


def _ragged(sides: Sides) -> Ragged:
    """Offsets and lengths of a call; those of keys that are not apart are the queries'."""
    queries, keys = sides.clamped()
    return Ragged(queries.offsets, keys.offsets, queries.lengths, keys.lengths)


def _sink(call: Separate, tensors: Tensors) -> torch.Tensor | None:
    """The logits beside the scores [H], in float32."""
    kind, q = call.settings.scores.sink, call.heads[0]
    if kind == "none":
        return None
    sink = tensors["sink"] if kind == "learned" else None
    return q.new_zeros(q.shape[1], dtype=torch.float32) if sink is None else sink.detach().float()
