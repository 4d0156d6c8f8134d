"""The site that ./dev docs builds: its pages and llms.txt. The strict build checks links, anchors and the nav."""

from __future__ import annotations

import inspect
import runpy

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
