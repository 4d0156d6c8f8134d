"""A word about what takes long, and none about what does not."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest

from te_fuser.codegen import progress
from te_fuser.codegen.progress import Progress


def test_what_is_quick_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1000.0)
    with Progress("looking"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("fails", "end", "why"),
    [(None, "done", ""), ("lost\nhere", "failed", ": ValueError: lost"), ("", "failed", ": ValueError")],
)
def test_what_is_slow_is_named_with_its_end(
    fails: str | None, end: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes out, and the first word before the last, however long it takes to say how far it is."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    asked = threading.Event()

    def state() -> str:
        asked.set()
        threading.Event().wait(0.05)
        return " (1 of 2)"

    error = contextlib.nullcontext() if fails is None else pytest.raises(ValueError)
    with error, Progress("looking", state):
        assert asked.wait(30)
        if fails is not None:
            raise ValueError(fails)
    started, ended = capsys.readouterr().err.splitlines()
    assert started == "te_fuser: looking (1 of 2) ..."
    assert re.fullmatch(rf"te_fuser: looking: {end} after \d+\.\d s{why}", ended)


def test_a_first_word_that_comes_too_late_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1000.0)
    with Progress("looking") as over:
        pass
    over._say()  # as a timer that had fired already
    assert capsys.readouterr().err == ""
