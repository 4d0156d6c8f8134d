"""Cache of plans by call key, with what a shape has to answer to run by one; and calls that ranks run alike.

Locks are held for looking up alone: nobody waits for a plan that another thread makes. A collective that ranks run
differently hangs or gives wrong numbers: before a plan first runs, or on sizes or a seed that are new to it, the ranks
of each group compare it, and all go on, or all raise.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from te_fuser.config import config
from te_fuser.distributed import consistency
from te_fuser.dtypes import text_of
from te_fuser.guards import Facts
from te_fuser.ops.sizes import Questions, on_grid
from te_fuser.params.gradient_sums import is_left
from te_fuser.sharding.rules import joint_ops

if TYPE_CHECKING:
    from te_fuser.distributed.consistency import Line
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.op_instances import ListedOp
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.call import Call, CallModes
    from te_fuser.fuser.run.loading import Executable

_caching = threading.Lock()  # one for all, as a model whose reference is being compiled may make fusers, but no locks
Item = TypeVar("Item")
Shapes = tuple[tuple[int, ...], ...]  # of the input, and of the named ones by their names


class LRU(Generic[Item]):
    """Cache by key of the items that were used last, at `most()` of them and the last one in any case."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._items: OrderedDict[Hashable, Item] = OrderedDict()

    def get(self, key: Hashable) -> Item | None:
        """Item kept by a key, which counts as used now; None where nothing is."""
        with _caching:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: Hashable, item: Item) -> Item:
        """Keep an item, or give the one kept by that key; the oldest is dropped."""
        with _caching:
            found = self._items.setdefault(key, item)
            self._items.move_to_end(key)
            while len(self._items) > max(self._most(), 1):
                self._items.popitem(last=False)
            return found

    def replace(self, key: Hashable, item: Item) -> None:
        """Keep an item in the place of one that is kept by that key."""
        with _caching:
            self._items.pop(key, None)
        self.put(key, item)

    def items(self) -> list[tuple[Any, Item]]:
        """Items with their keys, the one that was used last first."""
        with _caching:
            return list(reversed(self._items.items()))

    def clear(self) -> None:
        with _caching:
            self._items.clear()


@dataclass(frozen=True)
class CacheEntry:
    """A plan that is ready to run, and what tells the shapes that run by it."""

    prepared: Executable
    questions: tuple[str, ...]
    fits: Callable[..., bool]


@dataclass(frozen=True)
class KeptPlan:
    """A plan that a model keeps; sizes are those of the grid for the first shape that it was made for.

    For each class of shapes that runs by it, `questions` of their sizes s0, s1, ...: those of the input without its
    features, then those of named inputs by name. `shapes` are those that were seen last.
    """

    plan: Plan
    questions: tuple[tuple[str, ...], ...]
    shapes: tuple[Shapes, ...]

    def __str__(self) -> str:
        steps = f"{len(self.plan.forward)} steps forward, {len(self.plan.backward)} backward"
        seen = ", ".join(" with ".join(str(list(shape)) for shape in shapes) for shapes in self.shapes)
        return f"plan of {steps}: for {seen or 'shapes that are not known any more'}"

    __repr__ = __str__


