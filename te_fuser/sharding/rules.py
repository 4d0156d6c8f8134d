"""Sharding rules: how the ranks of a group run one kind of op, and those of all but attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from te_fuser.distributed.group import Group
from te_fuser.distributed.placement import Partial, Placement, Replicated, Shard
from te_fuser.formula.evaluate import parameter_axes
from te_fuser.formula.expr import Axes
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.bound import Bound
from te_fuser.ops.checks import described
from te_fuser.ops.collectives import AllGather, AllReduce, AllReduceGradient, Collective, ReduceScatter
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.op_table import Kind, OpTable
from te_fuser.ops.operations import FusedOperation
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.sharing import COLUMN, ROW, SHARING, Cut
from te_fuser.ops.structure import Flatten, Reshape, Take, Unflatten

Op = TypeVar("Op", bound=FusableOperation)


@dataclass(frozen=True)
class ShardingContext:
    """Placements of an op's other inputs, for a `ShardingRule`.

    Attributes:
        group: the ranks.
        start: the placement of the list's input, and of the call's other tensors.
        named: {argument: placement} of named inputs that come from ops of the list.
        shapes: of the op's parameters on this rank.
    """

    group: Group
    start: Placement = Replicated()
    named: Mapping[str, Placement] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class ShardingRule(Generic[Op]):
    """Rule for running an op on the ranks of a group; this default takes replicated values only.

    Override what differs for an op, mostly just `gives`, and decorate its class by `sharding_rule(rule)`; subclasses
    inherit the rule.
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
    """Decorator that gives a class of elementary ops, and its subclasses, a `ShardingRule`.

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
    """An op that several ranks run together, and the placement that it takes, or any."""

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


class RowRule(ShardingRule[Any]):
    """Rule of row ops: as the input, where the formula extends over what a rank has."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        given, who, ranks = op.named_inputs(), type(op).__name__, context.group.title
        for name, other in context.named.items():
            if given[name].axes == Axes.FULL and other != x:
                raise ValueError(
                    f"{who} takes two values that ranks of {ranks} have alike: x is {x}, "
                    f"{given[name].name.rsplit('/', 1)[-1]!r} is {other}"
                )
        made = op.on_symbols(shapes=context.shapes).values() if x in (Shard(-1), Partial()) else ()
        if x == Shard(-1) and any(y.depth > 0 for y in made):
            raise ValueError(
                f"{who} goes over all features of a row, and x is {x}: each rank of {ranks} would see its own alone; "
                "put it before the features are cut, or behind their sum"
            )
        if x == Partial() and any(y.op != "input" for y in made):
            raise ValueError(f"{who} takes a sum, and x is {x}: put ReduceScatter or AllReduce before it")
        return x

    def partial_gradients(self, op: Any, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        """A parameter with a number for each feature is cut as the features are."""
        names = super().partial_gradients(op, x, context)
        return tuple([n for n in names if x != Shard(-1) or parameter_axes(context.shapes[n]) == Axes.NONE])


class CutRule(RowRule):
    """Rule by `parallel_mode` and `sequence_parallel` of a `Cut`; beside that as a row op, or an op without a rule.

    `cut_input` is the mode in which the input is cut by features.
    """

    cut_input = ROW

    def group(self, op: Any) -> Group:
        group: Group = op.group
        return group if group.size == 1 or op.parallel_mode or op.sequence_parallel else Group()

    def takes(self, op: Any) -> Placement:
        return Shard(-1) if op.parallel_mode == self.cut_input else self.between(op)

    def between(self, op: Any) -> Placement:
        """The placement of a value that is not cut by features."""
        return Shard(op.sequence_dim) if op.sequence_parallel else Replicated()

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        self.check(op, x, context)
        return super().gives(op, x, context) if isinstance(op, RowOp) else ShardingRule.gives(self, op, x, context)

    def check(self, op: Any, x: Placement, context: ShardingContext) -> None:
        """Refuse an input of which the ranks that share the op have another part than it takes."""
        if self.group(op) == context.group and x != self.takes(op):
            said = [f"{name}={getattr(op, name)!r}" for name in SHARING if name != "group" and getattr(op, name)]
            raise ValueError(
                f"{type(op).__name__} with {', '.join(said)} takes what is {self.takes(op)} in the ranks of "
                f"{context.group.title}, and x is {x}: make both alike"
            )


class BiasRule(CutRule):
    """Rule of biases: by column it adds to a rank's features; by row it comes behind the sum."""

    cut_input = COLUMN

    def local_ops(self, op: Bias) -> tuple[FusableOperation, ...]:
        if not (op.parallel_mode == COLUMN and op.is_cut):
            return (op,)
        return (op.with_attributes(_parallel_mode=None, features=op.share(op.features, "features")),)

    def cuts(self, op: Bias) -> Mapping[str, tuple[int, Group]]:
        return {"bias": (0, op.group)} if op.parallel_mode == COLUMN and op.is_cut else {}


class MatMulRule(CutRule):
    """Rule of products: by column features, by row the sum; else as x, or a term of a sum."""

    def _takes_gathered(self, op: MatMul, x: Placement, context: ShardingContext) -> bool:
        by_column = op.parallel_mode == COLUMN and self.group(op) == context.group
        return by_column and x == Replicated(gathered=True)

    def gives(self, op: MatMul, x: Placement, context: ShardingContext) -> Placement:
        if op.is_cut and op.group == context.group:
            if not self._takes_gathered(op, x, context):
                self.check(op, x, context)
            return Shard(-1) if op.parallel_mode == COLUMN else self.between(op)
        if x == Shard(-1):
            return Partial()
        if x == Replicated() or x.by_rows:
            return x
        raise ValueError(f"MatMul takes whole rows, and x is {x}: set its parallel_mode, or put AllReduce before it")

    def local(self, op: MatMul, x: Placement, context: ShardingContext) -> FusableOperation:
        return op.with_attributes(_gathered=True) if self._takes_gathered(op, x, context) else op

    def local_ops(self, op: MatMul) -> tuple[FusableOperation, ...]:
        """Collectives before and behind a MatMul."""
        if not op.is_cut:
            return (op,)
        inner, outer = op.own_features
        own = op.with_attributes(_parallel_mode=None, in_features=inner, out_features=outer)
        group, rows = op.group, op.sequence_dim
        if op._gathered:
            return (own,)
        if op.parallel_mode == COLUMN:
            return (AllGather(group, rows) if op.sequence_parallel else AllReduceGradient(group)), own
        return own, (ReduceScatter(group, rows) if op.sequence_parallel else AllReduce(group))

    def cuts(self, op: MatMul) -> Mapping[str, tuple[int, Group]]:
        return {"weight": (0 if op.parallel_mode == COLUMN else 1, op.group)} if op.is_cut else {}

    def partial_gradients(self, op: MatMul, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        return () if x == Shard(-1) else super().partial_gradients(op, x, context)


class CollectiveRule(ShardingRule[Collective]):
    """Rule of collectives of the same group: join what was cut, add up what were terms."""

    def group(self, op: Collective) -> Group:
        return op.group

    def gives(self, op: Collective, x: Placement, context: ShardingContext) -> Placement:
        forth = op.forth
        if self.group(op) != context.group:
            return x
        takes = Replicated() if forth is None else Partial() if forth.join is None else Shard(forth.join)
        if x != takes:
            raise ValueError(
                f"{type(op).__name__} takes what is {takes} in the ranks of {op.group.title}, and x is {x}: put it "
                "elsewhere, or leave it to the products, which by their parallel_mode have what they need"
            )
        if forth is not None and forth.cut is not None:
            return Shard(forth.cut)
        return Replicated(gathered=op.back is not None)


class BoundRule(ShardingRule[Bound]):
    """Rule of the op that is bound, which a list has in its place."""

    def group(self, op: Bound) -> Group:
        return rule_of(op.op).group(op.op)

    def takes(self, op: Bound) -> Placement | None:
        return rule_of(op.op).takes(op.op)


class TakeRule(ShardingRule[Take]):
    """Rule of `Take`: as the value that is taken; what the call gives is as the list's input."""

    def gives(self, op: Take, x: Placement, context: ShardingContext) -> Placement:
        return context.named.get("value", context.start)


class ReshapeRule(ShardingRule[Reshape]):
    """Rule of `Reshape`: as x, where what is cut is none of the dimensions that become others."""

    def gives(self, op: Reshape, x: Placement, context: ShardingContext) -> Placement:
        kept = isinstance(x, Replicated) or isinstance(x, Shard) and x.by_rows and x.dim in op.kept()
        return x if kept else super().gives(op, x, context)


class FlattenRule(ReshapeRule):
    """Rule of `Flatten`: blocks of features that are cut become features that are cut; else as x."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        blocks = isinstance(x, Shard) and x.dim == op.start_dim < 0 and op.end_dim == -1
        return Shard(-1) if blocks else super().gives(op, x, context)


class UnflattenRule(ReshapeRule):
    """Rule of `Unflatten`: features that are cut become blocks that are cut; else as x."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        blocks = x == Shard(-1) and op.dim == -1 and op.unflattened_size[0] == -1
        return Shard(-len(op.unflattened_size)) if blocks else super().gives(op, x, context)


RULES.add(RowRule(), RowOp)
RULES.add(CutRule(), Cut)
RULES.add(BiasRule(), Bias)
RULES.add(MatMulRule(), MatMul)
RULES.add(CollectiveRule(), Collective)
RULES.add(BoundRule(), Bound)
RULES.add(TakeRule(), Take)
RULES.add(ReshapeRule(), Reshape)
RULES.add(FlattenRule(), Flatten)
RULES.add(UnflattenRule(), Unflatten)
