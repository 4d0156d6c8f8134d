"""Registry: fusions by name, registered, unregistered, switched off in a scope; makers of parameters; libraries.

A library whose kernels fusions run says whether it can be used, and which of its algorithms are the fastest.
"""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

import torch

from te_fuser.codegen.cuda_source_kernel import WrittenKernel
from te_fuser.contexts import being
from te_fuser.fusions.match import Body, Cost, Match, costs_in, why_no_cost
from te_fuser.fusions.pattern import PatternPart, matches, render
from te_fuser.kernels.tuning_trials import Contest, Deciding, ModelCall, ReasonNot, Trial
from te_fuser.ops.base import FusableOperation, Gradient, Place, Spec
from te_fuser.ops.checks import described

Condition = Callable[[Match], "bool | str | None"]
Choose = Callable[[Match, str], "Body | Callable[..., Any]"]
# Of a joint fusion (forward's, backward's), of one whose nodes run apart one for each node.
Costs = Union[Cost, tuple[Union[Cost, tuple[Cost, ...]], ...]]  # noqa: UP007 - a type alias at run time
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Rule:
    """A pattern over ops, a direction, a condition and a price, and what is run instead of the ops.

    Attributes:
        direction: "forward", "backward" or "joint".
        emits: values inside the match that the forward gives beside its output, e.g. "0.output".
        reads: what the backward reads: "input", "output", "k.output", "k.weight", "k.named".
        saves: names that a joint fusion's forward gives to its own backward; `saved_bytes` says how large they are.
    """

    name: str
    direction: str
    pattern: tuple[PatternPart, ...]
    run_forward: Callable[..., Any] | None
    run_backward: Callable[..., Any] | None
    when: Condition | None = None
    cost: Callable[[Match], Costs] | None = None
    emits: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    doc: str = ""

    @property
    def has_forward(self) -> bool:
        """True where the fusion takes part in forward plans."""
        return self.direction != "backward"

    @property
    def has_backward(self) -> bool:
        """True where the fusion takes part in backward plans."""
        return self.direction != "forward"

    def refusal(self, match: Match) -> str | None:
        """Reason for which this fusion does not take the match, in words; None when it does."""
        if self.when is None:
            return None
        try:
            answer = self.when(match)
        except Exception as error:
            raise RuntimeError(f"fusion {self.name!r}: its condition `when` failed, {error!r}") from error
        if isinstance(answer, str) and answer:
            return answer
        return None if answer is None or answer else "its condition `when` said no"

    def stops(self, ops: Sequence[Any], start: int, places: Sequence[tuple[Place, ...]] = ()) -> Iterator[int]:
        """Ends of matches that begin at `start`; `places`: where ops stand in fused operations."""
        return matches(self.pattern, ops, start, places)

    def __repr__(self) -> str:
        return f"<fusion {self.name!r} {self.direction}: {render(self.pattern)}>"


@dataclass(frozen=True, eq=False, repr=False)
class Fusion(Rule):
    """A declared fusion: made by `fusion`, with the fields of `Details`."""

    saved_bytes: Callable[[Match], Mapping[str, int]] | None = None
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    forward_ops: slice = field(default_factory=lambda: ALL)
    backward_ops: slice = field(default_factory=lambda: ALL)
    gradients: tuple[Gradient, ...] = ()
    choose: Choose | None = None
    compiles: Callable[[Match, str, frozenset[str]], Iterable[WrittenKernel]] | None = None
    takes_gradients_in: tuple[torch.dtype, ...] = ()

    def covers(self, direction: str, start: int, stop: int) -> tuple[int, int]:
        """(start, stop) of the ops that a direction covers, where the match is start..stop-1."""
        low, high, _ = (self.forward_ops if direction == "forward" else self.backward_ops).indices(stop - start)
        if low >= high:
            raise ValueError(f"fusion {self.name!r}: its {direction} covers none of the {stop - start} ops of a match")
        return start + low, start + high

    def asked(self, what: str, *arguments: Any) -> Any:
        """Answer of the fusion's function `what`, asked while planning."""
        try:
            return getattr(self, what)(*arguments)
        except Exception as error:
            raise RuntimeError(f"fusion {self.name!r}: its `{what}` failed, {error!r}") from error

    def costs(self, match: Match) -> Costs | None:
        """Cost of the match by the fusion's own account; None where it gives none."""
        if self.cost is None:
            return None
        found = self.asked("cost", match)
        several = self.direction == "joint" or self.gradients
        for c in costs_in(found) if several else (found,):
            why = why_no_cost(c)
            if why is not None:
                raise TypeError(f"fusion {self.name!r}: its `cost` gives {why}")
        return found


_lock = threading.Lock()
_registry: dict[str, Fusion] = {}
_version = 0
_disabled: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("te_fuser_disabled", default=frozenset())
_only: contextvars.ContextVar[frozenset[str | Fusion] | None] = contextvars.ContextVar("te_fuser_only", default=None)

# Names like others: kernels of several row ops; functions of PyTorch's; kernels that quantize by blocks what products
# read; exchanges of ranks by copy engines; kernels that add up what ranks have sent so.
STRETCH, RECORDED, BY_BLOCKS, PEER_COPIES, PEER_SUMS = _OWN = (
    "stretch",
    "torch_functions",
    "kernels_by_blocks",
    "peer_copies",
    "peer_sums",
)


def register(entry: Fusion) -> Fusion:
    """Add a fusion; models that exist see it at their next call.

    Raises:
        TypeError: when it is no fusion, as a class of them is none.
        ValueError: when the name is taken.
    """
    global _version
    if not isinstance(entry, Fusion):
        raise TypeError(f"register takes a fusion, got {described(entry)}")
    with _lock:
        if entry.name in _registry or entry.name in _OWN:
            raise ValueError(f"a fusion named {entry.name!r} is registered; unregister({entry.name!r}) it first")
        _registry[entry.name] = entry
        _version += 1
    return entry


