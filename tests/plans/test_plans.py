"""Plans, reasons and kernels of a corpus of models equal those written down.

A change that means to change them runs `python -m tests.plans` and shows the difference in its commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plans.models import CASES
from tests.plans.text import text_of

FOLDER = Path(__file__).parent / "written"


def file_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name.replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_written_down(name: str) -> None:
    assert text_of(CASES[name]).splitlines() == file_of(name).read_text().splitlines()
