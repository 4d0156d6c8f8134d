"""Shapes of the whole model for weights that lie in parts, as checkpoints see them.

A weight of several parts that ranks cut lies as `ops.dtensor.Laid` says. In `state_dict` of its module, and of an
optimizer that has stepped, it stands as `WholeShape`: a DTensor of the whole's shape of which each rank has several
pieces, views of the parameter's memory, which `torch.distributed.checkpoint` saves and loads one by one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_fuser.distributed.dtensor import LAID, Laid, how_laid, own_chunk

_STATE, _GROUPS = "state", "param_groups"  # keys of an optimizer's state_dict


class _Pieces(LocalShardsWrapper):
    """Pieces of a whole, which take their values from it."""

    def copy_(self, whole: torch.Tensor, non_blocking: bool = False) -> _Pieces:
        """Fill the pieces from a whole tensor that the first rank sends."""
        for piece, offsets in zip(self.local_shards(), self.local_offsets(), strict=True):
            piece.copy_(
                whole[tuple([slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True)])], non_blocking
            )
        return self


class WholeShape(DTensor):
    """A DTensor of parts that lie apart, in the shape of the whole, for checkpoints alone."""

    cut: DTensor
    laid: Laid

    @classmethod
    def of(cls, cut: DTensor, laid: Laid) -> WholeShape:
        """View of a DTensor in the whole's shape, over its memory."""
        (chunk,) = cut.__create_chunk_list__()
        whole = torch.empty(cut.shape, dtype=cut.dtype, device="meta")
        local = cut._local_tensor.detach()
        found = [*laid.pieces(local, chunk.offsets)] if local.numel() else []
        pieces = _Pieces([piece for piece, _ in found], [offsets for _, offsets in found])
        places = [Replicate()] * cut.device_mesh.ndim
        made = DTensor.from_local(
            pieces, cut.device_mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        made.__class__ = cls
        assert isinstance(made, cls)
        made.cut, made.laid, made._local_tensor = cut, laid, pieces
        return made

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's pieces."""
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole, in every rank."""
        return self.laid.whole(self.cut.full_tensor())

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:  # type: ignore[override]
        """The whole, in every rank: the only way that it lies but this one."""
        places = [Replicate()] * self.cut.device_mesh.ndim
        return DTensor.from_local(self.full_tensor(), self.cut.device_mesh, places, run_check=False)


def _as_it_lies(value: Any, like: DTensor, laid: Laid | None) -> Any:
    """Loaded value in a parameter's layout: of a whole tensor a rank's part; else as it is."""
    if isinstance(value, WholeShape):
        return value.cut
    if isinstance(value, DTensor) and laid is not None:
        value = value.full_tensor()
    if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if value.shape != like.shape:
        return value
    local = own_chunk(value if laid is None else laid.laid(value), like).to(like.device, copy=True)
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------------------ modules

_known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # which have parameters in parts


class _Layouts(dict[str, Laid]):
    """Layouts of a module's parameters that lie in parts; copies have their own."""

    def __init__(self, owner: torch.nn.Module, laid: Mapping[str, Laid]) -> None:
        super().__init__(laid)
        self._owner = weakref.ref(owner)
        _known.add(owner)
        _watch_optimizers()

    def __reduce__(self) -> Any:
        # An ordinary reference, which copy and pickle lead to the owner's copy.
        owner = self._owner()
        return (dict, (dict(self),)) if owner is None else (_Layouts, (owner, dict(self)))


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_watch_optimizer)


def set_laid(owner: torch.nn.Module, name: str, laid: Laid) -> None:
    """Say how parts of a parameter lie."""
    owner.__dict__[LAID] = _Layouts(owner, {**how_laid(owner), name: laid})


def keep_whole_shapes(owner: torch.nn.Module) -> None:
    """Let checkpoints of a module have the whole model's shapes."""
    hooks: Iterable[Any] = owner._load_state_dict_pre_hooks.values()
    if any(hook.hook is _take_whole for hook in hooks):
        return
    owner.register_state_dict_post_hook(_give_whole)
    owner.register_load_state_dict_pre_hook(_take_whole)


def _give_whole(owner: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, laid in how_laid(owner).items():
        value = state.get(prefix + name)
        if isinstance(value, DTensor) and not isinstance(value, (torch.nn.Parameter, WholeShape)):
            state[prefix + name] = WholeShape.of(value, laid)


def _take_whole(owner: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, own in owner._parameters.items():
        if prefix + name in state and isinstance(own, DTensor):
            state[prefix + name] = _as_it_lies(state[prefix + name], own, how_laid(owner).get(name))


# --------------------------------------------------------------------------------------------------------- optimizers

_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _watch_optimizer(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Give an optimizer's `state_dict` the shapes of the whole, before a step."""
    if optimizer in _watched or not any(True for _ in _those_laid(optimizer)):
        return
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_give_whole_state)
    optimizer.register_load_state_dict_pre_hook(_take_whole_state)
    for _, p, _ in _those_laid(optimizer):  # it was loaded before its first step
        own = optimizer.state.get(p, {})
        own.update({key: value.cut for key, value in own.items() if isinstance(value, WholeShape)})


def _those_laid(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, DTensor, Laid]]:
    """Parameters of an optimizer whose parts lie apart, with their places, and how they lie."""
    known = {id(owner._parameters[name]): laid for owner in _known for name, laid in how_laid(owner).items()}
    groups = (group["params"] for group in optimizer.param_groups)
    return ((k, p, known[id(p)]) for k, p in enumerate(itertools.chain(*groups)) if id(p) in known)


def _give_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    def whole(value: Any, p: DTensor, laid: Laid) -> Any:
        is_cut = isinstance(value, DTensor) and not isinstance(value, WholeShape) and value.shape == p.shape
        return WholeShape.of(value, laid) if is_cut else value

    return _changed(optimizer, state, whole)


def _take_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    def as_laid(value: Any, p: DTensor, laid: Laid) -> Any:
        return _as_it_lies(value, p, laid) if isinstance(value, torch.Tensor) and value.dim() else value

    return _changed(optimizer, state, as_laid)


def _changed(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], change: Callable[[Any, DTensor, Laid], Any]
) -> dict[str, Any]:
    keys = list(itertools.chain(*(group["params"] for group in state[_GROUPS])))
    of = {keys[k]: (p, laid) for k, p, laid in _those_laid(optimizer)}
    made = {
        key: {name: change(value, *of[key]) for name, value in own.items()} if key in of else own
        for key, own in state[_STATE].items()
    }
    return {**state, _STATE: made}
