"""Common parts of the examples of training engines: the small GPT, its batches by ranks, one process's losses.

Each of `train_accelerate`, `train_lightning`, `train_deepspeed` and `train_titan` takes these steps with the batch
spread over ranks; the mean of the ranks' losses is one process's, but for rounding.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Shape, build_gpt
from text import Windows, random_windows, read_text, standard_library
from torch.nn import functional

from te_fuser import Sequential

SHAPE = Shape(layers=2, hidden=64, heads=4, context=32, dropout=0.0)
STEPS = 8
BATCH = 8  # windows of all ranks together
RATE = 3e-3
MOST_BYTES = 1_000_000


def parse(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line that they have in common."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--text", type=Path, default=standard_library(), help="folder of .py files to read")
    parser.add_argument("--out", type=Path, help="a file for the losses, as JSON")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer, where the engine can")
    return parser.parse_args(argv)


def model() -> Sequential:
    """Small GPT, equal in every process."""
    torch.manual_seed(0)
    return build_gpt(SHAPE)


@functools.lru_cache(maxsize=1)
def _data(folder: Path) -> torch.Tensor:
    return read_text(folder, MOST_BYTES).training


def batches(folder: Path, rank: int = 0, ranks: int = 1) -> list[Windows]:
    """Windows of this rank, for each step."""
    generator = torch.Generator().manual_seed(0)
    whole = (random_windows(_data(folder), BATCH, SHAPE.context, generator) for _ in range(STEPS))
    return [Windows(w.inputs.chunk(ranks)[rank], w.targets.chunk(ranks)[rank]) for w in whole]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_optimizer(parameters: object) -> torch.optim.AdamW:
    """Optimizer of all these examples."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)  # type: ignore[arg-type]


def alone(folder: Path, bf16: bool = False) -> list[float]:
    """The losses of one process with the whole batch."""
    gpt, losses = model(), []
    optimizer = make_optimizer(gpt.parameters())
    for windows in batches(folder):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = gpt(windows.inputs)
        loss = loss_of(logits, windows.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_over_ranks(losses: Sequence[torch.Tensor]) -> list[float]:
    """Of each step."""
    found = torch.stack([loss.detach().float() for loss in losses])
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def report(losses: Sequence[float], out: Path | None) -> None:
    """Print them, and write them where that was asked for; by rank 0."""
    if dist.get_rank() != 0:
        return
    print(*(f"{loss:.4f}" for loss in losses))
    if out is not None:
        out.write_text(json.dumps(list(losses)))
