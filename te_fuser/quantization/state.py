"""State of a product from call to call: scales of its three tensors, their amaxes, and slots for new ones.

It belongs to the weight, by its owner and name: two buffers of the owner, float32 with the columns `ROLES`,
`fp8_scale` [3] and `fp8_amax_history` [length, 3], newest first. An update writes both in place. Calls read a snapshot
of the scales and reciprocals: an update puts another one in its place, so that what has saved numbers of it keeps them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_fuser.fuser.run.loading import obstacle
from te_fuser.kernels.quantizers import APART
from te_fuser.params.binding import Binding
from te_fuser.params.scales import HISTORY, SCALE, STATES, States, not_scaled, prefix_of, states_of, version_of
from te_fuser.quantization.products import try_recipe
from te_fuser.recipe import region
from te_fuser.recipe.recipes import DelayedScaling, Recipe
from te_fuser.recipe.region import lock

ROLES = ("input", "weight", "output_gradient")
SCALED = tuple([f"{role}_{what}" for what in ("scale", "inverse") for role in ROLES])
AMAXES = tuple([f"{role}_amax" for role in ROLES])
NUMBERS = tuple([f"{role}_{what}" for role in ROLES for what in ("scale", "inverse", "amax")])
Numbers = dict[str, torch.Tensor]
_PRODUCTS = 256  # of a block
_INDICES_KEPT = 16
_FAKE = torch._C._TorchDispatchModeKey.FAKE
changes = [0]  # how often `changed` was called
_blocks: list[Block] = []


def changed(dead: object = None) -> None:
    """Note that a product is new, gone, or runs by another recipe."""
    changes[0] += 1


def not_in_capture(what: str) -> None:
    """Refuse what replays would do again, or not at all, while a stream is captured."""
    if region.is_capturing():
        raise RuntimeError(
            f"{what} while a CUDA graph is captured: run the model in its region of FP8 before, as it is captured"
        )


@functools.cache
def say_once(words: str) -> None:
    """Warn, once in a process."""
    warnings.warn(words, stacklevel=3)


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
        """`live`, from now on; no capture may be the first to ask."""
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
        """Have captured graphs find three scales and three reciprocals in products' rows of `live`."""
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
    """A copy of numbers, each at a multiple of 16 bytes, where cuBLAS reads scales."""
    return torch.nn.functional.pad(numbers[..., None], (0, APART - 1))[..., 0]


def show(products: Iterable[Numbers], values: Iterable[torch.Tensor]) -> None:
    """Have calls find these in `numbers` of products: three scales and three reciprocals each."""
    there = iter(values)
    for numbers in products:
        numbers.update(zip(SCALED, there, strict=False))


# ------------------------------------------------------------------------------------------------------------ products


recorded_since = [False]  # whether any call recorded amaxes since the last update
Place = tuple[dict[str, torch.nn.Parameter | None], str, torch.Tensor]  # parameters of a module, one's name, that one
Source = tuple[dict[str, Any], str, weakref.ref[torch.Tensor], float]


@contextlib.contextmanager
def written_by_updates() -> Iterator[None]:
    """Context in which one thread makes and writes states' tensors, whatever its modes."""
    with lock, torch.inference_mode(False), torch.no_grad():
        yield


