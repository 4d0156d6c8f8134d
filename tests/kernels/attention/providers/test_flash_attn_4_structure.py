"""FlashAttention-4 told of windows, lengths, offsets, soft caps and sinks, with a package that computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from te_fuser import ops
from tests.kernels.attention import structured
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.packages import fake_flash_attn

PROVIDER = BY_NAME["cuda_flash_attn_4"]
SCORES = ({}, {"soft_cap": 0.7}, {"sink": "zero"}, {"sink": "learned", "soft_cap": 2.0})
CASES = {f"{name} {scores}": (op, t) for scores in SCORES for name, op, t in structured.cases(**scores)}


@pytest.fixture
def package(monkeypatch):
    """A package in place."""
    yield fake_flash_attn.in_place(monkeypatch)
    fake_flash_attn.forget()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, package):
    op, tensors = CASES[name]
    if op.sink is not None:
        op.sink.data.copy_(torch.linspace(-1, 1, op.heads))
    dy = structured.output_gradient(op, tensors)
    want = structured.by_op(op, tensors, dy)
    for _ in range(2):  # as the package computes it, and launched again
        ours = structured.by_provider(PROVIDER, op, tensors, dy)
        assert ours.keys() == want.keys()
        for key, tensor in want.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-6, check_dtype=key != "sink", msg=key)


def test_gradients_are_stored_where_they_lie(package):
    op = ops.DotProductAttention(4, 8, mask=ops.AttentionMask(causal=True, offsets="cu"), layout="tokens")
    tensors = structured.inputs_for(op, torch.float64)
    found = structured.by_provider(PROVIDER, op, tensors, structured.output_gradient(op, tensors))
    (_, ahead), (_, back) = package.calls  # how many tokens there are is no part of a form
    inside = {"q": "input", "k": "input", "v": "input", "out": "output", "dq": "input", "dk": "input", "dv": "input"}
    for name, tensor in (ahead | back).items():
        if name in inside:
            whole = tensors["input"] if name in "qkv" else found[inside[name]]
            assert tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), name


def test_no_sequence(package):
    op = ops.DotProductAttention(4, 8, mask=ops.AttentionMask(causal=True, offsets="cu"), layout="tokens")
    tensors = structured.inputs_for(op, torch.float64) | {"offsets": torch.zeros(1, dtype=torch.int64)}
    found = structured.by_provider(PROVIDER, op, tensors, structured.output_gradient(op, tensors))
    assert (found["output"] == 0).all() and (found["input"] == 0).all() and not package.calls
