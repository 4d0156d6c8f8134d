"""HeadNorm: a norm over the features of each query and key head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_fuser.ops.base import FusableOperation, Gradient, OpCall, Spec
from te_fuser.ops.checks import check_eps, check_features
from te_fuser.ops.dot_product_attention import PackedHeads, one_of
from te_fuser.ops.parameters import alike, empty, fill, randomized
from te_fuser.ops.unfused_operation import UnfusedOperation

NORMS: dict[str, tuple[str, ...]] = {"RMSNorm": ("weight",), "LayerNorm": ("weight", "bias"), "L2Normalization": ()}


class HeadNorm(UnfusedOperation):
    """Normalizes each query and key head of packed queries, keys and values; values stay.

    With m = mean(x) over a head for LayerNorm, else 0, and s = mean((x - m)^2), for L2Normalization sum(x^2), a head
    becomes (x - m) / sqrt(s + eps) * weight + bias; keys have `key_weight` and `key_bias`, L2Normalization has none.

    Args:
        head_dim: features of one head.
        heads: query heads; 0: x holds keys and values alone.
        kv_heads: key and value heads packed with them; None: x holds heads alone, which have `weight` and `bias`.
        norm: "RMSNorm", "LayerNorm" or "L2Normalization".
        eps: added to s.
        zero_centered_gamma: whether the weights are what is added to 1.
        packing: "interleaved" or "blocked", see `PackedHeads`.
        dtype, device: the parameters', torch's default if None.

    Raises:
        ValueError: when x has another feature size.
    """

    autocast = "follow"
    prototype_arguments = {"head_dim": 8, "heads": 2}
    other_choices = {"norm": "LayerNorm"}

    def __init__(
        self,
        head_dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        norm: str = "RMSNorm",
        eps: float = 1e-6,
        zero_centered_gamma: bool = False,
        packing: str = "interleaved",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_heads is not None:
            PackedHeads(heads or kv_heads, kv_heads, head_dim, "sequence_first", packing)
        self.head_dim, self.heads, self.kv_heads, self.packing = head_dim, heads, kv_heads, packing
        self.norm = one_of("norm", norm, NORMS)
        self.eps, self.zero_centered_gamma = check_eps(self, eps), zero_centered_gamma
        for name in self._names():
            self.register_parameter(name, empty(head_dim, dtype=dtype, device=device))
        self.reset_parameters()

    def _names(self) -> tuple[str, ...]:
        own = NORMS[self.norm]
        return (*(own if self.heads else ()), *(f"key_{name}" for name in own if self.kv_heads is not None))

    def reset_parameters(self) -> None:
        """Weights as if they were 1, biases 0."""
        for name in self._names():
            fill(self._parameters[name], float("weight" in name and not self.zero_centered_gamma))

    def infer(self, x: Spec) -> Spec:
        """As x."""
        check_features(self, x, (self.heads + 2 * (self.kv_heads or 0)) * self.head_dim)
        return x

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self._names(), (self.head_dim,))

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        weights = tuple(n for n in names if "weight" in n)
        return (Gradient(("input", *names), ("input", *weights), "all_gradients"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        y = []
        for role, (heads,) in self._parts(x):
            if role is None:
                y.append(heads)
                continue
            normed = self._normed(heads)[0] * self._gain(call, role)
            bias = call.get(f"{role}bias")
            y.append((normed if bias is None else normed + bias).to(x.dtype))
        return torch.cat(y, -2).view(x.shape)

    def all_gradients(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Of the input and of all parameters."""
        found: dict[str, torch.Tensor | None] = {}
        dx = []
        for role, (heads, given) in self._parts(call["input"], dy):
            if role is None:
                dx.append(given)
                continue
            normed, rstd = self._normed(heads)
            wide = given.to(normed.dtype)
            total, rows = wide * self._gain(call, role), tuple(range(wide.dim() - 1))
            inner = total * normed
            along = inner.sum(-1, True) if self.norm == "L2Normalization" else inner.mean(-1, True)
            centered = total - total.mean(-1, True) if self.norm == "LayerNorm" else total
            dx.append((rstd * (centered - normed * along)).to(dy.dtype))
            found[f"{role}weight"] = (wide * normed).sum(rows).to(dy.dtype)
            found[f"{role}bias"] = wide.sum(rows).to(dy.dtype)
        return {"input": torch.cat(dx, -2).view(dy.shape), **found}

    def example(self, features: int, rng: torch.Generator) -> FusableOperation:
        return randomized(alike(self, features, head_dim=features, heads=1, kv_heads=None), rng, center=1.0)

    def _normed(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = heads.to(torch.promote_types(heads.dtype, torch.float32))
        x = x - x.mean(-1, True) if self.norm == "LayerNorm" else x
        squares = x * x
        along = squares.sum(-1, True) if self.norm == "L2Normalization" else squares.mean(-1, True)
        rstd = (along + self.eps).rsqrt()
        return x * rstd, rstd

    def _gain(self, call: OpCall, role: str) -> Any:
        weight = call.get(f"{role}weight")
        if weight is None:
            return 1.0
        # A sum in bfloat16 would round what the weight says.
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1 if self.zero_centered_gamma else weight

    def _parts(self, *tensors: torch.Tensor) -> Iterator[tuple[str | None, list[torch.Tensor]]]:
        """Queries, keys ("key_" before names of parameters) and values (None), each [.., groups, heads, head_dim]."""
        groups = (self.kv_heads or 1) if self.packing == "interleaved" else 1
        keys = 0 if self.kv_heads is None else self.kv_heads // groups
        queries = {"": self.heads // groups} if self.heads else {}
        counts = queries | ({"key_": keys, None: keys} if keys else {})
        cut = [t.reshape(*t.shape[:-1], groups, sum(counts.values()), self.head_dim) for t in tensors]
        split = [t.split(list(counts.values()), -2) for t in cut]
        for k, role in enumerate(counts):
            yield role, [pieces[k] for pieces in split]
