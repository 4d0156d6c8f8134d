"""Sums of gradients over ranks that are left to a training engine."""

from collections.abc import Iterator

import torch

from te_fuser.flatten import flatten
from te_fuser.fused_regions import Border
from te_fuser.fuser.graph.list_passes import with_placements
from te_fuser.fuser.graph.op_instances import ListedOp
from te_fuser.params.binding import GivenBinding
from te_fuser.params.gradient_sums import LEFT
from te_fuser.presets.base import Preset
from te_fuser.sequential import Sequential


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
    items = [item for listed in lists_of(model) for item in with_placements(listed)]
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


def lists_of(module: torch.nn.Module) -> Iterator[tuple[ListedOp, ...]]:
    """The lists of ops that are planned together in a model."""
    if not isinstance(module, Sequential):
        for child in module.children():
            yield from lists_of(child)
        return
    for part in flatten(module):
        if not isinstance(part, Border):
            yield part.listed
        elif part.module is not module:
            yield from lists_of(part.module)
