"""Regions in which a model runs in FP8: which one is on in this thread and context, and what is called at entry."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from te_fuser.contexts import being
from te_fuser.recipe.recipes import DelayedScaling, Recipe


@dataclass(frozen=True)
class Region:
    """A region that is on.

    `group` are the ranks that agree on the largest magnitudes, None: all; while calibrating nothing is quantized.
    """

    recipe: Recipe
    group: Any = None
    calibrating: bool = False

    @functools.cached_property
    def agrees(self) -> str | None:
        """Name of the group that agrees where this is the outermost region; None where none does."""
        if not self.recipe.reduce_amax:
            return None
        return "" if self.group is None else str(self.group.group_name)


class Key(NamedTuple):
    """Key of a call in regions, which its plan depends on; recipe and calibrating are of the innermost one.

    Attributes:
        settings: how often what modules run by was changed.
        says_microbatch: whether weights are kept from micro-batch to micro-batch.
        agrees: by name the group whose ranks agree on magnitudes; None where none do.
    """

    recipe: Recipe
    calibrating: bool
    settings: int
    says_microbatch: bool
    agrees: str | None


_stack: ContextVar[tuple[Region | None, ...]] = ContextVar("te_fuser_regions", default=())
_entry: ContextVar[int] = ContextVar("te_fuser_entry", default=0)
_is_first: ContextVar[bool | None] = ContextVar("te_fuser_is_first_microbatch", default=None)
_used: ContextVar[list[Any] | None] = ContextVar("te_fuser_used", default=None)
_recomputing: ContextVar[bool] = ContextVar("te_fuser_recomputing", default=False)
_here = threading.local()  # `regions`: as _stack; what torch.compile can read, which cannot follow contexts
lock = threading.RLock()  # of updates of scales
_count = itertools.count(1)
_open: dict[int, threading.Thread] = {}  # the number of each entry whose region is on, and who entered it
_held: list[set[int]] = []  # those of which forwards run again now
_callbacks: list[Callable[[Region], None]] = []
_settings = [0]

entries = _entry.get  # the number of the region from outside of all that was entered last here; each entry has its own
entered = _stack.get  # the regions that this thread and context is in, the outermost first; None: one that is off
recomputing = _recomputing.get  # whether what runs here is a forward that ran before: `recomputed`
is_first_microbatch = _is_first.get  # True keeps weights in 8 bits, False reads what was kept, None does neither


def current() -> Region | None:
    """The innermost region of this thread and context, where that is on or calibrating."""
    stack = _stack.get()
    return stack[-1] if stack else None


def current_key() -> Key | None:
    """Key of calls here; None outside; RuntimeError in a region where torch.compile traces."""
    if torch.compiler.is_dynamo_compiling():
        regions = getattr(_here, "regions", ())
        if regions and regions[-1] is not None:
            raise RuntimeError(
                "torch.compile cannot follow regions of FP8 in model.reference(x): compile or call the model itself "
                "there, export with strict=False, or leave the region"
            )
        return None
    stack = _stack.get()  # asked in each call of a list
    found = stack[-1] if stack else None
    if found is None:
        return None
    outermost = stack[0] or next(filter(None, stack))
    return Key(found.recipe, found.calibrating, _settings[0], _is_first.get() is not None, outermost.agrees)


def microbatch(is_first: bool | None) -> AbstractContextManager[bool | None]:
    """Context whose calls belong to the first micro-batch of a step (True) or to a later one (False); None: no change.

    Raises:
        TypeError: for anything else than True, False and None.
    """
    if not (is_first is None or isinstance(is_first, bool)):
        raise TypeError(
            f"microbatch takes True for the first micro-batch of a step, False for others, or None, got {is_first!r}"
        )
    return being(_is_first, _is_first.get() if is_first is None else is_first)


@contextlib.contextmanager
def noting_used() -> Iterator[list[Any]]:
    """Context in which calls that read kept weights note what they read."""
    noted: list[Any] = []
    try:
        with being(_used, noted):
            yield noted
    finally:
        note_used(noted)


def note_used(items: Iterable[Any]) -> None:
    """Note what a call reads, where somebody asked."""
    noted = _used.get()
    if noted is not None:
        noted.extend(items)


def keeps_or_notes() -> bool:
    """True where a call here does more to kept weights than to read them."""
    return _is_first.get() is True or _used.get() is not None


def open_elsewhere() -> set[int]:
    """Entries whose regions other threads or contexts are in, or of which forwards run again."""
    for number, thread in tuple(_open.items()):
        if not thread.is_alive():
            _open.pop(number, None)
    return (set(_open) - {_entry.get()}).union(*_held)


@contextlib.contextmanager
def held(entries: set[int]) -> Iterator[None]:
    """Context in which these are among `open_elsewhere`."""
    with lock:
        _held.append(entries)
    try:
        yield
    finally:
        with lock:
            _held.remove(entries)


def on_entry(callback: Callable[[Region], None]) -> None:
    """Have a function called with each outermost region, before it is on."""
    _callbacks.append(callback)


def settings_changed() -> None:
    """Have plans of regions made anew, as what their modules run by was changed."""
    _settings[0] += 1


def settings() -> int:
    """Number of calls of `settings_changed`."""
    return _settings[0]


def counted_alone() -> AbstractContextManager[int]:
    """Context in which calls count as of an entry of their own, which runs no callbacks."""
    return being(_entry, next(_count))


def is_capturing() -> bool:
    """True where what this thread launches now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def recomputed(stack: tuple[Region | None, ...]) -> Iterator[None]:
    """Context in which a forward runs again in its regions; entering others runs no callbacks."""
    before = _stack.get()
    _be_within(stack)
    try:
        with being(_recomputing, True), counted_alone():
            yield
    finally:
        _be_within(before)


