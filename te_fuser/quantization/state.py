"""What is kept of a product from call to call: scales of its three tensors, their amaxes, and slots for new ones.

It belongs to the weight, by its owner and name, whichever lists read that. It is two buffers of the owner, both float32
with the columns `ROLES`: `fp8_scale` [3] and `fp8_amax_history` [length, 3], newest first; where the weight's name is
more than "weight", it stands before theirs (`fc1_fp8_scale`). Scales are never written in place: a fold puts another
buffer in place of the old one, so that what has saved that keeps it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from te_fuser.ops.base import Aside, FusableOperation
from te_fuser.ops.binding import Binding
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Recipe

ROLES = ("input", "weight", "output_gradient")
_LENGTH = 256  # of blocks
_lock = threading.RLock()
_blocks: list[Block] = []


class Block:
    """Slots for the amaxes of many products on one device.

    Attributes:
        amaxes: float32 [products, 3], the largest magnitudes since the last fold, 0 where there was nothing.
        skipped: int64 [products, 3], how many folds found one that was infinite or NaN.
        states: of each product, weakly.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.amaxes = torch.zeros(_LENGTH, len(ROLES), dtype=torch.float32, device=device)
            self.skipped = torch.zeros(_LENGTH, len(ROLES), dtype=torch.int64, device=device)
        self.device = self.amaxes.device
        self.states: list[weakref.ref[State]] = []

    def alive(self) -> list[tuple[int, State]]:
        """The products that are still there, and their rows."""
        return [(row, state) for row, ref in enumerate(self.states) if (state := ref()) is not None]


class State:
    """The state of one product: made when it is first asked for, with tensors from its first call in a region on.

    Attributes:
        scales, inverses, amaxes: role -> float32 []: where calls look up the scale of now, its reciprocal, and the slot
            of the amax.
        recipe: by which its last call ran.
    """

    def __init__(self, owner: torch.nn.Module, name: str) -> None:
        self._buffers = owner._buffers
        self.name, self.prefix = name, prefix_of(name)
        self.scales: dict[str, torch.Tensor] = {}
        self.inverses: dict[str, torch.Tensor] = {}
        self.amaxes: dict[str, torch.Tensor] = {}
        self.recipe: Recipe | None = None
        self.entry = -1  # the region from outside of all in which that was
        self.block: Block | None = None
        self.row = -1
        self._scale: torch.Tensor | None = None  # what `scales` are views of

    @property
    def scale(self) -> torch.Tensor:
        """The buffer of scales."""
        found = self._buffers[f"{self.prefix}fp8_scale"]
        assert found is not None
        return found

    @property
    def history(self) -> torch.Tensor:
        """The buffer of amaxes."""
        found = self._buffers[f"{self.prefix}fp8_amax_history"]
        assert found is not None
        return found

    @property
    def is_made(self) -> bool:
        """Whether there are tensors."""
        return self.block is not None

    def put(self, scale: torch.Tensor, history: torch.Tensor, inverse: torch.Tensor | None = None) -> None:
        """Put these in place of the buffers; `inverse`, the scales' reciprocals, is computed where it is not given."""
        self._buffers[f"{self.prefix}fp8_scale"] = self._scale = scale
        self._buffers[f"{self.prefix}fp8_amax_history"] = history
        self.scales.update(zip(ROLES, scale.unbind(), strict=True))
        self.inverses.update(zip(ROLES, (scale.reciprocal() if inverse is None else inverse).unbind(), strict=True))

    def make(self, length: int, device: torch.device) -> None:
        """Have tensors on a device: what the buffers hold where there are some, else scales of 1 and no amaxes."""
        with _lock, torch.inference_mode(False), torch.no_grad():
            if self.block is None or self.block.device != device:
                self._take_slots(device)
            scale = self._buffers.get(f"{self.prefix}fp8_scale")
            history = self._buffers.get(f"{self.prefix}fp8_amax_history")
            if scale is None or history is None:
                scale, history = torch.ones(len(ROLES), device=device), torch.zeros(0, len(ROLES), device=device)
            if self._scale is not None and scale.dtype != torch.float32:  # by .half() and the like: nothing is lost
                scale = self._scale
            if scale is not self._scale or scale.device != device or len(history) != length:
                scale, history = (t.to(device=device, dtype=torch.float32) for t in (scale, history))
                self.put(scale, newest(history, length))

    def _take_slots(self, device: torch.device) -> None:
        free = next((b for b in _blocks if b.device == device and len(b.states) < _LENGTH), None)
        if free is None:
            _blocks[:] = [b for b in _blocks if b.alive()]
            free = Block(device)
            _blocks.append(free)
        if self.block is not None:
            self.block.states[self.row] = _nobody
        self.block, self.row = free, len(free.states)
        free.states.append(weakref.ref(self))
        self.amaxes.update(zip(ROLES, free.amaxes[self.row].unbind(), strict=True))

    def is_as_put(self) -> bool:
        """Whether nobody has put another tensor in place of the scales since."""
        return self._buffers.get(f"{self.prefix}fp8_scale") is self._scale


