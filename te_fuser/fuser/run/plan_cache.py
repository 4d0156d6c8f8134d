"""Cache of plans by call key, with what a shape has to answer to run by a plan, and of shapes that were seen.

Both drop what was used longest ago. Locks are held for looking up alone: nobody waits for a plan that another thread
makes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from te_fuser.config import config
from te_fuser.ops.sizes import Questions, on_grid

if TYPE_CHECKING:
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.run.loading import Executable

_caching = threading.Lock()  # one for all, as a model whose reference is being compiled may make fusers, but no locks
Item = TypeVar("Item")
Shapes = tuple[tuple[int, ...], ...]  # of the input, and of the named ones by their names


class LRU(Generic[Item]):
    """What was used last, by key.

    Args:
        most: says how many are kept; asked at each `put`, the last one stays in any case.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._items: OrderedDict[Hashable, Item] = OrderedDict()

    def get(self, key: Hashable) -> Item | None:
        """What is kept by that key, used now; None where nothing is."""
        with _caching:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: Hashable, item: Item) -> Item:
        """Keep an item, unless one is kept by that key: that is given then. What was used longest ago is dropped."""
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
        """All of them with their keys, the one that was used last first."""
        with _caching:
            return list(reversed(self._items.items()))

    def clear(self) -> None:
        """Keep nothing."""
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
    """A plan that a model keeps.

    Attributes:
        plan: what runs; its sizes are those of the grid for the first shape that it was made for.
        questions: for each class of shapes that runs by it, what is asked of their sizes s0, s1, ...: those of the
            input without its features, then those of named inputs by name.
        shapes: the shapes that were seen last, of the input and of named inputs by name.
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
    """The plans of one list of ops.

    `form` is all that a plan depends on beside sizes.
    """

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
        """Keep nothing."""
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
    """What plans for such shapes have in common, whatever is asked of them: prices see no more."""
    return shapes[0][-1:], tuple([tuple(map(on_grid, shape)) for shape in (shapes[0][:-1], *shapes[1:])])
