"""Slots for what calls record of many products on one device, and the numbers that CUDA graphs read of these."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.fuser.run.loading import obstacle
from te_fuser.kernels.reductions import APART
from te_fuser.recipe import region

if TYPE_CHECKING:
    from te_fuser.quantization.state import State

ROLES = ("input", "weight", "output_gradient")
SCALED = tuple([f"{role}_{what}" for what in ("scale", "inverse") for role in ROLES])
AMAXES = tuple([f"{role}_amax" for role in ROLES])
NUMBERS = (*SCALED, *AMAXES)
Numbers = dict[str, torch.Tensor]
_PRODUCTS = 256  # of a block
_INDICES_KEPT = 16
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_changes = [0]
_blocks: list[Block] = []


def changed(dead: object = None) -> None:
    """Note that a product is new, gone, or runs by another recipe."""
    _changes[0] += 1


def changes() -> int:
    """Number of times that it was called."""
    return _changes[0]


def not_in_capture(what: str) -> None:
    """Refuse what replays would do again, or not at all.

    Raises:
        RuntimeError: while a stream is captured.
    """
    if region.is_capturing():
        raise RuntimeError(
            f"{what} while a CUDA graph is captured: run the model in its region of FP8 before, as it is captured"
        )


def has_kernel(device: torch.device) -> bool:
    """True where kernels update scales and quantize weights on a device."""
    return device.type == "cuda" and obstacle(device, torch.float32) is None


def is_transformed() -> bool:
    """True where PyTorch transforms or fakes what runs here."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(_FAKE) is not None


class Block:
    """Slots for the amaxes of many products on one device.

    Attributes:
        amaxes: float32 [products, 3], the largest magnitudes since the last update, 0 where there was nothing.
        not_finite: int64 [products, 3], how many updates found one that was infinite or NaN.
        live: float32 [products, 6, 4], scales and reciprocals of now, the first of four each, always in the same
            memory: for CUDA graphs; None before the first capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.amaxes = torch.zeros(_PRODUCTS, len(ROLES), dtype=torch.float32, device=device)
        self.not_finite = torch.zeros(_PRODUCTS, len(ROLES), dtype=torch.int64, device=device)
        self.live: torch.Tensor | None = None
        self.device = self.amaxes.device
        self._states: list[weakref.ref[State] | None] = []
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def rows(self) -> int:
        """Number of slots that were given away."""
        return len(self._states)

    def states(self) -> list[State]:
        """The products that are there."""
        return [state for ref in self._states if ref is not None and (state := ref()) is not None]

    def index(self, rows: tuple[int, ...]) -> torch.Tensor:
        """Index tensor of these rows; it is kept, as a copy to a GPU waits for the GPU."""
        found = self._indices.get(rows)
        if found is None:
            if len(self._indices) >= _INDICES_KEPT:
                self._indices.clear()
            found = self._indices[rows] = torch.tensor(rows, device=self.device)
        return found

    def made_live(self) -> torch.Tensor:
        """`live`, from now on; refused while a stream is captured, where there is none yet."""
        if self.live is None:
            not_in_capture("scales are read by a first graph")
            self.live = torch.ones(_PRODUCTS, 2 * len(ROLES), APART, device=self.device)
            for state in self.states():
                self.live[state.row, :, 0] = torch.stack([state.numbers[name] for name in SCALED])
        return self.live

    def show(self, states: Sequence[State], scales: torch.Tensor) -> None:
        """Have calls of products find these scales, [states, 3], and their reciprocals."""
        numbers = apart(torch.cat([scales, scales.reciprocal()], 1))
        show([state.numbers for state in states], numbers.flatten().unbind())  # by one call
        if self.live is not None:
            self.show_graphs(tuple([state.row for state in states]), numbers)

    def show_graphs(self, rows: tuple[int, ...], numbers: torch.Tensor) -> None:
        """Have captured graphs find these in products' rows of `live`: three scales and three reciprocals each."""
        assert self.live is not None
        self.live[:, :, 0].index_copy_(0, self.index(rows), numbers)

    def add(self, state: State, before: Block | None, row: int) -> int:
        """Give a product a row, with what it had in a row of another block."""
        self._states.append(weakref.ref(state, changed))
        changed()
        mine = len(self._states) - 1
        if before is not None:
            self.amaxes[mine].copy_(before.amaxes[row])
            self.not_finite[mine].copy_(before.not_finite[row])
            before._states[row] = None
        return mine


def blocks() -> list[Block]:
    """Blocks of all devices, in the order in which they were made."""
    return list(_blocks)


def all_states() -> list[State]:
    """The products that have slots, on all devices."""
    return [state for block in _blocks for state in block.states()]


def block_with_room(device: torch.device) -> Block:
    """A block of a device that has a free slot."""
    free = next((b for b in _blocks if b.device == device and b.rows < _PRODUCTS), None)
    if free is None:
        _blocks[:] = [b for b in _blocks if b.states()]
        with _disable_current_modes():  # of an export, which would make tensors without values
            free = Block(device)
        _blocks.append(free)
    return free


def apart(numbers: torch.Tensor) -> torch.Tensor:
    """A copy of numbers, each at a multiple of 16 bytes: cuBLAS reads scales of products there alone."""
    return torch.nn.functional.pad(numbers[..., None], (0, APART - 1))[..., 0]


def show(products: Iterable[Numbers], values: Iterable[torch.Tensor]) -> None:
    """Have calls find these among the `numbers` of products: three scales and three reciprocals of each."""
    there = iter(values)
    for numbers in products:
        numbers.update(zip(SCALED, there, strict=False))
