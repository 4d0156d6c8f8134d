"""Parameters that are DTensors: a rank runs on its own part of each, and gives gradients that are DTensors as they are.

A weight of several parts along its features that is cut lies rank by rank, so that ranks cut each part (a gate and what
it gates; queries, and fewer keys and values). Its owner knows which parameters lie so.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch.distributed.distributed_c10d import get_process_group_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from te_fuser.distributed.group import Group

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Piece = tuple[torch.Tensor, tuple[int, ...]]
LAID = "_laid"  # attribute of a module: parameter -> how its parts lie


class Lies(NamedTuple):
    """Layout of a call's parameter among ranks.

    Attributes:
        shape: of this rank's own tensor.
        mesh: the mesh in words.
        ranks: for each dimension of the mesh those that this rank is among; a DTensor may know them by an older mesh.
        placements: for each dimension of the mesh.
    """

    shape: tuple[int, ...]
    mesh: str
    ranks: tuple[tuple[int, ...], ...]
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, t: torch.Tensor) -> Lies | None:
        """Layout of a tensor; None where it is no DTensor."""
        if not is_dtensor(t):
            return None
        mesh = t.device_mesh
        ranks = tuple(tuple(get_process_group_ranks(g)) for g in mesh.get_all_groups())
        return cls(tuple(t._local_tensor.shape), str(mesh), ranks, tuple(t.placements))

    def is_whole(self) -> bool:
        """True where every rank has all of it."""
        return all(p.is_replicate() or len(r) == 1 for p, r in zip(self.placements, self.ranks, strict=True))

    def is_cut(self, dim: int, group: Group) -> bool:
        """True where the ranks of that group alone have equal parts along a dimension."""
        if self.ranks != (tuple(get_process_group_ranks(group.process_group())),):
            return False
        (placement,) = self.placements
        return placement.is_shard(dim)


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """True for a DTensor; before its module is loaded no tensor can be one."""
    if type(t) in _PLAIN:
        return False
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(t, known.DTensor)


class Laid(NamedTuple):
    """Layout of parts of these sizes, each cut: the first rank's shares come first."""

    sizes: tuple[int, ...]
    ranks: int

    def laid(self, whole: torch.Tensor) -> torch.Tensor:
        """The whole as it lies, in new memory."""
        return torch.cat([whole[first : first + count] for first, count in self._shares()])

    def whole(self, laid: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        made = torch.empty_like(laid)
        shares = [*self._shares()]
        for (first, count), share in zip(shares, laid.split([count for _, count in shares]), strict=True):
            made[first : first + count] = share
        return made

    def pieces(self, local: torch.Tensor, offsets: Sequence[int]) -> Iterator[Piece]:
        """Views of a rank's own tensor, which begins at `offsets`, with their offsets."""
        (start, *others), before = offsets, 0
        for first, count in self._shares():
            begin, end = max(before, start), min(before + count, start + local.shape[0])
            if begin < end:
                yield local[begin - start : end - start], (first + begin - before, *others)
            before += count

    def _shares(self) -> Iterator[tuple[int, int]]:
        """Start and size, in the whole, of each share, in the order in which they lie."""
        starts = [0, *itertools.accumulate(self.sizes)]
        for rank in range(self.ranks):
            for start, size in zip(starts, self.sizes, strict=False):
                yield start + rank * size // self.ranks, size // self.ranks


def how_laid(owner: torch.nn.Module) -> Mapping[str, Laid]:
    """The parameters of a module whose parts are cut each by itself."""
    return owner.__dict__.get(LAID, {})  # type: ignore[no-any-return]


def waited(t: Any) -> Any:
    """Result of one of PyTorch's collectives once it is there; anything else as it is."""
    known = sys.modules.get("torch.distributed._functional_collectives")
    return _Waited.apply(t) if known is not None and isinstance(t, known.AsyncCollectiveTensor) else t


class _Waited(torch.autograd.Function):
    """The plain tensor, whose gradient is that of what waited for it."""

    @staticmethod
    def forward(ctx: Any, t: Any) -> torch.Tensor:
        return t.trigger_wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def own_part(t: torch.Tensor) -> torch.Tensor:
    """Local tensor of a DTensor, without autograd; a plain tensor as it is."""
    return t._local_tensor if is_dtensor(t) else t


def recorded_part(t: torch.Tensor) -> torch.Tensor:
    """Local tensor of a DTensor, recorded by autograd; a plain tensor as it is."""
    return _OwnPart.apply(t, t._spec, tuple(t._local_tensor.shape)) if is_dtensor(t) else t  # type: ignore[no-any-return, no-untyped-call]


class _OwnPart(torch.autograd.Function):
    """Function that gives what `to_local` does; transforms of torch.func take it, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: DTensor, spec: Any, shape: tuple[int, ...]) -> torch.Tensor:
        return t._local_tensor.view_as(t._local_tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.lies = inputs[1:]  # of the first one transforms hide how it lies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return as_gradient(gradients[0], *ctx.lies), None, None


def as_gradient(gradient: torch.Tensor, spec: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Gradient of this rank's part, of this shape, as a DTensor of this spec."""
    kind = sys.modules["torch.distributed.tensor"].DTensor  # whose __init__ does nothing, and takes 4 us
    if gradient.storage_offset():  # of such a one no DTensor can be copied; of the same memory as a storage it can
        gradient = torch.from_dlpack(gradient)
    own = gradient if gradient.shape == shape else gradient.view(shape)
    return kind.__new__(kind, own, spec, requires_grad=False)  # type: ignore[no-any-return]


def like_dtensor(own: torch.Tensor, like: DTensor) -> torch.Tensor:
    """DTensor of this rank's own part, laid out as another one."""
    return as_gradient(own, like._spec, tuple(like._local_tensor.shape))


def own_chunk(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Part that this rank has of a whole tensor that is laid out as a DTensor; a view."""
    (chunk,) = like.__create_chunk_list__()
    own = whole[tuple([slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)])]
    return own.view(like._local_tensor.shape) if not own.numel() else own


def filled(owner: torch.nn.Module, name: str, fill: Callable[[torch.Tensor], Any]) -> None:
    """Fill a parameter; of a DTensor every rank draws the whole and takes its part."""
    parameter = owner._parameters.get(name)
    if parameter is None:
        return
    if not is_dtensor(parameter):
        fill(parameter)
        return
    laid, local = how_laid(owner).get(name), parameter._local_tensor
    whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
    fill(whole)
    with torch.no_grad():
        local.copy_(own_chunk(whole if laid is None else laid.laid(whole), parameter))


def is_taken_away(owner: torch.nn.Module) -> bool:
    """True where `fully_shard` takes parameters away after forward."""
    hooks = (h for m in owner.modules() for h in m._load_state_dict_post_hooks.values())
    return any((getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp") for hook in hooks)
