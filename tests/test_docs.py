"""Every python block of the documents runs, top to bottom, one namespace for each file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")


def blocks(path: Path) -> str:
    """The file's python blocks as one program; line numbers are the document's."""
    text = path.read_text()
    lines = [""] * (text.count("\n") + 1)
    for found in BLOCK.finditer(text):
        first = text[: found.start(1)].count("\n")
        for k, line in enumerate(found.group(1).splitlines()):
            lines[first + k] = line
    return "\n".join(lines)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    program = blocks(path)
    if not program.strip():
        pytest.skip("no python block")
    script = tmp_path / "blocks.py"
    script.write_text(program)
    # A process of its own: fusions that a document registers must not reach other tests.
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, f"{path.name}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    missing = [target for target in LINK.findall(path.read_text()) if not (path.parent / target).exists()]
    assert not missing
