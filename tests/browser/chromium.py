"""Headless Chromium, for tests of pages, with a profile of its own and no requests in the background."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"]  # fmt: skip
WIDE, NARROW = 1400, 400  # pixels; a window has at least 500, a frame in it may have less


def command(profile: Path, *arguments: str) -> list[str]:
    assert CHROMIUM is not None
    return [CHROMIUM, *QUIET, f"--user-data-dir={profile}", *arguments]
