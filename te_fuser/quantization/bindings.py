"""Numbers of products' states as bindings: looked up in each call, never values of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from te_fuser.params.binding import Binding, Key
from te_fuser.quantization.state import State


class StateBinding(Binding):
    """A tensor of the state of a product, by the dict that has it there (`held`) and its name in that (`role`)."""

    what: ClassVar[str]
    held: ClassVar[str]
    state: State
    role: str

    def __init__(self, state: State, role: str) -> None:
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "name", f"{state.prefix}{role}_{self.what}")

    @property
    def owner(self) -> torch.nn.Module:  # type: ignore[override]
        """No module has it among its parameters.

        Raises:
            ReferenceError: whenever it is asked for.
        """
        raise ReferenceError(f"{self.name} is kept with a weight, not as a parameter of a module")

    @property
    def key(self) -> Key:
        return id(self.slot[0]), self.role

    @property
    def computed(self) -> bool:
        return False

    def get(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.state, self.held)[self.role]
        return found

    @property
    def slot(self) -> tuple[Mapping[str, object], str]:
        return getattr(self.state, self.held), self.role

    def weak(self) -> StateBinding:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateBinding) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class ScaleBinding(StateBinding):
    """The scale of now, float32 []."""

    what, held = "scale", "scales"


class InverseBinding(StateBinding):
    """Its reciprocal, which 8 bits are multiplied by."""

    what, held = "inverse", "inverses"


class AmaxBinding(StateBinding):
    """The slot of the largest magnitude since the last update."""

    what, held, written = "amax", "amaxes", True


class OwnBinding(StateBinding):
    """A number that each call makes of what it quantizes: where calls look it up stands what it is like.

    Args:
        time: how many products of the list before it have this weight; each quantizes something else.
    """

    what, held, made_in_call = "of_this_call", "blanks", True
    time: int

    def __init__(self, state: State, role: str, time: int = 0) -> None:
        super().__init__(state, role)
        object.__setattr__(self, "time", time)

    @property
    def key(self) -> Key:
        return id(self.slot[0]), f"{self.role}.{self.time}"


class OwnAmaxBinding(OwnBinding):
    """The largest magnitude that such numbers follow from: a zero before it is raised.

    Where kernels make the others, too, calls have it among the four of `codegen.description.NUMBERS`.
    """

    written = True


class MadeBinding(StateBinding):
    """A weight in 8 bits that each call makes: where calls look it up stands what it is like."""

    what, held = "of_this_call", "blanks"


class MadeAgainBinding(MadeBinding):
    """One that backward makes again of the weight: `fully_shard` takes that away in between, and brings it back."""

    in_parts = True


class KeptBinding(StateBinding):
    """A weight in 8 bits that is kept. A later first micro-batch puts others in place, and writes to none."""

    what, held = "of_microbatches", "kept"
