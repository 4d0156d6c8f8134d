"""A call of a decoder layer of transformers, whatever its release names the arguments; facts that each call checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from te_fuser.guards import Facts

_READ = ("attention_mask", "position_embeddings", "cache", "past_key_values")
# Arguments that change nothing of what a layer computes by the functions that the op stands for, or are read elsewhere.
_WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class LayerCall:
    """Arguments of a layer's call beside x; `cache` names the cache's."""

    arguments: Mapping[str, Any]
    cache: str

    @property
    def mask(self) -> Any:
        """transformers' mask: None, [B, 1, S, T] booleans, True = seen, or what is added."""
        return self.arguments.get("attention_mask")

    @property
    def past(self) -> Any:
        """The cache of this layer's keys and values, or None."""
        past: Any = self.arguments.get(self.cache)
        return past.self_attention_cache if type(past) is EncoderDecoderCache else past

    @property
    def others(self) -> dict[str, Any]:
        """The arguments that the model's attention function is handed too."""
        return {name: value for name, value in self.arguments.items() if name not in _READ and value is not None}

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """The angles as `RotaryByAngles` takes them, [S, B or 1, 1, D]."""
        angles = self.arguments.get("position_embeddings")
        if angles is None:
            return {}
        return {name: t.transpose(0, 1).unsqueeze(2) for name, t in zip(("cos", "sin"), angles, strict=True)}

    def unknown(self) -> list[str]:
        """The arguments that say something, and of which lists of ops know nothing."""
        names = [
            name
            for name, value in self.arguments.items()
            if value is not None and name not in _WITHOUT_EFFECT and name not in (*_READ[:2], self.cache)
        ]
        past = self.past
        return names if past is None or isinstance(past, Cache) else [*names, f"{self.cache}=<{type(past).__name__}>"]


def argument_names(forward: Any) -> tuple[str, ...]:
    """The names of the arguments of a forward that may be given by position."""
    kinds = inspect.signature(forward).parameters.values()
    return tuple([p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD])


def cache_name(forward: Any) -> str:
    """The name by which a forward of transformers takes a cache of keys and values."""
    return "cache" if "cache" in argument_names(forward) else "past_key_values"  # before 5.24


def decoders(stack: Any, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions, by kind of cache, of the last layer's output for pieces of a prompt."""

    @torch.no_grad()
    def decode(make: Callable[..., Cache]) -> torch.Tensor:
        call = {cache_name(type(stack).forward): make(config=stack.config), "use_cache": True}
        pieces = x.split([x.shape[1] - 3, 2, 1], 1)
        return torch.cat([stack(inputs_embeds=piece, **call).last_hidden_state for piece in pieces], 1)

    static = functools.partial(StaticCache, max_cache_len=x.shape[1])
    return {
        "output by a DynamicCache": functools.partial(decode, DynamicCache),
        "output by a StaticCache": functools.partial(decode, static),
    }


_SCALARS = (bool, int, float, str, type(None))


def scalars_of(modules: Iterable[nn.Module]) -> Facts:
    """All numbers, flags and names that modules have as attributes."""
    own = [vars(m) for m in modules]
    return Facts(
        items=tuple([(d, name, value) for d in own for name, value in d.items() if isinstance(value, _SCALARS)]),
        calls=tuple([(d.__len__, len(d)) for d in own]),
    )
