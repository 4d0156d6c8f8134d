"""Tests that an environment runs: of libraries all that touch them, of PyTorch some of everything."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.documents import FILES, blocks
from tests.versions.packages import ROOT, named

# Values and gradients of all ops, how plans run, what surrounds a model, ranks: what a version of PyTorch may change.
TORCH = [
    *("tests/formula", "tests/ops", "tests/fuser/run", "tests/fuser/test_pipeline.py"),
    *("tests/csrc/test_guards_known_call.py", "tests/parallel/test_co*.py", "tests/test_*.py"),
]


@functools.cache
def _read(path: Path) -> tuple[set[str], list[Path]]:
    """The libraries that a file names, and the modules of the tests that it imports."""
    text, helpers = path.read_text(), list[Path]()
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith("tests.") and not name.startswith("tests.versions"):
                stem = ROOT / name.replace(".", "/")
                helpers += [p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.exists()]
    return named(text), helpers


def _touches(path: Path, seen: set[Path]) -> bool:
    seen.add(path)
    libraries, helpers = _read(path)
    return bool(libraries) or any(_touches(p, seen) for p in helpers if p not in seen)


def of_libraries() -> list[str]:
    """Test files that import a library, themselves or by a helper, and blocks of documents that do; no GPU is here."""
    files = [p.relative_to(ROOT) for p in sorted((ROOT / "tests").rglob("test_*.py")) if _touches(p, set())]
    documents = [p.relative_to(ROOT) for p in FILES if named(blocks(p))]
    chosen = [str(p) for p in files if p.parts[1] not in ("gpu", "versions")]
    return [*chosen, *(f"tests/test_docs.py::test_blocks_run[{p}]" for p in documents)]


def of_torch() -> list[str]:
    """Test files for each version of PyTorch."""
    return [str(p.relative_to(ROOT)) for pattern in TORCH for p in sorted(ROOT.glob(pattern))]
