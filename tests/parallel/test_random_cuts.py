"""Random lists and cuts; more of them by `python -m tests.parallel.random_cuts`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings

from tests.needs import needs_compiler
from tests.parallel.random_cuts import Case, cases, run
from tests.parallel.ranks import Ranks

SETTINGS: dict[str, Any] = {
    "database": None,
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@settings(max_examples=30, **SETTINGS)
@given(case=cases())
def test_random_lists_are_as_the_whole_ones(ranks: Ranks, case: Case) -> None:
    run(ranks, case)


@needs_compiler
@settings(max_examples=5, **SETTINGS)
@given(case=cases(copies=True))
def test_random_lists_by_copies_are_as_the_whole_ones(ranks: Ranks, case: Case) -> None:
    run(ranks, case)
