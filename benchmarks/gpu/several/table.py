"""The parts that several ranks measure together, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.several.data import data
from benchmarks.gpu.several.layer import layer
from benchmarks.gpu.several.links import links
from benchmarks.gpu.several.parameters import parameters


@dataclass(frozen=True)
class Part:
    """`run` takes the ranks, what is told of each step that may end the process, and what to leave out."""

    meaning: str
    run: Callable[..., Iterator[Entry]]
    seconds: int


PARTS: dict[str, Part] = {
    "links": Part("collectives alone and beside products", links, 40),
    "parameters": Part("what a DTensor parameter takes of the host", parameters, 20),
    "layer": Part("the seed layer, shared by tensor and sequence parallel, against its floor and rivals", layer, 150),
    "data": Part("layers with a batch a rank, by DDP and FSDP2", data, 60),
}
