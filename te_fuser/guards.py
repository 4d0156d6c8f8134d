"""Facts: what plans and lists were made by, which the native runtime compares with what is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType

from te_fuser import _native

if TYPE_CHECKING:
    import torch

still_hold = _native.still_hold
tensor_place = _native.tensor_place
holders = _native.holders
_Weak = ReferenceType["torch.nn.Module"]


class Facts(NamedTuple):
    """Conditions that held once, and may not any more; `still_hold(facts)` tells.

    Whoever keeps facts keeps the dicts and tensors in them alive, but no module.

    Attributes:
        members: (dict, its values).
        empty, filled: dicts without and with items.
        items: (dict, key, value); None stands for nothing.
        owned: (owner, path, module, name, whether): the path of names leads from the owner to that module in it, both
            by weak references, and whether this has a parameter of that name.
        placed: (dict, key, tensor, place): the tensor that is there, and what `tensor_place` knew of it.
        calls: (function, its result).
        pairs: two objects that are equal.
    """

    members: tuple[tuple[dict[str, Any], tuple[Any, ...]], ...] = ()
    empty: tuple[Mapping[Any, Any], ...] = ()
    filled: tuple[Mapping[Any, Any], ...] = ()
    items: tuple[tuple[dict[str, Any], str, Any], ...] = ()
    owned: tuple[tuple[_Weak, tuple[str, ...], _Weak, str, bool], ...] = ()
    placed: tuple[tuple[Mapping[str, Any], str, torch.Tensor, bytes | None], ...] = ()
    calls: tuple[tuple[Callable[[], Any], Any], ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def of(cls, several: Iterable[Facts]) -> Facts:
        """Join several facts into one."""
        return cls(*(tuple(itertools.chain(*same)) for same in zip(*several, strict=True)))

    @classmethod
    def of_answers(cls, *asked: Callable[[], Any]) -> Facts:
        """Facts that functions still give the answers that they give now."""
        return cls(calls=tuple([(ask, ask()) for ask in asked]))