def unregister(name: str | Fusion) -> Fusion:
    """Remove a fusion and return it.

    Raises:
        KeyError: when there is none of that name.
    """
    global _version
    with _lock:
        found = get(name.name if isinstance(name, Fusion) else name)
        _version += 1
        return _registry.pop(found.name)


def arrange(order: Sequence[str]) -> None:
    """Put the fusions that are registered in this order."""
    found = {name: _registry.pop(name) for name in order}
    assert not _registry, f"fusions without a place: {[*_registry]}"
    _registry.update(found)


def get(name: str) -> Fusion:
    """The fusion of that name.

    Raises:
        KeyError: when there is none.
    """
    if name not in _registry:
        raise KeyError(f"no fusion {name!r} (registered: {', '.join(sorted(_registry))})")
    return _registry[name]


def names() -> tuple[str, ...]:
    """The names of all fusions, the generated stretch and PyTorch's functions included."""
    return (*_OWN, *_registry)


def enabled(name: str) -> bool:
    """True if plans may use the fusion now."""
    chosen = _only.get()
    return name not in _disabled.get() and (chosen is None or name in chosen)


def active() -> list[Fusion]:
    """Fusions that plans may use now: registered, and in the current scope."""
    given = [f for f in _only.get() or () if isinstance(f, Fusion)]
    return [f for f in _registry.values() if enabled(f.name)] + given


def state() -> tuple[int, frozenset[str], frozenset[str | Fusion] | None]:
    """Key for plan caches: a token that changes with the registry and with the scope."""
    return _version, _disabled.get(), _only.get()


def disabled(*off: str) -> AbstractContextManager[frozenset[str]]:
    """Plan without these fusions inside the scope.

    Raises:
        KeyError: when a name is unknown.
    """
    for name in off:
        if name not in _OWN:
            get(name)
    return being(_disabled, _disabled.get() | frozenset(off))


def only(*on: str | Fusion) -> AbstractContextManager[Any]:
    """Plan with these fusions and no others inside the scope; without any: every op runs alone.

    A fusion is given by its name, or as itself, whether it is registered or not.

    Raises:
        KeyError: when a name is unknown.
    """
    for name in on:
        if isinstance(name, str) and name not in _OWN:
            get(name)
    return being(_only, frozenset(on))


@dataclass(frozen=True)
class Wanted:
    """Parameters made for one op that a plan reads.

    Attributes:
        given: what is known of the parameters that it is made of, in the order of the maker's `of`.
        makes: the names of what is read, in the order of the maker's `makes`.
        again: those that are not kept for backward, but made again there.
    """

    op: FusableOperation
    given: Mapping[str, Spec]
    makes: tuple[str, ...]
    again: frozenset[str] = frozenset()


class Maker(ABC):
    """Makes parameters of ops of one kind of others of theirs.

    Attributes:
        name: what plans call its step.
        of: the parameters that it reads; those that an op is not bound to are left out.
        makes: those that it makes, which the op is bound to as well: what is bound there only says what they are like.
        in_forward: of these, what fusions read in forward; others are made where a backward reads them.
    """

    name: ClassVar[str]
    of: ClassVar[tuple[str, ...]]
    makes: ClassVar[tuple[str, ...]]
    in_forward: ClassVar[tuple[str, ...]]

    @abstractmethod
    def takes(self, op: FusableOperation) -> bool:
        """True where the parameters in `makes` are made for an op, and not there already."""

    @abstractmethod
    def cost(self, wanted: Sequence[Wanted]) -> Cost:
        """Cost of making what is wanted."""

    @abstractmethod
    def written(self, wanted: Sequence[Wanted]) -> tuple[WrittenKernel, ...]:
        """The kernels written by hand that it launches."""

    @abstractmethod
    def function(self, wanted: Sequence[Wanted], device: torch.device) -> Callable[..., Any]:
        """f(*what is given) -> what is made, op after op: a tuple, or one tensor."""


_makers: dict[type[FusableOperation], list[Maker]] = {}


def register_maker(kind: type[FusableOperation], *makers: Maker) -> None:
    """Register makers of parameters of a kind; the first that takes an op makes them."""
    _makers[kind] = [*makers]


def maker_for(op: FusableOperation) -> Maker | None:
    """Maker of parameters of an op; None where there is none."""
    return next((maker for maker in _makers.get(op.kind, ()) if maker.takes(op)), None)


@dataclass(frozen=True)
class Library:
    """A library of kernels; register it, and plans say where it is missing, and `tune` tries its algorithms.

    Attributes:
        name: what it is called; `version` is that of the one at hand.
        kernels: what it gives.
        runs_without: what te_fuser runs how where it is missing, as a warning says it.
        note_without: the same as a plan notes it.
        obstacle: why it cannot be used for a plan on a device at hand, in words; None if it can, or no such plan
            wants it.
        tune: (call, contest, margin, reason_not, deciding) -> what came of other algorithms of what a call of the
            model runs of it; what is taken gains that share of the model's time, runs from now on, and is kept.
    """

    name: str
    kernels: str
    runs_without: str
    note_without: str
    version: Callable[[], int | None]
    obstacle: Callable[[torch.device], str | None]
    tune: Callable[[ModelCall, Contest, float, ReasonNot, Deciding], list[Trial]]


_registered: list[Library] = []


def register_library(library: Library) -> None:
    """Register a library with the engine."""
    _registered.append(library)


def libraries() -> tuple[Library, ...]:
    """All that fusions run on."""
    return tuple(_registered)
