"""Plans, reasons and kernels of a corpus of models equal those written down.

A change that means to change them runs `python -m tests.plans` and shows the difference in its commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plans.models import CASES
from tests.plans.passes import PASSES
from tests.plans.refused import REFUSED
from tests.plans.text import text_of, text_of_passes

FOLDER = Path(__file__).parent / "written"


def file_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name.replace(',', '').replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_written_down(name: str) -> None:
    assert text_of(CASES[name]).splitlines() == file_of(name).read_text().splitlines()


OTHERS = {**PASSES, **REFUSED}


@pytest.mark.parametrize("name", OTHERS)
def test_plans_that_passes_change_and_words_are_those_written_down(name: str) -> None:
    assert text_of_passes(OTHERS[name]).splitlines() == file_of(name).read_text().splitlines()


def test_written_plans_are_each_of_a_case() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file_of(name).name for name in (*CASES, *OTHERS)}
