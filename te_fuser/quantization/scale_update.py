"""Update of scales: what calls recorded becomes history, and history becomes scales.

There is one rule: what was recorded since the last update counts at the entry of the next region from outside of all
others in which gradients are on. A forward keeps the scales that it used for its own backward, whenever that comes. An
evaluation, `states`, `state_dict()` and copies have what the next update would make, and move nothing. Ranks that agree
on amaxes update together, in `states` and `not_finite` too; who saves or evaluates has the scales of the last update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from te_fuser.distributed.group import has_ranks
from te_fuser.quantization.amax_allreduce import agreement_in, note_alike
from te_fuser.quantization.amax_slots import Block, check_place
from te_fuser.quantization.brought import take_brought
from te_fuser.quantization.scale_kernel import folded_in, kernel_of, note_thread
from te_fuser.quantization.scaling import scales_of, try_recipe
from te_fuser.quantization.state import State, blocks, busy_states, has_recorded, keep_snapshot, lock, note_recording
from te_fuser.recipe.recipes import DelayedScaling
from te_fuser.recipe.region import Region, is_capturing, on_entry

Moved = tuple[Sequence[State], torch.Tensor, torch.Tensor]  # of one recipe: history [length, states, 3], scales


@dataclass
class Recorded:
    """The last region with gradients from outside of all, and whether it was entered since the last update."""

    region: Region | None = None
    is_new: bool = False


recorded = Recorded()


def update() -> None:
    """Make history and scales of what was recorded since the last update; ranks of a group, all of them, together.

    Raises:
        RuntimeError: where what runs is captured, transformed or faked.
    """
    check_place()
    with lock, torch.inference_mode(False), torch.no_grad():
        agreement, last = agreement_in(recorded.region), recorded.region
        keep_snapshot()
        recorded.is_new = False
        if agreement is not None and last is not None:
            agreement.reduce(last.recipe)
        left_out = set(busy_states() if agreement is None else agreement.waiting())
        note_recording(bool(left_out))  # other threads may from here on
        for block in blocks():
            _update_block(block, left_out)
        if has_ranks():
            note_alike(agreement, left_out)


def _update_block(block: Block, left_out: set[State]) -> None:
    kernel, others = (None, folded_in(block)) if left_out else kernel_of(block)
    seen = block.amaxes if kernel is not None and not others else block.amaxes.clone()
    if kernel is not None:
        kernel.fold(block)
    else:
        for state in left_out & {*block.states()}:
            seen[state.row] = 0.0
        block.amaxes.masked_fill_(seen != 0, 0.0)  # other threads may have recorded since
        block.not_finite += ~seen.isfinite()
    for states, history, scales in moved(block, [s for s in others if s not in left_out], seen):
        torch._foreach_copy_([state.history for state in states], list(history.unbind(1)))
        torch._foreach_copy_([state.scale for state in states], list(scales.unbind()))
        block.show(states, scales)


def moved(block: Block, states: Iterable[State], seen: torch.Tensor) -> Iterator[Moved]:
    """Histories and scales that an update makes of what was seen, [products, 3], by recipe; it writes nothing."""
    by_recipe: dict[int, list[State]] = {}
    for state in states:
        by_recipe.setdefault(id(state.recipe), []).append(state)
    for alike in by_recipe.values():
        recipe: DelayedScaling = alike[0].recipe  # type: ignore[assignment]
        amaxes = seen[block.index(tuple([state.row for state in alike]))]
        old, scales = torch.stack([s.history for s in alike], 1), torch.stack([s.scale for s in alike])
        moves = amaxes.isfinite() & (amaxes > 0)
        new = torch.where(moves, torch.cat([amaxes[None], old[:-1]]), old)
        made = scales_of(recipe, new.flatten(1), scales.flatten()).view_as(scales)
        yield alike, new, torch.where(moves, made, scales)


def evaluate() -> None:
    """Have an evaluation go by the scales that the next update would make."""
    check_place()
    with lock, torch.inference_mode(False), torch.no_grad():
        keep_snapshot()
        stays = {*busy_states()}
        for block in blocks():
            own = folded_in(block, [state for state in block.states() if state not in stays])
            for states, _, scales in moved(block, own, block.amaxes):
                block.show(states, scales)


def _at_entry(region: Region) -> None:
    if "torch._dynamo" not in sys.modules:
        return _begin(region)
    from te_fuser.fuser.run.outside_tracing import outside_tracing

    outside_tracing(_begin, region)  # else it may look at each function that a compiled one calls


def _begin(region: Region) -> None:
    """Update at an entry. Ranks are asked where gradients are on: who evaluates alone waits for nobody."""
    if is_capturing():
        raise NotImplementedError(
            "a region of FP8 is entered while a CUDA graph is captured: replays would enter none; enter it around "
            "te_fuser.cuda_graph(model, x), and around each replay"
        )
    note_thread()
    try_recipe(region.recipe)
    last, agreement = recorded.region, agreement_in(region)
    if not torch.is_grad_enabled():
        if agreement is None and agreement_in(last) is None and (take_brought(region.recipe) or recorded.is_new):
            evaluate()
            recorded.region, recorded.is_new = last or region, False
        return
    brought = take_brought(region.recipe)
    if agreement is not None:
        agreement.enter(region)
        agreement.announce(brought)
    keeps = any(isinstance(r.recipe, DelayedScaling) for r in (last, region) if r is not None)
    if last is not None and (keeps or has_recorded()):
        update()
    if agreement is not None:
        agreement.begin(region.recipe)
    recorded.region = region
    if brought and (last is None if agreement is None else agreement.all_bring()):
        update()  # of products that ranks have agreed on but now
    recorded.is_new = True


on_entry(_at_entry)
