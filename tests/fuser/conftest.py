"""What tests of the Fuser share."""

from __future__ import annotations

import pytest

from te_fuser.fuser.plan import planner
from te_fuser.fuser.run import fuser as fuser_module


@pytest.fixture
def planned(monkeypatch):
    """Counts how often a plan is made."""
    made = []

    def counted(*arguments):
        made.append(arguments)
        return planner.make_plan(*arguments)

    monkeypatch.setattr(fuser_module, "make_plan", counted)
    return made
