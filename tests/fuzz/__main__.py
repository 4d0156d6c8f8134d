"""python -m tests.fuzz --lists 10000: as many random lists, run by generated kernels, each against its reference."""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
from hypothesis import HealthCheck, given, seed, settings

from te_fuser.codegen import compiler
from tests.fuzz.lists import FuzzCase, fuzz_cases


def fuzz(lists: int, number: int, kernels: str, regions: bool) -> FuzzCase | None:
    """The smallest list found that differs from its reference, or None."""
    done, failing = itertools.count(1), list[FuzzCase]()

    def run(case: FuzzCase) -> None:
        at = 0 if failing else next(done)
        if at and at % 100 == 0:
            print(f"{at} of {lists} lists", flush=True)
        failed = case.check()
        if failed:
            if not failing:
                print(f"list {at} differs: {failed[0]}; looking for a smaller one", flush=True)
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
