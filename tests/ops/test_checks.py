"""Arguments that nothing can be made of: an error that names the op, what it got, and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.refused import refused
from tests.twins import assert_as_meant, sequential, tensor

NAN, INF = float("nan"), float("inf")


# what is wrong -> the call, the error, what its message says
ARGUMENTS = {
    "eps_below_0": (lambda: ops.LayerNorm(8, eps=-1), ValueError, [r"^LayerNorm: eps is a small number", "got -1"]),
    "eps_nan": (lambda: ops.RMSNorm(8, eps=NAN), ValueError, [r"^RMSNorm: eps", "got nan"]),
    "eps_none": (lambda: ops.RMSNorm(8, eps=None), TypeError, ["^RMSNorm takes a number as eps, got None"]),
    "eps_text": (lambda: ops.L2Norm("a"), TypeError, ["^L2Norm takes a number as eps, got 'a'"]),
    "eps_of_heads": (lambda: ops.HeadNorm(4, heads=2, eps=INF), ValueError, [r"^HeadNorm: eps", "got inf"]),
    "eps_adaptive": (lambda: ops.AdaptiveLayerNorm(8, -1.0, per="row"), ValueError, [r"^AdaptiveLayerNorm: eps"]),
    "scale_by_text": (lambda: ops.Scale(value="a"), TypeError, ["^Scale takes a number as value, got 'a'"]),
    "flatten_text": (lambda: ops.Flatten("a"), TypeError, ["^Flatten takes a whole number as start_dim, got 'a'"]),
    "unflatten_text": (lambda: ops.Unflatten("a", (2, 2)), TypeError, ["^Unflatten takes a whole number as dim"]),
    "half_a_size": (lambda: ops.Unflatten(1, (1.5, 2)), TypeError,
     ["^Unflatten takes a whole number as each size, got 1"]),
    "no_size": (lambda: ops.Reshape(None), TypeError, ["^Reshape takes a whole number as each size, got None"]),
    "softmax_elsewhere": (lambda: ops.Softmax(dim=1), ValueError,
     [r"^Softmax goes over the features of each row, dim=-1, got dim=1: put torch\.nn\.Softmax\(1\) into the list"]),
    "verify_text": (lambda: te_fuser.verify(ops.GELU(), "x"), TypeError,
     [r"^verify\(model, x\) takes a torch.Tensor, got str$"]),
    "verify_dtype_names": (lambda: te_fuser.verify(ops.GELU(), dtypes=["float32"]), TypeError,
     [r"^dtypes are a list of PyTorch's, verify\(model, dtypes=\[torch\.float32\]\), got \['float32'\]"]),
    "verify_one_dtype": (lambda: te_fuser.verify(ops.GELU(), dtypes=torch.float32), TypeError, ["^dtypes are a list"]),
    "reference_text": (lambda: te_fuser.Sequential(ops.GELU()).reference("a"), TypeError,
     ["^te_fuser takes a torch.Tensor, got str"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    call, error, words = ARGUMENTS[name]
    refused(error, words, call)


def test_arguments_that_are_numbers():
    """Those of numpy, whole ones, and what torch.nn takes."""
    assert ops.Reshape(np.int64(2), -1).shape == (2, -1) and ops.LayerNorm(8, eps=0).eps == 0.0
    assert ops.Scale(value=np.float32(0.5)).value == 0.5
    assert_as_meant(sequential(ops.Softmax(dim=-1), ops.LogSoftmax(-1)), tensor(5, 8))
