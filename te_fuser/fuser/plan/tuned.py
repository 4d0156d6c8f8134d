"""Choices that `tune` measured, on disk: by list of ops and device, which fusions to take where, at whatever price.

A place is a fusion and the feature sizes of what it covers, so equal layers of a stack are one place.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.codegen.cache_files import EntryFile
from te_fuser.ops.sizes import on_grid
from te_fuser.sharding.rules import joint_ops

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fusions.match import Match
    from te_fuser.fusions.registry import Fusion

ON, OFF = "on", "off"
Choices = Mapping[str, str]  # place -> ON or OFF


def place_of(fusion: Fusion, match: Match) -> str:
    """The place where a fusion fits: "matmul_bias 4096>12288"."""
    seen = match.rounded()
    return f"{fusion.name} {seen.x.features}>{seen.y.features}"


def list_key(graph: Graph, memory: str | int, kernels: str) -> str:
    """A digest of what measured choices depend on."""
    graph = graph.rounded()
    rows = math.prod(map(on_grid, graph.values[0].spec.shape[:-1]))
    described: list[Any] = [TunedChoices.form, memory, kernels, rows.bit_length()]
    joint = joint_ops([node.op for node in graph.nodes])
    exchanging = {one.op: [one.group.size] for one in joint if one.takes is None}
    for node in graph.nodes:
        spec = graph.values[node.output].spec
        parameters = [(graph.parameter_specs[p].shape, graph.parameter_needs[p]) for p in node.parameters.values()]
        among = exchanging.get(node.op, [])
        described.append((node.op.kind.__name__, spec.features, str(spec.dtype), node.traits.draws, parameters, *among))
        described.append([graph.values[v].index for v in (node.input, *node.named_in.values())])
    described.append([v.needs_grad for v in graph.values])
    return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:32]


class TunedChoices(EntryFile):
    """The choices for one device."""

    def find(self, key: str) -> Choices:
        """The choices for a list of ops; none where it was never tuned."""
        places = self.entries().get(key, {}).get("places", {})
        return dict(places) if isinstance(places, dict) and set(places.values()) <= {ON, OFF} else {}

    def put(self, key: str, choices: Choices, ratio: float) -> None:
        """Keep the choices for a list of ops, and by how much they are faster; what others wrote stays."""
        found = {"places": dict(choices), "ratio": ratio}
        self.change(lambda entries: entries.update({key: found}))

    def check(self) -> None:
        """Check that `put` can write its file; OSError when the file cannot be written, with what to do."""
        try:
            self.change(lambda entries: None)
        except OSError as error:
            what = (
                f"what tune finds cannot be kept in {self.path.parent}: {error.strerror}; set te_fuser.config.cache_dir"
            )
            raise type(error)(error.errno, what) from error


def device_name(device: torch.device) -> str:
    """Name that tells machines apart: the GPU's, or the processor's kind and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def store_for(device_name: str) -> TunedChoices:
    return TunedChoices.of(device_name)


def signature(plan: Plan) -> tuple[Any, ...]:
    """Key of a plan, equal for plans that run the same steps."""
    steps = [(s.name, s.start, s.stop, s.inputs, s.outputs) for s in plan.steps]
    return (*steps, *((s.start, s.stop) for s in plan.segments))
