"""The site that ./dev docs builds: its pages, their links, llms.txt; mkdocs itself, which is strict, runs in CI."""

from __future__ import annotations

import inspect
import runpy
from typing import Any

import yaml

import te_fuser
from tests.documents import ROOT
from tests.public import MODULES

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
PAGES: dict[str, str] = HOOKS["site_pages"]()
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
OURS = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_llms_text_names_every_page() -> None:
    text = HOOKS["llms_text"](PAGES)
    assert PAGES.keys() > OURS and [name for name in PAGES if f"]({name})" not in text] == []


def test_the_nav_names_every_page_but_notes() -> None:
    def pages(part: Any) -> list[str]:
        return [part] if isinstance(part, str) else [p for each in part for p in pages([*dict(each).values()][0])]

    assert sorted(pages(SITE["nav"])) == sorted(
        name for name in PAGES if not name.startswith(("lab/", "repository/")) or name == "lab/README.md"
    )


def test_the_reference_has_every_public_name() -> None:
    for module in set(MODULES) - {te_fuser.utils}:
        page = PAGES[f"api/{module.__name__}.md"]
        names = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
        assert [n for n in names if f".{n}\n" not in page and f"`{n}`" not in page] == []
