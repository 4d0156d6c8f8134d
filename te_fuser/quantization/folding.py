"""Folding: what calls recorded becomes history, and history becomes scales."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fuser.distributed.group import has_ranks
from te_fuser.facts import Facts, holders, still_hold, tensor_place
from te_fuser.fuser.run.targets import obstacle
from te_fuser.kernels.fold_amaxes import AmaxFolder, Folded
from te_fuser.params.narrow import HISTORY, SCALE
from te_fuser.params.scales import before_saving
from te_fuser.quantization.agreement import Agreement, agreement_of, any_agrees
from te_fuser.quantization.block import ROLES, Block, Looked, apart, changes, not_in_capture
from te_fuser.quantization.brought import say_that_ranks_differ, take, waiting
from te_fuser.quantization.state import Numbers, State, blocks, has_recorded, lock, note_recording, show
from te_fuser.quantization.trial import try_recipe
from te_fuser.recipe.recipes import DelayedScaling, Format, Recipe
from te_fuser.recipe.region import (
    Region,
    entered,
    in_backward,
    is_capturing,
    on_entry,
    open_elsewhere,
    settings_changed,
)

LARGEST = torch.finfo(torch.float32).max
_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass
class _Recorded:
    """What may have been recorded.

    Attributes:
        region: the last one from outside of all in which gradients were on.
        is_new: whether there was one since the last fold, of which a backward may come later yet.
        tried: the recipe of the last region of all.
    """

    region: Region | None = None
    is_new: bool = False
    tried: Recipe | None = None


_recorded = _Recorded()


class Kept(NamedTuple):
    """The scales of a product between two folds.

    Attributes:
        state: of the product.
        scales, inverses: what it had by role.
        entries: the numbers of the regions that it was called in last, `entry` and `ran_in`.
    """

    state: weakref.ref[State]
    scales: Numbers
    inverses: Numbers
    entries: frozenset[int]

    @classmethod
    def of(cls, state: State) -> Kept:
        """Those of now."""
        entries = frozenset((state.entry, state.ran_in))
        return cls(weakref.ref(state), {**state.scales}, {**state.inverses}, entries)


class Snapshot:
    """The scales between two folds, for what computes a forward again.

    Attributes:
        scales: of each product; None while they are what it has.
        is_captured: whether they are copies that a CUDA graph makes.
    """

    scales: list[Kept] | None = None
    is_captured = False


_threads: set[int] = set()  # those that have entered regions
_noted: list[Any] = [None]  # what `_note_alike` went by last
_snapshot: list[Any] = [lambda: None]  # a weak reference to that of now, where somebody keeps one
_captured: ContextVar[Snapshot | None] = ContextVar("te_fuser_captured_scales", default=None)


def read_in_capture() -> Snapshot | None:
    """The copies of scales that calls here read, which a CUDA graph makes at each replay; None where none does."""
    return _captured.get()


@contextlib.contextmanager
def of_capture(scales: Snapshot) -> Iterator[None]:
    """In here they are these."""
    token = _captured.set(scales)
    try:
        yield
    finally:
        _captured.reset(token)


def snapshot() -> Snapshot:
    """The scales of now."""
    captured = _captured.get()
    if captured is not None:
        return captured
    with lock:
        found: Snapshot | None = _snapshot[0]()
        if found is None:
            found = Snapshot()
            _snapshot[0] = weakref.ref(found)
        return found


def fold(looks: bool = False) -> None:
    """Make history and scales of what was recorded since the last fold; ranks of a group, all of them, together.

    It runs before states are read, and at the entry of each region from outside of all; where neither that nor the one
    before has a recipe that keeps amaxes, and no call recorded any, what a late backward left waits for the next.
    For each tensor whose amax is finite and above 0, the largest of the group where its recipe reduces:

        history = [amax, *history without the oldest]
        scale = largest of the format / amax(history) / 2^margin    in float32; infinite: the largest one

    Where somebody looked since the last region was entered, `amax` is the largest since then, and takes the place of
    what that look has put in front: an entry of a history is a region's, whoever looks meanwhile.

    Args:
        looks: whether it is for somebody who looks, and more may be recorded that belongs to the same entries.

    Raises:
        RuntimeError: on all ranks of a group where they have different numbers of products; while a stream is captured;
            where PyTorch transforms or fakes what runs.
    """
    not_in_capture("amaxes are folded")
    if _is_transformed():
        raise RuntimeError(
            "what earlier calls recorded is folded where a region is entered, and not inside of torch.func transforms "
            "or FakeTensorMode: enter the region around these"
        )
    with lock, torch.inference_mode(False), torch.no_grad():
        last = _recorded.region
        agreement = _agreement(last)
        if last is not None and agreement is not None:
            agreement.make(last.recipe)
        _keep_snapshot()
        note_recording(False)  # other threads may from here on
        parts = {block: _parts_of(block) for block in blocks()}
        seen = {b: b.amaxes if p.kernel and not (p.others or looks) else b.amaxes.clone() for b, p in parts.items()}
        if last is not None and agreement is not None:
            agreement.reduce(seen, last.recipe)
        _recorded.is_new = False
        waiting = [] if agreement is None else agreement.waiting()
        left_out = waiting if agreement is not None else _in_use_elsewhere()
        if left_out:
            note_recording()
        held = _taken_out(left_out, seen, parts)
        for block, amaxes in seen.items():
            before = _scales_before(block) if looks else None
            _fold_block(block, parts[block], amaxes, set(left_out))
            known = amaxes if block.looked is None else torch.maximum(block.looked.amaxes, amaxes)
            block.looked = None if before is None else Looked(known, before)
        for slots, amaxes in held:
            slots.copy_(amaxes)
        if has_ranks():
            _note_alike(agreement, waiting)


def _in_use_elsewhere() -> list[State]:
    """Products of regions that other threads or contexts are in still, or that run again: their scales stay so."""
    entries = open_elsewhere()
    return [s for block in blocks() for s in block.states() if s.entry in entries] if entries else []


def _taken_out(
    states: Sequence[State], seen: dict[Block, torch.Tensor], parts: dict[Block, _Parts]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take what products recorded out of what is folded: slots that a kernel would clear, and what these hold on."""
    found = []
    for state in states:
        if state.block is not None:
            row = seen[state.block][state.row]
            if parts[state.block].kernel is not None:
                found.append((state.block.amaxes[state.row], row.clone()))
            row.zero_()
    return found


