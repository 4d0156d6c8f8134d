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

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
PAGES: dict[str, str] = HOOKS["site_pages"]()
OURS = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_llms_text_names_every_page() -> None:
    text = HOOKS["llms_text"](PAGES)
    assert PAGES.keys() > OURS and [name for name in PAGES if f"]({name})" not in text] == []


def test_the_reference_has_every_public_name() -> None:
    for module in set(MODULES) - {te_fuser.utils}:
        page = PAGES[f"api/{module.__name__}.md"]
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
