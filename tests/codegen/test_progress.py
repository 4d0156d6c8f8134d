"""A word about what takes long, and none about what does not."""

from __future__ import annotations

import re
import time

import pytest

from te_fuser.codegen import progress
from te_fuser.codegen.progress import Progress


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)


def test_what_is_quick_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("looking"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("fails", "end"), [(False, "done"), (True, "failed")])
def test_what_is_slow_is_named_with_its_end(fails: bool, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        time.sleep(0.5)
        if fails:
            raise ValueError("lost")

    try:
        with Progress("looking", lambda: " (1 of 2)"):
            work()
    except ValueError:
        assert fails
    started, ended = capsys.readouterr().err.splitlines()
    assert started == "te_fuser: looking (1 of 2) ..."
    assert re.fullmatch(rf"te_fuser: looking: {end} after 0\.[5-9] s", ended)
