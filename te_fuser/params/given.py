"""Given: tensors of a call in place of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from te_fuser.params.binding import WeakBinding


class Given(torch.nn.Module):
    """Owner of a call's tensors, which ops read as their parameters: `Bound(op, given, weight="weight")`.

    A call runs inside of `with given.holding(weight=w):`, in a list of its own (see `te_fuser.Variants`); or it gives
    the tensors by the path of the list that the ops stand in, `model(x, **{"0.weight": w})`. Each such tensor gets its
    gradient, as any input of autograd's does. Other threads and other calls do not see it.

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

    @contextmanager
    def holding(self, **tensors: torch.Tensor) -> Iterator[None]:
        """Context in which ops that are bound to this read these tensors."""
        held: ContextVar[Any] = self.__dict__["_held"]
        token = held.set(tensors)
        try:
            yield
        finally:
            held.reset(token)

    def __getattr__(self, name: str) -> Any:
        found = (self.__dict__["_held"].get() or {}).get(name) if "_held" in self.__dict__ else None
        return super().__getattr__(name) if found is None else found


class GivenBinding(WeakBinding):
    """A tensor of a call by its name: what it is like is known without computing anything."""

    tells: ClassVar[bool] = True

    def shape(self) -> tuple[int, ...]:
        """Empty shape, as none is known without a call."""
        return ()

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor:
        t = self.get()
        return made(t.shape, t.dtype, t.device, t.requires_grad)

    def weak(self) -> GivenBinding:
        return self
