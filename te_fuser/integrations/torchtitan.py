"""An override for torchtitan: Llama 3's blocks run by te_fuser, with the parameters, names and checkpoints they have.

--override.imports te_fuser.integrations.torchtitan.llama3_block
"""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.llama3.model import Llama3TransformerBlock

from te_fuser import ops
from te_fuser.convert.layer_ops import LayerParts, Theirs
from te_fuser.integrations import run_list


def norm(parts: LayerParts, path: str = "attention_norm") -> list[nn.Module]:
    """A norm of the block."""
    return parts.norm(path, nn.RMSNorm, lambda m: ops.RMSNorm(m.normalized_shape, m.eps, device="meta"))


def behind_attention(parts: LayerParts) -> list[nn.Module]:
    """h = x + attended, then h + w2(silu(w1(norm(h))) * w3(norm(h))), of attended and x, the "residual"."""
    if parts.is_left("feed_forward", FeedForward):
        feed: list[nn.Module] = [Theirs(parts.module("feed_forward"))]
    else:
        gate_and_up = parts.linear("feed_forward.w1", "feed_forward.w3")
        feed = [*gate_and_up, ops.SwiGLU(), *parts.linear("feed_forward.w2")]
    return [ops.Add("residual"), ops.Fork("middle"), *norm(parts, "ffn_norm"), *feed, ops.Add("middle")]


class FusedTransformerBlock(Llama3TransformerBlock):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h))."""

    Config = make_dataclass(
        "FusedTransformerBlock.Config", [], bases=(Llama3TransformerBlock.Config,), kw_only=True, slots=True
    )

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        """y of x, [B, S, features]."""
        attended = self.attention(run_list(self, norm, x), attention_masks, positions)
        return run_list(self, behind_attention, attended, residual=x)


@override(target=Llama3TransformerBlock.Config, exact=True, description="te_fuser's kernels around attention")
def llama3_block(config: Llama3TransformerBlock.Config) -> Any:
    """Let te_fuser run the block."""
    return derive(config, FusedTransformerBlock.Config)
