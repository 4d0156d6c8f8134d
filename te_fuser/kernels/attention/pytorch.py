"""Attention by kernels that PyTorch builds: for the CPU, FlashAttention-2, xFormers' memory-efficient kernel."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention.lengths import Sides, Slots, counts_from_the_end, window_of
from te_fuser.kernels.attention.problem import (
    DROPS_SOME,
    IN_GRID,
    NO_DROPOUT,
    NO_MASK,
    ONE_SIZE,
    SEVERAL_POSITIONS,
    SQUARE_IF_CAUSAL,
    AttentionProblem,
    cuda_kernel,
    head_dim,
    needs,
    runs_on,
    takes,
)
from te_fuser.kernels.attention.provider import CudaProvider, Provider, Saved, Speed, function_of, why_no_operator
from te_fuser.kernels.attention.qkv_views import AttentionInputs, Gradients, HeadsCall, Tensors
from te_fuser.ops.attention.dot_product_attention import STRUCTURES, AttentionSettings
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
    hides_later = True
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

    def _bias(self, hidden: torch.Tensor, heads: Gradients) -> torch.Tensor:
        return heads[0].new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        # In float16 the kernel is several times slower than in float32; in bfloat16 too, where products in it are.
        slow = x.dtype == torch.float16 or x.dtype == torch.bfloat16 and torch.bfloat16 not in half_gains()
        x = x.float() if slow else x
        return x if x.stride(-1) == 1 else x.contiguous()


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
        """Reason against the problem; a mask by structure needs operators of its own."""
        return super().reason_not(problem) or (self._no_structure if problem.settings.mask.beyond else None)

    def tells(self, settings: AttentionSettings) -> bool:
        return bool(settings.mask.beyond)

    def _call(self, settings: AttentionSettings, tensors: Tensors) -> HeadsCall:
        return HeadsCall.of(settings, tensors) if settings.mask.beyond else super()._call(settings, tensors)

    def _run_told(
        self, call: HeadsCall, sides: Sides | None, tensors: Tensors, all_rows: bool
    ) -> tuple[torch.Tensor, Saved]:
        assert sides is not None
        settings, slots = call.settings, Slots.of(call, sides, all_rows)
        left, right = window_of(settings.mask)
        heads = [self._by_position(part, slots) for part in call.heads]
        out, logsumexp, seed, offset, _ = self._forward_by_structure(
            *(*heads, *_lengths(call, slots), settings.dropout, False, False),
            scale=settings.scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=None if slots is None else slots.keys.seen,
        )
        return call.output(_by_head(out, call.heads[0])), self._saved(logsumexp, seed, offset)

    def _run_told_backward(self, call: HeadsCall, sides: Sides | None, tensors: Tensors, dy: torch.Tensor) -> Saved:
        assert sides is not None
        return call.gradients(*self._gradients_by_structure(call, tensors, dy, Slots.of(call, sides)))

    def gradients_of_rows(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor) -> Gradients:
        """Gradients of heads, of rows that are in a sequence."""
        call = HeadsCall.of(settings, tensors)
        slots = Slots.of(call, Sides.of(call, tensors), all_rows=False)
        return self._gradients_by_structure(call, tensors, dy, slots)

    def _gradients_by_structure(
        self, call: HeadsCall, tensors: Tensors, dy: torch.Tensor, slots: Slots | None
    ) -> Gradients:
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


def _lengths(call: HeadsCall, slots: Slots | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Offsets of queries and keys, and how many there are of each at most."""
    if slots is None:
        q, k, _ = call.heads
        return None, None, q.shape[2], k.shape[2]
    return slots.queries.offsets, slots.keys.offsets, slots.queries.longest, slots.keys.longest


def _by_head(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An operator's result, by position, as [B, H, S, D]."""
    samples, heads, positions, dim = like.shape
    return made.view(samples, positions, heads, dim).transpose(1, 2)


class CudaEfficient(CudaProvider):
    """xFormers' memory-efficient attention, as PyTorch builds it."""

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
