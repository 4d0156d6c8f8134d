"""Other plans than the cheapest: what the planner may choose on some device, with some fusions, must be right too."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from te_fuser import fusions
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.plan.device import DEVICES, Device
from te_fuser.fuser.run import loading
from te_fuser.fusions import Cost, Fusion, Match
from te_fuser.ops import FusableOperation


@contextlib.contextmanager
def as_planned(seed: int) -> Iterator[None]:
    """The plans as they are."""
    yield


@contextlib.contextmanager
def as_if_generated(seed: int) -> Iterator[None]:
    """The plans for generated kernels, run by PyTorch operations."""

    def load(descriptions: Any, target: str, device: Any, rows: Any = None, written: Any = ()) -> Any:
        return {d.key: InterpretedKernel(d) for d in descriptions}

    def target(device: Any, dtype: Any, kernels: str, fallback: str) -> str:
        return "cpp"

    with mock.patch.object(pipeline, "target_for", target), mock.patch.object(loading, "load_kernels", load):
        yield


class _Whimsical(Device):
    """A device on which every step takes a time drawn for it."""

    def seconds(self, cost: Cost, dtype: str) -> float:
        if cost.seconds is not None:
            return cost.seconds
        return 1e-6 * (1 + _drawn(self.name, cost.read, cost.written, cost.flops) ** 2)


def _drawn(*what: Any) -> int:
    """A number below 256 that depends on `what` alone."""
    return hashlib.blake2b(repr(what).encode(), digest_size=1).digest()[0]


@contextlib.contextmanager
def random_cover(seed: int) -> Iterator[None]:
    """Stretches cut anywhere, and each direction covered by chance."""
    whimsical = dataclasses.replace(DEVICES["cpu"], name=f"whimsical {seed}")
    device = _Whimsical(**{f.name: getattr(whimsical, f.name) for f in dataclasses.fields(whimsical)})

    def may_cut(m: Match) -> bool:
        return _drawn(seed, type(m[0].op).__name__, m.x.shape, m.y.shape) < 96

    # A stretch may be cut where a matched fusion begins or ends; this one is never worth its price.
    cut = Fusion("cut", "forward", (FusableOperation,), _never_run, None, may_cut, lambda m: Cost(seconds=1.0))
    with mock.patch.object(pipeline, "device_of", lambda device_at_hand: device), fusions.only(*fusions.names(), cut):
        yield


def _never_run(m: Any, x: Any) -> Any:
    raise AssertionError("a fusion that costs a second was taken")


@contextlib.contextmanager
def random_cover_as_if_generated(seed: int) -> Iterator[None]:
    """Both."""
    with as_if_generated(seed), random_cover(seed):
        yield


@contextlib.contextmanager
def small_segments(seed: int) -> Iterator[None]:
    """A segment wherever one may end."""
    with mock.patch.multiple(segmenting, SEGMENT_BYTES=1, WORTH_A_NODE=0):
        yield


# Name of a way to plan -> what is in force while it is used.
PLANS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "default": as_planned,
    "as if generated": as_if_generated,
    "random cover": random_cover,
    "random cover as if generated": random_cover_as_if_generated,
    "small segments": small_segments,
}
GENERATED_PLANS = ("default", "random cover", "small segments")
