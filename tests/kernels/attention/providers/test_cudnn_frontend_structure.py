"""cuDNN's front end told of windows and lengths, with a package that computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.base import Spec
from tests.kernels.attention import structured
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.packages import fake_cudnn

PROVIDER = BY_NAME["cuda_cudnn_frontend"]
CASES = {name: (op, tensors) for name, op, tensors in structured.cases(dtype=torch.float64) if op.layout != "tokens"}


@pytest.fixture
def package(monkeypatch):
    """A front end in place."""
    yield fake_cudnn.in_place(monkeypatch)
    fake_cudnn.forget()


def reason(op, tensors):
    """Of a plan for an H200."""
    x, key = tensors["input"], tensors.get("key")
    keys = None if key is None else op.packed.lengths(key.shape)[1]
    spec = Spec(tuple(x.shape), torch.bfloat16, torch.device("cuda"))
    return PROVIDER.reason_not(AttentionProblem.of(op.settings(), spec, (9, 0), True, keys))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, package):
    op, tensors = CASES[name]
    why = reason(op, tensors)
    if why is not None and "bounds later positions" in why:
        assert op.settings().mask.sides[1] not in (None, 0), why
        return
    if why is not None:
        assert "apart" in name and why.startswith("queries and keys that are apart may differ"), why
        assert not name.endswith((": none", "of queries", "window")) or tensors["key"].shape != tensors["input"].shape
        return
    dy = structured.output_gradient(op, tensors)
    want = structured.by_op(op, tensors, dy)
    for by_addresses in (True, False):
        package.takes_addresses = by_addresses
        ours = structured.by_provider(PROVIDER, op, tensors, dy)
        assert ours.keys() == want.keys() and len(package.graphs) == 2
        for key, tensor in want.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-10, msg=key)
