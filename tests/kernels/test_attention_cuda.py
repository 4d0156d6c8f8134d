"""The CUDA providers with their kernels played by plain math, and on a GPU.

Played, they show what they pass, in which order, and how masks come out.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.base import Spec
from tests.kernels.attention_cases import (
    BY_NAME,
    LAYOUTS,
    MASKS,
    PACKINGS,
    assert_matches,
    boolean_mask,
    by_op,
    by_provider,
    make,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Played:
    """Stands for one operator: takes arguments as its schema says, and computes in PyTorch."""

    def __init__(self, provider, index):
        self.schema = torch._C.parse_schema(provider.schemas[index])
        self.grouped = provider.name != "cuda_efficient"

    def __call__(self, *args, **kwargs):
        positional = [a for a in self.schema.arguments if not a.kwarg_only]
        assert len(args) <= len(positional)
        given = {a.name: value for a, value in zip(positional, args, strict=False)} | kwargs
        for a in self.schema.arguments:
            assert a.name in given or a.has_default_value(), a.name
            value = given.setdefault(a.name, a.default_value)
            kind = {"Tensor": torch.Tensor, "float": float, "bool": bool, "int": int}.get(str(a.type), object)
            may_be_nothing = a.name in ("cum_seq_q", "cum_seq_k", "attn_bias")
            assert isinstance(value, kind) or (value is None and may_be_nothing), (a.name, value)
        return self.computed(given)

    def heads(self, given):
        q, k, v, bias = given["query"], given["key"], given["value"], given.get("attn_bias")
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert self.grouped or q.shape[1] == k.shape[1] == v.shape[1]
        if bias is not None:
            assert bias.dtype == q.dtype and bias.dim() == 4 and bias.shape[-1] == q.shape[2] and bias.stride(-1) == 1
            assert bias.isfinite().all() and all(
                s % 16 == 0 for s, n in zip(bias.stride()[:3], bias.shape, strict=False)
            )
            assert self.grouped or bias.shape == (*q.shape[:3], q.shape[2])
        q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            repeats = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(repeats, 1).mT * given["scale"]
            if bias is not None:
                scores = scores + bias
            if given["is_causal"]:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            return (q, k, v), scores.softmax(-1) @ v.repeat_interleave(repeats, 1), scores.logsumexp(-1)

    def computed(self, given):
        parts, out, logsumexp = self.heads(given)
        names = [r.name for r in self.schema.returns]
        if "philox_seed" not in given:
            seeds = {"philox_seed": torch.tensor(7), "rng_state": torch.tensor(7), "philox_offset": torch.tensor(9)}
            seeds["unused"] = torch.tensor(9)
            sums = {"output": out.detach(), "logsumexp": logsumexp.detach(), "log_sumexp": logsumexp.detach()}
            lengths = {"max_q": out.shape[2], "max_k": out.shape[2]}
            return tuple({**sums, **seeds, **lengths}.get(name) for name in names)
        assert given["philox_seed"] == 7 and given["philox_offset"] == 9
        torch.testing.assert_close(given["logsumexp"], logsumexp.detach())
        dout = given.get("grad_out", given.get("grad_out_"))
        hidden_anyway = given.get("attn_bias") is not None
        assert hidden_anyway or torch.equal(given["out"], out.detach())
        assert self.grouped or given["out"].transpose(1, 2).is_contiguous()
        return (*torch.autograd.grad(out, parts, dout), *(None for _ in names[3:]))


@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_cuda_providers_with_played_kernels(name, layout, packing, monkeypatch):
    provider = BY_NAME[name]
    monkeypatch.setattr(provider, "_forward", Played(provider, 0))
    monkeypatch.setattr(provider, "_backward", Played(provider, 1))
    for (mask, kind), kv_heads in itertools.product(MASKS, (4, 2, 1)):
        if name == "cuda_flash" and kind is not None:
            continue
        op, x, dy = make(kv_heads=kv_heads, mask=mask, layout=layout, packing=packing)
        given = None if kind is None else boolean_mask(kind)
        assert_matches(provider, op, x, dy, given)
        odd = torch.cat((x, x[..., :1]), -1)[..., : x.shape[-1]]
        assert_matches(provider, op, odd, dy[..., :1].expand(dy.shape), given)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_cuda_providers(name, layout, packing):
    provider = BY_NAME[name]
    sizes = itertools.product(MASKS, (4, 2, 1), ((8, 7), (64, 130), (128, 64)), (torch.bfloat16, torch.float32))
    ran = 0
    for (mask, kind), kv_heads, (dim, positions), dtype in sizes:
        op, x, dy = make(kv_heads=kv_heads, dim=dim, positions=positions, dtype=dtype, device="cuda", mask=mask,
                         layout=layout, packing=packing)  # fmt: skip
        if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
            continue
        given = None if kind is None else boolean_mask(kind, positions=positions, device="cuda")
        exact = by_op(op, x.double(), dy.double(), given)
        for one, want in zip(by_provider(provider, op, x, dy, given), exact, strict=True):
            error, scale = (one.double() - want).abs().max(), want.abs().max()
            assert error <= (0.02 if dtype == torch.bfloat16 else 2e-3) * scale, (mask, kind, kv_heads, dim, dtype)
        ran += 1
    assert ran


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["cuda_cudnn", "cuda_flash", "cuda_efficient"])
def test_cuda_dropout_repeats_in_backward(name):
    """The output is linear in the values, so sum(dy y) = sum(dv v) holds exactly when both drop the same."""
    provider = BY_NAME[name]
    op, x, dy = make(dim=64, positions=256, dtype=torch.bfloat16, device="cuda", dropout=0.25, mask="causal")
    if provider.reason_not(AttentionProblem.of(op.settings(), Spec(x.shape, x.dtype, x.device))) is not None:
        pytest.skip("not on this GPU")
    y, dx = by_provider(provider, op, x, dy)
    assert not torch.equal(y, by_provider(provider, op, x, dy)[0])
    v, dv = op.packed.split(x.double())[2], op.packed.split(dx.double())[2]
    forward, backward = (dy.double() * y.double()).sum(), (dv * v).sum()
    assert (forward - backward).abs() <= 0.01 * (dy.double() * y.double()).abs().sum().sqrt() * y.abs().max()
    ones = torch.ones_like(x)
    kept = provider.forward(op.settings(), ones)[0].double().mean()
    assert (kept - 1.0).abs() < 0.02
