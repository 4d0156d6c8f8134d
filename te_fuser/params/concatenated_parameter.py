"""Parameters made of others: several joined along dimension 0, without a copy where they lie in one buffer; one turned.

And what is made of parts in any other way, where backward is to make it again.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from te_fuser import _native
from te_fuser.distributed.dtensor import as_gradient, is_dtensor, own_part, recorded_part
from te_fuser.guards import Facts, still_hold
from te_fuser.params.binding import WeakBinding, owned, place_of
from te_fuser.params.scales import HoldsScales

_JOINED = "_te_fuser_joined"  # attribute of a joined tensor: what it was made of
_FIRST = 2**63  # of nodes that could run, backward takes the one of the largest number, gradients of leaves apart


def _concatenated(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([own_part(part).detach() for part in parts])


class Joined(NamedTuple):
    """Sources of a tensor that was joined, or made in another way.

    Attributes:
        facts: hold while these are the parts and lie where they lay.
        copied: whether it has memory of its own, and is no view of theirs.
        again: makes the tensor from the parts.
    """

    parts: tuple[torch.Tensor, ...]
    facts: Facts
    copied: bool
    again: Callable[..., torch.Tensor] = _concatenated


class InOneBuffer(torch.autograd.Function):
    """Tensors as one; each gets its rows of the gradient, a DTensor as one that lies alike."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.rows = [own_part(p).shape[0] for p in parts]
        ctx.specs = [(k, p._spec) for k, p in enumerate(parts) if is_dtensor(p)]
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:  # type: ignore[override]
        if dy is None:
            return (None, *[None] * len(ctx.rows))
        shares = [*dy.split_with_sizes(ctx.rows)]
        for k, spec in ctx.specs:
            shares[k] = as_gradient(shares[k], spec, shares[k].shape)
        return (None, *shares)


