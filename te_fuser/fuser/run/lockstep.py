"""Ranks that share ops run the same plan: what each is about to run is compared before its first run.

A collective that one rank runs and another does not, or on a tensor of another size, waits for ever or gives wrong
numbers. So before a plan runs for the first time, or on sizes that it has not run on, the ranks of each group tell each
other what it is to be (`telling`): all go on, or all raise. A rank that cannot plan the call tells its error instead.
Later calls of such sizes exchange nothing, until the generator that they draw from has another seed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from te_fuser.distributed import stuck, telling
from te_fuser.dtypes import text_of
from te_fuser.facts import Facts
from te_fuser.params.gradient_sums import is_left
from te_fuser.sharding.rule import joint_ops

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.distributed.telling import Line
    from te_fuser.fuser.graph.listed import ListedOp
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.known import Call


def groups_of(listed: Sequence[ListedOp]) -> tuple[Group, ...]:
    """The groups of ranks that run ops of a list together."""
    joint = joint_ops([item.lowered.op for item in listed])
    return tuple(dict.fromkeys([*[group for item in listed for group in item.entering], *[one.group for one in joint]]))


def begin(groups: Sequence[Group], call: Call) -> None:
    """Tell that this rank is making a call ready."""
    telling.begin(groups, f"a call with x {_of(call.x)}")


def check(groups: Sequence[Group], call: Call, plan: Plan, modes: str, draws: bool) -> None:
    """Compare what the ranks of these groups are about to run; of a group that is missing its ops tell.

    Args:
        modes: what else the call depends on, in words.
        draws: whether the call draws random numbers.

    Raises:
        Disagreement: on all ranks, naming them and the first difference; or the error of one that has no plan.
    """
    drawn = [("seed", f"random numbers from {_random(call.x.device)}")] if draws else []
    telling.compare(groups, [*_call(call, plan), ("mode", modes), *_steps(plan), *_sums(call, plan), *drawn])
    stuck.watch(groups)


def seed_of(device: torch.device) -> int | None:
    """The seed of the generator that calls draw from; None while a CUDA graph is captured, when it cannot be asked."""
    if device.type != "cuda":
        return torch.default_generator.initial_seed()
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[device.index or 0].initial_seed()


def seed_facts(device: torch.device) -> Facts:
    """That it is the one of now."""
    ask: Callable[[], int | None] = torch.default_generator.initial_seed
    if device.type == "cuda":
        ask = functools.partial(seed_of, device)
    return Facts(calls=((ask, ask()),))


def _call(call: Call, plan: Plan) -> Iterator[Line]:
    yield "x", f"x {_of(call.x)}"
    for name, t in sorted(call.inputs.items()):
        yield "input", f"input {name!r} {_of(t)}"
    for node in plan.graph.nodes:
        for name, k in node.parameters.items():
            yield "parameter", f"{node.label} with {name} {_of(call.parameters[k])}"


def _of(t: torch.Tensor) -> str:
    """The form of a tensor; of one that is spread over ranks, this rank's part."""
    shown = getattr(t, "_local_tensor", t)
    return f"{list(shown.shape)} {text_of(shown.dtype)}{' with a gradient' if t.requires_grad else ''}"


def _steps(plan: Plan) -> Iterator[Line]:
    nodes = plan.graph.nodes
    for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for k, step in enumerate(steps):
            over = ", ".join(f"{n.label} {n.op.extra_repr()}".rstrip() for n in nodes[step.start : step.stop])
            yield "step", f"step {k} of {direction}: {step.name} for {over}"
    for k, segment in enumerate(plan.segments):
        yield "step", f"segment {k} of steps {segment.start} to {segment.stop}"


def _sums(call: Call, plan: Plan) -> Iterator[Line]:
    """The gradients that backward adds up over ranks."""
    read = {k: f"{name} of {node.label}" for node in reversed(plan.graph.nodes) for name, k in node.parameters.items()}
    for k, group in sorted(plan.graph.sums.items()):
        by = "left to the engine" if is_left(call.parameters[k]) else "added up by the list"
        yield "sum", f"the gradient of {read[k]}, of which ranks have terms, {by} over {group.title!r}"


def _random(device: torch.device) -> str:
    """The state of the generator that the call draws from."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        return f"seed {generator.initial_seed()}, offset {generator.get_offset()}"
    state = hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=4).hexdigest()
    return f"seed {torch.default_generator.initial_seed()}, state {state}"
