"""The site that ./dev docs builds: its pages and llms.txt. The strict build checks links, anchors and the nav."""

from __future__ import annotations

import inspect
import runpy

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
