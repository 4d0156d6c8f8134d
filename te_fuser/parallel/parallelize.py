"""Models that ranks share: products and presets over a mesh, sequences over another one; sums left to an engine."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Container, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import shared_errors
from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.distributed.group import Group
from te_fuser.flatten import flatten
from te_fuser.from_torch import converts
from te_fuser.fused_regions import Border
from te_fuser.fuser.graph.list_passes import with_placements
from te_fuser.fuser.graph.op_instances import ListedOp
from te_fuser.ops import Bound, Cut, FusableOperation, checks
from te_fuser.ops.checks import no_tensor, yes_or_no
from te_fuser.ops.glu import GatedUnit
from te_fuser.ops.sharing import Context
from te_fuser.parallel.derive import derived_plan, sequence_dim
from te_fuser.parallel.styles import Column, Parts, Row, described, distribute, owners, set_cut
from te_fuser.params.binding import GivenBinding
from te_fuser.params.concatenated_parameter import Together
from te_fuser.params.gradient_sums import LEFT
from te_fuser.presets.attention_base import set_context
from te_fuser.presets.base import Preset
from te_fuser.presets.dot_product_attention import DotProductAttention
from te_fuser.presets.layer_norm_mlp import LayerNormMLP
from te_fuser.presets.linear import Affine
from te_fuser.presets.multihead_attention import MultiheadAttention
from te_fuser.sequential import Sequential
from te_fuser.sharding.rules import rule_of

_SHOWN = 5  # modules that a message names
Model = TypeVar("Model", bound=torch.nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool = False,
    plan: Mapping[str, ParallelStyle] | None = None,
    context: DeviceMesh | None = None,
) -> Model:
    """Shard a model's products over the ranks of a mesh, in place; its parameters become DTensors on the mesh.

    With `context` sequences are sharded over the ranks of another mesh.

    Inputs and outputs of lists are plain local tensors: whole, or with `sequence_parallel` this rank's part along the
    sequence dimension of attention's layout (0 without attention). Call it before `fully_shard` and before an optimizer
    is made; all ranks get the values of the mesh's first rank.

    Args:
        model: lists of ops, alone or in modules.
        mesh: of one dimension: `mesh["tp"]`; None: each rank has all weights, and parameters stay as they are.
        sequence_parallel: shard tensors with all features along the sequence.
        plan: {pattern of names: style}, as {"*.fc1": Column(), "*.fc2": Row()}; None: see `derived_plan`.
        context: of one dimension: `mesh["cp"]`. Each of its ranks has a block of the sequence, as by `cut_sequence`;
            around attention they exchange heads for positions. With `sequence_parallel` the ranks of `mesh` divide that
            block further. DDP or `fully_shard` have to average gradients over the ranks of the context, too.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: for a mesh of several dimensions, a pattern that no module has, sizes that cannot be cut
            into equal parts, modules that a style does not take, one mesh as both, a context without an attention.
        RankMismatchError: on all ranks, before anything is sent, for different models or arguments, after an error on a
            rank, or when a rank is missing.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"parallelize takes a module, got {checks.described(model)}")
    if context is not None:
        group = _group_of(context)
        groups = [group] if group.size > 1 else []
        with shared_errors(groups):
            if groups and mesh is not None and group == Group.of("parallelize", mesh):
                whose = f"{group.title!r} is mesh and context"
                raise ValueError(f"parallelize: {whose}: give a dimension of a mesh to each")
            if not set_context(model, Context(group)):
                raise ValueError(
                    "parallelize: context= cuts the sequence that attention sees, and this model has no "
                    "DotProductAttention: leave it out; attentions of converted models and other libraries know no "
                    "context"
                )
        consistency.compare(groups, [("argument", "parallelize(model, context=mesh)"), *described(model)])
    return model if mesh is None and context is not None else _shared(model, mesh, sequence_parallel, plan)


