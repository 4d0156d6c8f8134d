"""Plans that several ranks run together: what each is about to run is compared before its first run.

A collective that one rank runs and another does not, or on a tensor of another size, waits for ever or gives wrong
numbers. So before a plan runs for the first time, or on sizes that it has not run on, the ranks of each group compare
it (`consistency`): all go on, or all raise. Later calls of such sizes compare nothing, until the generator that they
draw from has another seed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from te_fuser.distributed import consistency
from te_fuser.dtypes import text_of
from te_fuser.facts import Facts
from te_fuser.params.gradient_sums import is_left
from te_fuser.sharding.rule import joint_ops

if TYPE_CHECKING:
    from te_fuser.distributed.consistency import Line
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.listed import ListedOp
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.known import Call


def groups_of(listed: Sequence[ListedOp]) -> tuple[Group, ...]:
    """The groups of ranks that run ops of a list together."""
    joint = joint_ops([item.lowered.op for item in listed])
    return tuple(dict.fromkeys([*[group for item in listed for group in item.entering], *[one.group for one in joint]]))


def compare_plans(groups: Sequence[Group], call: Call, plan: Plan, modes: str, draws: bool) -> None:
    """Compare what the ranks of these groups are about to run.

    Args:
        modes: what else the call depends on, in words.
        draws: whether the call draws random numbers.

    Raises:
        RankMismatchError: on all ranks, naming the first difference, the error of one that has no plan, or who does
            not come.
    """
    lines = [*_lines(call, plan, modes)]
    if draws:
        state = _generator(call.x.device).get_state().numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=4).hexdigest()
        lines.append(("seed", f"random numbers from seed {seed_of(call.x.device)}, state {digest}"))
    labels = {node.op: node.label for node in plan.graph.nodes}
    first = next((f" of {labels[one.op]}" for one in joint_ops([*labels]) if one.group in groups), "")
    consistency.compare(groups, lines, f"a call{first} with {lines[0][1]}")


def _generator(device: torch.device) -> torch.Generator:
    """The generator that calls draw from."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def seed_of(device: torch.device) -> int | None:
    """The seed that calls draw by; None while a CUDA graph is captured, when it cannot be asked."""
    captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return None if captures else _generator(device).initial_seed()


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
