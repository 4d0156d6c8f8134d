"""Patterns over a list of ops: kinds, families of kinds, alternatives, optional and repeated parts."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

from te_fuser.ops.base import FusableOperation, Place
from te_fuser.ops.operations import FusedOperation, UnfusedOperation
from te_fuser.ops.row_op import RowOp


@dataclass(frozen=True)
class OneOf:
    """Part of a pattern: one op of any of these classes, `OneOf(ops.ReLU, ops.GELU)`."""

    kinds: tuple[type[FusableOperation], ...]

    def __init__(self, *kinds: type[FusableOperation]) -> None:
        object.__setattr__(self, "kinds", kinds)


@dataclass(frozen=True)
class Optional:
    """Part of a pattern that may be absent, `Optional(ops.Bias)`."""

    part: PatternPart


@dataclass(frozen=True)
class Repeat:
    """Part of a pattern `at_least` times or more, `Repeat(ops.Bias)`."""

    part: PatternPart
    at_least: int = 1


PatternPart = Union[type[FusableOperation], OneOf, "Optional", "Repeat"]  # noqa: UP007 - a type alias at run time


def check(pattern: Sequence[PatternPart], fusion: str) -> tuple[PatternPart, ...]:
    """The pattern as a tuple; TypeError for no list, ValueError where it can never match."""
    if not isinstance(pattern, Sequence) or isinstance(pattern, str):
        raise TypeError(
            f"fusion {fusion!r}: a pattern is a list of kinds of ops, got {pattern!r}; write [...] around it"
        )
    parts = tuple(pattern)
    if not parts:
        raise ValueError(f"fusion {fusion!r}: its pattern is empty and can never match")
    for part in parts:
        _check_part(part, fusion)
    if not any(map(_needs_an_op, parts)):
        raise ValueError(f"fusion {fusion!r}: every part of its pattern is optional; it would match nothing at all")
    return parts


def _needs_an_op(part: PatternPart) -> bool:
    if isinstance(part, Repeat):
        return part.at_least > 0 and _needs_an_op(part.part)
    return not isinstance(part, Optional)


def most_ops(pattern: Sequence[PatternPart]) -> int | None:
    """Largest number of elementary ops of a match; None where that depends on the list."""
    counts = [_most_ops_of(part) for part in pattern]
    return None if None in counts else sum(filter(None, counts))


def _most_ops_of(part: PatternPart) -> int | None:
    if isinstance(part, Optional):
        return _most_ops_of(part.part)
    kinds = part.kinds if isinstance(part, OneOf) else (part,)
    several = isinstance(part, Repeat) or any(issubclass(kind, FusedOperation) for kind in kinds)  # type: ignore[arg-type]
    return None if several else 1


def _check_part(part: Any, fusion: str) -> None:
    if isinstance(part, (Optional, Repeat)):
        return _check_part(part.part, fusion)
    kinds = part.kinds if isinstance(part, OneOf) else (part,)
    if not kinds:
        raise ValueError(f"fusion {fusion!r}: OneOf() without kinds can never match")
    for kind in kinds:
        why = _why_never(kind)
        if why is not None:
            raise ValueError(f"fusion {fusion!r}: {why}")
    return None


def _why_never(kind: Any) -> str | None:
    """Reason for which no list holds an op of this kind; None where one may."""
    if isinstance(kind, FusableOperation):
        own = f"write {type(kind).__name__}, and say by when= what it has to be like"
        return _why_never(type(kind)) or f"{kind!r} is an op, and a pattern lists classes: {own}"
    if not (isinstance(kind, type) and issubclass(kind, FusableOperation)):
        name = f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else repr(kind)
        return (
            f"{name} is not a FusableOperation, so its pattern can never match: list classes of ops, such as "
            "te_fuser.ops.GELU, and OneOf, Optional and Repeat of these"
        )
    name = kind.__name__
    if kind.lower is FusedOperation.lower:
        return _why_never_of_its_kind(kind)
    # One with a meaning of its own stands for itself in some lists at least, as a norm of one dimension does.
    if kind.lower is not FusableOperation.lower and not issubclass(kind, (RowOp, UnfusedOperation)):
        return (
            f"{name} is lowered to its elementary ops before fusing, so the pattern can never match; "
            "name those instead (Linear is MatMul, Bias)"
        )
    if kind is not FusableOperation and not issubclass(kind, (RowOp, UnfusedOperation)):
        return (
            f"{name} is neither a RowOp nor an UnfusedOperation, so no list holds one and the pattern can never match"
        )
    return _why_never_of_its_kind(kind) or _why_without_meaning(kind)


def _why_never_of_its_kind(kind: type[FusableOperation]) -> str | None:
    if kind.family or kind.kind is kind:
        return None
    own = kind.kind.__name__
    return f"the kind of {kind.__name__} is {own}, so the pattern can never match; name {own}"


def _why_without_meaning(kind: type[FusableOperation]) -> str | None:
    meaning = {RowOp: "compute", UnfusedOperation: "op_forward"}
    for base, method in meaning.items():
        if not kind.family and issubclass(kind, base) and getattr(kind, method) is getattr(base, method):
            return (
                f"{kind.__name__} defines no {method}, so no list holds one and the pattern can never match; "
                f"name its subclasses, or say family = True in {kind.__name__}"
            )
    return None


def _fits(kind: type[FusableOperation], own: type[FusableOperation]) -> bool:
    return issubclass(own, kind) if kind.family else own is kind


@dataclass(frozen=True)
class _List:
    """Elementary ops in a row, and where each stands in fused operations."""

    ops: Sequence[FusableOperation]
    places: Sequence[tuple[Place, ...]]

    def ends(self, kind: type[FusableOperation], at: int) -> Iterator[int]:
        """Stops of the op, or of runs of ops of one fused operation, at `at`."""
        if at >= len(self.ops):
            return
        if not issubclass(kind, FusedOperation):
            yield from [at + 1] if _fits(kind, self.ops[at].kind) else []
            return
        for place in self.places[at] if self.places else ():
            # Under autocast a Cast may stand between the ops: then they are no run.
            run = [Place(place.whole, k, place.count) for k in range(place.count)]
            if _fits(kind, place.whole.kind) and all(
                p in found for p, found in zip(run, self.places[at:], strict=False)
            ):
                yield from [at + place.count] if at + place.count <= len(self.ops) else []


def matches(
    pattern: Sequence[PatternPart],
    ops: Sequence[FusableOperation],
    start: int,
    places: Sequence[tuple[Place, ...]] = (),
) -> Iterator[int]:
    """Every stop such that ops[start:stop] fits, each once, longest first."""
    first = heads(pattern) if start < len(ops) else None
    if first is None or among(first, (ops[start].kind,)):
        yield from sorted(set(_stops(tuple(pattern), _List(ops, places), start)), reverse=True)


def heads(pattern: Sequence[PatternPart]) -> tuple[type[FusableOperation], ...] | None:
    """Kinds of which the first op of a match is; None: of any."""
    found: list[type[FusableOperation]] = []
    for part in pattern:
        first = part.part if isinstance(part, (Optional, Repeat)) else part
        for one in first.kinds if isinstance(first, OneOf) else (first,):
            if not isinstance(one, type) or issubclass(one, FusedOperation):
                return None
            found.append(one)
        if first is part or isinstance(part, Repeat) and part.at_least > 0:
            return tuple(found)
    return None


def among(kinds: Sequence[type[FusableOperation]], there: Collection[Any]) -> list[Any]:
    """Members of `there` that are one of `kinds`, or of its family."""
    found = [[k for k in there if issubclass(k, kind)] if kind.family else [kind] for kind in kinds]
    return [k for k in dict.fromkeys(itertools.chain.from_iterable(found)) if k in there]


def _stops(pattern: tuple[PatternPart, ...], listed: _List, at: int) -> Iterator[int]:
    if not pattern:
        yield at
        return
    head, rest = pattern[0], pattern[1:]
    if isinstance(head, Optional):
        yield from _stops(rest, listed, at)
        yield from _stops((head.part, *rest), listed, at)
    elif isinstance(head, Repeat):
        if head.at_least <= 0:
            yield from _stops(rest, listed, at)
        for middle in set(_stops((head.part,), listed, at)):
            if middle > at:
                yield from _stops((Repeat(head.part, head.at_least - 1), *rest), listed, middle)
    else:
        for kind in head.kinds if isinstance(head, OneOf) else (head,):
            for stop in listed.ends(kind, at):
                yield from _stops(rest, listed, stop)


def render(pattern: Sequence[PatternPart]) -> str:
    """The pattern as text."""
    return ", ".join(_render(p) for p in pattern)


def _render(part: PatternPart) -> str:
    if isinstance(part, Optional):
        return f"[{_render(part.part)}]"
    if isinstance(part, Repeat):
        return f"{_render(part.part)} x {part.at_least}+"
    return " | ".join(k.__name__ for k in part.kinds) if isinstance(part, OneOf) else part.__name__
