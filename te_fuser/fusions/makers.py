"""Makers: who makes what fusions read of parameters, in each call before its first step, for a whole list at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from te_fuser.codegen.written import WrittenKernel
from te_fuser.fusions.match import Cost
from te_fuser.ops.base import FusableOperation, Spec


@dataclass(frozen=True)
class Wanted:
    """What a plan reads of what is made for one op.

    Attributes:
        op: as the plan has it.
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
        """Whether these are made for an op, and not there already."""

    @abstractmethod
    def cost(self, wanted: Sequence[Wanted]) -> Cost:
        """What that takes."""

    @abstractmethod
    def written(self, wanted: Sequence[Wanted]) -> tuple[WrittenKernel, ...]:
        """The kernels written by hand that it launches."""

    @abstractmethod
    def function(self, wanted: Sequence[Wanted], device: torch.device) -> Callable[..., Any]:
        """f(*what is given) -> what is made, op after op, as a tuple; a tensor, where it is one."""


_makers: dict[type[FusableOperation], list[Maker]] = {}


def register_maker(kind: type[FusableOperation], *makers: Maker) -> None:
    """Let the engine know who makes parameters of ops of a kind: the first that takes one."""
    _makers[kind] = [*makers]


def maker_for(op: FusableOperation) -> Maker | None:
    """Who makes parameters of an op; None where nobody does."""
    return next((maker for maker in _makers.get(op.kind, ()) if maker.takes(op)), None)
