"""Regions in CUDA graphs: what a graph reads of scales, and what has to be so before each of its replays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_fuser.guards import Facts, still_hold
from te_fuser.params.binding import Binding
from te_fuser.quantization.checkpointing import SavedScales, Snapshot, of_capture, read_in_capture, refuse_another
from te_fuser.quantization.products import products_of, scalings_of
from te_fuser.quantization.state import ReadyCheck, State, all_states, blocks, history_length, lock, show
from te_fuser.quantization.weight_cache import keep
from te_fuser.recipe import region
from te_fuser.recipe.recipes import Recipe

_THERE = "capture again there, or call the model itself"
# Part of the key of a region in which that of a capture differs, and what it is there -> words.
_DIFFER: dict[str, dict[Any, str]] = {
    "recipe": {None: "this graph was captured in a region by {then}, and is called in one by {now}"},
    "calibrating": {None: "this graph was captured with calibrating={then}, and is called with {now}"},
    "says_microbatch": {
        True: "this graph was captured in quantization.microbatch(True), and is called without saying which "
        "micro-batch it is: replay it in quantization.microbatch(True or False)",
        False: "this graph was captured outside of quantization.microbatch(True), and quantizes weights in each "
        "replay, but is called in one: replay it without, or capture in quantization.microbatch(True)",
    },
    "agrees": {None: "this graph was captured where other ranks agree on amaxes than here"},
    "settings": {None: "te_fuser.precision was called since the capture, and the graph goes by what was before"},
}


class GraphedRegion:
    """The region that a model is captured in, and the products that ran there.

    A captured forward begins with a copy of the scales of then, which it and its backward read; amaxes go where those
    of calls go. Weights that are kept from micro-batch to micro-batch lie where they lay at the capture: a first
    micro-batch quantizes them before its replay.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._key = region.current_key()
        self._has_products = bool(products_of(model))
        self._records = torch.is_grad_enabled()
        self._device = device
        self._products: list[tuple[State, Recipe]] = []
        self._facts = Facts()
        self._kept: dict[State, tuple[dict[str, torch.Tensor], Binding]] = {}
        self._copied: dict[State, Any] = {}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which a forward warms up, or is captured."""
        if self._key is None:
            yield
            return
        said = None if region.is_first_microbatch() is None else not region.is_capturing()
        copied, micro_batch = _copied(self._device), region.microbatch(said)
        with region.counted_alone() as entry, copied, micro_batch, region.noting_used() as used:
            yield
        ran = [state for state in all_states() if state.ran_in == entry]
        for state in ran:
            state.ran_in = state.entry = region.entries()
        self._products = [(state, state.recipe) for state in ran if state.recipe is not None]
        recipes = tuple([(vars(state), "recipe", recipe) for state, recipe in self._products])
        self._facts = Facts(items=recipes, calls=((ReadyCheck(ran, records=True), True),))
        self._kept = {state: (kept, weight) for state, kept, weight in used}

    def run(self, replay: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Replay in the region of now; without gradients nothing is recorded; ValueError if captured in another."""
        self._check()
        if not self._products:
            return replay(*tensors)
        if not still_hold(self._facts):
            self._renew()
        if self._kept:
            self._keep()
        if torch.is_grad_enabled() or not self._records:
            return replay(*tensors)
        before = [(block.amaxes, block.amaxes.clone()) for block in {s.block for s, _ in self._products} if block]
        try:
            return replay(*tensors)
        finally:
            for amaxes, then in before:
                amaxes.copy_(then)

    def _check(self) -> None:
        """Refuse another region than that of the capture, where products ran in it, or may have.

        No state tells what ran there outside of regions, and by recipes that have none.
        """
        then, now = self._key, region.current_key()
        has_no_states = then is None or scalings_of(then.recipe) is not None
        if now == then or not (self._products or (self._has_products and has_no_states)):
            return
        if now is None:
            raise ValueError(
                "this graph was captured in a region of FP8, and is called outside of all: replay it in one by the "
                f"same recipe, whose entry makes scales; for the model's own precision {_THERE}"
            )
        if then is None:
            raise ValueError(
                f"this graph was captured outside of regions of FP8, and is called in one: {_THERE}; for replays in "
                "the model's own precision leave the region, or enter autocast(enabled=False)"
            )
        name = next(name for name in _DIFFER if getattr(then, name) != getattr(now, name))
        of = {"then": getattr(then, name), "now": getattr(now, name)}
        words = _DIFFER[name].get(None) or _DIFFER[name][of["then"]]
        raise ValueError(f"{words.format(**of)}: {_THERE}")

    def _renew(self) -> None:
        """Have scales where buffers are others, and recipes that were others since."""
        for state, recipe in self._products:
            refuse_another(state, recipe)
            if not state.runs_by(recipe):
                raise ValueError(
                    f"a product of this graph ran by a second recipe in this region, {state.recipe}, and its replay "
                    f"goes by {recipe}: leave the region between the two"
                )
            assert state.block is not None
            state.make(history_length(recipe), state.block.device)

    def _keep(self) -> None:
        """Have weights of 8 bits where the graph reads them."""
        keep([(state, weight) for state, (_, weight) in self._kept.items()], torch.is_grad_enabled())
        for state, (there, _) in self._kept.items():
            if self._copied.get(state) is not state.kept["weight_data"]:
                with torch.no_grad():
                    to, of = ([t.view(t.shape or 1).view(torch.uint8) for t in k.values()] for k in (there, state.kept))
                    torch._foreach_copy_(to, of)
                self._copied[state] = state.kept["weight_data"]


@contextlib.contextmanager
def _copied(device: torch.device) -> Iterator[None]:
    """Context in which calls read copies of the scales of a device, made here."""
    before: list[SavedScales] = []
    snapshot = Snapshot([], is_captured=True)
    with lock, torch.no_grad():
        for block in [block for block in blocks() if block.device == device]:
            states = block.states()
            for state in states if not region.is_capturing() else ():
                if state.has_buffers and state.scale.device == device:  # somebody may have put others in place
                    state.make(None, device)
            found = block.made_live().clone()[:, :, 0]
            before += map(SavedScales.of, states)
            for state in states:
                show([state.numbers], found[state.row].unbind())
            snapshot.scales += map(SavedScales.of, states)  # type: ignore[operator]
    try:
        with of_capture(snapshot):
            yield
    finally:
        with lock:
            for kept in before:
                kept.put_back()


def refuse_by_hand() -> None:
    """Refuse calls that a CUDA graph would capture with the scales of now, but for `te_fuser.cuda_graph`."""
    if region.is_capturing() and read_in_capture() is None:
        raise NotImplementedError(
            "a model runs in a region of FP8 while a CUDA graph is captured by hand: replays would go on by the scales "
            "of the capture; te_fuser.cuda_graph(model, x) in the region captures one that reads those of its replay"
        )
