"""HeadNorm: a norm over the features of each query and key head."""

from __future__ import annotations

import torch

from te_fuser.ops.attention.dot_product_attention import PackedHeads, one_of
from te_fuser.ops.attention.head_parallel import OfHeads
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.checks import check_eps, check_features, count, yes_or_no
from te_fuser.ops.construction import empty, fill

NORMS: dict[str, tuple[str, ...]] = {"RMSNorm": ("weight",), "LayerNorm": ("weight", "bias"), "L2Normalization": ()}


class HeadNorm(OfHeads):
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
        TypeError: for an argument of another kind.
        ValueError: for counts that do not fit, or when x has another feature size.
    """

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
        who = type(self).__name__
        count(who, "head_dim", head_dim)
        count(who, "heads", heads, least=1 if kv_heads is None else 0)
        if kv_heads is not None:
            count(who, "kv_heads", kv_heads)
            PackedHeads(heads or kv_heads, kv_heads, head_dim, "sequence_first", packing)
        self.head_dim, self.heads, self.kv_heads, self.packing = head_dim, heads, kv_heads, packing
        self.norm = one_of("norm", norm, NORMS)
        self.eps = check_eps(self, eps)
        self.zero_centered_gamma = yes_or_no(who, "zero_centered_gamma", zero_centered_gamma)
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
        """Spec of x, as it is."""
        check_features(self, x, (self.heads + 2 * (self.kv_heads or 0)) * self.head_dim)
        return x

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self._names(), (self.head_dim,))

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        weights = tuple(n for n in names if "weight" in n)
        return (Gradient(("input", *names), ("input", *weights), "all_gradients"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        heads, values = self._cut(x)
        y = self._normed(heads)[0]
        gain, bias = self._gain(call), self._by_head(call, "bias")
        y = y if gain is None else y * gain
        return self._packed(y if bias is None else y + bias, values, x)

    def all_gradients(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Gradients of the input and of all parameters."""
        (normed, rstd), (given, values) = self._normed(self._cut(call["input"])[0]), self._cut(dy)
        wide, gain = given.to(normed.dtype), self._gain(call)
        total = wide if gain is None else wide * gain
        inner = total * normed
        along = inner.sum(-1, True) if self.norm == "L2Normalization" else inner.mean(-1, True)
        centered = total - total.mean(-1, True) if self.norm == "LayerNorm" else total
        found: dict[str, torch.Tensor | None] = {"input": self._packed(rstd * (centered - normed * along), values, dy)}
        for name in NORMS[self.norm]:
            heads = (wide * normed if name == "weight" else wide).sum(tuple(range(wide.dim() - 2)))
            for role, part in zip(self._counts, heads.split(list(self._counts.values())), strict=True):
                found[f"{role}{name}"] = part.sum(0).to(dy.dtype)
        return found

    def _normed(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = heads.to(torch.promote_types(heads.dtype, torch.float32))
        x = x - x.mean(-1, True) if self.norm == "LayerNorm" else x
        squares = x * x
        along = squares.sum(-1, True) if self.norm == "L2Normalization" else squares.mean(-1, True)
        rstd = (along + self.eps).rsqrt()
        return x * rstd, rstd

    def _gain(self, call: OpCall) -> torch.Tensor | None:
        weight = self._by_head(call, "weight")
        if weight is None or not self.zero_centered_gamma:
            return weight
        # A sum in bfloat16 would round what the weight says.
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1

    def _by_head(self, call: OpCall, name: str) -> torch.Tensor | None:
        """A parameter of queries and that of keys, [heads of a group, head_dim], where there is one."""
        if name not in NORMS[self.norm]:
            return None
        return torch.cat([call[f"{role}{name}"].expand(count, -1) for role, count in self._counts.items()])

    @property
    def _groups(self) -> int:
        return (self.kv_heads or 1) if self.packing == "interleaved" else 1

    @property
    def _counts(self) -> dict[str, int]:
        """Prefix of names of parameters -> number of heads of a group that have them."""
        counts = {"": self.heads // self._groups, "key_": (self.kv_heads or 0) // self._groups}
        return {role: count for role, count in counts.items() if count}

    def _cut(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads that are normed, and the values, [.., groups, heads of a group, head_dim] each."""
        heads = x.reshape(*x.shape[:-1], self._groups, x.shape[-1] // (self._groups * self.head_dim), self.head_dim)
        normed = sum(self._counts.values())
        return heads[..., :normed, :], heads[..., normed:, :]

    def _packed(self, heads: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        heads = heads.to(like.dtype)
        return (torch.cat((heads, values), -2) if values.shape[-2] else heads).reshape(like.shape)