class State:
    """The state of one product: made when it is first asked for, with tensors from its first call in a region on.

    Attributes:
        name, prefix: the weight's name, and what buffers have of it before theirs.
        numbers: by `NUMBERS` float32 []: where calls look up the scales of now, their reciprocals, and the slots of the
            amaxes.
        blanks: what the weight in 8 bits is like, in both layouts, where each call makes it; without values.
        kept: the same with values, which calls read from micro-batch to micro-batch; empty where there are none.
        kept_of: the parameters that these were made of, where they are, with their versions of then.
        recipe: by which its last call ran that recorded.
        entry: the number of the outermost region of that call.
        ran_by, ran_in: the recipe of its last call of all, whatever that recorded, None: outside of regions; and the
            number of the outermost region.
        block, row: where its slots are; None before it has tensors.
        alike: the ranks whose amaxes went into each of its updates, which have the same scales; None before the first.
    """

    def __init__(self, owner: torch.nn.Module, name: str) -> None:
        self.name, self.prefix = name, prefix_of(name)
        self.numbers: Numbers = {}
        self.blanks: Numbers = {}
        self.kept: Numbers = {}
        self.kept_of: tuple[Source, ...] = ()
        self.recipe: Recipe | None = None
        self.ran_by: Recipe | None = None
        self.ran_in = self.entry = self.row = -1
        self.block: Block | None = None
        self.alike: frozenset[int] | None = None
        self._buffers = owner._buffers
        self._owner = weakref.ref(owner)
        self._put: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    @property
    def scale(self) -> torch.Tensor:
        """The buffer of scales, [3]."""
        return self._buffers[self.prefix + SCALE]  # type: ignore[return-value]

    @property
    def history(self) -> torch.Tensor:
        """The buffer of amaxes, [length, 3]."""
        return self._buffers[self.prefix + HISTORY]  # type: ignore[return-value]

    def found(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both, where they are there."""
        return self._buffers.get(self.prefix + SCALE), self._buffers.get(self.prefix + HISTORY)

    @property
    def has_buffers(self) -> bool:
        """True where a call, a checkpoint, or a copy's source made any."""
        return all(t is not None for t in self.found())

    def is_as_put(self) -> bool:
        """True where nobody has put other tensors in place of the buffers since."""
        return self._put is not None and all(t is put for t, put in zip(self.found(), self._put, strict=True))

    def is_given(self) -> bool:
        """True where somebody gave scales, or amaxes, where there are no buffers for them."""
        return not {self.prefix + SCALE, self.prefix + HISTORY}.isdisjoint(getattr(self._owner(), "__dict__", ()))

    def make(self, length: int | None, device: torch.device) -> None:
        """Have tensors on a device: what buffers hold, else ones and zeros; None leaves the length."""
        is_there = self.block is not None and self.block.device == device and self.has_buffers and self.is_as_put()
        if is_there and length in (None, len(self.history)):
            return
        self._check()
        not_in_capture("scales are made or moved")
        with written_by_updates():
            if self.block is None or self.block.device != device:
                block = block_with_room(device)
                self.block, self.row = block, block.add(self, self.block, self.row)
                self.numbers.update(zip(AMAXES, block.amaxes[self.row].unbind(), strict=True))
            scale, history = self._numbers(device)
            history = history if length in (None, len(history)) else newest(history, length or 1)
            self._put = scale, history
            self._buffers[self.prefix + SCALE], self._buffers[self.prefix + HISTORY] = scale, history
            self.block.show([self], scale[None])

    def read(self, device: torch.device) -> None:
        """Have what calls read that record nothing: what the buffers hold, or scales of 1."""
        if self.has_buffers:
            self.make(None, device)
            return
        self._check()
        if not (self.is_as_put() and self.numbers["input_scale"].device == device):
            # Of an export the modes would make tensors without values.
            with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                show([self.numbers], apart(torch.ones(len(SCALED), device=device)).unbind())
                if self.block is None:
                    self.numbers.update(zip(AMAXES, torch.zeros(len(ROLES), device=device).unbind(), strict=True))
            self._put = None, None

    def _numbers(self, device: torch.device) -> list[torch.Tensor]:
        """Scales and history that updates can write."""
        if not self.has_buffers:
            return [torch.ones(len(ROLES), device=device), torch.zeros(1, len(ROLES), device=device)]
        found = []
        for t, before in zip((self.scale, self.history), self._put or (None, None), strict=True):
            if before is not None and t.dtype != before.dtype and t.shape == before.shape and not t.is_meta:
                t = before if torch.equal(t, before.to(t)) else t
            t = t.to(device=device, dtype=torch.float32)
            found.append(t.clone(memory_format=torch.contiguous_format) if t.is_inference() else t.contiguous())
        return found

    def _check(self) -> None:
        """Refuse what somebody put where calls look for scales, and they cannot go by."""
        scale, columns = f"{self.prefix}{SCALE}", len(ROLES)
        if self.has_buffers:
            shapes = list(self.scale.shape), list(self.history.shape)
            if shapes[0] != [columns] or shapes[1][1:] != [columns] or 0 in shapes[1]:
                raise ValueError(
                    f"{scale} is {shapes[0]} and {self.prefix}{HISTORY} {shapes[1]}: scales are [{columns}], and the "
                    f"amaxes that they are made of [calls, {columns}]"
                )
        elif self.is_given():
            raise ValueError(
                f"{scale} was given to a {type(self._owner()).__name__} that has no such buffer yet, as "
                "torch.func.functional_call does: give scales to a model that has run in a region with gradients, or "
                "has loaded a checkpoint with scales"
            )

    def keeps_another(self) -> bool:
        """True where nothing is kept, or a parameter was replaced or written in place since."""
        for there, name, parameter, version in self.kept_of:
            then = parameter()
            if then is None or version_of(then) != version or there.get(name) is not then:
                return True
        return not self.kept

    def recorded(self) -> list[float]:
        """The amaxes since the last update, by role."""
        return [] if self.block is None else self.block.amaxes[self.row].tolist()

    def record(self, amaxes: list[float]) -> None:
        """Raise those to these."""
        assert self.block is not None
        with written_by_updates():
            slots = self.block.amaxes[self.row]
            slots.copy_(torch.maximum(slots, torch.tensor(amaxes, dtype=torch.float32, device=slots.device)))
            recorded_since[0] = True

    def forget_recorded(self) -> None:
        """Drop those: they are not of the scales that come in place of its own."""
        if self.block is not None:
            with written_by_updates(), _disable_current_modes():
                self.block.amaxes[self.row] = 0.0

    def now(self) -> tuple[Any, ...]:
        """State of now for `put_back`: all that calls record and note."""
        noted = self.ran_by, self.ran_in, self.entry
        return self.recipe, noted, self.recorded(), (dict(self.kept), self.kept_of)

    def put_back(self, then: tuple[Any, ...] | None) -> None:
        """Have that of then again; None: as of a new state."""
        recipe, noted, amaxes, kept = then or (None, (None, -1, -1), [], ({}, ()))
        self.ran_by, self.ran_in, self.entry = noted
        self._runs_now_by(recipe)
        self.forget_recorded()
        if any(amaxes) and self.block is not None:
            self.record(amaxes)
        with lock:
            self.kept.clear()
            self.kept.update(kept[0])
            self.kept_of = kept[1]

    def runs_by(self, recipe: Recipe) -> bool:
        """Note by which recipe a call runs now; False where it ran by another one in the same region."""
        recorded_since[0] = True
        if region.recomputing():  # which was noted when it ran first
            return True
        if self.recipe not in (None, recipe) and self.entry == region.entries():
            return False
        self.entry = region.entries()
        self._runs_now_by(recipe)
        return True

    def _runs_now_by(self, recipe: Recipe | None) -> None:
        if recipe != self.recipe:
            changed()
        self.recipe = recipe


class ReadyCheck:
    """True where all is as it was made ready for calls of a list; where so, its products run in this region.

    Not of what computes a forward again in another one, which is to be refused.

    Args:
        states: that have scales, in which nobody is to have put other tensors.
        records: whether calls record amaxes.
        kept: states of which calls read weights in 8 bits that are kept, and do nothing else.
        narrow: parameters in 8 bits alone: among which, by what name, which.
    """

    def __init__(
        self,
        states: Sequence[State],
        records: bool,
        kept: Sequence[State] = (),
        narrow: Sequence[Place] = (),
    ) -> None:
        self._records, self._kept, self._narrow = records, kept, narrow
        self._states = [(state, state._buffers, state.prefix + SCALE, state.prefix + HISTORY) for state in states]

    def __call__(self) -> bool:  # in each call: one loop, which calls nothing
        entry, runs_again = None if region.recomputing() else region.entries(), None
        if self._records and self._states:
            recorded_since[0] = True
        for state, buffers, scale, history in self._states:
            if state._put is None or buffers.get(scale) is not state._put[0]:
                return False
            if buffers.get(history) is not state._put[1] or (state._put[0] is None and state.is_given()):
                return False
            if entry is not None and state.ran_in != entry:
                runs_again = region.runs_again() if runs_again is None else runs_again
                if runs_again:
                    return False
                state.ran_in = entry
            if entry is not None and self._records:
                state.entry = entry
        if self._kept and region.keeps_or_notes():
            return False
        if entry is not None and any(state.keeps_another() for state in self._kept):
            return False
        return not self._narrow or all(
            there.get(name) is p and not_scaled(p, there) is None for there, name, p in self._narrow
        )


def known_state_of(weight: Binding) -> State | None:
    """The state of a product, where it was asked for before."""
    states: States | None = weight.owner.__dict__.get(STATES)
    return None if states is None else states.get(weight.name)


def state_of(weight: Binding) -> State:
    """The state of a product by the binding of its weight; it need not have tensors yet."""
    found = known_state_of(weight)
    if found is not None:
        return found
    with lock:
        made: State = states_of(weight.owner).setdefault(weight.name, State(weight.owner, weight.name))
    return made


def ensure(weight: Binding, recipe: Recipe, device: torch.device) -> State:
    """The state of a product, which runs now by a recipe, with its tensors on a device."""
    state = state_of(weight)
    if recipe != state.recipe:
        try_recipe(recipe)
    if not state.runs_by(recipe):
        raise ValueError(
            f"{type(weight.owner).__name__}.{weight.name} runs by a second recipe in one region, {recipe}, after "
            f"{state.recipe}: its scales go by one recipe; leave the region between the two, or give both the same"
        )
    state.make(None if region.recomputing() and state.block is not None else history_length(recipe), device)
    return state


def history_length(recipe: Recipe) -> int:
    """Number of amaxes that a product keeps which runs by a recipe."""
    return recipe.amax_history_len if isinstance(recipe, DelayedScaling) else 1


def newest(history: torch.Tensor, length: int) -> torch.Tensor:
    """The newest amaxes of a history, [length, 3], with zeros behind where it is shorter."""
    made = history.new_zeros(length, history.shape[1])
    made[: len(history)] = history[:length]
    return made


def busy_states() -> list[State]:
    """Products of regions that others are in still, or that run again: their scales stay."""
    entries = region.open_elsewhere()
    return [state for state in all_states() if state.entry in entries] if entries else []
