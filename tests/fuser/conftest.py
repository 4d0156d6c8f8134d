"""Fixtures of the Fuser's tests."""

from __future__ import annotations

import pytest

from te_fuser.fuser import pipeline


@pytest.fixture
def planned(monkeypatch):
    """Counts how often a plan is made."""
    made, make_plan = [], pipeline.make_plan

    def counted(*arguments):
        made.append(arguments)
        return make_plan(*arguments)

    monkeypatch.setattr(pipeline, "make_plan", counted)
    return made
