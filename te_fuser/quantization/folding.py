"""Folding: what calls recorded becomes history, and history becomes scales."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.quantization.agreement import Agreement, agreement_of
from te_fuser.quantization.state import ROLES, Block, State, apart, before_saving, blocks, lock
from te_fuser.quantization.trial import try_recipe
from te_fuser.recipe.recipes import DelayedScaling, Format
from te_fuser.recipe.region import Region, on_entry

LARGEST = torch.finfo(torch.float32).max


@dataclass
class _Recorded:
    """What may have been recorded.

    Attributes:
        region: the last one from outside of all in which gradients were on.
        is_new: whether there was one since the last fold, of which a backward may come later yet.
    """

    region: Region | None = None
    is_new: bool = False


_recorded = _Recorded()


class Snapshot:
    """The scales between two folds, for what computes a forward again.

    Attributes:
        scales: of each product what it had; None while that is what it has.
    """

    scales: list[tuple[weakref.ref[State], torch.Tensor]] | None = None


_snapshot: list[Any] = [lambda: None]  # a weak reference to that of now, where somebody keeps one


def snapshot() -> Snapshot:
    """The scales of now."""
    with lock:
        found: Snapshot | None = _snapshot[0]()
        if found is None:
            found = Snapshot()
            _snapshot[0] = weakref.ref(found)
        return found


def fold() -> None:
    """Make history and scales of what was recorded since the last fold; ranks of a group, all of them, together.

    It runs at the entry of each region from outside of all, and before states are read. For each tensor whose amax is
    finite and above 0, the largest of the group where its recipe reduces:

        history = [amax, *history without the oldest]
        scale = largest of the format / amax(history) / 2^margin    in float32; infinite: the largest one

    Raises:
        RuntimeError: on all ranks of a group where they have different numbers of products.
    """
    with lock, torch.inference_mode(False), torch.no_grad():
        last = _recorded.region
        agreement = _agreement(last)
        if last is not None and agreement is not None:
            agreement.make(last.recipe)
        seen = {block: block.amaxes.clone() for block in blocks()}
        if last is not None and agreement is not None:
            agreement.reduce(seen, last.recipe)
        _recorded.is_new = False
        _keep_snapshot()
        for block, amaxes in seen.items():
            block.amaxes.zero_()
            block.not_finite += ~amaxes.isfinite()
            _fold_block(block, amaxes)


def fold_alone() -> None:
    """The same where no other rank has to be asked, and something was recorded."""
    if _agreement(_recorded.region) is None and any(bool(block.amaxes.any()) for block in blocks()):
        fold()


def _agreement(region: Region | None) -> Agreement | None:
    """What ranks agree on, where a region has several."""
    if region is None or not getattr(region.recipe, "reduce_amax", False):
        return None
    return agreement_of(region.group)


def _fold_block(block: Block, amaxes: torch.Tensor) -> None:
    by_recipe: dict[int, list[State]] = {}
    for state in block.states():
        if isinstance(state.recipe, DelayedScaling) and not state.is_meta:
            by_recipe.setdefault(id(state.recipe), []).append(state)
    for states in by_recipe.values():
        _update(states, amaxes[block.index(tuple([state.row for state in states]))])


def _update(states: Sequence[State], seen: torch.Tensor) -> None:
    """Put what was seen, [states, 3], into histories and scales of states that run by one recipe, all at once."""
    recipe: DelayedScaling = states[0].recipe  # type: ignore[assignment]
    for state in states:
        state.make(recipe.amax_history_len, seen.device)
    histories, scales = [state.history for state in states], torch.stack([state.scale for state in states])
    old = torch.stack(histories, 1)  # [length, states, 3]
    moved = seen.isfinite() & (seen > 0)
    new = torch.where(moved, torch.cat([seen[None], old[:-1]]), old)
    torch._foreach_copy_(histories, list(new.unbind(1)))
    made = scales_of(recipe, new.flatten(1), scales.flatten()).view_as(scales)
    _put(states, torch.where(moved, made, scales))


def _put(states: Sequence[State], scales: torch.Tensor) -> None:
    """Put scales, [states, 3], in place of those of states: in tensors of their own, as some files take no others."""
    each = apart(torch.stack([scales, scales.reciprocal()], 1).flatten())  # all views by one call
    rows = [torch.empty_like(state.scale) for state in states]
    torch._foreach_copy_(rows, list(scales.unbind()))
    for k, (state, row) in enumerate(zip(states, rows, strict=True)):
        state.put_scale(row, state.history, each[6 * k : 6 * k + 3], each[6 * k + 3 : 6 * k + 6])


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
        kept.scales = [(weakref.ref(s), s.scale) for block in blocks() for s in block.states() if s.has_buffers]
    _snapshot[0] = lambda: None


def _at_entry(region: Region) -> None:
    if "torch._dynamo" in sys.modules:  # it may look at each function that a compiled one calls
        from te_fuser.fuser.run.outside_tracing import outside_tracing

        outside_tracing(_begin, region)
    else:
        _begin(region)


def _begin(region: Region) -> None:
    """Fold what earlier regions left. Ranks are asked where gradients are on: who evaluates alone waits for nobody."""
    try_recipe(region.recipe)
    if not torch.is_grad_enabled():
        if _recorded.is_new and _agreement(_recorded.region) is None:
            fold()
        return
    if _recorded.region is not None:
        fold()
    agreement = _agreement(region)
    if agreement is not None:
        agreement.begin(region.recipe)
    _recorded.region, _recorded.is_new = region, True


on_entry(_at_entry)
before_saving.append(fold_alone)
