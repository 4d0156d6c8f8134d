"""Lists that continue sequences by caches, as plans of decoding have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan

MASK: dict[str, Any] = {"causal": True, "corner": "bottom_right", "lengths": "counts", "key_lengths": "filled"}
CACHES = ops.Apart("key_cache", "value_cache")


def inputs(
    samples: int = 3, dtype: torch.dtype = torch.bfloat16, whole: torch.dtype = torch.int64
) -> dict[str, torch.Tensor]:
    """Caches of 2 heads of 16 features for 40 positions, and how far they are filled."""
    rng = torch.Generator().manual_seed(samples)
    key, value = (torch.randn(41, samples, 32, generator=rng).to(dtype) for _ in range(2))
    starts, counts = torch.tensor([4, 0, 37])[:samples].to(whole), torch.ones(samples, dtype=whole)
    return {"key_cache": key, "value_cache": value, "starts": starts, "counts": counts, "filled": starts + counts}


def attention(mask: ops.AttentionMask | None = None, **options: Any) -> ops.DotProductAttention:
    """Of 8 heads of queries to 2 of keys and values, of 16 features."""
    hides = mask or ops.AttentionMask(**MASK)
    return ops.DotProductAttention(
        8, 16, **{"layout": "sequence_first", "kv_heads": 2, "mask": hides, "packing": CACHES, **options}
    )


def cache(**options: Any) -> ops.KeyValueCache:
    """Op that writes the caches."""
    return ops.KeyValueCache(16, heads=8, kv_heads=2, **options)


def planned(x: torch.Tensor, given: Mapping[str, Any], *listed: ops.FusableOperation, grad: bool = False) -> Plan:
    """The plan for an H200, of those inputs that are read."""
    names = {n.name for op in listed for n in op.named_inputs().values()}
    known: dict[str, Any] = {name: t for name, t in given.items() if name in names}
    with torch.set_grad_enabled(grad):
        return te_fuser.Sequential(*listed).eval().plan(x.detach().requires_grad_(grad), device="h200", **known)


def reasons(p: Plan, name: str) -> set[str]:
    """Reasons for which a fusion was not taken."""
    return {r.reason for r in p.refusals if r.name == name and "predicted" not in r.reason}
