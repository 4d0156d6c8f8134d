"""Column, Row and Heads: how the ranks of a mesh share an op, as styles of PyTorch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from te_fuser.distributed import consistency
from te_fuser.distributed.consistency import Line
from te_fuser.distributed.dtensor import Laid, is_dtensor, own_part
from te_fuser.distributed.group import Group
from te_fuser.ops import Bias, Bound, Cut, DotProductAttention, FusableOperation, Linear, MatMul
from te_fuser.ops.checks import count
from te_fuser.parallel.checkpoint import keep_whole_shapes, set_laid
from te_fuser.params.binding import place_of

Parts = int | tuple[int, ...]  # that lie side by side: how many equal ones, or their sizes as far as they matter
_TAKES = "a MatMul, a Bias, a Linear, or a Bound one of these"


@dataclass
class _Style(ParallelStyle):
    """Style by which the ranks of a mesh share a product, or a bias.

    Args:
        sequence_parallel: whether ranks cut the rows of what is whole in its features; None: as `parallelize` says, by
            default not.
        sequence_dim: the dimension along which these are cut.
    """

    sequence_parallel: bool | None = None
    sequence_dim: int = 0

    mode = ""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        group = Group.of(type(self).__name__, device_mesh)
        if group.size > 1:
            consistency.compare([group], [("argument", consistency.shown(self)), *described(module)])
        return self.cut(module, device_mesh)

    def cut(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        """The module, with what ranks share, where they are known to be alike."""
        op = module.op if isinstance(module, Bound) else module
        who = type(self).__name__
        if not isinstance(op, (MatMul, Bias, Linear)):
            raise TypeError(f"{who} takes {_TAKES}, got {type(op).__name__}: leave it out of the plan")
        self._check(op, Group.of(who, device_mesh))
        for name, dim in self._dims(op).items():
            for owner, of in owners(module, name):
                distribute(owner, of, device_mesh, dim, self._parts, self.src_data_rank)
        set_cut(op, self.mode, device_mesh, bool(self.sequence_parallel), self.sequence_dim)
        return module

    @property
    def _parts(self) -> Parts:
        return 1

    def _check(self, op: Cut, group: Group) -> None:
        """Refuse, in words, what the ranks cannot cut."""

    def _dims(self, op: Cut) -> dict[str, int | None]:
        """Parameter -> the dimension that is cut; None: whole in each rank."""
        raise NotImplementedError


@dataclass
class Column(_Style):
    """Shard a product by output features: each rank has a part of weight [out, in] and bias [out] along out.

    Args:
        sequence_parallel, sequence_dim: the input is sharded by rows, along this dimension, and gathered first.
        parts: parts of the output that are sharded separately: their number if equal, 2 before a gated unit, or their
            relative sizes, (4, 1, 1) for queries, keys and values. `state_dict` has the order of the whole.

    Raises:
        TypeError: for a module that it does not take.
        ValueError: for features that the ranks cannot cut into equal parts.
    """

    parts: Parts = 1
    mode = "column"

    def __post_init__(self) -> None:
        for part in self.parts if isinstance(self.parts, (tuple, list)) else (self.parts,):
            count("Column", "parts", part)

    @property
    def _parts(self) -> Parts:
        return self.parts

    def _check(self, op: Cut, group: Group) -> None:
        features = op.features if isinstance(op, Bias) else op.out_features  # type: ignore[attr-defined]
        check_share(type(op).__name__, "out_features", features, group, self.parts)

    def _dims(self, op: Cut) -> dict[str, int | None]:
        return {name: 0 for name in ("weight", "bias") if name in op._parameters}


@dataclass
class Row(_Style):
    """Shard a product by input features: each rank has a part of weight [out, in] along in, and the whole bias.

    The ranks' results are summed; the bias is added once, after the sum.

    Args:
        sequence_parallel, sequence_dim: the sum is scattered, so that each rank gets its rows along this dimension.

    Raises:
        TypeError: for a module that it does not take.
        ValueError: for features that the ranks cannot cut into equal parts.
    """

    mode = "row"

    def _check(self, op: Cut, group: Group) -> None:
        if not isinstance(op, Bias):
            check_share(type(op).__name__, "in_features", op.in_features, group)  # type: ignore[attr-defined]

    def _dims(self, op: Cut) -> dict[str, int | None]:
        known: dict[str, int | None] = {"weight": 1, "bias": None}
        return {name: dim for name, dim in known.items() if name in op._parameters}


@dataclass
class Heads(ParallelStyle):
    """Shard an attention's learned sinks [heads] by the heads that the product before it gives each rank.

    Raises:
        TypeError: for a module that it does not take.
        ValueError: for heads that the ranks cannot cut into equal parts.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        op = module.op if isinstance(module, Bound) else module
        if not isinstance(op, DotProductAttention):
            raise TypeError(f"Heads takes a DotProductAttention, got {type(op).__name__}: leave it out of the plan")
        check_share(type(op).__name__, "heads", op.heads, Group.of("Heads", device_mesh))
        for owner, of in owners(module, "sink"):
            distribute(owner, of, device_mesh, 0, source=self.src_data_rank)
        op.sink_group = device_mesh
        return module


