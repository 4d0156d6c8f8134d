"""Random lists and cuts; more of them by `python -m tests.parallel.random_cuts`."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.parallel.random_cuts import Case, cases, run
from tests.parallel.ranks import Ranks


@settings(
    max_examples=40,
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
@given(case=cases())
def test_random_lists_are_as_the_whole_ones(ranks: Ranks, case: Case) -> None:
    run(ranks, case)
