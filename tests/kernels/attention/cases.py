"""Cases for attention: ops with inputs, masks, problems, and both ways to compute one."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from te_fuser.kernels.attention import PROVIDERS, AttentionProblem
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.base import OpCall

LAYOUTS = ("sequence_first", "batch_first")
PACKINGS = ("interleaved", "blocked")
MASKS = [("none", None), ("causal", None)] + [
    (mask, kind) for mask in ("given", "causal_and_given") for kind in ("padding", "some", "square", "column")
]
BY_NAME = {provider.name: provider for provider in PROVIDERS}
CPU = BY_NAME["cpu_flash"]
H200 = AttentionProblem(
    DotProductAttention(4, 64, mask="none", layout="sequence_first").settings(),
    "cuda",
    (9, 0),
    torch.bfloat16,
    2,
    128,
    deterministic=False,
    cudnn=91900,
)


def make(heads=4, kv_heads=4, dim=8, samples=2, positions=7, dtype=torch.float64, device="cpu", **arguments):
    """An op, packed heads x and the output's gradient dy."""
    op = DotProductAttention(heads, dim, kv_heads=kv_heads, **{"mask": "none", "layout": "sequence_first", **arguments})
    shape = (positions, samples) if op.layout == "sequence_first" else (samples, positions)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, op.packed.features, generator=rng, dtype=torch.float64).to(device, dtype)
    dy = torch.randn(*shape, heads * dim, generator=rng, dtype=torch.float64).to(device, dtype)
    return op, x, dy


def boolean_mask(kind, samples=2, heads=4, positions=7, device="cpu"):
    """A mask of that shape; of "some" one row sees nothing."""
    shape = {
        "padding": (samples, 1, 1, positions),
        "some": (samples, heads, positions, positions),
        "square": (positions, positions),
        "column": (samples, 1, positions, 1),
    }[kind]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    if kind == "some":
        mask[0, 1, 2] = True
    return mask.to(device)


def by_op(op, x, dy, mask=None):
    """The output and the gradient of x by the op's own math."""
    call = OpCall({"attention_mask": mask})
    y = op.op_forward(call, x)
    return y, op.op_backward(OpCall({"input": x, "attention_mask": mask, **call.emitted}), dy)


def by_provider(provider, op, x, dy, mask=None):
    """Output and gradient of x by a provider."""
    settings = op.settings()
    given = {"input": x, "attention_mask": mask}
    y, saved = provider.forward(settings, given)
    assert tuple(saved) == provider.emits and all(isinstance(t, torch.Tensor) for t in saved.values())
    return y, provider.backward(settings, {**given, "output": y, **saved}, dy)["input"]


def assert_matches(provider, op, x, dy, mask=None, tolerance=1e-12):
    for ours, want in zip(by_provider(provider, op, x, dy, mask), by_op(op, x, dy, mask), strict=True):
        assert ours.dtype == x.dtype and ours.isfinite().all()
        torch.testing.assert_close(ours, want, rtol=0, atol=tolerance)


def each_packed(provider, layout, packing):
    """(op, x, dy, y, dx) of each mask, grouping and number of samples; heads without a common stride are refused."""
    for mask, kv_heads, samples in itertools.product(("none", "causal"), (4, 2, 1), (1, 2)):
        op, x, dy = make(kv_heads=kv_heads, mask=mask, layout=layout, packing=packing, samples=samples)
        reason = provider.reason_not(problem(settings=op.settings(), samples=samples))
        if (packing, layout, kv_heads, samples) == ("interleaved", "batch_first", 2, 2):
            assert "no common stride in packing='interleaved' with layout='batch_first'" in reason
            continue
        assert reason is None
        assert_matches(provider, op, x, dy)
        y, dx = by_provider(provider, op, x, dy)
        assert dx.is_contiguous() and dx.untyped_storage().nbytes() == dx.nbytes and not dx._is_view()
        yield op, x, dy, y, dx


def assert_takes_any_strides(provider):
    """As by the op: features apart, rows of an odd length, behind another tensor's numbers, an odd start, stride 0."""
    op, x, dy = make(layout="batch_first", mask="causal")

    def strided(t):
        behind = torch.stack((torch.zeros_like(t), t))[1]
        off = torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)
        return t.mT.contiguous().mT, torch.cat((t, t[..., :1]), -1)[..., : t.shape[-1]], behind, off

    for other in strided(x):
        assert_matches(provider, op, other, dy)
    for gradient in (*strided(dy), dy[..., :1].expand(dy.shape)):
        assert_matches(provider, op, x, gradient)


def problem(base=H200, **changes):
    """H200's problem with something changed: fields, or what its op is made from."""
    op = {name: changes.pop(name) for name in ("heads", "kv_heads", "head_dim", "mask", "dropout") if name in changes}
    if op:
        settings = DotProductAttention(
            **{"mask": "none", "layout": "sequence_first", "heads": 4, "head_dim": 64, **op}
        ).settings()
        changes["settings"] = settings
    return dataclasses.replace(base, **changes)
