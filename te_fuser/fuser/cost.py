"""What a step takes: bytes, operations and launches, counted from its description."""

from __future__ import annotations

import math
from collections.abc import Iterable

from te_fuser.codegen.description import KernelDescription
from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph import Graph, Node
from te_fuser.fusions.match import Cost
from te_fuser.ops.base import Spec

# float32 operations that one call of a function amounts to in a generated kernel
_WEIGHT = {"exp": 8, "log": 10, "tanh": 14, "erf": 18, "sigmoid": 12, "sqrt": 4, "rsqrt": 4, "div": 4, "keep": 16}
_FREE = {"input", "const", "value", "concat"}


def bytes_of(spec: Spec) -> int:
    """The size of a tensor."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def kernel_cost(description: KernelDescription, rows: int, samples: int, generated: bool) -> Cost:
    """A row kernel: one pass if it is generated, one PyTorch operation for each node if it is interpreted."""
    full = [n for n in description.nodes if n.axes & Axes.FEATURE and n.axes & Axes.ROWS and n.op not in _FREE]
    size = rows * max(description.width, 1)
    operations = float(sum(_WEIGHT.get(n.op, 1) for n in full) * size)
    read, written = description.bytes_moved(rows, samples)
    if generated:
        return Cost(read, written, 0.0, 1, operations)
    nodes = [n for n in description.nodes if n.op not in _FREE]
    traffic = 4.0 * size * len(full)
    return Cost(read + 2 * traffic, written + traffic, 0.0, max(len(nodes), 1), operations)


def forward_cost(graph: Graph, nodes: Iterable[Node]) -> Cost:
    """Opaque ops or a fusion: what enters and leaves the range, the parameters, and the products' operations."""
    nodes = list(nodes)
    inside = {v for n in nodes for v in (n.output, *n.named_out)}
    entering = {v for n in nodes for v in (n.input, *n.named_in.values())} - inside
    read = sum(bytes_of(graph.values[v].spec) for v in entering) + _parameter_bytes(graph, nodes)
    written = bytes_of(graph.values[nodes[-1].output].spec)
    scratch = _scratch(graph, nodes)
    return Cost(read + scratch, written + scratch, _flops(graph, nodes), 1)


def backward_cost(graph: Graph, nodes: Iterable[Node], products: int) -> Cost:
    """The backward of the same: `products` gradients of matrix products, each as costly as the forward one."""
    nodes = list(nodes)
    dy = bytes_of(graph.values[nodes[-1].output].spec)
    dx = bytes_of(graph.values[nodes[0].input].spec)
    parameters = _parameter_bytes(graph, nodes)
    scratch = 2 * _scratch(graph, nodes)
    return Cost(dy + dx + parameters + scratch, dx + parameters + scratch, _flops(graph, nodes) * products, max(products, 1))


def _scratch(graph: Graph, nodes: Iterable[Node]) -> int:
    return sum(n.op.scratch_bytes(graph.values[n.input].spec) for n in nodes)


def _parameter_bytes(graph: Graph, nodes: Iterable[Node]) -> int:
    return sum(bytes_of(graph.parameter_specs[p]) for n in nodes for p in n.parameters.values())


def _flops(graph: Graph, nodes: Iterable[Node]) -> float:
    total = 0.0
    for n in nodes:
        specs = {name: graph.parameter_specs[p] for name, p in n.parameters.items()}
        total += n.op.flops(graph.values[n.input].spec, specs)
    return total
