"""The documents, and the programs that their python blocks are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(path: Path) -> str:
    """The file's python blocks as one program; line numbers are the document's."""
    text = path.read_text()
    lines = [""] * (text.count("\n") + 1)
    for found in BLOCK.finditer(text):
        first = text[: found.start(1)].count("\n")
        for k, line in enumerate(found.group(1).splitlines()):
            lines[first + k] = line
    return "\n".join(lines)