def set_cut(op: Cut, mode: str | None, mesh: DeviceMesh, sequence_parallel: bool, sequence_dim: int) -> None:
    """Say how ranks share an op; the last two hold for an op that each has whole, too."""
    op.group = mesh  # type: ignore[assignment]  # its setter takes a mesh
    op.sequence_parallel, op.sequence_dim = sequence_parallel, sequence_dim
    op.parallel_mode = mode


def described(model: torch.nn.Module) -> Iterator[Line]:
    """A model in lines: its modules, and the form of their parameters."""
    for path, module in model.named_modules():
        of = module.extra_repr() if isinstance(module, FusableOperation) else ""
        forms = [
            f"{name} {list(p.shape)} {p.dtype} {'with' if p.requires_grad else 'without'} a gradient on {p.device.type}"
            for name, p in module._parameters.items()
            if p is not None
        ]
        yield "module", f"{path or 'the model'}: {type(module).__name__}({of}) {', '.join(forms)}".rstrip()


def sizes_of(parts: Parts, whole: int) -> tuple[int, ...]:
    """Sizes of the parts of a whole, which ratios may not divide."""
    ratios = (1,) * parts if isinstance(parts, int) else parts
    return tuple(whole // sum(ratios) * ratio for ratio in ratios)


def check_share(op: str, name: str, size: int, group: Group, parts: Parts = 1) -> None:
    """Refuse a size that ranks cannot cut into equal parts."""
    sizes = sizes_of(parts, size)
    if sum(sizes) != size or any(own % group.size for own in sizes):
        each = f", each of {len(sizes)} parts by itself" * (len(sizes) > 1)
        raise ValueError(
            f"{op} on {group}: {name}={size} cannot be cut into {group.size} equal parts{each}: change one, or leave "
            "the op out of the plan"
        )


def distribute(
    owner: torch.nn.Module, name: str, mesh: DeviceMesh, dim: int | None, parts: Parts = 1, source: int | None = 0
) -> None:
    """Make a parameter a DTensor that is cut along a dimension, or whole in each rank (None).

    Args:
        parts: what lies along dimension 0, each of which is cut by itself.
        source: the rank in the mesh whose values all get; None: each has the same, and nothing is sent.
    """
    old = owner._parameters.get(name)
    if old is None:
        return
    sizes = () if dim is None else sizes_of(parts, old.shape[0])
    laid = Laid(sizes, mesh.size()) if len(sizes) > 1 else None
    wanted = [Replicate()] if dim is None else [Shard(dim)]
    if is_dtensor(old):
        if old.device_mesh == mesh and list(old.placements) == wanted:
            return
        raise ValueError(
            f"{name} of {type(owner).__name__} is a DTensor already, on {old.device_mesh} with {list(old.placements)}: "
            "parallelize a model once, before fully_shard"
        )
    whole = old.detach()
    if laid is not None:
        whole = laid.laid(whole)
        set_laid(owner, name, laid)
    made: torch.Tensor = distribute_tensor(whole, mesh, wanted, src_data_rank=source)
    if own_part(made).storage_offset() or own_part(made) is whole:
        made = made.clone()
    parameter = torch.nn.Parameter(made, old.requires_grad)
    parameter.__dict__.update({key: value for key, value in old.__dict__.items() if key != "_is_param"})
    owner.register_parameter(name, parameter)
    keep_whole_shapes(owner)


def owners(module: torch.nn.Module, name: str) -> list[tuple[torch.nn.Module, str]]:
    """Modules that have a parameter of an op, and its names there; of a bound one, its owner's."""
    if not isinstance(module, Bound):
        return [(module, name)]
    given: Any = module.names.get(name, ())
    return [place_of(module.owner, of) for of in ((given,) if isinstance(given, str) else given)]
