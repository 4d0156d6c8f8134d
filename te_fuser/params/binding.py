"""Parameters by owner and name: looked up or computed once in each call, or given by it; known without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from te_fuser.contexts import being
from te_fuser.guards import Facts

Key = tuple[int, str]


@dataclass(frozen=True)
class Binding:
    """A parameter by its owner and name, looked up in each call, as it may be replaced."""

    tells: ClassVar[bool] = False  # of one that is computed: whether `look` knows what stands for it
    written: ClassVar[bool] = False  # whether steps write into it, in backward too: it is never saved for that
    made_in_call: ClassVar[bool] = False  # whether steps of each call make it: what is bound says what it is like
    in_parts: ClassVar[bool] = False  # whether for backward the parts that it is made of may be kept, and not itself

    owner: torch.nn.Module
    name: str

    @property
    def key(self) -> Key:
        """Key of the parameter, equal for all its bindings, whichever copy has it."""
        return id(self.owner._parameters), self.name

    @property
    def computed(self) -> bool:
        """True where the parameter is computed, and no tensor is stored."""
        return _stored(self.owner, self.name) is None

    def get(self) -> torch.Tensor:
        """The parameter as it is now; one that is computed is computed anew."""
        owner = self.owner
        found = owner._parameters.get(self.name)
        return getattr(owner, self.name) if found is None else found

    def parts(self) -> list[torch.Tensor]:
        """The parameters that it stands for: mostly one."""
        return [self.get()]

    def shape(self) -> tuple[int, ...]:
        """The shape, as its parts say it without being joined."""
        first, *others = self.parts()
        rows = sum(part.shape[0] for part in (first, *others)) if others else 0
        return (rows, *first.shape[1:]) if others else tuple(first.shape)

    def taken(self) -> torch.Tensor:
        """Tensor that a call takes for the parameter: by default the parameter itself."""
        return self.get()

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        """(dict, key) where calls find what they take, if it is there."""
        return self.owner._parameters, self.name

    def facts(self) -> Facts:
        """Facts by which calls find the right tensor in `slot`."""
        return Facts()

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """Stand-in for a computed parameter, of `made`; None: computing it tells."""
        return None

    def note(self) -> str:
        """Note on the parameter in plans; mostly empty."""
        return ""

    def weak(self) -> Binding:
        """Binding of the same parameter that does not keep the owner alive."""
        return WeakBinding(self.owner, self.name)


class WeakBinding(Binding):
    """A binding that does not keep the owner alive, which may hold plans with the binding."""

    def __init__(self, owner: torch.nn.Module, name: str) -> None:
        object.__setattr__(self, "_owner", weakref.ref(owner))
        object.__setattr__(self, "name", name)

    @property
    def owner(self) -> torch.nn.Module:  # type: ignore[override]
        """The module that has the parameter; ReferenceError when it is gone."""
        found: torch.nn.Module | None = self.__dict__["_owner"]()
        if found is None:
            raise ReferenceError(f"the module whose {self.name!r} is to be read is gone")
        return found


def place_of(owner: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has the parameter, and its name there."""
    path, _, last = name.rpartition(".")
    return (owner.get_submodule(path) if path else owner), last


def owned(owner: torch.nn.Module, names: Iterable[str]) -> Facts:
    """Facts that each parameter stays with its module, and each missing one stays missing."""
    facts = []
    for name in names:
        module, last = place_of(owner, name)
        path, whether = tuple(name.split(".")[:-1]), module._parameters.get(last) is not None
        facts.append((weakref.ref(owner), path, weakref.ref(module), last, whether))
    return Facts(owned=tuple(facts))


def has_tensor(owner: torch.nn.Module, name: str) -> bool:
    """True where a module has a tensor of that name, without computing a parametrized one."""
    if _stored(owner, name) is not None or name in owner.__dict__["_modules"].get("parametrizations", ()):
        return True
    return isinstance(getattr(owner, name, None), torch.Tensor)


def _stored(owner: torch.nn.Module, name: str) -> torch.Tensor | None:
    for there in (owner._parameters, owner._buffers, owner.__dict__):
        found = there.get(name)
        if isinstance(found, torch.Tensor):
            return found
    return None


# ---------------------------------------------------------------------------------------------- while planning

StandIns = Mapping[Key, Callable[[], torch.Tensor]]
_standing: ContextVar[StandIns | None] = ContextVar("standing", default=None)


def standing_in(known: StandIns) -> AbstractContextManager[StandIns]:
    """Context in which ops get stand-ins of computed parameters."""
    return being(_standing, {**(_standing.get() or {}), **known})


class PlannedParametrizations:
    """Value of `parametrizations` while planning: name -> a function that gives the stand-in."""

    def __init__(self, owner: torch.nn.Module, known: StandIns) -> None:
        self._owner, self._known = owner, known

    @classmethod
    def of(cls, owner: torch.nn.Module) -> PlannedParametrizations | None:
        """Planned parametrizations of an op; None where nothing stands in for its parameters."""
        known = _standing.get()
        return None if known is None or not any(k == id(owner._parameters) for k, _ in known) else cls(owner, known)

    def __contains__(self, name: str) -> bool:
        return (id(self._owner._parameters), name) in self._known

    def __getitem__(self, name: str) -> Callable[[], torch.Tensor]:
        return self._known[id(self._owner._parameters), name]


class Given(torch.nn.Module):
    """Owner for ops whose parameters come with each call: `Bound(op, given, weight="weight")`.

    Call inside of `with given.holding(weight=w):`, in a list of its own (see `te_fuser.Variants`), or pass the tensors
    by path, `model(x, **{"0.weight": w})`. Each tensor gets a gradient. Other threads and calls do not see it.

    Raises:
        TypeError: when a call gives none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_held"] = ContextVar("held", default=None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: item for name, item in self.__dict__.items() if name != "_held"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_held"] = ContextVar("held", default=None)

    def holding(self, **tensors: torch.Tensor) -> AbstractContextManager[Any]:
        """Context in which the ops bound to this module read these tensors."""
        return being(self.__dict__["_held"], tensors)

    def __getattr__(self, name: str) -> Any:
        found = (self.__dict__["_held"].get() or {}).get(name) if "_held" in self.__dict__ else None
        return super().__getattr__(name) if found is None else found


class GivenBinding(WeakBinding):
    """A tensor of a call by its name."""

    tells: ClassVar[bool] = True

    def shape(self) -> tuple[int, ...]:
        """Empty shape, as none is known without a call."""
        return ()

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor:
        t = self.get()
        return made(t.shape, t.dtype, t.device, t.requires_grad)

    def weak(self) -> GivenBinding:
        return self
