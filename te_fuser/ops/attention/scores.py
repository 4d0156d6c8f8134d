"""What attention does to its scores beside scaling them: soft cap, bias, ALiBi, sinks.

    t = cap * tanh(s / cap) + bias - slope |d|        s = q k^T * scale, d = key position - query position
    y = sum_k exp(t_k) v_k / (exp(sink) + sum_k exp(t_k))

Soft cap: Gemma Team, "Gemma 2", 2024. ALiBi: Press et al., "Train Short, Test Long", 2022. Sinks: Miller, "Attention Is
Off By One", 2023, with 0 for a sink; learned ones as in gpt-oss, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fuser.ops.attention.heads import one_of
from te_fuser.ops.base import Spec
from te_fuser.ops.checks import check_name, real_number

SOFT_CAP, BIAS, ALIBI, SINK = "a soft cap", "a score bias", "ALiBi", "a sink"
SINKS = {"none": "no sink", "zero": "a logit of 0 beside the scores", "learned": "a parameter for each head"}


@dataclass(frozen=True)
class AttentionScores:
    """What is added to the scores of an attention, and how they are bounded; nothing by default.

    Attributes:
        soft_cap: the bound c of c * tanh(scores / c); 0: none.
        bias: the name of a floating-point input, broadcastable to [batch, heads, queries, keys], which has a gradient.
        alibi: True: the slopes of the paper, by head; a name: an input of slopes [heads] or [batch, heads], without a
            gradient.
        by_position: of layout="tokens": the bias is [.., queries, keys] of positions in a sequence, as many as the
            longest has or more, the same for each sequence. On a GPU rows that it is too small for are NaN.
        sink: "none"; "zero": a logit of 0 beside the scores of each row; "learned": the op's parameter `sink` [heads].
    """

    soft_cap: float = 0.0
    bias: str | None = None
    alibi: bool | str = False
    sink: str = "none"
    by_position: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= real_number("AttentionScores", "soft_cap", self.soft_cap) < math.inf:
            raise ValueError(f"soft_cap is a positive bound of the scores, or 0 for none; got {self.soft_cap}")
        one_of("sink", self.sink, SINKS)
        if self.by_position and self.bias is None:
            raise ValueError("by_position says how a bias lies, and bias is None: name it, or leave by_position out")
        for name in self.names.values():
            check_name(name)

    @property
    def names(self) -> dict[str, str]:
        """Argument -> the name of the input that it reads."""
        found = {"attention_bias": self.bias, "alibi_slopes": self.alibi if isinstance(self.alibi, str) else None}
        return {argument: name for argument, name in found.items() if name is not None}

    @property
    def beyond(self) -> tuple[str, ...]:
        """What it asks for, in words."""
        asked = {
            SOFT_CAP: self.soft_cap > 0.0,
            BIAS: self.bias is not None,
            ALIBI: bool(self.alibi),
            SINK: self.sink != "none",
        }
        return tuple(words for words, wanted in asked.items() if wanted)

    def check(self, op: str, full: tuple[int, int, int, int], others: Mapping[str, Spec]) -> None:
        """Raise, in words, when bias or slopes do not fit [batch, heads, queries, keys].

        Raises:
            ValueError: one is missing, or of another shape.
            TypeError: no floating-point numbers.
        """
        for argument, name in self.names.items():
            spec = others.get(argument)
            if spec is None:
                raise ValueError(f"{op} reads a tensor {name!r}: call the model with {name}=...")
            if not spec.dtype.is_floating_point:
                raise TypeError(f"{name!r} is {spec.dtype}; {op} takes floating-point numbers: convert with .float()")
            whole = full if argument == "attention_bias" else full[:2]
            sizes = (1,) * (len(whole) - len(spec.shape)) + spec.shape
            if self.by_position and argument == "attention_bias" and len(sizes) == 4:
                whole = (*whole[:2], *sizes[2:])
            if len(sizes) > len(whole) or any(s not in (1, w) for s, w in zip(sizes, whole, strict=True)):
                axes = "[batch, heads, queries, keys]" if argument == "attention_bias" else "[batch, heads]"
                raise ValueError(
                    f"{name!r} has shape {list(spec.shape)}, which does not broadcast to {axes} = {[*whole]}"
                )


Places = tuple[torch.Tensor, torch.Tensor]  # of queries [S] and keys [K] in their sequences


def at_places(bias: torch.Tensor, places: Places) -> torch.Tensor:
    """A bias of positions [B, H, P, R] for each query and key, [B, H, S, K]; NaN where it has no such position."""
    found = bias[(..., *_indices(bias, places))]
    for dim, (place, size) in enumerate(zip(places, bias.shape[-2:], strict=True)):
        outside = place >= (size if size > 1 else torch.iinfo(place.dtype).max)
        found = found.masked_fill(outside[None, :] if dim else outside[:, None], torch.nan)
    return found


def summed_by_place(gradient: torch.Tensor, bias: torch.Tensor, places: Places) -> torch.Tensor:
    """The gradient of the bias for that of `at_places`."""
    by_place = gradient.sum_to_size(*bias.shape[:2], *gradient.shape[2:]).permute(2, 3, 0, 1)
    made = gradient.new_zeros(*bias.shape[2:], *bias.shape[:2])
    return made.index_put_(_indices(bias, places), by_place, accumulate=True).permute(2, 3, 0, 1)


def _indices(bias: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = (place.clamp(max=size - 1) for place, size in zip(places, bias.shape[-2:], strict=True))
    return queries[:, None], keys[None, :]


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The paper's slopes [heads]: 2^(-8 i / n) for the largest power of two n, then those of 2 n at odd i."""
    power = 1 << (heads.bit_length() - 1)
    whole = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8.0 / power)
    between = (torch.arange(heads - power, dtype=torch.float64, device=device) * 2 + 1) * (-4.0 / power)
    return torch.cat((whole, between)).exp2()
