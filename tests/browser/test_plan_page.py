"""The page of an explanation in a browser: a script that is added to a copy of it looks, and says what it found."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.browser.chromium import NARROW, WIDE, command, needs_chromium

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers on a GPU that is not here."""
    h = 1024
    attention = ops.DotProductAttention(8, h // 8, mask="causal", layout="batch_first")
    layer = te_fuser.Sequential(
        te_fuser.Residual(ops.LayerNorm(h), ops.Linear(h, 3 * h), attention, ops.Linear(h, h), ops.Dropout(0.1)),
        te_fuser.Residual(ops.LayerNorm(h), ops.Linear(h, 4 * h), ops.GELU(), ops.Linear(4 * h, h), ops.Dropout(0.1)),
    ).bfloat16()
    x = torch.zeros(2, 512, h, dtype=torch.bfloat16, requires_grad=True)
    path: Path = layer.explain(x, device="h200", details=True).to_html(tmp_path_factory.mktemp("page") / "plan.html")
    return path


def run(folder: Path, *arguments: str) -> str:
    return subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=60, check=True).stdout


def looked(page: Path, folder: Path, script: str, width: int = WIDE) -> Any:
    """Result of a script, as JSON, in a window of that width; an error of the page fails it."""
    copy = folder / "copy.html"
    ending = f"""<div id="frame"></div><script>
    addEventListener('error', e => document.body.setAttribute('data-error', e.message));
    addEventListener('load', () => setTimeout(() => document.body.setAttribute('data-found', JSON.stringify((() => {{
    {script} }})())), 50));</script></body>"""
    copy.write_text(page.read_text().replace("</body>", ending))
    text = run(
        folder / "profile", f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom", f"file://{copy}"
    )
    assert "data-error" not in text.partition("<body")[2].partition(">")[0]
    found = re.search(r'data-found="([^"]*)"', text)
    assert found is not None, text[-500:]
    return json.loads(unescape(found[1]))


def test_a_bar_shows_its_facts_and_leads_to_its_row(page: Path, tmp_path: Path) -> None:
    """When it has the focus, as under a pointer; keyboards reach each bar in turn, and a click unfolds the table."""
    script = """
    const bars = [...document.querySelectorAll('.lane a')], tip = bars[1].nextSibling;
    const before = getComputedStyle(tip).display;
    bars[1].focus();
    const shown = [before, getComputedStyle(tip).display, tip.innerText, bars.every(b => b.tabIndex === 0)];
    const row = document.getElementById('step-0-forward-1'), table = row.closest('details'), closed = !table.open;
    bars[1].click();
    return [...shown, closed, table.open, location.hash, row.getBoundingClientRect().height > 0];"""
    before, after, text, reached, closed, unfolded, place, seen = looked(page, tmp_path, script)
    assert closed and unfolded and seen and place == "#step-0-forward-1"
    assert (before, after, reached) == ("none", "block", True)
    assert "limit: products" in text and "ops 2-3: MatMul" in text, text


def test_hundreds_of_bars_fit_into_the_lane(tmp_path: Path) -> None:
    model = te_fuser.Sequential(*(te_fuser.Residual(ops.LayerNorm(8), ops.Linear(8, 8)) for _ in range(150)))
    path = model.explain(torch.zeros(4, 8), device="h200", details=True).to_html(tmp_path / "plan.html")
    wide = "l => [l.children.length, l.scrollWidth - l.clientWidth]"
    script = f"return [...document.querySelectorAll('.lane')].map({wide});"
    lanes = looked(path, tmp_path, script, NARROW)
    assert all(count > 200 and beyond <= 0 for count, beyond in lanes) and len(lanes) == 2


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_is_wider_than_the_window(page: Path, tmp_path: Path, width: int) -> None:
    """Tables scroll by themselves; all folds are open."""
    script = f"""
    const frame = document.querySelector('.te-fuser');
    frame.style.width = '{width - 24}px';
    document.querySelectorAll('details').forEach(d => d.open = true);
    const parts = [...frame.querySelectorAll('h2,h3,p,ol,svg,.scroll')];
    const right = part => part.getBoundingClientRect().right;
    return [parts.length, Math.max(...parts.map(right)) - right(frame)];"""
    count, beyond = looked(page, tmp_path, script, width)
    assert count > 10 and beyond <= 0


def test_dark_windows_have_dark_pages(page: Path, tmp_path: Path) -> None:
    script = "return getComputedStyle(document.querySelector('.te-fuser')).backgroundColor;"
    assert looked(page, tmp_path, script) == "rgb(255, 255, 255)"
    dark = page.read_text().replace("@media(prefers-color-scheme:dark)", "@media all")
    (tmp_path / "dark.html").write_text(dark)
    assert looked(tmp_path / "dark.html", tmp_path, script) == "rgb(18, 24, 31)"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_screenshot_is_no_blank_page(page: Path, tmp_path: Path, width: int) -> None:
    run(tmp_path / "profile", f"--window-size={width},900", f"--screenshot={tmp_path / 'page.png'}", f"file://{page}")
    assert (tmp_path / "page.png").stat().st_size > 10_000
