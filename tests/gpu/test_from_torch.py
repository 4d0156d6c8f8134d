"""from_torch on a GPU: a TransformerEncoder in half precision, by kernels, beside the module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import te_fuser

B, S, E = 3, 70, 128


@pytest.mark.parametrize("mask", ["none", "causal", "given"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_encoder(dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 512, dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    exact = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=False).cuda().double()
    module = copy.deepcopy(exact).to(dtype)
    model = te_fuser.from_torch(module, mask=mask)
    hidden = torch.ones(S, S, dtype=torch.bool, device="cuda").triu(1)
    theirs, ours = (None if mask == "none" else hidden), ({"attention_mask": hidden} if mask == "given" else {})
    x = torch.randn(B, S, E, device="cuda", dtype=torch.float64)
    results = []
    for run, kind in (
        (lambda x: exact(x, mask=theirs), torch.float64),
        (lambda x: module(x, mask=theirs), dtype),
        (lambda x: model(x, **ours), dtype),
    ):
        given = x.to(kind).requires_grad_()
        y = run(given)
        owner = exact if kind == torch.float64 else module
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
        results.append([y, *torch.autograd.grad(y, [given, *owner.parameters()], dy)])
    for want, eager, got in zip(*results, strict=True):
        scale = want.abs().max()
        errors = [((t.double() - want).abs().max() / scale).item() for t in (eager, got)]
        assert errors[1] <= 2 * errors[0] + torch.finfo(dtype).eps, errors
