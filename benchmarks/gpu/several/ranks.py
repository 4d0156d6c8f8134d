"""The ranks that measure together: where each stands, what they agree on, and contests whose slowest rank counts."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu.contest.measure import Block, Card, Effort, Result, Step, block, calls_in_a_block

WAIT = datetime.timedelta(minutes=3)  # for the others; a rank that ended leaves them waiting


@dataclass(frozen=True)
class Sizes:
    """Of the layer that ranks share.

    Attributes:
        layers: of a stack.
        parameters: of the list that has DTensors.
        train_seconds: how long ranks train.
    """

    positions: int = 2048
    batch: int = 4
    hidden: int = 4096
    heads: int = 32
    layers: int = 4
    parameters: int = 32
    train_seconds: float = 480.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        """Of one call."""
        return self.positions * self.batch

    @property
    def inner(self) -> int:
        """Features between the MLP's products."""
        return 4 * self.hidden

    @property
    def tolerance(self) -> float:
        """The largest relative error of what ranks compute together."""
        return 3e-2 if self.dtype == torch.bfloat16 else 1e-4


TOY = Sizes(positions=64, batch=2, hidden=64, heads=4, layers=2, parameters=4, train_seconds=0.0, dtype=torch.float32)


@dataclass(frozen=True)
class Ranks:
    """One process among those that measure together.

    Attributes:
        control: a group on CPUs, for what they agree on: nothing of it runs on the GPUs.
    """

    rank: int
    size: int
    card: Card
    sizes: Sizes
    effort: Effort
    control: dist.ProcessGroup
    with_compile: bool = True
    tune: bool = False

    @classmethod
    def join(cls, sizes: Sizes, effort: Effort, gpu: bool, with_compile: bool = True, tune: bool = False) -> Ranks:
        """Meet the others, as the environment says where they are: by NCCL, each with its GPU, else by gloo on CPUs."""
        local = int(os.environ["LOCAL_RANK"])
        own = torch.device("cuda", local) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(own)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if gpu else "gloo", timeout=WAIT)
        return cls.of_group(Card(own), sizes, effort, with_compile, tune)

    @classmethod
    def of_group(cls, card: Card, sizes: Sizes, effort: Effort, with_compile: bool, tune: bool = False) -> Ranks:
        """The ranks that have met."""
        control = dist.new_group(backend="gloo", timeout=WAIT)
        return cls(dist.get_rank(), dist.get_world_size(), card, sizes, effort, control, with_compile, tune)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.card.device

    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension."""
        return init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("ranks",))

    def largest(self, number: float) -> float:
        """Over the ranks, each of which gives its own; all wait for it."""
        found = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.item()

    def all_can(self, make: Callable[[], Any]) -> tuple[Any, str]:
        """(what was made, why not): where it fails on one rank no other goes on without it."""
        made, reason = None, ""
        try:
            made = make()
            self.card.synchronize()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if self.largest(float(bool(reason))):
            return None, reason or "it failed on another rank"
        return made, ""

    def random(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random numbers by name, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(sum(map(ord, name)))
        return (scale * torch.randn(shape, generator=generator, device=self.device)).to(self.sizes.dtype)

    def own(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Block of a tensor for this rank, in its own memory: a view would keep the whole alive, and be counted so."""
        return whole.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)


def contest(steps: Mapping[str, Step], ranks: Ranks, effort: Effort | None = None) -> dict[str, Result]:
    """Let contenders take turns, on all ranks at once; who begins changes from round to round.

    A block's time is the slowest rank's; energy and clock are this one's.
    """
    effort = effort or ranks.effort
    counts = {n: round(ranks.largest(calls_in_a_block(step, effort, ranks.card))) for n, step in steps.items()}
    names, start = list(steps), time.perf_counter()
    while ranks.largest(time.perf_counter() - start) < effort.warm_up:
        for name in names:
            _block(steps[name], max(1, counts[name] // 4), ranks)
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for number in range(effort.rounds):
        for k in range(len(names)):
            name = names[(k + number) % len(names)]
            blocks[name].append(_block(steps[name], counts[name], ranks))
    return {name: Result(tuple(found)) for name, found in blocks.items()}


def _block(step: Step, count: int, ranks: Ranks) -> Block:
    ranks.largest(0.0)
    found = block(step, count, ranks.card)
    return replace(found, seconds=ranks.largest(found.seconds))