def _shared(model: Model, mesh: Any, sequence_parallel: bool, plan: Mapping[str, ParallelStyle] | None) -> Model:
    group = _group_of(mesh)
    groups = [group] if group.size > 1 else []
    with shared_errors(groups):
        yes_or_no("parallelize", "sequence_parallel", sequence_parallel)
        dim = sequence_dim(model) if sequence_parallel else 0
        styles = derived_plan(model, group) if plan is None else _matched(model, plan)
        _say_what_is_plain(model, styles, sequence_parallel)
    asked = [f"parallelize(model, mesh, sequence_parallel={sequence_parallel})"]
    if plan is None:
        asked.append("no plan: what the model gives by itself")
    else:
        asked += [f"a plan with {pattern!r}: {consistency.shown(style)}" for pattern, style in plan.items()]
    consistency.compare(groups, [*[("argument", text) for text in asked], *described(model)])
    if plan is None:
        _share_presets(model, mesh, sequence_parallel, dim)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, (Column, Row)):
            style._apply(module, mesh)
        elif style.sequence_parallel is None:
            dataclasses.replace(style, sequence_parallel=sequence_parallel, sequence_dim=dim).cut(module, mesh)
        else:
            style.cut(module, mesh)
    for module in [*model.modules()]:
        op = module.op if isinstance(module, Bound) else module
        if isinstance(op, Cut) and op.parallel_mode is None and group.size > 1:
            set_cut(op, None, mesh, sequence_parallel, dim)
        if isinstance(module, (FusableOperation, Together)):
            for name in [*module._parameters]:
                if not is_dtensor(module._parameters[name]):
                    distribute(module, name, mesh, None)
    return model


def _group_of(mesh: DeviceMesh) -> Group:
    """The ranks of a mesh; what else has ranks is told to them, before it is refused."""
    found = Group.of("parallelize", mesh)
    if isinstance(mesh, DeviceMesh):
        return found
    with shared_errors([found] if found.size > 1 else []):
        raise TypeError(
            f"parallelize takes a DeviceMesh, got a {type(mesh).__name__}: give a dimension of one, mesh['tp'], "
            "or make one of the group: DeviceMesh.from_group(group, 'cuda')"
        )


