"""What products of 8 bits read of their state, as bindings: looked up in each call, never values of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from te_fuser.params.binding import Binding, Key
from te_fuser.quantization.state import State


class StateBinding(Binding):
    """A number of the state of a product, float32 [], by what it is called there and its role."""

    what: ClassVar[str]
    state: State
    role: str

    def __init__(self, state: State, role: str) -> None:
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "name", f"{state.prefix}{role}_{self.what}")

    def _held(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    @property
    def owner(self) -> torch.nn.Module:  # type: ignore[override]
        """No module has it among its parameters.

        Raises:
            ReferenceError: whenever it is asked for.
        """
        raise ReferenceError(f"{self.name} is kept with a weight, not as a parameter of a module")

    @property
    def key(self) -> Key:
        return id(self._held()), self.role

    @property
    def computed(self) -> bool:
        return False

    def get(self) -> torch.Tensor:
        return self._held()[self.role]

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        return self._held(), self.role

    def weak(self) -> StateBinding:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateBinding) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class ScaleBinding(StateBinding):
    """The scale of now."""

    what = "scale"

    def _held(self) -> dict[str, torch.Tensor]:
        return self.state.scales  # type: ignore[no-any-return]


class InverseBinding(StateBinding):
    """Its reciprocal, which 8 bits are multiplied by."""

    what = "inverse"

    def _held(self) -> dict[str, torch.Tensor]:
        return self.state.inverses  # type: ignore[no-any-return]


class OwnBinding(StateBinding):
    """A number that each call makes of what it quantizes: where calls look it up stands what it is like.

    Args:
        time: the how manieth product of a list with this weight makes it, from 0.
    """

    what = "of_this_call"
    made_in_call = True

    def __init__(self, state: State, role: str, time: int = 0) -> None:
        super().__init__(state, role)
        object.__setattr__(self, "time", time)

    @property
    def key(self) -> Key:
        """Another one each time that a list has the product: each quantizes something else."""
        found, role = super().key
        return found, f"{role}.{self.__dict__['time']}"

    def _held(self) -> dict[str, torch.Tensor]:
        return self.state.blanks  # type: ignore[no-any-return]


class OwnAmaxBinding(OwnBinding):
    """The largest magnitude that such numbers follow from: a zero before it is raised.

    Where kernels make the others, too, calls have it among the four of `codegen.description.NUMBERS`.
    """

    written = True


class AmaxBinding(StateBinding):
    """The slot of the largest magnitude since the last fold."""

    what = "amax"
    written = True

    def _held(self) -> dict[str, torch.Tensor]:
        return self.state.amaxes  # type: ignore[no-any-return]
