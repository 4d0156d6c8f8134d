"""Ranks that share ops run the same plan: what each is about to run is compared before its first run.

A collective that one rank runs and another does not, or on a tensor of another size, waits for ever or gives wrong
numbers. So before a plan runs for the first time, or on sizes that it has not run on, the ranks of each group tell each
other what it is to be, through the store by which they found one another: all go on, or all raise. A rank that cannot
plan the call tells its error instead. Later calls of such sizes exchange nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from te_fuser.dtypes import text_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.listed import ListedOp
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.known import Call
    from te_fuser.ops.group import Group

_REMEMBERED = 8  # of what was told
PATIENCE = 600.0  # seconds that others may take to plan and compile what this rank has ready

_SEED = "random numbers"
_REMEDIES = {
    "x": "give all ranks of the group tensors of one shape and dtype",
    "input": "give all ranks of the group the same named inputs, of one shape and dtype",
    "parameter": "make the model in the same way on each",
    "mode": "put the model in the same mode on each, inside of the same torch.no_grad() or autocast",
    "step": "make the model in the same way on each, with equal options, packages and measured choices (one cache_dir)",
    _SEED: "call torch.manual_seed with one number on all ranks of the group, and draw the same of it before the model",
}
_told: dict[tuple[str, int], int] = {}  # by group and its size: what this process has told it
_counting = threading.Lock()
Line = tuple[str, str]  # what is said, as remedies know it, and the words


def groups_of(listed: Sequence[ListedOp]) -> tuple[Group, ...]:
    """The groups of ranks that run ops of a list together."""
    found = (item.lowered.op.runs_with() for item in listed)
    return tuple(dict.fromkeys(group for group in found if group is not None and group.size > 1))


@contextlib.contextmanager
def telling_errors(groups: Sequence[Group]) -> Iterator[None]:
    """An error in here is told to the other ranks, which wait for this one's plan."""
    try:
        yield
    except Disagreement:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # its own error is the one to raise
            for group in groups:
                _tell(group, {"error": f"{type(error).__name__}: {error}"})
        raise


class Disagreement(RuntimeError):  # noqa: N818 - it is one
    """Ranks that share ops are about to run different calls."""


def check(groups: Sequence[Group], call: Call, plan: Plan, modes: str, draws: bool) -> None:
    """Compare what the ranks of these groups are about to run; of a group that is missing its ops tell.

    Args:
        modes: what else the call depends on, in words.
        draws: whether the call draws random numbers.

    Raises:
        Disagreement: on all ranks, naming them and the first difference; or the error of one that has no plan.
    """
    lines = [*_call(call, plan), ("mode", modes), *_steps(plan), *([(_SEED, _random(call.x.device))] if draws else [])]
    numbers = [(group, _tell(group, {"lines": lines})) for group in groups if group.is_here()]
    for group, number in numbers:
        _compare(group, number, lines)


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


def _random(device: torch.device) -> str:
    """The state of the generator that the call draws from."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        return f"{_SEED} from seed {generator.initial_seed()}, offset {generator.get_offset()}"
    state = hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=4).hexdigest()
    return f"{_SEED} from seed {torch.default_generator.initial_seed()}, state {state}"


def _tell(group: Group, said: Mapping[str, object]) -> int:
    """Tell the ranks of a group; the number of what was told."""
    with _counting:
        number = _told[group.name, group.size] = _told.get((group.name, group.size), 0) + 1
    store = group.process_group().get_group_store()
    store.set(_key(number, group.rank), json.dumps(said))
    if number > _REMEMBERED:  # nobody asks for it any more
        store.delete_key(_key(number - _REMEMBERED, group.rank))
    return number


def _key(number: int, rank: int) -> str:
    return f"te_fuser/lockstep/{number}/{rank}"


def _compare(group: Group, number: int, lines: Sequence[Line]) -> None:
    """Hold what the others tell against what this rank is about to run."""
    for rank in range(group.size):
        told = _told_by(group, number, rank)
        if "error" in told:
            raise Disagreement(
                f"rank {rank} of group {group.title!r} cannot run this call, so no rank of it does: {told['error']}"
            )
        theirs = [(kind, words) for kind, words in told["lines"]]
        if theirs != list(lines):
            raise Disagreement(_difference(group, rank, theirs, lines))


def _told_by(group: Group, number: int, rank: int) -> dict[str, list[Line]]:
    store, key = group.process_group().get_group_store(), _key(number, rank)
    try:
        store.wait([key], timedelta(seconds=PATIENCE))
    except RuntimeError as error:
        raise Disagreement(
            f"rank {rank} of group {group.title!r} did not plan call {number} of the group within {PATIENCE:.0f} s, "
            f"which {group} is ready to run: ranks of a group call a model equally often, with tensors of one shape"
        ) from error
    return json.loads(store.get(key))  # type: ignore[no-any-return]


def _difference(group: Group, rank: int, theirs: Sequence[Line], ours: Sequence[Line]) -> str:
    """Where two ranks begin to differ, in words that are the same whoever says them."""
    pairs = list(zip(theirs, ours, strict=False))
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    kinds = [lines[at][0] for lines in (theirs, ours) if at < len(lines)]
    said = {rank: theirs, group.rank: ours}
    has = [f"rank {r} has {lines[at][1] if at < len(lines) else 'nothing more'}" for r, lines in sorted(said.items())]
    return (
        f"the ranks of group {group.title!r} are about to run different calls of a model that they share: "
        f"{'; '.join(has)}. {_REMEDIES[kinds[0]].capitalize()}"
    )
