"""What presets plan ahead for: calls of the sizes that they were given, on the rows of this rank."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.presets.attention_call import AttentionCall
from te_fuser.presets.base import Preset


def plans_ahead(said: Any) -> bool:
    """Whether a preset is to plan ahead for calls of sizes that were given."""
    return said.seq_length is not None and said.micro_batch_size is not None


def own_rows(preset: Preset, rows: list[int]) -> list[int]:
    """Of the sizes of the whole's rows this rank's, where ranks cut the sequence.

    Raises:
        ValueError: when they cannot cut it so.
    """
    dim = preset.sequence_dim
    return [*rows[:dim], preset.share(rows[dim], "seq_length"), *rows[dim + 1 :]] if preset.sequence_parallel else rows


def example(preset: Preset, call: AttentionCall, like: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """The input of a call of the sizes that a preset was given, in the dtype and on the device of another tensor.

    Raises:
        ValueError: where ranks cut sequences, and cannot cut these.
    """
    positions, samples = preset.common.seq_length or 1, preset.common.micro_batch_size or 1
    rows = {"sbhd": [positions, samples], "bshd": [samples, positions], "thd": [positions * samples]}
    return like.new_empty(*own_rows(preset, rows[call.qkv_format]), hidden_size, requires_grad=True)


def example_masks(said: Any, call: AttentionCall, device: torch.device, cross: bool = False) -> dict[str, Any]:
    """What such a call gives for its mask, by its keywords: keys of the queries' length, and nothing is hidden."""
    positions, samples = said.seq_length or 1, said.micro_batch_size or 1
    if call.qkv_format == "thd":
        return {"cu_seqlens_q": torch.arange(samples + 1, dtype=torch.int32, device=device) * positions}
    if not call.reads_mask:
        return {}
    arbitrary = call.mask_type == "arbitrary"
    mask = torch.zeros(samples, 1, positions if arbitrary else 1, positions, dtype=torch.bool, device=device)
    return {call.mask: (mask, mask) if cross and not arbitrary else mask}
