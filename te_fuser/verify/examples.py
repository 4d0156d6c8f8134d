"""Lists of ops that a fusion's pattern matches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.fusions import Fusion, OneOf, Optional, Repeat
from te_fuser.fusions.pattern import PatternPart
from te_fuser.ops import GELU, MatMul, op_table
from te_fuser.ops.base import FusableOperation, Spec, output_specs
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.unfused_operation import UnfusedOperation

Kinds = tuple[type[FusableOperation], ...]

_MOST_LISTS = 12
_MOST_VARIANTS = 16
# What stands for a pattern part that takes any op.
_STANDS_FOR: dict[type[FusableOperation], type[FusableOperation]] = {
    FusableOperation: GELU,
    RowOp: GELU,
    UnfusedOperation: MatMul,
}


@dataclass(frozen=True)
class Example:
    """A list of ops; `changed` when an argument of one is not its default."""

    label: str
    ops: tuple[FusableOperation, ...]
    changed: bool = False


def expand(pattern: Sequence[PatternPart]) -> list[Kinds]:
    """The kinds of ops in lists that match: every alternative, optional parts there and not, repeats at their least
    number and one more; the first ones, if they are many."""
    return list(itertools.islice(dict.fromkeys(_expansions(tuple(pattern))), _MOST_LISTS))


def _expansions(pattern: tuple[PatternPart, ...]) -> Iterator[Kinds]:
    if not pattern:
        yield ()
        return
    for rest in _expansions(pattern[1:]):
        for head in _heads(pattern[0]):
            yield (*head, *rest)


def _heads(part: PatternPart) -> Iterator[Kinds]:
    if isinstance(part, Optional):
        yield from _heads(part.part)
        yield ()
    elif isinstance(part, Repeat):
        for count in (max(part.at_least, 1), part.at_least + 1):
            yield from _expansions((part.part,) * count)
    else:
        for kind in part.kinds if isinstance(part, OneOf) else (part,):
            yield (_STANDS_FOR.get(kind, kind),)


def examples(fusion: Fusion, features: int, rng: torch.Generator) -> Iterator[Example]:
    """Op lists that the fusion's pattern matches, and variants of them with one argument changed.

    Raises:
        ValueError: when an op cannot be made; the message says which, and what to give instead.
    """
    for kinds in expand(fusion.pattern):
        label = ", ".join(kind.__name__ for kind in kinds)
        yield Example(label, tuple(_chain(kinds, features, rng, None)))
        for place, argument, other in itertools.islice(_changes(kinds), _MOST_VARIANTS):
            try:
                ops = tuple(_chain(kinds, features, rng, (place, argument, other)))
            except (ValueError, TypeError):
                continue  # not every made-up number is one that the op takes
            yield Example(f"{label} with {argument}={other!r}", ops, True)


def _chain(
    kinds: Kinds, features: int, rng: torch.Generator, change: tuple[int, str, Any] | None
) -> Iterator[FusableOperation]:
    """Ops that take one another's output; forks and what closes them share their names."""
    opened: list[str] = []
    x = Spec((2, 4, features), torch.float32, torch.device("cpu"))
    for place, kind in enumerate(kinds):
        name, changed = f"value{place}", {} if change is None or change[0] != place else {change[1]: change[2]}
        op = _made(kind, x.features, name, changed, rng)
        if opened and name in [given.name for given in op.named_inputs().values()]:
            op = _made(kind, x.features, opened.pop(), changed, rng)
        if op.named_outputs() and not op_table.exports.of(type(op)):
            opened.append(name)
        yield op
        x = output_specs(op, x)["output"]


def _made(
    kind: type[FusableOperation], features: int, name: str, changed: dict[str, Any], rng: torch.Generator
) -> FusableOperation:
    try:
        made = kind.prototype(features, name, **changed).example(features, rng)
        if not isinstance(made, FusableOperation):
            raise TypeError(f"its example is {made!r}")
        return made
    except (TypeError, NotImplementedError, AttributeError, LookupError) as error:
        raise ValueError(
            f"verify cannot make a {kind.__name__} by itself ({error}): define {kind.__name__}.prototype(features, "
            "name, **changed) and .example(features, rng), or give the ops to verify with, "
            "verify(fusion, ops=[[...], ...])"
        ) from error


def _changes(kinds: Kinds) -> Iterator[tuple[int, str, Any]]:
    for place, kind in enumerate(kinds):
        for argument, parameter in inspect.signature(kind).parameters.items():
            default = parameter.default
            if isinstance(default, bool):
                yield place, argument, not default
            elif isinstance(default, float):
                yield place, argument, default * 2.0 + 0.125
            elif argument in kind.other_choices:
                yield place, argument, kind.other_choices[argument]
