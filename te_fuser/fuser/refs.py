"""How plans name tensors before they become slots: a kind and what identifies it."""

from __future__ import annotations

from typing import Any

import torch

Ref = tuple[Any, ...]

SEED: Ref = ("seed",)


def value_ref(root: int) -> Ref:
    """A value of the graph, by the value whose storage it is."""
    return ("value", root)


def recomputed_ref(root: int) -> Ref:
    """The same value, computed again in backward."""
    return ("recomputed", root)


def parameter_ref(index: int) -> Ref:
    """A parameter."""
    return ("parameter", index)


def cast_ref(index: int, dtype: torch.dtype) -> Ref:
    """A parameter in another dtype."""
    return ("cast", index, dtype)


def statistic_ref(stretch: int, digest: str) -> Ref:
    """A per-row statistic of a stretch, by the digest of its expression."""
    return ("statistic", stretch, digest)


def emitted_ref(node: int, name: str) -> Ref:
    """What an opaque op emits for its backward."""
    return ("emitted", node, name)


def fused_ref(start: int, fusion: str, name: str) -> Ref:
    """What a joint fusion saves for its own backward."""
    return ("fused", start, fusion, name)


def gradient_ref(value: int) -> Ref:
    """The adjoint of a value."""
    return ("gradient", value)


def parameter_gradient_ref(index: int) -> Ref:
    """The gradient of a parameter."""
    return ("parameter gradient", index)


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"int64": torch.int64}
