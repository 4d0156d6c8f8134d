"""What a step takes: bytes, operations and launches, counted from its description."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from te_fuser.formula.expr import Axes
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.fusions.match import Cost

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Graph, Node

_FREE = {"input", "const", "value", "concat"}


def kernel_cost(description: KernelDescription, rows: int, samples: int, generated: bool) -> Cost:
    """A row kernel: one pass if it is generated, one PyTorch operation for each node if it is interpreted."""
    full = [n for n in description.nodes if n.axes & Axes.FEATURE and n.axes & Axes.ROWS and n.op not in _FREE]
    size = rows * max(description.width, 1)
    operations = float(sum(FUNCTIONS[n.op].operations for n in full) * size)
    read, written = description.bytes_moved(rows, samples)
    if generated:
        return Cost(read, written, 0.0, 1, operations)
    nodes = [n for n in description.nodes if n.op not in _FREE]
    traffic = 4.0 * size * len(full)
    return Cost(read + 2 * traffic, written + traffic, 0.0, max(len(nodes), 1), operations)


def flops_of(graph: Graph, nodes: Iterable[Node]) -> float:
    """The products' floating-point operations in forward."""
    total = 0.0
    for n in nodes:
        specs = {name: graph.parameter_specs[p] for name, p in n.parameters.items()}
        total += n.op.flops(graph.values[n.input].spec, specs)
    return total
