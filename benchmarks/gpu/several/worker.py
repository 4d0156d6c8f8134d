"""Program of each rank: `python -m benchmarks.gpu.several.worker PART OUT ...`, started by `benchmarks.gpu.ranks`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.contest.measure import TRIAL, Effort
from benchmarks.gpu.several.ranks import TOY, Ranks, Sizes
from benchmarks.gpu.several.table import PARTS

FULL, QUICK = Effort(5, 0.8, 3.0), Effort(3, 0.2, 0.5)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path, help="where rank 0 writes a line for each thing that it has to say")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--without", nargs="*", default=[])
    return parser.parse_args(arguments)


def effort_of(quick: bool, toy: bool) -> Effort:
    """Length of measurements."""
    return TRIAL if toy else QUICK if quick else FULL


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the others and measure a part with them."""
    chosen = parse(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # newer releases of PyTorch rename collectives that older ones lack
    effort = effort_of(chosen.quick, chosen.toy)
    ranks = Ranks.join(TOY if chosen.toy else Sizes(), effort, not chosen.toy, not chosen.no_compile, chosen.tune)

    def say(**what: Any) -> None:
        if ranks.rank == 0:
            with chosen.out.open("a") as file:
                print(json.dumps(what), file=file)

    say(about=describe(ranks))
    torch.manual_seed(0)
    for entry in PARTS[chosen.part].run(ranks, say, chosen.without):
        say(entry=entry)
    say(done=True)
    ranks.largest(0.0)
    dist.destroy_process_group()
    return 0


def describe(ranks: Ranks) -> dict[str, Any]:
    """Facts of the record on where this was measured, beside the card."""
    by_nccl = dist.get_backend() == "nccl"
    return {"ranks": ranks.size, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if by_nccl else "none: gloo"}


if __name__ == "__main__":
    sys.exit(main())
