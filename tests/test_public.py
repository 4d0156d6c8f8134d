"""The package as users meet it: its names and signatures, and what has to be installed for it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

from tests.documents import BLOCK, ROOT
from tests.public import WRITTEN, text


def test_public_names_and_signatures() -> None:
    """Names change on purpose alone: tests/public.txt is written anew in the commit that changes them."""
    assert text().splitlines() == WRITTEN.read_text().splitlines(), "see tests/public.py"


def test_the_readme_needs_no_package_of_an_extra() -> None:
    """Its program and te-fuser doctor run where transformers, matplotlib and the like are not installed."""
    asked = [r for r in metadata.requires("te_fuser") or () if "extra ==" in r and not r.startswith("te_fuser")]
    extras = {re.split(r"[^\w-]", r)[0].replace("-", "_") for r in asked}
    assert {"transformers", "matplotlib"} < extras
    block = BLOCK.search((ROOT / "README.md").read_text())
    assert block is not None
    absent = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    command = "from te_fuser.cli import main\nassert main(['doctor']) == 0"
    subprocess.run([sys.executable, "-c", f"{absent}\n{block[1]}\n{command}"], check=True, cwd=ROOT)
