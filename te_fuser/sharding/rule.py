"""ShardingRule: how the ranks of a group run one kind of op, and the table of these rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from te_fuser.distributed.group import Group
from te_fuser.distributed.placement import Placement, Replicated
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.fused_operation import FusedOperation
from te_fuser.ops.op_table import Kind, OpTable
from te_fuser.ops.words import described

Op = TypeVar("Op", bound=FusableOperation)


@dataclass(frozen=True)
class ShardingContext:
    """Placements around an op of a list, beside that of its main input.

    Attributes:
        group: the ranks.
        start: the placement of the list's input, which the call's other tensors have too.
        named: by argument, those of the named inputs that ops of the list have made.
        shapes: of the op's parameters, as this rank has them.
    """

    group: Group
    start: Placement = Replicated()
    named: Mapping[str, Placement] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class ShardingRule(Generic[Op]):
    """Rule by which ranks of a group run an op. This one is that of ops without one: they run where values are whole.

    A subclass says how another kind of op differs from it; mostly `gives` is enough. `sharding_rule(rule)` decorates
    the class of the op, whose subclasses have the rule too.
    """

    def group(self, op: Op) -> Group:
        """The ranks that run it together, each in the same place among what they run so; by default this process."""
        return Group()

    def takes(self, op: Op) -> Placement | None:
        """The placement of its input in these ranks, by its own attributes; None: as the ops before it leave it.

        The placements of a list's values follow from what the first op takes that says it.
        """
        return None

    def gives(self, op: Op, x: Placement, context: ShardingContext) -> Placement:
        """The placement of its outputs for an input that is placed so; of what is replicated all ranks give the same.

        Raises:
            ValueError: when it cannot take that; the message says what to do.
        """
        given = [placed for placed in (x, *context.named.values()) if placed != Replicated()]
        if given:
            raise ValueError(
                f"{type(op).__name__} does not say what it makes of an input that is {given[0]} in the ranks of "
                f"{context.group.title}: give it a rule by @te_fuser.parallel.sharding_rule(...), or put it where "
                "values are whole"
            )
        return x

    def local(self, op: Op, x: Placement, context: ShardingContext) -> FusableOperation:
        """The op with the sizes of a rank's part, where they are not those of the whole.

        Raises:
            ValueError: when there are no equal parts.
        """
        return op

    def local_ops(self, op: Op) -> tuple[FusableOperation, ...]:
        """The ops that each rank runs in its place: one of its kind, and collectives around it.

        These may read its named inputs, and hand each other values by other names, which nobody else hears of.
        """
        return (op,)

    def cuts(self, op: Op) -> Mapping[str, tuple[int, Group]]:
        """Parameter of which a rank has its part alone -> the dimension that is cut, and the ranks."""
        return {}

    def partial_gradients(self, op: Op, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        """Parameters of whose gradient each rank has a term: whole ones, read beside what is not."""
        cuts = self.cuts(op)
        whole = [name for name in context.shapes if name not in cuts or cuts[name][1] != context.group]
        return () if x == Replicated() else tuple(whole)

    def draws_for(self, op: Op, x: Placement, context: ShardingContext) -> Placement:
        """The placement of what it draws random numbers for; by default that of its input."""
        return x


RULES: OpTable[ShardingRule[Any]] = OpTable("sharding", ShardingRule())


def sharding_rule(rule: ShardingRule[Any]) -> Callable[[Kind], Kind]:
    """Decorator that gives a class of elementary ops a rule, which its subclasses have too.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(rule, ShardingRule):
        raise TypeError(f"sharding_rule takes a ShardingRule, as @sharding_rule(Rows()), got {described(rule)}")

    def decorated(kind: Kind) -> Kind:
        if not issubclass(kind, FusableOperation) or issubclass(kind, FusedOperation):
            raise TypeError(f"sharding_rule decorates a class of ops that stand for no others, got {described(kind)}")
        return RULES.row(rule)(kind)

    return decorated


def rule_of(op: FusableOperation) -> ShardingRule[Any]:
    """The rule of an op's class."""
    return RULES.of(type(op))


class JointOp(NamedTuple):
    """An op that several ranks run together, and the placement that it takes; None: any, as collectives do."""

    op: FusableOperation
    group: Group
    takes: Placement | None


def joint_ops(ops: Collection[FusableOperation]) -> list[JointOp]:
    """Ops that several ranks run together, in their order."""
    rules = {kind: RULES.of(kind) for kind in {*map(type, ops)}}
    own = {kind: rule for kind, rule in rules.items() if type(rule).group is not ShardingRule.group}
    found = []
    for op in ops:  # a loop, as Dynamo goes through it
        rule = own.get(type(op))
        if rule is not None:
            group = rule.group(op)
            if group.size > 1:
                found.append(JointOp(op, group, rule.takes(op)))
    return found
