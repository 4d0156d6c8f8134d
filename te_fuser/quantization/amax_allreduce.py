"""Ranks that agree on amaxes: one vector over the products that all have, in the order of their construction.

Where they do, what ranks gather is quantized first: they have one scale, so it is half the bytes or less, and the same
numbers. That is what a product takes where ranks cut its rows (`sequence_parallel`), and the gradient of what another
one gives.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from te_fuser.distributed import consistency
from te_fuser.distributed.group import Group, groups_given, has_ranks
from te_fuser.fuser.graph.op_instances import ListedOp, with_attributes
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.casts import Quantize, QuantizeGradient
from te_fuser.ops.collectives import AllGather, Carried, ReduceScatter
from te_fuser.ops.construction import latest
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.params.binding import Binding, GivenBinding
from te_fuser.quantization.products import device_of, products, recipe_for, weight_in
from te_fuser.quantization.state import ROLES, Block, State, all_states, blocks, known_state_of, state_of
from te_fuser.recipe.recipes import DelayedScaling, Recipe
from te_fuser.recipe.region import Region, entered, settings, settings_changed

_kept: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()


def agreement_in(region: Region | None) -> Agreement | None:
    """The agreement of the ranks of a region's group, if they agree on amaxes."""
    if region is None or not region.recipe.reduce_amax or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if region.group is None else region.group
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is none of the group's that agrees on amaxes: give each rank one that it is in")
    if dist.get_world_size(group) == 1:
        return None
    found = _kept.get(group)
    if found is None:
        found = _kept[group] = Agreement(group)
    return found


def _on_host(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """f() -> numbers, which are on their way to the host, and waited for then."""
    if not numbers.is_cuda:
        return numbers.tolist
    there, event = torch.empty_like(numbers, device="cpu", pin_memory=True), torch.cuda.Event()
    there.copy_(numbers, non_blocking=True)
    event.record()

    def read() -> list[int]:
        event.synchronize()
        return there.tolist()

    return read


@functools.lru_cache(64)
def _counts(count: int, brings: bool, device: torch.device) -> torch.Tensor:
    """Numbers of products, turned round, and who brings, kept on the device."""
    return torch.tensor([count, -count, -int(brings)], dtype=torch.int32, device=device)


class Agreement:
    """The products whose amaxes the ranks of a group agree on.

    They are those that there are when the group's first region is entered. With each update the ranks tell each other
    how many others there are by then, and from the next one on agree on these, too; what these recorded waits for that.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self._products: list[tuple[Binding, Callable[[], State | None]]] = []
        self._coming: list[Binding] = []  # those that were told of, and when these were all
        self._looked: tuple[int, ...] = ()
        self._told: Callable[[], list[int]] | None = None
        self._brings = False
        self._answer: Callable[[], list[int]] | None = None  # of all ranks, since this one said what it brings
        self._begun = self.differs = False
        self._entered: set[Hashable] = set()  # regions that ranks were found to enter together

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks of the group."""
        return frozenset(dist.get_process_group_ranks(self._group()))

    def reduced(self) -> dict[State, int]:
        """The products whose amaxes updates reduce now, and where they are in the vector."""
        found = [(state, place) for place, (_, ref) in enumerate(self._products) if (state := ref()) is not None]
        return {state: place for state, place in found if _is_agreed_on(state)}

    def waiting(self) -> list[State]:
        """Products that all ranks may have made, which the next update reduces; their scales stay."""
        found = [] if self.differs else [state for weight in self._coming if (state := _ref(weight)()) is not None]
        return [s for s in found if s.block is not None and _is_agreed_on(s)]

    def enter(self, region: Region, brings: bool) -> None:
        """Compare with the others a region that this rank has not entered before: amaxes would wait for who does not.

        They ask where they compare calls, too, in all groups of none but them, small ones first: one that goes on to
        a call is heard. `brings`: products wait here to be folded, which the others are told.
        """
        self._brings, self._answer = brings, None
        key = region.recipe, region.calibrating
        if key in self._entered:
            return
        own = Group.of("fp8_group", self._group())
        named = sorted((own, *groups_given()), key=lambda g: (len(g.name), g.name))  # alike on all, the newest last
        groups = {tuple(dist.get_process_group_ranks(g.process_group())): g for g in named}
        among = sorted((len(ranks), ranks) for ranks in groups if self.ranks.issuperset(ranks))
        kind = " that calibrates" * region.calibrating
        what = f"the entry of a region of FP8{kind} by {consistency.shown(region.recipe)}"
        consistency.compare([groups[ranks] for _, ranks in among], [("region", what)])
        self._entered.add(key)

    def begin(self, recipe: Recipe) -> None:
        """Compare how many products there are, once."""
        if self._begun:
            return
        gc.collect()  # of a model that was dropped, one rank may have products yet, and another one none
        self._coming = new = self._new(recipe)
        self._answer = _on_host(self._largest(_counts(len(new), self._brings, self._device(new)).clone()))
        most, least, _ = self._answer()
        if most != -least:
            raise RuntimeError(
                f"ranks that agree on amaxes have different numbers of products: this one {len(new)}, all {-least} to "
                f"{most}; make the same modules in the same order on each, give fp8_group the ranks that do, or take "
                'out what is one rank\'s alone: te_fuser.precision(model, {"*": None})'
            )
        self._begun, self._told = True, None
        self._products += [(weight, _ref(weight)) for weight in new]

    def reduce(self, recipe: Recipe) -> None:
        """Raise slots to all ranks' largest amaxes: one all-reduce of bits keeps NaN."""
        self._grow()
        for weight, ref in self._products:
            state = ref()
            if state is not None and state.block is None and (device := device_of(weight)) is not None:
                state.recipe = recipe_for(weight, recipe)
                if isinstance(state.recipe, DelayedScaling):
                    state.make(state.recipe.amax_history_len, device)
        device, reduced = self._device([weight for weight, _ in self._products]), self.reduced()
        amaxes = torch.zeros(len(self._products), len(ROLES), dtype=torch.float32, device=device)
        places: list[tuple[Block, torch.Tensor, torch.Tensor]] = []
        for block in blocks():
            if found := [state for state in block.states() if state in reduced]:
                there = block.index(tuple([reduced[state] for state in found])).to(device)
                rows = block.index(tuple([state.row for state in found]))
                amaxes[there] = block.amaxes[rows].to(device)
                places.append((block, there, rows))
        self._coming = self._new(recipe)
        bits = torch.cat([amaxes.view(torch.int32).flatten(), _counts(len(self._coming), self._brings, device)])
        self._largest(bits)
        self._told = self._answer = _on_host(bits[-3:])
        amaxes = bits[:-3].view(torch.float32).view_as(amaxes)
        for block, there, rows in places:
            block.amaxes[rows] = amaxes[there].to(block.device)

    def all_bring(self) -> bool:
        """True where all bring some at this entry; a GPU is waited for."""
        return self._answer is not None and self._answer()[-1] == -1

    def _largest(self, bits: torch.Tensor) -> torch.Tensor:
        group = self._group()
        try:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise consistency.RankMismatchError(
                f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} that agree on amaxes waited for the "
                "others at the entry of a region of FP8: enter it on all of them, equally often, or give fp8_group "
                f"those that do; {error}"
            ) from error
        return bits

    def _grow(self) -> None:
        """Add the products that all ranks told of."""
        if self._told is None:
            return
        (most, least, _), self._told = self._told(), None
        if most == -least == len(self._coming):
            self._products += [(weight, _ref(weight)) for weight in self._coming]
        elif not self.differs:
            self.differs = True
            settings_changed()
            warnings.warn(
                f"ranks that agree on amaxes have made different numbers of products ({-least} to {most}) since their "
                "first region: the amaxes of these are each rank's own",
                stacklevel=2,
            )

    def _new(self, recipe: Recipe) -> list[Binding]:
        """Products that ranks do not agree on yet, but for those that run by no recipe."""
        now = latest(), settings(), len(self._products)
        if self._looked == now:
            return self._coming
        self._looked = now
        known = {id(state) for _, ref in self._products if (state := ref()) is not None}
        return [w for w in products() if recipe_for(w, recipe) is not None and id(state_of(w)) not in known]

    def _device(self, weights: Sequence[Binding]) -> torch.device:
        """Device of the vector: the first product's, but a GPU for ranks of NCCL."""
        if "nccl" in dist.get_backend(self._group()):
            return torch.device("cuda", torch.cuda.current_device())
        return next(filter(None, map(device_of, weights)), torch.device("cpu"))


