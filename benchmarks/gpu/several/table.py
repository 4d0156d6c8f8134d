"""The parts that several ranks measure together, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.several.data import data
from benchmarks.gpu.several.layer import layer
from benchmarks.gpu.several.links import links
from benchmarks.gpu.several.parameters import parameters
from benchmarks.gpu.several.timeline import timeline
from benchmarks.gpu.several.train import train
from benchmarks.gpu.several.variants import variants

USUAL_LIMIT = 240.0


@dataclass(frozen=True)
class Part:
    """Part of the command.

    Attributes:
        run: takes the ranks, what is told of each step that may end the process, and what to leave out.
        seconds: about how long it takes.
        limit: after so many seconds it is stopped.
        usual: whether it runs where no part is named.
    """

    meaning: str
    run: Callable[..., Iterator[Entry]]
    seconds: int
    limit: float = USUAL_LIMIT
    usual: bool = True


PARTS: dict[str, Part] = {
    "links": Part("collectives alone, beside products and in one step with them", links, 40),
    "parameters": Part("what a DTensor parameter takes of the host", parameters, 20),
    "layer": Part("the seed layer, shared by tensor and sequence parallel, against its floor and rivals", layer, 150),
    "variants": Part("a Llama layer that ranks share, and the seed layer in FP8", variants, 120),
    "timeline": Part("what runs on a GPU in a step of the shared layer", timeline, 20),
    "data": Part("layers with a batch a rank, by DDP and FSDP2", data, 60),
    "train": Part("eight minutes of training layers that ranks share", train, 500, limit=580.0, usual=False),
}