class PlanCache:
    """The plans of one list of ops; `form` is all that a plan depends on beside sizes."""

    def __init__(self) -> None:
        self._forms: LRU[object] = LRU(lambda: config.plans_kept)
        self._plans: LRU[CacheEntry] = LRU(lambda: config.plans_kept)
        self._shapes: LRU[Any] = LRU(lambda: config.shapes_kept)  # the keys of their plans
        self._last: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def find(self, shapes: Shapes, form: Hashable) -> Executable | None:
        """The plan for these shapes, known or by what they answer; None where one is to be made."""
        last_shapes, last_form, token, found = self._last  # comparing takes half the time of a look-up
        same = form == last_form
        if same and shapes == last_shapes:
            return found  # type: ignore[no-any-return]
        if not same:
            token = self._forms.get(form)
        known = None if token is None else self._known(token, shapes) or self._fitting(token, shapes)
        if known is not None:
            self._last = shapes, form, token, known
        return known

    def put(self, shapes: Shapes, form: Hashable, questions: Questions, prepared: Executable) -> Executable:
        """Keep a plan for these shapes and all that answer its questions alike."""
        token = self._forms.put(form, object())
        asked = tuple(text if answer else f"not {text}" for text, answer in questions.answers.items())
        answered = CacheEntry(prepared, asked, questions.look())
        key = token, _grid_of(shapes), asked
        kept = self._plans.put(key, answered).prepared
        self._shapes.put((token, shapes), key)
        self._last = shapes, form, token, kept
        return kept

    def clear(self) -> None:
        self._plans.clear()
        self._shapes.clear()
        self._forms.clear()
        self._last = (None, None, None, None)

    def prepared(self, form: Hashable) -> list[Executable]:
        """The plans that are kept for calls of this form."""
        token = self._forms.get(form)
        return [answered.prepared for key, answered in self._plans.items() if key[0] is token]

    def kept(self) -> list[KeptPlan]:
        """All plans, the one that was used last first."""
        shapes, questions = dict[int, list[Shapes]](), dict[int, list[tuple[str, ...]]]()
        plans = self._plans.items()
        numbers = {key: id(answered.prepared) for key, answered in plans}
        for (_, seen), key in self._shapes.items():
            shapes.setdefault(numbers.get(key, 0), []).append(seen)
        for _, answered in plans:
            questions.setdefault(id(answered.prepared), []).append(answered.questions)
        found = {id(answered.prepared): answered.prepared.plan for _, answered in plans}
        return [KeptPlan(plan, tuple(questions[k]), tuple(shapes.get(k, ()))) for k, plan in found.items()]

    def _known(self, token: object, shapes: Shapes) -> Executable | None:
        """The plan for a shape that was seen, if it is still kept."""
        key = self._shapes.get((token, shapes))
        answered = None if key is None else self._plans.get(key)
        return None if answered is None else answered.prepared

    def _fitting(self, token: object, shapes: Shapes) -> Executable | None:
        """The plan for a new shape, by what it answers."""
        grid, sizes = _grid_of(shapes), sizes_of(shapes)
        for key, answered in self._plans.items():
            if key[0] is token and key[1] == grid and answered.fits(*sizes):
                self._plans.get(key)
                self._shapes.put((token, shapes), key)
                return answered.prepared
        return None


def sizes_of(shapes: Shapes) -> tuple[int, ...]:
    """The sizes of a call that may be asked for: all but the features of the input."""
    return tuple([size for shape in (shapes[0][:-1], *shapes[1:]) for size in shape])


def _grid_of(shapes: Shapes) -> tuple[Any, ...]:
    """Key that plans for such shapes have in common, whatever is asked of them: prices see no more."""
    return shapes[0][-1:], tuple([tuple(map(on_grid, shape)) for shape in (shapes[0][:-1], *shapes[1:])])


def groups_of(listed: Sequence[ListedOp]) -> tuple[Group, ...]:
    """The groups of ranks that run ops of a list together."""
    joint = joint_ops([item.lowered.op for item in listed])
    return tuple(dict.fromkeys([*[group for item in listed for group in item.entering], *[one.group for one in joint]]))


class RankAgreement:
    """Calls that ranks were found to run alike, each with its seed."""

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

        Where they differ, or one fails, all raise the same RankMismatchError.
        """
        groups, plan = call.ops.groups, executable.plan
        lines = [*_lines(call, plan, modes.words)]
        if executable.draws:
            state = _generator(call.x.device).get_state().numpy().tobytes()
            digest = hashlib.blake2b(state, digest_size=4).hexdigest()
            lines.append(("seed", f"random numbers from seed {seed_of(call.x.device)}, state {digest}"))
        labels = {node.op: node.label for node in plan.graph.nodes}
        first = next((f" of {labels[one.op]}" for one in joint_ops([*labels]) if one.group in groups), "")
        consistency.compare(groups, lines, f"a call{first} with {lines[0][1]}")
        self._seeds.replace(*unknown)


def _generator(device: torch.device) -> torch.Generator:
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
