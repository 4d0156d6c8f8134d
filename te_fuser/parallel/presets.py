"""Presets as the ranks of a mesh share them: attention by whole key/value heads, MLPs by features."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from te_fuser.distributed.group import Group
from te_fuser.ops import Bound
from te_fuser.ops.glu import GatedUnit
from te_fuser.parallel.styles import Parts, distribute, owners
from te_fuser.presets.base import Preset
from te_fuser.presets.dot_product_attention import DotProductAttention
from te_fuser.presets.layer_norm_mlp import LayerNormMLP
from te_fuser.presets.linear import Affine
from te_fuser.presets.multihead_attention import MultiheadAttention
from te_fuser.sharding.rules import rule_of


def share_presets(model: torch.nn.Module, mesh: DeviceMesh, sequence_parallel: bool, sequence_dim: int) -> None:
    """Let the ranks of a mesh share the attentions and MLPs in a model, as `set_parallel_mode=True` does.

    Raises:
        ValueError: for one that is shared already, and for heads and features that cannot be cut into equal parts.
    """
    group = Group.of("parallelize", mesh)
    presets = [m for m in model.modules() if isinstance(m, Preset)]
    parts: dict[torch.nn.Module, dict[str, Parts]] = {}
    for preset in presets:
        parts.update(_parts_of(preset))
    for preset in presets:
        _check(preset, group)
    for preset in presets:
        _set(preset, group, sequence_parallel, sequence_dim)
    for preset in reversed(presets):  # what is in it first
        preset.relist()
    for module in [*model.modules()]:
        if not (isinstance(module, Bound) and isinstance(module.owner, Preset)):
            continue
        for name, (dim, _) in rule_of(module.op).cuts(module.op).items():
            for owner, of in owners(module, name):
                distribute(owner, of, mesh, dim, parts.get(owner, {}).get(of, 1))


def _check(preset: Preset, group: Group) -> None:
    who = type(preset).__name__
    if preset.tp_size != 1:
        raise ValueError(f"{who} is shared by tp_group already: make it without, or parallelize what is around it")
    if isinstance(preset, DotProductAttention) and preset.num_gqa_groups % group.size:
        raise ValueError(
            f"{who} on {group}: num_gqa_groups={preset.num_gqa_groups} cannot be cut into {group.size} equal "
            "parts: take fewer ranks, or more key/value heads"
        )
    if isinstance(preset, LayerNormMLP) and preset.ffn_hidden_size % group.size:
        raise ValueError(
            f"{who} on {group}: ffn_hidden_size={preset.ffn_hidden_size} cannot be cut into {group.size} equal parts: "
            "change one"
        )


def _set(preset: Preset, group: Group, sequence_parallel: bool, sequence_dim: int) -> None:
    preset._group, preset.tp_size = group, group.size
    preset.sequence_parallel, preset.sequence_dim = sequence_parallel, sequence_dim
    known = {f.name for f in fields(preset.common)}
    said = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim, "set_parallel_mode": True}
    preset.common = replace(preset.common, **{name: value for name, value in said.items() if name in known})
    preset._refusal = preset._why_not()
    preset._made_from = []  # variants are made anew
    if isinstance(preset, MultiheadAttention):
        for child in preset.children():
            if isinstance(child, Affine):
                child.parallel_mode = "row" if child is preset.proj else "column"


def _parts_of(preset: Preset) -> dict[torch.nn.Module, dict[str, Parts]]:
    """Parameters of a preset, and of those in it, in which several parts lie side by side, and which."""
    if isinstance(preset, LayerNormMLP):
        gates = [m for m in preset.children() if isinstance(m, GatedUnit)]
        return {preset: dict.fromkeys(("fc1_weight", "fc1_bias"), 2)} if gates else {}
    if isinstance(preset, MultiheadAttention) and preset.common.fuse_qkv_params and not preset.qkv_weight_interleaved:
        heads, groups = preset.num_attention_heads, preset.num_gqa_groups
        joined, parts = (
            (preset.key_value, (groups, groups)) if preset.crosses else (preset.first, (heads, groups, groups))
        )
        return {joined: dict.fromkeys(("weight", "bias"), parts)}
    return {}