def _say_what_is_plain(model: torch.nn.Module, styles: Container[str], sequence_parallel: bool) -> None:
    """Warn of modules in lists that are no ops and have no style."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, Sequential)]
    found: dict[str, torch.nn.Module] = {}
    for path, listed in lists:
        for name, module in listed.named_modules(prefix=path):
            knows = isinstance(module, (FusableOperation, Sequential, Together))
            if not knows and name not in styles and any(True for _ in module.parameters(recurse=False)):
                found[name] = module
    if found:
        first = ", ".join(f"{name} ({type(module).__name__})" for name, module in [*found.items()][:_SHOWN])
        known = sorted({type(module).__name__ for module in found.values() if converts(module)})
        ops = f"; te_fuser.from_torch makes ops of {', '.join(known)}" if known else ""
        wrong = ", and gradients of their parameters, of which each has a term, are not added up" * sequence_parallel
        warnings.warn(
            f"parallelize leaves {first}{' and more' * (len(found) > _SHOWN)} as they are: no ops, but modules of "
            f"their own in a list. Every rank runs them whole{wrong}{ops}",
            stacklevel=4,
        )


def _matched(model: torch.nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    names = [name for name, _ in model.named_modules()]
    if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise TypeError(f'parallelize takes a plan as {{"*.fc1": Column(), "*.fc2": Row()}}, got {plan!r}')
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"parallelize: no module has a name like {pattern!r}; there are {', '.join(filter(None, names[:20]))}"
            )
        found.update(dict.fromkeys(matching, style))
    return found


# -------------------------------------------------------------------------------------------------- sequences


def cut_sequence(x: torch.Tensor, group: Any, dim: int = 0, balanced: bool = False) -> torch.Tensor:
    """Take this rank's part of a tensor with whole sequences: inputs, labels, or `torch.arange(positions)`.

    Args:
        x: the same on all ranks.
        group: the ranks that cut sequences: `mesh["cp"]`, or a ProcessGroup.
        dim: the dimension of the positions.
        balanced: of 2 n equal blocks rank r of n has the blocks r and 2 n - 1 - r, as presets take them that have their
            group by `set_context_parallel_group`; else of n blocks the block r, as `parallelize(model, context=..)`
            says.

    Returns:
        [.., positions / ranks, ..]; a view where it is one block, which keeps all of x: clone it where that is large.

    Raises:
        ValueError: when the ranks cannot cut it into equal blocks, or it has no such dimension.
    """
    if not isinstance(x, torch.Tensor):
        raise no_tensor("cut_sequence", x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"cut_sequence: an input of shape {list(x.shape)} has no dimension {dim!r} to cut along")
    context = Context(Group.of("cut_sequence", group), balanced)
    context.check("cut_sequence", x.shape[dim])
    return context.own(x, x.shape[dim] // context.group.size, dim)


# ---------------------------------------------------------------------------------------------------- presets


def _share_presets(model: torch.nn.Module, mesh: DeviceMesh, sequence_parallel: bool, sequence_dim: int) -> None:
    """Let the ranks of a mesh share the attentions and MLPs in a model."""
    group = Group.of("parallelize", mesh)
    presets = [m for m in model.modules() if isinstance(m, Preset)]
    parts: dict[torch.nn.Module, dict[str, Parts]] = {}
    for preset in presets:
        parts.update(_parts_of(preset))
    for preset in presets:
        _check_preset(preset, group)
    for preset in presets:
        _set_preset(preset, group, sequence_parallel, sequence_dim)
    for preset in reversed(presets):  # what is in it first
        preset.relist()
    for module in [*model.modules()]:
        if not (isinstance(module, Bound) and isinstance(module.owner, Preset)):
            continue
        for name, (dim, _) in rule_of(module.op).cuts(module.op).items():
            for owner, of in owners(module, name):
                distribute(owner, of, mesh, dim, parts.get(owner, {}).get(of, 1))


def _check_preset(preset: Preset, group: Group) -> None:
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


def _set_preset(preset: Preset, group: Group, sequence_parallel: bool, sequence_dim: int) -> None:
    preset._group, preset.tp_size = group, group.size
    preset.sequence_parallel, preset.sequence_dim = sequence_parallel, sequence_dim
    known = {f.name for f in dataclasses.fields(preset.common)}
    said = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim, "set_parallel_mode": True}
    preset.common = dataclasses.replace(preset.common, **{name: value for name, value in said.items() if name in known})
    preset._refusal = preset._why_not()
    preset._made_from = []  # variants are made anew
    if isinstance(preset, MultiheadAttention):
        for child in preset.children():
            if isinstance(child, Affine):
                child.parallel_mode = "row" if child is preset.proj else "column"


def _parts_of(preset: Preset) -> dict[torch.nn.Module, dict[str, Parts]]:
    """Parameters of a preset, and of those in it, that have parts, and which."""
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


# ----------------------------------------------------------------------------------------- sums of gradients


def leave_sums_to_engine(model: torch.nn.Module) -> list[str]:
    """Leave sums of gradients over the ranks to the training engine: sets `parameter.sequence_parallel = True`.

    For norms and biases on sharded sequences, and norms of sharded heads. te_fuser then no longer sums their gradients;
    an engine such as Megatron does, once a step, by these marks. Presets keep the marks when they are moved, copied or
    loaded; other modules lose them when a parameter is replaced.

    Returns:
        The parameters' names.

    Raises:
        ValueError: where an op of a list cannot take what ranks have.
    """
    items = [item for listed in _lists_of(model) for item in with_placements(listed)]
    summed = [item.lowered.bindings[name] for item in items for name in item.summed]
    marked = {id(part) for b in summed if not isinstance(b, GivenBinding) for part in b.parts()}
    presets = [module for module in model.modules() if isinstance(module, Preset)]
    marked |= {id(preset.get_parameter(name)) for preset in presets for name in preset.returned_terms()}
    found = []
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in marked:
                found.append(f"{path}.{name}" if path else name)
                if isinstance(module, Preset):
                    module.mark(name, **{LEFT: True})
                setattr(parameter, LEFT, True)
    return found


def _lists_of(module: torch.nn.Module) -> Iterator[tuple[ListedOp, ...]]:
    """The lists of ops that are planned together in a model."""
    if not isinstance(module, Sequential):
        for child in module.children():
            yield from _lists_of(child)
        return
    for part in flatten(module):
        if not isinstance(part, Border):
            yield part.listed
        elif part.module is not module:
            yield from _lists_of(part.module)