class JoinedBinding(WeakBinding):
    """Parameters of one module and its parts, by their names, as one: [a; b; ..] along dimension 0.

    A call gets a tensor that knows its parts, and each of these by autograd the gradient that is its share. Without a
    copy it is made once for many calls, and so is its node, of which backward has to know nothing else.
    """

    tells: ClassVar[bool] = True
    in_parts: ClassVar[bool] = True

    names: tuple[str, ...]

    def __init__(self, owner: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(owner, ", ".join(names))
        object.__setattr__(self, "names", names)
        places = [(weakref.ref(part), last) for part, last in (place_of(owner, name) for name in names)]
        object.__setattr__(self, "_places", places)

    @property
    def computed(self) -> bool:
        return True

    def parts(self) -> list[torch.Tensor]:
        """The parameters as they are now."""
        owner = self.owner
        found = [getattr(part(), last) for part, last in self.__dict__["_places"]]
        first = found[0]
        for name, t in zip(self.names, found, strict=True):
            if not t.dim() or t.shape[1:] != first.shape[1:]:
                shapes = ", ".join(str(list(t.shape)) for t in found)
                raise ValueError(f"{self.name} of {type(owner).__name__} are joined along dimension 0, got {shapes}")
            if (t.dtype, t.device) != (first.dtype, first.device):
                raise TypeError(
                    f"{self.name} of {type(owner).__name__} are joined, but {name} is {t.dtype} on {t.device} and "
                    f"{self.names[0]} {first.dtype} on {first.device}; convert one with .to()"
                )
        return found

    def get(self) -> torch.Tensor:
        return torch.cat([recorded_part(p) for p in self.parts()])

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        owner = self.owner
        return owner.__dict__.get("_wholes", owner._parameters), self.name

    def facts(self) -> Facts:
        """Facts of the kept tensor: its parts, and where they lie."""
        kept = joined_of(self._wholes.get(self.name))
        return Facts() if kept is None else kept.facts

    @property
    def _wholes(self) -> dict[str, torch.Tensor]:
        return self.owner.__dict__.get("_wholes", {})  # type: ignore[no-any-return]

    def taken(self) -> torch.Tensor:
        wholes = self._wholes
        kept = wholes.get(self.name)
        if kept is not None and still_hold(kept.__dict__[_JOINED].facts):
            return kept
        wholes.pop(self.name, None)
        del kept  # its node, and those that take the parts' gradients, know the stream that they were made on
        parts = self.parts()
        together = lie_together([own_part(p) for p in parts])
        with torch.inference_mode(False), torch.enable_grad():  # later calls may be recorded
            if not together and not any(map(is_dtensor, parts)):
                whole = torch.cat(parts)  # type: ignore[arg-type]
            else:
                whole = in_one_buffer([own_part(p) for p in parts]) if together else _concatenated(*parts)
                if any(p.requires_grad for p in parts):
                    whole = InOneBuffer.apply(whole, *parts)  # type: ignore[no-untyped-call]
                if together and whole.grad_fn is not None:
                    whole.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
        whole.__dict__[_JOINED] = Joined(tuple(parts), self._placed(parts), not together)
        if together:
            wholes[self.name] = whole
        return whole

    def _placed(self, parts: Sequence[torch.Tensor]) -> Facts:
        """Facts that these are the parts, where they lie, on a GPU's stream."""
        dicts = [(part()._parameters, last) for part, last in self.__dict__["_places"]]
        placed = [(*at, t, _native.tensor_place(t)) for at, t in zip(dicts, parts, strict=True)]
        of_others = owned(self.owner, [name for name in self.names if "." in name])
        return of_others._replace(placed=tuple(placed), calls=_on_this_stream(parts[0].device))

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor:
        parts = self.parts()
        rows = sum(own_part(p).shape[0] for p in parts)
        needs = any(p.requires_grad for p in parts)
        return made((rows, *own_part(parts[0]).shape[1:]), parts[0].dtype, parts[0].device, needs)

    def note(self) -> str:
        if lie_together([own_part(p) for p in self.parts()]):
            return ""
        return f"{self.name} lie apart, so each call copies them: te_fuser.ops.Together keeps them in one buffer"

    def weak(self) -> JoinedBinding:
        return self


def joined_of(t: torch.Tensor | None) -> Joined | None:
    """Sources of a parameter of a call that was joined; None where it was not."""
    return None if t is None else t.__dict__.get(_JOINED)


def parts_of(t: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts of a parameter that was joined; empty where it was not."""
    joined = joined_of(t)
    return () if joined is None else joined.parts


def made_of(t: torch.Tensor, parts: Sequence[torch.Tensor], again: Callable[..., torch.Tensor]) -> None:
    """Note what a tensor was made of, and what makes it again."""
    joined = joined_of(parts[0])
    if joined is not None and joined.copied:
        count, inner, outer = len(joined.parts), joined.again, again
        parts = (*joined.parts, *parts[1:])

        def again(*parts: torch.Tensor) -> torch.Tensor:
            return outer(inner(*parts[:count]), *parts[count:])

    t.__dict__[_JOINED] = Joined(tuple(parts), Facts(), True, again)


# Where a copy stood, from where to where its parts stand now, and what makes it again.
Places = list[tuple[int, int, int, Callable[..., torch.Tensor]]]


def kept_in_parts(kept: Sequence[Any], joined: Sequence[int]) -> tuple[list[Any], Places]:
    """Tensors kept for backward, with parts in place of joined copies."""
    found, places = list(kept), Places()
    for place in joined:
        of = joined_of(found[place])
        if of is not None and of.copied:
            places.append((place, len(found), len(found) + len(of.parts), of.again))
            found[place] = None
            found += of.parts
    return found, places


def whole_again(kept: Sequence[Any], places: Places) -> Sequence[Any]:
    """Tensors that `kept_in_parts` took apart, with the copies made again."""
    if not places:
        return kept
    found = list(kept[: places[0][1]])
    for place, start, stop, again in places:
        found[place] = again(*kept[start:stop])
    return found


def lie_together(parts: Sequence[torch.Tensor]) -> bool:
    """True where tensors lie one behind the other in one buffer, without gaps."""
    if not all(p.is_contiguous() and p.device.type != "meta" for p in parts):
        return False
    places = [(p.untyped_storage().data_ptr(), p.storage_offset(), p.numel()) for p in parts]
    return all(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in itertools.pairwise(places))


def in_one_buffer(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors that `lie_together` as one, along dimension 0: a view of their memory."""
    first = parts[0].detach()
    return first.as_strided((sum([p.shape[0] for p in parts]), *first.shape[1:]), first.stride())


def _on_this_stream(device: torch.device) -> tuple[tuple[Callable[[], Any], Any], ...]:
    """Check that the current stream is still the one of now, as `Facts.calls`."""
    if device.type != "cuda":
        return ()
    stream = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
    return ((stream, stream()),)


class _Wholes(dict[str, torch.Tensor]):
    """Cache of tensors joined without a copy, by names; copies and pickles have none."""

    def __reduce__(self) -> Any:
        return _Wholes, ()


class Together(HoldsScales):
    """Module that stores several parameters in one buffer, so that `Bound` concatenates them without a copy.

    Call `keep_together("query_weight", "key_weight", "value_weight")` when they exist; parameters of submodules are
    named `part.weight`. They stay separate parameters; `.to()`, loading, deepcopy and pickle keep the buffer.

    Raises:
        AttributeError: when there is no such parameter.
    """

    def keep_together(self, *names: str) -> None:
        """Keep these parameters in one buffer, in this order, from now on."""
        for name in names:
            self.get_parameter(name)
        self._kept_together = (*getattr(self, "_kept_together", ()), names)
        self.__dict__.setdefault("_wholes", _Wholes())
        self._settle()

    def _settle(self) -> None:
        """Drop joined tensors and bring parts into one buffer again."""
        self.__dict__.get("_wholes", {}).clear()
        for names in getattr(self, "_kept_together", ()):
            parts = self._found(names)
            kinds = {(type(p.data), p.dtype, p.device, p.shape[1:]) for p in parts}
            if len(parts) < len(names) or len(kinds) > 1 or parts[0].is_meta or type(parts[0].data) is not torch.Tensor:
                continue  # a DTensor has no storage of its own to look at
            if not lie_together(parts):
                buffer = torch.cat([p.detach() for p in parts])
                for p, piece in zip(parts, buffer.split([p.shape[0] for p in parts]), strict=True):
                    p.data = piece

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        made = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in itertools.chain(*getattr(self, "_kept_together", ())):
            t = made.get(prefix + name)
            if type(t) is torch.Tensor and not t.is_meta:
                # The same memory as a storage of its own: what writes files takes the buffer for one tensor's.
                made[prefix + name] = torch.from_dlpack(t)
        return made

    def _found(self, names: Sequence[str]) -> list[torch.nn.Parameter]:
        try:
            places = [place_of(self, name) for name in names]
        except AttributeError:  # a part was taken out
            return []
        return [p for part, last in places if (p := part._parameters.get(last)) is not None]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        made = super()._apply(fn, recurse)
        self._settle()
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._settle()


@dataclass(frozen=True)
class Transposed:
    """Transpose of a module's matrix, by name: `Bound(op, owner, weight=Transposed("weight"))`.

    A MatMul then reads a weight [in, out] as [out, in], without a copy.
    """

    name: str


class TransposedBinding(WeakBinding):
    """The transpose of a parameter, a view that each call makes."""

    tells: ClassVar[bool] = True

    def __init__(self, owner: torch.nn.Module, name: str) -> None:
        super().__init__(owner, f"{name}.T")
        object.__setattr__(self, "_plain", name)

    @property
    def computed(self) -> bool:
        return True

    def get(self) -> torch.Tensor:
        """The transpose; ValueError when the parameter is no matrix."""
        found: torch.Tensor = getattr(self.owner, self.__dict__["_plain"])
        if found.dim() != 2:
            raise ValueError(f"{self.name} of {type(self.owner).__name__} is read of a matrix, got {list(found.shape)}")
        return found.t()

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor:
        found = self.get()
        return made(tuple(found.shape), found.dtype, found.device, found.requires_grad)

    def weak(self) -> TransposedBinding:
        return self
