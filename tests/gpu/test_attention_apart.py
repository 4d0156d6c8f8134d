"""Attention of keys and values apart, and of what hides by structure, by CUDA providers: values and all gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from tests.fusions.separate_attention import cases, tokens
from tests.twins import randomize

PROVIDERS = ("cuda_cudnn", "cuda_flash", "cuda_efficient")
SIZES = [(40, 33), (33, 40), (48, 48), (7, 130), (1, 17), (65, 2)]


def on_gpu(x, dtype):
    return x.detach().to("cuda", dtype if x.is_floating_point() else None)


def gradients(run, model, x, inputs):
    """The output and all gradients, for an output gradient that is always the same."""
    x = x.detach().requires_grad_()
    inputs = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
    y = run(x, **inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.device, y.dtype)
    leaves = [x, *(t for t in inputs.values() if t.requires_grad), *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(model, x, inputs, dtype):
    """Errors against float64 are at most twice those of the ops' own math in this dtype, and two units."""
    model, exact = copy.deepcopy(model).to("cuda", dtype), copy.deepcopy(model).to("cuda", dtype).double()
    low = [on_gpu(x, dtype), {n: on_gpu(t, dtype) for n, t in inputs.items()}]
    high = [low[0].double(), {n: t.double() if t.is_floating_point() else t for n, t in low[1].items()}]
    got = gradients(model, model, *low)
    usual = gradients(model.reference, model, *low)
    wanted = gradients(exact.reference, exact, *high)
    # Gradients of scores are 0 where each row sees one key: differences of sums, which kernels add in other orders.
    least = (0.5 if dtype == torch.float32 else 0.02) * max(want.abs().max() for want in wanted)
    units = (32 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for ours, theirs, want in zip(got, usual, wanted, strict=True):
        allowed = 2 * (theirs.double() - want).abs().max() + units * max(want.abs().max(), least)
        assert ours.isfinite().all() and (ours.double() - want).abs().max() <= allowed


def takes(provider, model, x, inputs, dtype):
    """True if a plan with this provider alone takes it in both directions; else its reason."""
    model = copy.deepcopy(model).to("cuda", dtype)
    named = {n: on_gpu(t, dtype).requires_grad_(t.is_floating_point()) for n, t in inputs.items()}
    plan = model.plan(on_gpu(x, dtype).requires_grad_(), **named)
    steps = [s.name for s in (*plan.forward, *plan.backward)]
    if steps.count(f"attention_{provider}") == 2:
        return True
    return next(r.reason for r in plan.refusals if r.name == f"attention_{provider}")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_masks_and_ways(provider, sizes):
    dtypes = (torch.bfloat16, torch.float16) + (torch.float32,) * (provider == "cuda_efficient")
    with fusions.only("stretch", f"attention_{provider}"):
        for dtype in dtypes:
            found = {}
            for k, (name, model, x, inputs) in enumerate(cases(64, dtype, sizes, every=True)):
                if k % 5 not in (0, SIZES.index(sizes)):  # all of them in some size
                    continue
                found[name] = takes(provider, model, x, inputs, dtype)
                if found[name] is True:
                    check(model, x, inputs, dtype)
            refused = {name.split()[0]: why for name, why in found.items() if why is not True}
            print(provider, sizes, dtype, refused)
            if provider == "cuda_efficient":
                assert not refused
            assert provider == "cuda_cudnn" and 1 in sizes or found["none key batch_first 4"] is True


@pytest.mark.parametrize("provider", ["cuda_cudnn", "cuda_efficient"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked", "apart"])
def test_sequences_one_behind_the_other(provider, packing):
    _, model, x, inputs = tokens(packing, 64, torch.bfloat16)
    with fusions.only("stretch", f"attention_{provider}"):
        assert takes(provider, model, x, inputs, torch.bfloat16) is True
        check(model, x, inputs, torch.bfloat16)


def test_dropout_runs_and_repeats():
    op = ops.DotProductAttention(4, 64, packing="apart", layout="batch_first", dropout=0.25, mask="none")
    model = randomize(te_fuser.Sequential(op)).to("cuda", torch.bfloat16)
    x, key, value = (torch.randn(2, n, 256, device="cuda", dtype=torch.bfloat16) for n in (40, 32, 32))
    for provider in PROVIDERS:
        with fusions.only("stretch", f"attention_{provider}"):
            results = []
            for _ in range(2):
                torch.manual_seed(3)
                results.append(gradients(model, model, x, {"key": key, "value": value}))
            assert all(torch.equal(a, b) for a, b in zip(results[0][:1], results[1][:1], strict=True))
            # Values of 1 give the sum of kept probabilities, 1 on average.
            ones = model(x, key=key, value=torch.ones_like(value)).float()
            assert 0.9 < ones.mean() < 1.1 and ones.std() > 0.01


def test_empty_sides():
    op = ops.DotProductAttention(2, 64, packing="apart", layout="batch_first", mask="causal")
    model = te_fuser.Sequential(op).to("cuda", torch.bfloat16)
    for samples, queries, keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        x = torch.randn(samples, queries, 128, device="cuda", dtype=torch.bfloat16)
        other = torch.randn(samples, keys, 128, device="cuda", dtype=torch.bfloat16)
        y, dx, dk, dv = gradients(model, model, x, {"key": other, "value": other})
        assert (y == 0).all() and (dx == 0).all() and dk.shape == dv.shape == other.shape
