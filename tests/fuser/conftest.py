"""What tests of the Fuser share."""

from __future__ import annotations

import pytest

from te_fuser.fuser import fuser as fuser_module


@pytest.fixture
def planned(monkeypatch):
    """Counts how often a plan is made."""
    made = []

    class Counted(fuser_module.Planner):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(fuser_module, "Planner", Counted)
    return made