def _ref(weight: Binding) -> Callable[[], State | None]:
    """Weak reference to a product's state; of one that is gone it leads nowhere, in its place."""
    try:
        return weakref.ref(state_of(weight))
    except ReferenceError:
        return lambda: None


def _is_agreed_on(state: State) -> bool:
    """True where ranks agree on the amaxes of a product, by the recipe of its last call."""
    return state.recipe is not None and state.recipe.reduce_amax


def note_alike(agreement: Agreement | None, left_out: set[State]) -> None:
    """Note for each updated product which ranks' amaxes went into it."""
    alone, parted = frozenset([dist.get_rank()]), False
    ranks, reduced = (alone, {}) if agreement is None else (agreement.ranks, agreement.reduced())
    for state in [state for state in all_states() if state not in left_out]:
        if isinstance(state.recipe, DelayedScaling):
            by, before = ranks if state in reduced else alone, state.alike
            state.alike = by if before is None else by & before
            parted = parted or state.alike != (by if before is None else before) or state.alike == alone != before
    if parted and _kept:
        settings_changed()


Kinds = tuple[type[FusableOperation], type[FusableOperation]]


def quantized_first(listed: Sequence[ListedOp], around: Recipe) -> list[ListedOp]:
    """The list with what quantizes before what gathers, where ranks have one scale."""
    agreement = agreement_in(next(filter(None, entered()), None)) if has_ranks() else None
    ranks = frozenset[int]() if agreement is None or agreement.differs else agreement.ranks
    found = list(listed)

    def exchange(at: int, kinds: Kinds, carried: Carried) -> None:
        """Exchange two neighbours of these kinds, which read and are read by nothing by name."""
        pair = found[max(at, 0) : at + 2]
        if [None if i.names_in or i.names_out else i.lowered.op.kind for i in pair] != [*kinds]:
            return
        item = pair[1] if kinds[1] is ReduceScatter else pair[0]
        op: Any = item.lowered.op
        if op.group.size > 1 and ranks.issuperset(dist.get_process_group_ranks(op.group.process_group())):
            op = with_attributes(op, {**op.__dict__, "carried": carried})
            moved = replace(item, lowered=replace(item.lowered, op=op))
            found[at : at + 2] = [moved, pair[0]] if item is pair[1] else [pair[1], moved]

    for at, item in enumerate(listed if ranks else ()):
        product = item.lowered.op
        if not isinstance(product, Float8MatMul) or isinstance(weight := weight_in(item), GivenBinding):
            continue
        state, recipe = known_state_of(weight), recipe_for(weight, around)
        if recipe is None or not recipe.reduce_amax:
            continue
        if state is None or state.alike is None or state.alike.issuperset(ranks):
            x, _, dy = product.form.formats
            exchange(at - 2, (AllGather, Quantize), Carried(x, product.form.dtype))
            exchange(at + 1, (QuantizeGradient, ReduceScatter), Carried(product.form.dtype, dy))
    return found
