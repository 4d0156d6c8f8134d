"""The site that ./dev docs builds: its pages and llms.txt. The strict build checks links, anchors and the nav."""

from __future__ import annotations

import doctest
import inspect
import runpy
from pathlib import Path

import pytest

import te_fuser
from tests.documents import ROOT
from tests.public import MODULES


def test_every_page_is_named_and_the_reference_has_every_public_name() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    pages: dict[str, str] = hooks["site_pages"]()
    text, ours = hooks["llms_text"](pages), {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")}
    assert pages.keys() > ours and [name for name in pages if f"]({name})" not in text] == []
    for module in set(MODULES) - {te_fuser.utils}:
        page = pages[f"api/{module.__name__}.md"]
        names = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
        assert [n for n in names if f".{n}\n" not in page and f"`{n}`" not in page] == []


def test_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "Examples:", which the site shows as code."""
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    texts = {inspect.getdoc(getattr(module, name)) or "" for module in MODULES for name in module.__all__}
    for text in (text for text in texts if ">>>" in text):
        assert "\nExamples:\n" in text
        runner.run(parser.get_doctest(text, {}, text.partition("\n")[0], None, None))
    assert runner.summarize().attempted > 8 and runner.failures == 0