def _be_within(stack: tuple[Region | None, ...]) -> None:
    _stack.set(stack)
    _here.regions = stack


def in_backward() -> bool:
    """True where this runs inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def runs_again() -> bool:
    """True where a forward is computed again in a backward without its regions."""
    return in_backward() and torch.is_grad_enabled() and not _recomputing.get()


class Entered(contextlib.ContextDecorator):
    """Context and decorator of `autocast(..)`: to be entered any number of times, nested and in any thread.

    Attributes:
        region: what is on inside; None: nothing is.
    """

    def __init__(self, region: Region | None) -> None:
        self.region = region

    def __enter__(self) -> None:
        stack = _stack.get()
        outer = next(filter(None, reversed(stack)), None)
        if self.region is not None and outer is not None and self.region.group not in (None, outer.group):
            raise ValueError(
                "a region inside of another one has another group of ranks: what both record is agreed on once, so "
                "give the outer one's, or none"
            )
        if self.region is not None and outer is None and not _recomputing.get():
            if in_backward():
                raise RuntimeError(
                    "a region is entered inside of a backward, which has no scales of its forward: what computes that "
                    "again takes context_fn=te_fuser.quantization.checkpoint_contexts, or is te_fuser.checkpoint"
                )
            for callback in _callbacks:
                callback(self.region)
            _entry.set(next(_count))
            _open[_entry.get()] = threading.current_thread()
        _be_within((*stack, self.region))

    def __exit__(self, *error: object) -> None:
        *around, left = _stack.get() or (None,)
        _be_within(tuple(around))
        if left is not None and not any(around):
            _open.pop(_entry.get(), None)

    def __call__(self, func: Any) -> Any:
        """The function in this region."""
        runs_later = inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func)
        if isinstance(func, type) or runs_later or inspect.isasyncgenfunction(func):
            why = "which would run outside of it: write `with autocast(..):` inside"
            raise TypeError(f"a region decorates a function that runs when it is called, got {func!r}, {why}")
        if not callable(func):
            how = "write @autocast(recipe=..) above one, or `with autocast(recipe=..):`"
            raise TypeError(f"a region decorates a function, got {func!r}: {how}")
        return super().__call__(func)


def fp8_autocast(
    enabled: bool = False,
    calibrating: bool | Recipe = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
) -> Entered:
    """A region whose products run in FP8: `with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):`.

    Regions nest; the innermost one counts. A backward runs as its forward did, inside of a region or outside.

    Args:
        enabled: False turns FP8 off, also inside of another region.
        calibrating: with enabled=False, record amaxes without quantizing. A recipe as second argument is `fp8_recipe`.
        fp8_recipe: formats and scales; by default DelayedScaling().
        fp8_group: the ranks that share amaxes; by default all.

    Raises:
        TypeError: for what is no recipe, no group, or neither True nor False.
    """
    if isinstance(calibrating, Recipe):
        fp8_group = fp8_recipe if fp8_group is None else fp8_group  # type: ignore[assignment]
        fp8_recipe, calibrating = calibrating, False
    return _entered("fp8_autocast", enabled, calibrating, fp8_recipe, fp8_group)


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: ProcessGroup | None = None,
) -> Entered:
    """`fp8_autocast` under its newer name, on by default: `with autocast(recipe=DelayedScaling()):`.

    Raises:
        TypeError: for what is no recipe, no group, or neither True nor False.
    """
    return _entered("autocast", enabled, calibrating, recipe, amax_reduction_group)


def _entered(name: str, enabled: Any, calibrating: Any, recipe: Any, group: Any) -> Entered:
    for argument, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not (value is None or isinstance(value, bool)):
            raise TypeError(f"{name}: {argument} is True or False, got {value!r}")
    as_recipe, as_group = ("recipe", "amax_reduction_group") if name == "autocast" else ("fp8_recipe", "fp8_group")
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise TypeError(
            f"{name} takes a recipe of te_fuser.recipe as {as_recipe}, DelayedScaling() say, got {recipe!r}"
        )
    if not (group is None or isinstance(group, ProcessGroup)):
        words = f"{name} takes a group of torch.distributed's as {as_group}, got {group!r}"
        raise TypeError(f"{words}: use new_group(ranks)")
    if not (enabled or calibrating):
        return Entered(None)
    return Entered(Region(DelayedScaling() if recipe is None else recipe, group, not enabled))
