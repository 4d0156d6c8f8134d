"""Update of scales: what calls recorded becomes history, and history becomes scales.

There is one rule: what was recorded since the last update counts at the entry of the next region from outside of all
others in which gradients are on. A forward keeps the scales that it used for its own backward, whenever that comes. An
evaluation, `states`, `state_dict()` and copies have what the next update would make, and move nothing. Ranks that agree
on amaxes update together, in `states` and `not_finite` too; who saves or evaluates has the scales of the last update.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from te_fuser.distributed.group import has_ranks
from te_fuser.fake_tensors import is_looking
from te_fuser.guards import Facts, holders, still_hold, tensor_place
from te_fuser.kernels.quantizers import AmaxFolder, Folded
from te_fuser.params.scales import HISTORY, LARGEST, SCALE, STATES, States, saved_numbers, some_wait
from te_fuser.quantization.amax_allreduce import agreement_in, note_alike
from te_fuser.quantization.products import device_of, products, products_of, recipe_for, try_recipe
from te_fuser.quantization.rerun import keep_scales
from te_fuser.quantization.state import (
    ROLES,
    Block,
    State,
    all_states,
    blocks,
    busy_states,
    changes,
    has_kernel,
    history_length,
    is_transformed,
    not_in_capture,
    recorded_since,
    show,
    state_of,
    written_by_updates,
)
from te_fuser.recipe.recipes import DelayedScaling, Format, Recipe
from te_fuser.recipe.region import Region, entered, in_backward, is_capturing, lock, on_entry

Moved = tuple[Sequence[State], torch.Tensor, torch.Tensor]  # of one recipe: history [length, states, 3], scales
_threads: set[int] = set()  # those that have entered regions


@dataclass
class Recorded:
    """The last outermost region with gradients, and whether it was entered since the last update."""

    region: Region | None = None
    is_new: bool = False


recorded = Recorded()


def update() -> None:
    """Make history and scales of what was recorded since the last update, on all ranks of a group."""
    _check_place()
    with written_by_updates():
        agreement, last = agreement_in(recorded.region), recorded.region
        keep_scales()
        recorded.is_new = False
        if agreement is not None and last is not None:
            agreement.reduce(last.recipe)
        left_out = set(busy_states() if agreement is None else agreement.waiting())
        recorded_since[0] = bool(left_out)  # other threads may from here on
        for block in blocks():
            _update_block(block, left_out)
        if has_ranks():
            note_alike(agreement, left_out)


def _check_place() -> None:
    not_in_capture("amaxes are folded")
    if is_transformed():
        raise RuntimeError(
            "what earlier calls recorded is folded where a region is entered, and not inside of torch.func transforms "
            "or FakeTensorMode: enter the region around these"
        )


def _update_block(block: Block, left_out: set[State]) -> None:
    kernel, others = (None, _folded_in(block, block.states())) if left_out else _kernel_of(block)
    seen = block.amaxes if kernel is not None and not others else block.amaxes.clone()
    if kernel is not None:
        kernel.fold(block)
    else:
        for state in left_out & {*block.states()}:
            seen[state.row] = 0.0
        block.amaxes.masked_fill_(seen != 0, 0.0)  # other threads may have recorded since
        block.not_finite += ~seen.isfinite()
    for states, history, scales in _moved(block, [s for s in others if s not in left_out], seen):
        torch._foreach_copy_([state.history for state in states], list(history.unbind(1)))
        torch._foreach_copy_([state.scale for state in states], list(scales.unbind()))
        block.show(states, scales)


def _folded_in(block: Block, among: Iterable[State]) -> list[State]:
    """Products with amaxes in a block, of these, but for modules on the meta device."""
    found = [state for state in among if state.block is block and isinstance(state.recipe, DelayedScaling)]
    found = [state for state in found if not any(t is not None and t.is_meta for t in state.found())]
    for state in found:
        state.make(cast(DelayedScaling, state.recipe).amax_history_len, block.device)
    return found


def upcoming(among: Iterable[State]) -> Iterator[tuple[Block, Moved]]:
    """Histories and scales that the next update would make; nothing is written."""
    stays = {*busy_states()}
    own = [state for state in among if state not in stays]
    for block in blocks():
        yield from ((block, found) for found in _moved(block, _folded_in(block, own), block.amaxes))


def _moved(block: Block, states: Iterable[State], seen: torch.Tensor) -> Iterator[Moved]:
    """Histories and scales, by recipe, that an update makes of what was seen, [products, 3]."""
    by_recipe: dict[int, list[State]] = {}
    for state in states:
        by_recipe.setdefault(id(state.recipe), []).append(state)
    for alike in by_recipe.values():
        amaxes = seen[block.index(tuple([state.row for state in alike]))]
        old, scales = torch.stack([s.history for s in alike], 1), torch.stack([s.scale for s in alike])
        moves = amaxes.isfinite() & (amaxes > 0)
        new = torch.where(moves, torch.cat([amaxes[None], old[:-1]]), old)
        made = scales_of(cast(DelayedScaling, alike[0].recipe), new.flatten(1), scales.flatten()).view_as(scales)
        yield alike, new, torch.where(moves, made, scales)


def scales_of(recipe: DelayedScaling, history: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """New scales by a recipe, float32 [tensors]: of a history [length, tensors] newest first, and the scales of before.

    The tensors are those of products one behind the other, each as `ROLES`. Where the amax is not finite and above 0,
    or a function gives NaN or no number above 0, the scale stays. What functions give in another dtype is converted.
    """
    most = _most(recipe.fp8_format, history.shape[1] // len(ROLES), history.device)
    algo, made = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    amax = algo(history) if callable(algo) else history[0] if algo == "most_recent" else history.amax(0)
    amax = amax.float()
    found: torch.Tensor = most / amax / 2.0**recipe.margin if made is None else made(amax, scale, most, recipe)
    return torch.where((amax > 0) & (amax <= LARGEST) & (found > 0), found.float(), scale).clamp(max=LARGEST)


@functools.lru_cache(maxsize=64)
def _most(form: Format, products: int, device: torch.device) -> torch.Tensor:
    """The largest numbers of the formats of so many products' tensors."""
    forward, backward = form.value
    return torch.tensor([forward, forward, backward], dtype=torch.float32, device=device).repeat(products)


