"""Plans in which fusions are taken are those that are written down; `python -m tests.fusions.plans` writes them."""

from __future__ import annotations

import pytest

from tests.fusions.plans import FOLDER, PLANS, file_of, text_of


@pytest.mark.parametrize("name", PLANS)
def test_plan_with_fusions_is_the_one_written_down(name: str) -> None:
    assert text_of(PLANS[name]()).splitlines() == file_of(name).read_text().splitlines()


def test_written_plans_are_each_of_a_case() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file_of(name).name for name in PLANS}
