"""Plans that several ranks run together: what each is about to run is compared before its first run.

A collective that one rank runs and another does not, or on a tensor of another size, waits for ever or gives wrong
numbers. So before a plan runs for the first time, or on sizes that it has not run on, the ranks of each group compare
it (`consistency`): all go on, or all raise. Later calls of such sizes compare nothing, until the generator that they
draw from has another seed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from te_fuser.config import config
from te_fuser.distributed import consistency
from te_fuser.dtypes import text_of
from te_fuser.facts import Facts
from te_fuser.fuser.run.plan_cache import LRU
from te_fuser.params.gradient_sums import is_left
from te_fuser.sharding.rule import joint_ops

if TYPE_CHECKING:
    from te_fuser.distributed.consistency import Line
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.listed import ListedOp
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.call import Call, CallModes
    from te_fuser.fuser.run.loading import Executable


def groups_of(listed: Sequence[ListedOp]) -> tuple[Group, ...]:
    """The groups of ranks that run ops of a list together."""
    joint = joint_ops([item.lowered.op for item in listed])
    return tuple(dict.fromkeys([*[group for item in listed for group in item.entering], *[one.group for one in joint]]))


class RankAgreement:
    """Calls that ranks were found to run alike, each with its seed; others are compared before they run."""

    def __init__(self) -> None:
        self._seeds: LRU[int] = LRU(lambda: config.shapes_kept)

    def unknown(self, call: Call, modes: CallModes) -> tuple[Hashable, int] | None:
        """The key of a call that ranks have to compare, and its seed; None where there is no need to."""
        if not call.ops.groups:
            return None
        draws = any(op.draws() for op in call.ops.lowered)
        key, seed = call.signature(modes), seed_of(call.x.device) if draws else 0
        known = self._seeds.get(key)
        return None if known is not None and seed in (known, None) else (key, seed or 0)

    def reach(self, unknown: tuple[Hashable, int], call: Call, modes: CallModes, executable: Executable) -> None:
        """Compare what the ranks are about to run.

        Raises:
            RankMismatchError: on all ranks, naming the first difference, the error of one that has no plan, or who does
                not come.
        """
        groups, plan = call.ops.groups, executable.plan
        lines = [*_lines(call, plan, modes.words)]
        if executable.draws:
            lines.append(("seed", f"random numbers from {_random(call.x.device)}"))
        labels = {node.op: node.label for node in plan.graph.nodes}
        first = next((f" of {labels[one.op]}" for one in joint_ops([*labels]) if one.group in groups), "")
        consistency.compare(groups, lines, f"a call{first} with {lines[0][1]}")
        self._seeds.replace(*unknown)


def seed_of(device: torch.device) -> int | None:
    """The seed of the generator that calls draw from; None while a CUDA graph is captured, when it cannot be asked."""
    if device.type != "cuda":
        return torch.default_generator.initial_seed()
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[device.index or 0].initial_seed()


def seed_facts(device: torch.device) -> Facts:
    """Facts that hold while the seed is the one of now."""
    return Facts(calls=((functools.partial(seed_of, device), seed_of(device)),))


def _lines(call: Call, plan: Plan, modes: str) -> Iterator[Line]:
    """The call, the steps of its plan, and the gradients that backward adds up over ranks."""
    nodes = plan.graph.nodes
    yield "x", f"x {_of(call.x)}"
    for name, t in sorted(call.inputs.items()):
        yield "input", f"input {name!r} {_of(t)}"
    for node in nodes:
        for name, k in node.parameters.items():
            yield "parameter", f"{node.label} with {name} {_of(call.parameters[k])}"
    yield "mode", modes
    for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for k, step in enumerate(steps):
            over = ", ".join(f"{n.label} {n.op.extra_repr()}".rstrip() for n in nodes[step.start : step.stop])
            yield "step", f"step {k} of {direction}: {step.name} for {over}"
    for k, segment in enumerate(plan.segments):
        yield "step", f"segment {k} of steps {segment.start} to {segment.stop}"
    read = {k: f"{name} of {node.label}" for node in reversed(nodes) for name, k in node.parameters.items()}
    for k, group in sorted(plan.graph.sums.items()):
        by = "left to the engine" if is_left(call.parameters[k]) else "added up by the list"
        yield "sum", f"the gradient of {read[k]}, of which ranks have terms, {by} over {group.title!r}"


def _of(t: torch.Tensor) -> str:
    """The form of a tensor; of one that is spread over ranks, this rank's part."""
    shown = getattr(t, "_local_tensor", t)
    return f"{list(shown.shape)} {text_of(shown.dtype)}{' with a gradient' if t.requires_grad else ''}"


def _random(device: torch.device) -> str:
    """The state of the generator that the call draws from."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        return f"seed {generator.initial_seed()}, offset {generator.get_offset()}"
    state = hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=4).hexdigest()
    return f"seed {torch.default_generator.initial_seed()}, state {state}"
