"""A plan that leaves an op to large intermediate results says so once, with the reasons."""

from __future__ import annotations

import warnings

import pytest
import torch

from te_fuser import fusions, ops
from te_fuser.fuser.plan import planner
from tests.twins import sequential, tensor


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    planner._warn_of_large.cache_clear()
    monkeypatch.setattr(planner, "_LARGE", 1000)


def messages(model, x, **inputs):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(x, **inputs)
    return [str(w.message) for w in found]


def test_said_once_with_the_reason():
    capped = ops.AttentionScores(soft_cap=1.0)
    model = sequential(ops.DotProductAttention(2, 4, layout="batch_first", scores=capped, mask="none"))
    assert messages(model, tensor(1, 7, 24)) == []  # 8 * 2 * 49 bytes
    (said,) = messages(model, tensor(2, 7, 24))
    assert "op 0 (DotProductAttention '0') by explicit intermediate results of more than 1 GiB" in said
    assert "attention_cpu_flash: it is not called for a soft cap" in said
    assert messages(model, tensor(2, 9, 24)) == []


def test_keys_count_and_a_kernel_is_silent():
    op = ops.DotProductAttention(2, 4, layout="batch_first", packing="apart", mask="none")
    x, inputs = tensor(2, 3, 8), {n: tensor(2, 11, 8) for n in ("key", "value")}
    assert messages(sequential(op), x, **inputs) == []
    with fusions.only():
        (said,) = messages(sequential(op), x, **inputs)
    assert said.endswith("(no fusion that could take it is on)")
    with fusions.only(), torch.no_grad():
        assert messages(sequential(op), x, **{n: t[:, :2] for n, t in inputs.items()}) == []
