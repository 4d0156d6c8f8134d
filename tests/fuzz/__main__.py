"""python -m tests.fuzz --lists 10000: as many random lists, run by generated kernels, each against its reference."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from hypothesis import HealthCheck, given, seed, settings

from te_fuser.codegen import compiler
from tests.fuzz.lists import FuzzCase, fuzz_cases


class _Progress:
    """Counts lists, and says so now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began, self.said = total, 0, time.monotonic(), 0.0

    def count(self) -> None:
        """One more."""
        self.done += 1
        now = time.monotonic() - self.began
        if now - self.said > 10.0:
            self.said = now
            print(f"{self.done} of {self.total} lists, {now:.0f} s, {now / self.done:.2f} s each", flush=True)


def fuzz(lists: int, number: int, kernels: str, regions: bool) -> FuzzCase | None:
    """The smallest list found that differs from its reference, or None."""
    progress = _Progress(lists)
    failing: list[FuzzCase] = []

    def run(case: FuzzCase) -> None:
        if not failing:
            progress.count()
        failed = case.check()
        if failed:
            if not failing:
                print(f"list {progress.done} differs: {failed[0]}; looking for a smaller one", flush=True)
            failing.append(case)
        assert not failed

    chosen = settings(max_examples=lists, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    try:
        seed(number)(chosen(given(fuzz_cases(kernels=kernels, regions=regions))(run)))()
    except Exception:
        if not failing:
            raise
        return min(failing, key=lambda case: len(repr(case)))
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--lists", type=int, default=300, help="how many lists (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which lists (%(default)s)")
    parser.add_argument("--kernels", choices=("auto", "reference"), default="auto", help="how they run (%(default)s)")
    parser.add_argument("--regions", action="store_true", help="in regions of FP8, by recipes that are drawn")
    given_arguments = parser.parse_args()
    torch.set_num_threads(1)
    if given_arguments.kernels == "auto" and compiler.find_compiler() is None:
        parser.error("generated kernels need a C++ compiler (g++ or clang++), or give --kernels reference")
    case = fuzz(given_arguments.lists, given_arguments.seed, given_arguments.kernels, given_arguments.regions)
    if case is None:
        print(f"{given_arguments.lists} lists agree with their references")
        return 0
    print(f"\nto see it again:\n\n{case.script()}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