_nobody: Any = lambda: None  # noqa: E731  a reference to nothing


class States(dict[str, State], Aside):
    """The states of a module's weights, by their names; copies and pickles of a module have none, but its buffers."""

    def buffers(self) -> list[str]:
        return [f"{state.prefix}{name}" for state in self.values() for name in ("fp8_scale", "fp8_amax_history")]

    def __reduce__(self) -> Any:
        return States, ()


def state_of(weight: FusableOperation | Binding) -> State:
    """The state of a product, by the binding of its weight, or the op that owns that; it need not have tensors yet."""
    owner, name = (weight.owner, weight.name) if isinstance(weight, Binding) else (weight, "weight")
    states = owner.__dict__.setdefault("_fp8_states", States())
    found: State | None = states.get(name)
    if found is None:
        found = states.setdefault(name, State(owner, name))
    return found


def ensure(weight: FusableOperation | Binding, recipe: Recipe, device: torch.device | None = None) -> State:
    """The state of a product, which runs now by a recipe, with its tensors.

    Args:
        device: where they are to be; by default the weight's.

    Raises:
        ValueError: when it ran by another recipe in the same region.
    """
    state = state_of(weight)
    if recipe != state.recipe:
        if state.recipe is not None and state.entry == region.entries():
            raise ValueError(_two_recipes(weight, state.recipe, recipe))
        state.recipe = recipe
    state.entry = region.entries()
    if device is None:
        device = weight.get().device if isinstance(weight, Binding) else weight.weight.device  # type: ignore[union-attr]
    state.make(getattr(recipe, "amax_history_len", 1), device)
    return state


def scale_of(weight: FusableOperation | Binding, role: str) -> torch.Tensor:
    """The scale of now, float32 []: never written in place, so who saves it keeps it."""
    state = state_of(weight)
    if not state.is_as_put():
        state.make(len(state.history), state.scale.device)
    return state.scales[role]


def amax_of(weight: FusableOperation | Binding, role: str) -> torch.Tensor:
    """The slot of the largest magnitude since the last fold, float32 []: kernels put the larger one there."""
    return state_of(weight).amaxes[role]


def newest(history: torch.Tensor, length: int) -> torch.Tensor:
    """The newest amaxes of a history, [length, 3], with zeros behind where it is shorter."""
    made = history.new_zeros(length, history.shape[1])
    kept = min(length, len(history))
    made[:kept] = history[:kept]
    return made


def prefix_of(name: str) -> str:
    """What buffers of a weight have before their names: "" of "weight", "fc1_" of "fc1_weight"."""
    parts = [part.removesuffix(".T").removesuffix("weight").strip("._") for part in name.split(", ")]
    said = "_".join(part.replace(".", "_") for part in parts if part)
    return f"{said}_" if said else ""


def blocks() -> list[Block]:
    """Those of all devices, in the order in which they were made."""
    return list(_blocks)


def _two_recipes(weight: FusableOperation | Binding, one: Recipe, other: Recipe) -> str:
    who = weight.owner if isinstance(weight, Binding) else weight
    name = weight.name if isinstance(weight, Binding) else "weight"
    return (
        f"{type(who).__name__}.{name} runs by a second recipe in one region, {other}, after {one}: its scales go by "
        "one recipe; leave the outer region before, or give both the same"
    )