def _scales_before(block: Block) -> torch.Tensor:
    """The scales of a block before the first fold since the last entry for somebody who looks, [products, 3]."""
    if block.looked is not None:
        return block.looked.scales
    found, states = torch.ones_like(block.amaxes), [state for state in block.states() if _is_folded(state)]
    for state in states:
        state.make(state.recipe.amax_history_len, block.device)  # type: ignore[union-attr]
    if states:
        found[block.index(tuple([state.row for state in states]))] = torch.stack([state.scale for state in states])
    return found


def _note_alike(agreement: Agreement | None, waiting: Sequence[State]) -> None:
    """Note of each product that was folded whose amaxes went into that; plans follow where ranks' scales part."""
    now = changes(), dist.get_rank(), agreement, 0 if agreement is None else agreement.known, [*map(id, waiting)]
    if _noted[0] == now:
        return
    _noted[0] = now
    alone, parted = frozenset([dist.get_rank()]), False
    ranks, reduced = (alone, set()) if agreement is None else (agreement.ranks, agreement.reduced())
    for state in [s for block in blocks() for s in block.states() if s not in waiting]:
        if isinstance(state.recipe, DelayedScaling):
            by, before = ranks if state in reduced else alone, state.alike
            state.alike = by if before is None else by & before
            parted = parted or state.alike != (by if before is None else before) or state.alike == alone != before
    if parted and any_agrees():
        settings_changed()


def fold_to_look() -> None:
    """The same for who looks, where nothing goes by the scales of now: outside of regions, backwards and transforms."""
    if not (any(entered()) or in_backward() or _is_transformed()):
        fold(looks=True)


def _is_transformed() -> bool:
    """Whether PyTorch transforms or fakes what runs here."""
    return torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(_FAKE) is not None


def fold_alone(saves: bool = False) -> None:
    """That where no other rank has to be asked, and something was recorded, for who saves or copies."""
    if _is_transformed():
        return
    if _agreement(_recorded.region) is not None:
        if saves and _recorded.is_new:
            say_that_ranks_differ()
    elif any(bool(block.amaxes.any()) for block in blocks()):
        fold_to_look()


def _agreement(region: Region | None) -> Agreement | None:
    """What ranks agree on, where a region has several."""
    if region is None or not region.recipe.reduce_amax:
        return None
    return agreement_of(region.group)


def _fold_block(block: Block, parts: _Parts, amaxes: torch.Tensor, left_out: set[State]) -> None:
    """Fold amaxes of a block's products; those left out have none here, and calls go on with what they find of them."""
    if parts.kernel is None:
        block.amaxes.masked_fill_(amaxes != 0, 0.0)  # other threads may have recorded since
        block.not_finite += ~amaxes.isfinite()
    else:
        parts.kernel.fold(block, amaxes, left_out)
    by_recipe: dict[int, list[State]] = {}
    for state in parts.others:
        if state not in left_out:
            by_recipe.setdefault(id(state.recipe), []).append(state)
    for alike in by_recipe.values():
        _update(block, alike, amaxes[block.index(tuple([state.row for state in alike]))])


