"""What the tests of the products' fusions share: plans for a GPU that is not at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fuser import Sequential
from te_fuser.fuser.plan import Plan
from te_fuser.ops.base import FusableOperation


def plan(
    *ops: FusableOperation,
    features: int = 4096,
    rows: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = "h200",
    grad: bool = True,
    memory: str = "balanced",
    kernels: str = "auto",
) -> Plan:
    """The plan for a device by its name and an input without memory; without a name, for the CPU."""
    where = "meta" if device else "cpu"
    model = Sequential(*ops, memory=memory, kernels=kernels).to(where, dtype)
    x = torch.empty(rows, features, dtype=dtype, device=where, requires_grad=grad)
    for p in model.parameters():
        p.requires_grad_(grad)
    return model.plan(x, device=device)


def covered(steps: Sequence[object]) -> list[tuple[str, int, int]]:
    """(name, start, stop) of steps."""
    return [(s.name, s.start, s.stop) for s in steps]  # type: ignore[attr-defined]


def reasons(p: Plan, name: str) -> set[str]:
    """Why a fusion was not taken."""
    return {r.reason for r in p.refusals if r.name == name}
