"""The models that tests of the Fuser share."""

from __future__ import annotations

import torch
from torch import nn

from te_fuser import ops
from tests.twins import randomize, sequential


def mlp(**options):
    """Of our ops, with dropout."""
    return sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Dropout(0.25), ops.Linear(16, 8), **options)


def torch_mlp(dtype=torch.float64):
    """Without dropout, in torch.nn."""
    return randomize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU("tanh"), nn.Linear(16, 8)).to(dtype))


def our_mlp(dtype=torch.float64):
    """Without dropout, in our ops."""
    return sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8), dtype=dtype)
