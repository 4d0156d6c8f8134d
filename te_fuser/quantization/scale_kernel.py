"""Update of scales on a GPU: one launch for the products of a block."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from te_fuser.facts import Facts, holders, still_hold, tensor_place
from te_fuser.fuser.run.targets import obstacle
from te_fuser.kernels.reductions import AmaxFolder, Folded
from te_fuser.params.narrow import HISTORY, SCALE
from te_fuser.quantization.amax_slots import Block, changes, show
from te_fuser.quantization.state import State, lock
from te_fuser.recipe.recipes import DelayedScaling

_threads: set[int] = set()  # those that have entered regions


def note_thread() -> None:
    """Note that this thread enters regions: where several do, no update writes numbers that another one looks up."""
    if threading.get_ident() not in _threads:
        with lock:
            _threads.add(threading.get_ident())


class BlockKernel:
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
        """True where nothing changed since, told without looking at any product."""
        return self.alone == changes() and still_hold(self._facts)

    def holds_for(self, states: Sequence[State]) -> bool:
        """True where these are the products, by the same recipes, and their buffers lie where they lay."""
        return (
            [ref() for ref in self._states] == states
            and [state.recipe for state in states] == self._recipes
            and still_hold(self._facts)
        )

    def fold(self, block: Block) -> None:
        """Fold what the block has recorded, and clear its slots.

        Numbers that calls found since the last fold, and that nobody holds any more, are written in place.
        """
        free = len(_threads) == 1 and self._held is not None and holders(self._views) == self._held
        over = self._numbers if free else None
        numbers = self._folder.by_kernel(block.amaxes, block.amaxes, block.not_finite, block.rows, over)
        torch.autograd.graph.increment_version(self._written)
        if over is None:
            self._numbers, self._views = numbers, numbers.select(2, 0).flatten().unbind()
            show(self._shown, self._views)
            self._held = holders(self._views)
        if block.live is not None:
            block.show_graphs(self._rows, numbers[:, :, 0])


_kernels: weakref.WeakKeyDictionary[Block, BlockKernel] = weakref.WeakKeyDictionary()


def kernel_of(block: Block) -> tuple[BlockKernel | None, list[State]]:
    """The kernel of a block, and its products that PyTorch folds: all, or those with functions of somebody's own."""
    kept = _kernels.get(block)
    if kept is not None and kept.holds_as_it_was():
        return kept, []
    now, found = changes(), folded_in(block)
    plain = [state for state in found if _is_plain(state.recipe)] if has_kernel(block.device) else []
    if not plain:
        return None, found
    if kept is None or not kept.holds_for(plain):
        kept = _kernels[block] = BlockKernel(block, plain)
    others = [state for state in found if not _is_plain(state.recipe)]
    kept.alone = -1 if others else now
    return kept, others


def folded_in(block: Block, among: Sequence[State] | None = None) -> list[State]:
    """The products of a block, or those among some, that keep amaxes, and have somewhere to keep them."""
    there = block.states() if among is None else [state for state in among if state.block is block]
    found = [state for state in there if isinstance(state.recipe, DelayedScaling) and not state.is_meta]
    for state in found:
        state.make(state.recipe.amax_history_len, block.device)  # type: ignore[union-attr]
    return found


def has_kernel(device: torch.device) -> bool:
    """True where there is one for a device."""
    return device.type == "cuda" and obstacle(device, torch.float32) is None


def _is_plain(recipe: Any) -> bool:
    """True where scales follow from the formula, without a function of somebody's own."""
    return isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None


def _folded(state: State) -> Folded:
    recipe: DelayedScaling = state.recipe  # type: ignore[assignment]
    newest = recipe.amax_compute_algo == "most_recent"
    return Folded(state.history, state.scale, newest, recipe.margin, *recipe.fp8_format.value)