class _Parts(NamedTuple):
    """The products of a block with delayed scaling: what a kernel folds of them, and those that PyTorch does."""

    kernel: _ByKernel | None
    others: list[State]


class _ByKernel:
    """Folds products of a block in one launch, where these and their buffers stay what they are.

    It keeps their buffers alive, but none of their modules.

    Attributes:
        alone: the number of `changes` up to which the block is known to have no other products; -1 where it has some.
    """

    def __init__(self, block: Block, states: Sequence[State]) -> None:
        self.alone = -1
        self._states = [weakref.ref(state) for state in states]
        self._recipes = [state.recipe for state in states]
        self._shown = [(state.scales, state.inverses) for state in states]
        self._rows = tuple([state.row for state in states])
        for state in states:
            state.make(state.recipe.amax_history_len, block.device)  # type: ignore[union-attr]
        products = {state.row: _folded(state) for state in states}
        self._folder = AmaxFolder(products, len(block.amaxes), block.device)
        self._written = [t for product in products.values() for t in product[:2]]
        at = [(state._buffers, state.prefix + name) for state in states for name in (HISTORY, SCALE)]
        placed = [(*where, t, tensor_place(t)) for where, t in zip(at, self._written, strict=True)]
        self._facts = Facts(placed=tuple(placed))
        self._numbers: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._held: bytes | None = None  # how often these were when nobody else held them

    def holds_as_it_was(self) -> bool:
        """Whether nothing changed since, told without looking at any product."""
        return self.alone == changes() and still_hold(self._facts)

    def holds_for(self, states: Sequence[State]) -> bool:
        """Whether these are the products, by the same recipes, and their buffers lie where they lay."""
        return (
            [ref() for ref in self._states] == states
            and [state.recipe for state in states] == self._recipes
            and still_hold(self._facts)
        )

    def fold(self, block: Block, seen: torch.Tensor, left_out: set[State]) -> None:
        """Fold what was seen, [products, 3], and clear the block's slots; what calls find of those left out stays.

        Numbers that calls found since the last fold, and that nobody holds any more, are written in place.
        """
        free = not left_out and len(_threads) == 1 and self._held is not None and holders(self._views) == self._held
        over = self._numbers if free else None
        numbers = self._folder.by_kernel(seen, block.amaxes, block.not_finite, block.rows, over)
        torch.autograd.graph.increment_version(self._written)
        if over is None:
            self._show(numbers, left_out)
        if block.live is not None:
            block.show_graphs(self._rows, numbers[:, :, 0])

    def _show(self, numbers: torch.Tensor, left_out: set[State]) -> None:
        """Have calls find these, but of products that are left out."""
        self._numbers, self._views, shown = numbers, numbers.select(2, 0).flatten().unbind(), self._shown
        if left_out:
            shown = [({}, {}) if ref() in left_out else pair for ref, pair in zip(self._states, shown, strict=True)]
        show(shown, self._views)
        self._held = holders(self._views) if not left_out else None


_kernels: weakref.WeakKeyDictionary[Block, _ByKernel] = weakref.WeakKeyDictionary()


def _parts_of(block: Block) -> _Parts:
    kept = _kernels.get(block)
    if kept is not None and block.looked is None and kept.holds_as_it_was():
        return _Parts(kept, [])
    now = changes()
    found = [state for state in block.states() if _is_folded(state)]
    plain = [state for state in found if _is_plain(state.recipe)] if _has_kernel(block.device) else []
    if not plain or block.looked is not None:
        return _Parts(None, found)
    if kept is None or not kept.holds_for(plain):
        kept = _kernels[block] = _ByKernel(block, plain)
    others = [state for state in found if not _is_plain(state.recipe)]
    kept.alone = -1 if others else now
    return _Parts(kept, others)


def _is_folded(state: State) -> bool:
    """Whether a product of a block keeps amaxes, and has somewhere to keep them."""
    return isinstance(state.recipe, DelayedScaling) and not state.is_meta


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and obstacle(device, torch.float32) is None


def _is_plain(recipe: Any) -> bool:
    """Whether scales follow from the formula, without a function of somebody's own."""
    return isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None


def _folded(state: State) -> Folded:
    recipe: DelayedScaling = state.recipe  # type: ignore[assignment]
    newest = recipe.amax_compute_algo == "most_recent"
    return Folded(state.history, state.scale, newest, recipe.margin, *recipe.fp8_format.value)


