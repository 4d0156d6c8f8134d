"""Models cut for the ranks of a group: tensor and sequence parallelism, on PyTorch's DeviceMesh and DTensor."""

from te_fuser.distributed.placement import Partial, Placement, Replicated, Shard
from te_fuser.fuser.run.delayed import backward_dw
from te_fuser.parallel.derive import derived_plan
from te_fuser.parallel.parallelize import cut_sequence, leave_sums_to_engine, parallelize
from te_fuser.parallel.styles import Column, Heads, Row
from te_fuser.sharding.rules import ShardingContext, ShardingRule, sharding_rule

__all__ = [
    "Column",
    "Heads",
    "Partial",
    "Placement",
    "Replicated",
    "Row",
    "Shard",
    "ShardingContext",
    "ShardingRule",
    "backward_dw",
    "cut_sequence",
    "derived_plan",
    "leave_sums_to_engine",
    "parallelize",
    "sharding_rule",
]
__dir__ = __all__.copy