def evaluate() -> None:
    """Have an evaluation go by the scales that the next update would make."""
    _check_place()
    with written_by_updates():
        keep_scales()
        for block, (states, _, scales) in upcoming(all_states()):
            block.show(states, scales)


# ------------------------------------------------------------------------------- on a GPU: one launch for a block


class BlockKernel:
    """Update of products of a block in one launch, where these and their buffers stay what they are.

    It keeps their buffers alive, but none of their modules.

    Attributes:
        of: the products, and by which recipes.
        alone: the number of `changes` up to which the block is known to have no other products; -1 where it has some.
        facts: that nobody has put other buffers in place.
    """

    def __init__(self, block: Block, states: Sequence[State]) -> None:
        self.alone = -1
        self.of = [(weakref.ref(state), state.recipe) for state in states]
        self._shown = [state.numbers for state in states]
        self._rows = tuple([state.row for state in states])
        products = {}
        for state in states:
            recipe = cast(DelayedScaling, state.recipe)
            newest = recipe.amax_compute_algo == "most_recent"
            products[state.row] = Folded(state.history, state.scale, newest, recipe.margin, *recipe.fp8_format.value)
        self._folder = AmaxFolder(products, len(block.amaxes), block.device)
        self._written = [t for product in products.values() for t in product[:2]]
        at = [(state._buffers, state.prefix + name) for state in states for name in (HISTORY, SCALE)]
        placed = [(*where, t, tensor_place(t)) for where, t in zip(at, self._written, strict=True)]
        self.facts = Facts(placed=tuple(placed))
        self._numbers: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        self._held: bytes | None = None  # how often these were when nobody else held them

    def fold(self, block: Block) -> None:
        """Fold what the block has recorded, and clear its slots.

        Numbers that calls found since the last update, and that nobody holds any more, are written in place; but where
        several threads enter regions, none that another one looks up.
        """
        free = len(_threads) == 1 and self._held is not None and holders(self._views) == self._held
        over = self._numbers if free else None
        numbers = self._folder.by_kernel(block.amaxes, block.not_finite, block.rows, over)
        torch.autograd.graph.increment_version(self._written)
        if over is None:
            self._numbers, self._views = numbers, numbers.select(2, 0).flatten().unbind()
            show(self._shown, self._views)
            self._held = holders(self._views)
        if block.live is not None:
            block.show_graphs(self._rows, numbers[:, :, 0])


