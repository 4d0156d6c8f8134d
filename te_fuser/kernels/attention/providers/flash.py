"""Attention by FlashAttention-2, as PyTorch builds it."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.blank_rows import Blank, by_torch
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
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Saved, Speed, function_of, why_no_operator
from te_fuser.kernels.attention.separate import Separate, Tensors
from te_fuser.kernels.attention.structure import Sides, Slots, counts_from_the_end, window_of
from te_fuser.kernels.attention.views import AttentionInputs, Gradients
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings

# Of tokens [T, H, D] and int32 offsets [N + 1] of sequences, or of [B, S, H, D].
_BY_STRUCTURE = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None) -> (Tensor output, "
    "Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
)


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
    beyond = STRUCTURES
    by_structure = True
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
        counts_from_the_end,
    )

    def __init__(self) -> None:
        super().__init__()
        self._no_structure = next(filter(None, map(why_no_operator, _BY_STRUCTURE)), None)
        self._forward_by_structure, self._backward_by_structure = map(function_of, _BY_STRUCTURE)

    def reason_not(self, problem: AttentionProblem) -> str | None:
        """Why not; what hides by structure is for operators of its own."""
        return super().reason_not(problem) or (self._no_structure if problem.settings.mask.beyond else None)

    def forward_separate(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank | None = by_torch
    ) -> tuple[torch.Tensor, Saved]:
        """The output and what backward takes, without a mask tensor."""
        call = Separate.of(settings, tensors)
        if call.is_empty or not settings.mask.beyond:
            return super().forward_separate(settings, tensors, blank)
        sides, (left, right) = Sides.of(call, tensors), window_of(settings.mask)
        slots = Slots.of(call, sides, blank is not None)
        heads = [self._by_position(part, slots) for part in call.heads]
        out, logsumexp, seed, offset, _ = self._forward_by_structure(
            *(*heads, *_lengths(call, slots), settings.dropout, False, False),
            scale=settings.scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=None if slots is None else slots.keys.seen,
        )
        y = call.output(_by_head(out, call.heads[0]))
        sides.blank({"input": y}, blank)
        return y, self._saved(logsumexp, seed, offset)

    def backward_separate(
        self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None = by_torch
    ) -> Saved:
        """The gradients by input, without a mask tensor."""
        call = Separate.of(settings, tensors)
        if call.is_empty or not settings.mask.beyond:
            return super().backward_separate(settings, tensors, dy, blank)
        sides = Sides.of(call, tensors)
        found = call.gradients(*self._gradients(call, tensors, dy, Slots.of(call, sides)))
        sides.blank(found, blank)
        return found

    def gradients_separate(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor) -> Gradients:
        """Those of heads, of rows that are in a sequence."""
        call = Separate.of(settings, tensors)
        return self._gradients(call, tensors, dy, Slots.of(call, Sides.of(call, tensors), all_rows=False))

    def _gradients(self, call: Separate, tensors: Tensors, dy: torch.Tensor, slots: Slots | None) -> Gradients:
        """dq [B, H, S, D], dk and dv [B, G, K, D]."""
        settings, y, (left, right) = call.settings, tensors["output"], window_of(call.settings.mask)
        assert y is not None
        read = (call.split_output(dy.contiguous()), *call.heads, call.split_output(y.contiguous()))
        logsumexp, seed, offset = (tensors[name] for name in self.emits)
        made = self._backward_by_structure(
            *(self._by_position(part, slots) for part in read),
            *(logsumexp, *_lengths(call, slots), settings.dropout, False, seed, offset),
            scale=settings.scale,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (_by_head(part, like) for part, like in zip(made, call.heads, strict=True))
        return dq, dk, dv

    def _by_position(self, heads: torch.Tensor, slots: Slots | None) -> torch.Tensor:
        """[B, H, S, D] as the operators read it: [B, S, H, D], of slots [B * S, H, D]."""
        heads = heads.transpose(1, 2)
        return self._readable(heads if slots is None else heads.flatten(0, 1))

    def _run(self, call: AttentionInputs) -> tuple[torch.Tensor, Saved]:
        settings = call.settings
        result = self._forward(call.q, call.k, call.v, settings.dropout, call.causal, False, scale=settings.scale)
        out, logsumexp, _, _, _, _, seed, offset, _ = result
        return out, self._saved(logsumexp, seed, offset)

    def _run_backward(self, call: AttentionInputs, out: torch.Tensor, dout: torch.Tensor, saved: Saved) -> Gradients:
        settings = call.settings
        logsumexp, seed, offset = (saved[name] for name in self.emits)
        no_varying_lengths = (None, None, call.positions, call.keys)
        tensors = (dout, call.q, call.k, call.v, out, logsumexp)
        draws = (settings.dropout, call.causal, seed, offset)
        return self._backward(*tensors, *no_varying_lengths, *draws, scale=settings.scale)


def _lengths(call: Separate, slots: Slots | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Offsets of queries and keys, and how many there are of each at most."""
    if slots is None:
        q, k, _ = call.heads
        return None, None, q.shape[2], k.shape[2]
    return slots.queries.offsets, slots.keys.offsets, slots.queries.longest, slots.keys.longest


def _by_head(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What an operator gives by position as [B, H, S, D]."""
    samples, heads, positions, dim = like.shape
    return made.view(samples, positions, heads, dim).transpose(1, 2)
