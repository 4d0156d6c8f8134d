"""What a problem is taken from."""

from __future__ import annotations

import torch

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.base import Spec


def test_a_problem_is_taken_from_settings_and_spec():
    op = DotProductAttention(4, 8, kv_heads=2, layout="batch_first", dropout=0.25, mask="none")
    found = AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu")))
    assert (found.samples, found.positions, found.device_type) == (3, 9, "cpu")
    assert found.settings.dropout == 0.25 and not found.switched_off and not found.deterministic
    assert hash(found) == hash(AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu"))))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        off = AttentionProblem.of(op.settings(), Spec((3, 9, 64), torch.float32, torch.device("cpu"))).switched_off
    assert off == {"cuda_cudnn", "cuda_flash", "cuda_efficient"}