_kernels: weakref.WeakKeyDictionary[Block, BlockKernel] = weakref.WeakKeyDictionary()


def _kernel_of(block: Block) -> tuple[BlockKernel | None, list[State]]:
    """The kernel of a block, and its products that PyTorch folds."""
    kept = _kernels.get(block)
    if kept is not None and kept.alone == changes[0] and still_hold(kept.facts):
        return kept, []
    now, found = changes[0], _folded_in(block, block.states())
    # Scales of these follow from the formula, without a function of somebody's own.
    recipes = [(state, cast(DelayedScaling, state.recipe)) for state in found]
    plain = [s for s, r in recipes if isinstance(r.amax_compute_algo, str) and r.scaling_factor_compute_algo is None]
    if not plain or not has_kernel(block.device):
        return None, found
    of = [] if kept is None else [(ref(), recipe) for ref, recipe in kept.of]
    if kept is None or of != [(state, state.recipe) for state in plain] or not still_hold(kept.facts):
        kept = _kernels[block] = BlockKernel(block, plain)
    kept.alone = now if len(plain) == len(found) else -1
    return kept, [state for state in found if state not in plain]


# ----------------------------------------------------------------------------------------- the entry of a region


def _take_brought(recipe: Recipe) -> bool:
    """Put amaxes of checkpoints and copies where calls record; True if there were any."""
    if not some_wait[0] or is_looking():
        return False
    some_wait[0], some = False, False
    for weight in products():
        states: States | None = weight.owner.__dict__.get(STATES)
        if states is None or not states.waiting:
            continue
        state, own, device = state_of(weight), recipe_for(weight, recipe), device_of(weight)
        if isinstance(own, DelayedScaling) and device is not None and state.prefix in states.waiting:
            if state.recipe is None:
                state.runs_by(own)
            state.make(history_length(state.recipe or own), device)
            state.record(states.waiting.pop(state.prefix))
            some = True
        some_wait[0] = some_wait[0] or bool(states.waiting)
    return some


def _at_entry(region: Region) -> None:
    if "torch._dynamo" not in sys.modules:
        return _begin(region)
    from te_fuser.fuser.run.dynamo_break import outside_tracing

    outside_tracing(_begin, region)  # else it may look at each function that a compiled one calls


def _begin(region: Region) -> None:
    """Update at an entry, with other ranks where gradients are on."""
    if is_capturing():
        raise NotImplementedError(
            "a region of FP8 is entered while a CUDA graph is captured: replays would enter none; enter it around "
            "te_fuser.cuda_graph(model, x), and around each replay"
        )
    if threading.get_ident() not in _threads:
        with lock:
            _threads.add(threading.get_ident())
    try_recipe(region.recipe)
    last, agreement = recorded.region, agreement_in(region)
    if not torch.is_grad_enabled():
        if agreement is None and agreement_in(last) is None and (_take_brought(region.recipe) or recorded.is_new):
            evaluate()
            recorded.region, recorded.is_new = last or region, False
        return
    brought = _take_brought(region.recipe)
    if agreement is not None:
        agreement.enter(region, brought)
    keeps = any(isinstance(r.recipe, DelayedScaling) for r in (last, region) if r is not None)
    if last is not None and (keeps or recorded_since[0]):
        update()
    if agreement is not None:
        agreement.begin(region.recipe)
    recorded.region = region
    if brought and (last is None if agreement is None else agreement.all_bring()):
        update()  # of products that ranks have agreed on but now
    recorded.is_new = True


on_entry(_at_entry)

# --------------------------------------------------------------------------------------------------- as users see them


