"""Stand-ins on the CPU for the operators and packages of providers that are told the mask's structure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.attention import varlen
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.packages import fake_cudnn, fake_flash_attn

TOLD = ("cuda_flash", "cuda_flash_attn_4", "cuda_cudnn_frontend")


class Operators:
    """Both, with the arguments of their schemas; they keep how they were called.

    `all_rows` says whether sequences end with the last row.
    """

    all_rows = True

    def __init__(self):
        self.calls = []

    def _checked(self, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right):
        self.calls.append((q.shape, cum_seq_q, max_q, max_k))
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        for offsets, t, longest in ((cum_seq_q, q, max_q), (cum_seq_k, k, max_k)):
            assert (offsets is None) == (t.dim() == 4)
            if offsets is not None:
                assert offsets.dtype == torch.int32 and offsets.is_contiguous()
                assert offsets[0] == 0 and (offsets.diff() >= 0).all() and offsets.diff().max() <= longest
                assert longest >= 2 and (offsets[-1] == len(t) if self.all_rows else offsets[-1] <= len(t))
        assert cum_seq_q is None or len(cum_seq_q) == len(cum_seq_k)
        return window_size_left, window_size_right

    def forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
    ):  # fmt: skip
        places = cum_seq_q, cum_seq_k, max_q, max_k
        window = self._checked(query, key, value, *places, window_size_left, window_size_right)
        assert dropout_p == 0.0 and not is_causal and not return_debug_mask
        assert seqused_k is None or seqused_k.dtype == torch.int32 and len(seqused_k) == len(cum_seq_k) - 1
        spans = varlen.Spans(cum_seq_q is not None, cum_seq_q, cum_seq_k, key_lengths=seqused_k)
        out, lse = varlen.forward(varlen.Kernel(scale, window), spans, query, key, value)
        return out, lse, torch.empty(2), torch.empty(()), torch.empty(0)

    def backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        places = cum_seq_q, cum_seq_k, max_q, max_k
        window = self._checked(query, key, value, *places, window_size_left, window_size_right)
        assert dropout_p == 0.0 and not is_causal and rng_state.shape == (2,) and unused.shape == ()
        spans = varlen.Spans(cum_seq_q is not None, cum_seq_q, cum_seq_k)
        return varlen.backward(varlen.Kernel(scale, window), spans, query, key, value, out, grad_out, logsumexp)[:3]


class Lenient(Operators):
    """The real ones compute something for sequences that are longer than they are told."""

    def _checked(self, *given):
        return given[-2:]


@contextlib.contextmanager
def in_place(kind: type[Operators] = Operators, all_rows: bool = True) -> Iterator[dict[str, Any]]:
    """All of them: provider -> what it calls."""
    with pytest.MonkeyPatch.context() as patch:
        operators = kind()
        operators.all_rows = all_rows
        for way in ("forward", "backward"):
            patch.setattr(BY_NAME["cuda_flash"], f"_{way}_by_structure", getattr(operators, way))
        packages = [fake.in_place(patch) for fake in (fake_flash_attn, fake_cudnn)]
        yield dict(zip(TOLD, (operators, *packages), strict=True))
    for fake in (fake_flash_attn, fake_cudnn):
        fake.forget()