def _update(block: Block, states: Sequence[State], seen: torch.Tensor) -> None:
    """Put what was seen, [states, 3], into histories and scales of states that run by one recipe, all at once."""
    recipe: DelayedScaling = states[0].recipe  # type: ignore[assignment]
    for state in states:
        state.make(recipe.amax_history_len, seen.device)
    histories, scales = [state.history for state in states], torch.stack([state.scale for state in states])
    old = torch.stack(histories, 1)  # [length, states, 3]
    before, goes_on, amaxes = scales, None, seen
    if block.looked is not None:
        known, then = (t[block.index(tuple([state.row for state in states]))] for t in block.looked)
        goes_on, amaxes = known.isfinite() & (known > 0), torch.maximum(known, seen)
        before = torch.where(goes_on, then, scales)
    rest = old[:-1] if goes_on is None else torch.where(goes_on, old[1:], old[:-1])
    moved = amaxes.isfinite() & (seen > 0)
    new = torch.where(moved, torch.cat([amaxes[None], rest]), old)
    torch._foreach_copy_(histories, list(new.unbind(1)))
    made = scales_of(recipe, new.flatten(1), before.flatten()).view_as(scales)
    _put(block, states, torch.where(moved, made, scales))


def _put(block: Block, states: Sequence[State], scales: torch.Tensor) -> None:
    """Put scales, [states, 3], in place of those of states."""
    torch._foreach_copy_([state.scale for state in states], list(scales.unbind()))
    shown = [(state.scales, state.inverses) for state in states]
    rows = tuple([state.row for state in states])
    numbers = apart(torch.cat([scales, scales.reciprocal()], 1))
    show(shown, numbers.flatten().unbind())  # all views by one call
    if block.live is not None:
        block.show_graphs(rows, numbers)


def scales_of(recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """New scales by a recipe, float32 [tensors]: of a history [length, tensors] newest first, and the scales of before.

    The tensors are those of products one behind the other, each as `ROLES`. Where the amax is not finite and above 0,
    or a function gives NaN or no number above 0, the scale stays. What functions give in another dtype is converted.
    """
    most = _most(recipe.fp8_format, history.shape[1] // len(ROLES), history.device)
    algo = recipe.amax_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    made = recipe.scaling_factor_compute_algo
    amax = amax.float()
    found: torch.Tensor = most / amax / 2.0**recipe.margin if made is None else made(amax, scale, most, recipe)
    return torch.where((amax > 0) & (amax <= LARGEST) & (found > 0), found.float(), scale).clamp(max=LARGEST)


@functools.lru_cache(maxsize=64)
def _most(form: Format, products: int, device: torch.device) -> torch.Tensor:
    """The largest numbers of the formats of so many products' tensors."""
    forward, backward = form.value
    return torch.tensor([forward, forward, backward], dtype=torch.float32, device=device).repeat(products)


def _keep_snapshot() -> None:
    """Leave the scales, which are about to change, to who asked for those of now."""
    kept: Snapshot | None = _snapshot[0]()
    if kept is not None:
        kept.scales = [Kept.of(state) for block in blocks() for state in block.states()]
    _snapshot[0] = lambda: None


def _at_entry(region: Region) -> None:
    if "torch._dynamo" in sys.modules:  # it may look at each function that a compiled one calls
        from te_fuser.fuser.run.outside_tracing import outside_tracing

        outside_tracing(_begin, region)
    else:
        _begin(region)


def _begin(region: Region) -> None:
    """Fold what earlier regions left. Ranks are asked where gradients are on: who evaluates alone waits for nobody."""
    if is_capturing():
        raise NotImplementedError(
            "a region of FP8 is entered while a CUDA graph is captured: replays would enter none; enter it around "
            "te_fuser.cuda_graph(model, x), and around each replay"
        )
    if threading.get_ident() not in _threads:
        with lock:  # no fold writes numbers that this thread has looked up meanwhile
            _threads.add(threading.get_ident())
    if region.recipe is not _recorded.tried:
        try_recipe(region.recipe)
        _recorded.tried = region.recipe
    last, agreement, brought = _recorded.region, _agreement(region), waiting(region.recipe)
    if not torch.is_grad_enabled():
        if brought and agreement is None and _agreement(last) is None:
            take(brought, region.recipe)
            _recorded.region, _recorded.is_new = last or region, True
        if _recorded.is_new and _agreement(last) is None:
            fold(looks=True)
        return
    if agreement is not None:
        agreement.enter(region)
        agreement.announce(bool(brought))
    take(brought, region.recipe)
    if last is not None and (_keeps_amaxes(last) or _keeps_amaxes(region) or has_recorded()):
        fold()
    if agreement is not None:
        agreement.begin(region.recipe)
    _recorded.region = region
    if brought and (last is None if agreement is None else agreement.all_bring()):
        fold()  # of products that ranks have agreed on but now
    _recorded.is_new = True


def _keeps_amaxes(region: Region) -> bool:
    return isinstance(region.recipe, DelayedScaling)


on_entry(_at_entry)
before_saving.append(fold_alone)
