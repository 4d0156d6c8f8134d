"""Cases of attention beyond the packed one: ops with inputs, and the paper's formula."""

from __future__ import annotations

import itertools
import math

import torch

from te_fuser.formula.random import RandomStream
from te_fuser.ops.base import OpCall
from tests.presets.plain import Call, attend


def tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


STREAM = RandomStream(seed=0x1234_5678_9ABC, offset=5, stream=3)


def in_layout(heads, layout):
    """[B, H, S, D] -> [S, B, H D], [B, S, H D] or, of one sample, [S, H D]."""
    flat = heads.permute(0, 2, 1, 3).flatten(2)
    return {"sequence_first": lambda: flat.transpose(0, 1), "batch_first": lambda: flat, "tokens": lambda: flat[0]}[
        layout
    ]()


def by_formula(q, k, v, seen, *, scale, cap=0.0, added=None, sink=None, factors=None):
    """The paper's formula of q [B, H, S, D], k and v of G heads; `seen(b, i)` are the keys of a query."""
    hidden = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
    for b, i in itertools.product(range(q.shape[0]), range(q.shape[2])):
        hidden[b, 0, i, list(seen(b, i))] = False
    return attend(q, k, v, Call(hidden, bias=added, sink=sink, soft_cap=cap), scale, factors)


def run(op, x, dy, inputs=None, stream=None):
    """y, dx and the gradients by name, with nothing given to backward but what the op says it reads."""
    given = {**(inputs or {}), **dict(op.named_parameters())}
    with torch.no_grad():
        call = OpCall(dict(given), random=stream)
        y = op.op_forward(call, x)
        assert set(call.emitted) == set(op.emits)
        (node,) = op.gradients(tuple(given))
        known = {"input": x, "output": y, **call.emitted, **given}
        back = OpCall({name: known[name] for name in node.reads}, frozenset(node.produces), stream)
        made = getattr(op, node.method)(back, dy)
    assert set(made) == set(node.produces)
    return y, made.pop("input"), made


def check(op, x, inputs, want, wanted, dy, stream=None):
    """Values and all gradients, by what runs and by the reference; `wanted` has gradients by name, also "input"."""
    y, dx, made = run(op, x, dy, inputs, stream)
    assert {"input", *made} == set(wanted)
    leaves = {"input": x, **inputs, **dict(op.named_parameters())}
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in leaves.items()}
    reference = op.reference(OpCall(dict(leaves), random=stream), leaves["input"])
    gradients = torch.autograd.grad(reference, [leaves[n] for n in wanted], dy)
    for found in (y, reference.detach()):
        close(found, want.detach())
    for name, of_reference in zip(wanted, gradients, strict=True):
        close({"input": dx, **made}[name], wanted[name])
        close(of_reference, wanted[name])


def close(ours, want, tolerance=1e-12):
    assert ours.shape == want.shape
    torch.testing.assert_close(ours.double(), want, rtol=0, atol=tolerance * max(1.0, math.sqrt(want.numel())))