class TensorState(NamedTuple):
    """Scale of a tensor in 8 bits, float32 [], and its amax history.

    Attributes:
        amax_history: newest first, float32 [amax_history_len].
    """

    scale: torch.Tensor
    amax_history: torch.Tensor


def states(model: torch.nn.Module) -> dict[str, TensorState]:
    """Scales and amax histories of a model's tensors in 8 bits, with all recorded amaxes applied.

    Inside of a region or a backward they are those in use there. Ranks that share amaxes have to call it together.

    Returns:
        {path of a product + ".input", ".weight" or ".output_gradient": (scale, amax_history)}, without path and dot for
        a model that is one product. Products that have not run in a region, or whose weights come with the call, are
        left out.

    Raises:
        TypeError: for what is no module.
    """
    found = _states_of(model, "states", updates=not (any(entered()) or in_backward()))
    numbers = numbers_now([*found.values()])
    return {
        f"{path}{role}": TensorState(numbers[state][0][k].clone(), numbers[state][1][:, k].clone())
        for path, state in found.items()
        for k, role in enumerate(ROLES)
    }


def numbers_now(states: Sequence[State]) -> dict[State, tuple[torch.Tensor, torch.Tensor]]:
    """Scale and history of products, as the next update would make them of what was recorded; nothing is written.

    Inside of a region with gradients or a backward, and where ranks agree on amaxes, they are those of the last update.
    """
    not_in_capture("amaxes are folded")
    found = {state: (state.scale, state.history) for state in states}
    inside = recorded.is_new and (any(entered()) or in_backward())
    if inside or is_transformed() or agreement_in(recorded.region) is not None:
        return found
    with written_by_updates():
        for _, (alike, history, scales) in upcoming(states):
            found.update({state: (scales[k], history[:, k]) for k, state in enumerate(alike)})
    return found


def _saved(state: State, saves: bool) -> dict[str, torch.Tensor]:
    """Tensors that saves and copies have for a product's buffers; without any, amaxes go along."""
    if agreement_in(recorded.region) is not None and saves and recorded.is_new:
        warnings.warn(
            "ranks have not agreed yet on the amaxes of FP8 of the last step: what is saved now has those of this "
            "rank, and goes on exactly where each rank loads its own; to save on one rank for all, call "
            "te_fuser.quantization.states(model) on all ranks before",
            stacklevel=2,
        )
    if not state.has_buffers or state.block is None or is_transformed() or not any(state.recorded()):
        return {}
    now = numbers_now([state])[state]
    return {} if now[0] is state.scale else dict(zip((state.prefix + SCALE, state.prefix + HISTORY), now, strict=True))


def not_finite(model: torch.nn.Module) -> dict[str, int]:
    """Counts of infinite or NaN amaxes, which moved no scale: {name as in `states`: count}, without zeros.

    Raises:
        TypeError: for what is no module.
        RuntimeError: inside of a region, whose amaxes are counted at its end.
    """
    if any(entered()):
        raise RuntimeError("not_finite counts what regions recorded that were left: ask outside, and before the step")
    states = _states_of(model, "not_finite", updates=True)
    found = {block: (block.not_finite + ~block.amaxes.isfinite()).tolist() for block in blocks()}  # a GPU is waited for
    counts = {
        f"{path}{role}": found[state.block][state.row][k]
        for path, state in states.items()
        for k, role in enumerate(ROLES)
        if state.block is not None
    }
    return {name: count for name, count in counts.items() if count}


def _states_of(model: torch.nn.Module, function: str, updates: bool) -> dict[str, State]:
    """The states of a model's products that have numbers, by path with a dot behind; "" of one that is the model.

    `updates`: ranks that agree on amaxes do so first.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"te_fuser.quantization.{function} takes the model whose products it tells of, a torch.nn.Module, got "
            f"{type(model).__name__}: give what runs in the region"
        )
    if updates and agreement_in(recorded.region) is not None:
        update()
    found = {f"{path}." if path else "": state_of(weight) for path, weight in products_of(model).items()}
    return {path: state for path, state in found.items() if state.has_buffers}


saved_numbers.append(_saved)
