"""The providers as a whole: which one is taken, and what holds for all of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention import PROVIDERS, AttentionProblem
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from tests.kernels.attention.cases import CPU, H200, LAYOUTS, PACKINGS, by_provider, problem


def able(p: AttentionProblem) -> list[str]:
    """The providers that can compute a problem, in the order of preference."""
    return [provider.name for provider in PROVIDERS if provider.reason_not(p) is None]


def test_the_best_provider():
    assert able(H200) == ["cuda_cudnn", "cuda_flash", "cuda_efficient"]
    for changes, best in (
        ({}, "cuda_cudnn"),
        ({"deterministic": True}, "cuda_flash"),
        ({"dropout": 0.1}, "cuda_cudnn"),
        ({"dropout": 0.1, "deterministic": True}, "cuda_flash"),
        ({"head_dim": 256}, "cuda_flash"),
        ({"mask": "given"}, "cuda_cudnn"),
        ({"mask": "given", "dropout": 0.1}, "cuda_cudnn"),
        ({"mask": "given", "deterministic": True}, "cuda_efficient"),
        ({"dtype": torch.float32}, "cuda_efficient"),
        ({"switched_off": frozenset({"cuda_cudnn"})}, "cuda_flash"),
        ({"device_type": "cpu", "capability": (0, 0)}, "cpu_flash"),
    ):
        assert able(problem(**changes))[0] == best, changes
    assert able(problem(dtype=torch.float64)) == []
    assert able(problem(head_dim=63)) == []
    assert able(problem(device_type="cpu", dropout=0.5)) == []


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    for provider, layout, packing in itertools.product(PROVIDERS, LAYOUTS, PACKINGS):
        if shape == (1, 1) and provider is not CPU:
            continue
        op = DotProductAttention(4, 8, kv_heads=2, layout=layout, packing=packing, mask="none")
        y, dx = by_provider(provider, op, torch.randn(*shape, 64), torch.randn(*shape, 32))
        assert y.shape == (*shape, 32) and dx.shape == (*shape, 64) and y.isfinite().all() and dx.isfinite().all()
