"""The CUDA providers with their kernels played by plain math, and on a GPU.

Played, they show what they pass, in which order, and how masks come out.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.base import Spec
from tests.kernels.attention import cases
from tests.kernels.played import Played

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")


@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("packing", cases.PACKINGS)
def test_cuda_providers_with_played_kernels(name, layout, packing, monkeypatch):
    provider = cases.BY_NAME[name]
    monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    monkeypatch.setattr(provider, "_backward", Played(provider, 1))
    for (mask, kind), kv_heads in itertools.product(cases.MASKS, (4, 2, 1)):
        if name == "cuda_flash" and kind is not None:
            continue
        op, x, dy = cases.make(kv_heads=kv_heads, mask=mask, layout=layout, packing=packing)
        given = None if kind is None else cases.boolean_mask(kind)
        cases.assert_matches(provider, op, x, dy, given)
        odd = torch.cat((x, x[..., :1]), -1)[..., : x.shape[-1]]
        cases.assert_matches(provider, op, odd, dy[..., :1].expand(dy.shape), given)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("packing", cases.PACKINGS)
def test_cuda_providers(name, layout, packing):
    provider = cases.BY_NAME[name]
    sizes = itertools.product(cases.MASKS, (4, 2, 1), ((8, 7), (64, 130), (128, 64)), (torch.bfloat16, torch.float32))
    ran = 0
    for (mask, kind), kv_heads, (dim, positions), dtype in sizes:
        op, x, dy = cases.make(kv_heads=kv_heads, dim=dim, positions=positions, dtype=dtype, device="cuda", mask=mask,
                         layout=layout, packing=packing)  # fmt: skip
        if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
            continue
        given = None if kind is None else cases.boolean_mask(kind, positions=positions, device="cuda")
        exact = cases.by_op(op, x.double(), dy.double(), given)
        for one, want in zip(cases.by_provider(provider, op, x, dy, given), exact, strict=True):
            error, scale = (one.double() - want).abs().max(), want.abs().max()
            assert error <= (0.02 if dtype == torch.bfloat16 else 2e-3) * scale, (mask, kind, kv_heads, dim, dtype)
        ran += 1
    assert ran


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
def test_cuda_dropout_repeats_in_backward(name):
    """The output is linear in the values, so sum(dy y) = sum(dv v) holds exactly when both drop the same."""
    provider = cases.BY_NAME[name]
    op, x, dy = cases.make(dim=64, positions=256, dtype=torch.bfloat16, device="cuda", dropout=0.25, mask="causal")
    if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
        pytest.skip("not on this GPU")
    y, dx = cases.by_provider(provider, op, x, dy)
    assert not torch.equal(y, cases.by_provider(provider, op, x, dy)[0])
    v, dv = op.packed.split(x.double())[2], op.packed.split(dx.double())[2]
    forward, backward = (dy.double() * y.double()).sum(), (dv * v).sum()
    assert (forward - backward).abs() <= 0.01 * (dy.double() * y.double()).abs().sum().sqrt() * y.abs().max()
    ones = torch.ones_like(x)
    kept = provider.forward(op.settings(), {"input": ones})[0].double().mean()
    assert (kept - 1.0).abs() < 0.02
