"""What products of 8 bits gain over the same in their own precision, by the prices that plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_fuser.dtypes import name_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.steps.step import Step
    from te_fuser.ops.base import Spec


@dataclass(frozen=True)
class Gain:
    """Matrix products that a plan runs in 8 bits, forward and backward together.

    Attributes:
        path: their op's place in the model.
        dtype: the name of their own precision.
        seconds: the predicted time of the steps that multiply them, with what these do beside.
        own_seconds: that of as many products alone, of factors in `dtype`.
    """

    path: str
    dtype: str
    seconds: float
    own_seconds: float


def gains(plan: Plan) -> list[Gain]:
    """One for each op whose products are of 8 bits, in their order; what a step has of several counts for the first."""
    found: dict[int, Gain] = {}
    for step in plan.steps:
        nodes = [plan.graph.nodes[k] for k in step.task.ops or range(step.start, step.stop)]
        node = next((node for node in nodes if getattr(node.op, "multiplies_8_bits", False)), None)
        if node is None or not step.cost.flops:
            continue
        before = found.get(node.index)
        y = plan.graph.values[node.output].spec
        taken = step.seconds + (before.seconds if before else 0.0)
        own = _own_seconds(plan, step, node, y) + (before.own_seconds if before else 0.0)
        found[node.index] = Gain(node.path, name_of(y.dtype), taken, own)
    return [found[index] for index in sorted(found)]


def _own_seconds(plan: Plan, step: Step, node: Node, y: Spec) -> float:
    """The predicted time of a step's products of one op, in y's dtype and with nothing beside them."""
    x = plan.graph.values[node.input].spec
    one = node.op.flops(x, {})
    count = step.cost.flops / one
    numbers = x.rows * (x.features + y.features) + one / (2 * x.rows)
    cost = type(step.cost)(read=count * numbers * y.dtype.itemsize, flops=step.cost.flops, launches=round(count))
    return plan.device.seconds(cost, name_of(y.dtype))
