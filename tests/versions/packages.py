"""Packages that are tested in several versions: their oldest by pyproject.toml, tests that touch them, a table."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement

from requirements.installed import locked, tomllib
from tests.documents import FILES, blocks

ROOT = Path(__file__).parents[2]
# Package -> its module, for each of the two kinds of environments.
KINDS = {
    "libraries": {
        "transformers": "transformers",
        "accelerate": "accelerate",
        "pytorch-lightning": "pytorch_lightning",
        "deepspeed": "deepspeed",
        "peft": "peft",
        "kernels": "kernels",
    },
    "torch": {"torch": "torch"},
}
WORDS = {"kernels"}  # that te_fuser says, too: of these imports count, strings do not
# Prints package -> version of those in its argument. One that cannot be imported is no version that was tested.
IMPORTED = """
import importlib, json, sys
from importlib import metadata
modules = json.loads(sys.argv[1])
for module in modules.values():
    importlib.import_module(module)
print(json.dumps({package: metadata.version(package) for package in modules}))
"""
MODULES = {package: module for packages in KINDS.values() for package, module in packages.items()}


def oldest(package: str) -> str:
    """The version from which on pyproject.toml takes the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = {
        specifier.version
        for requirement in map(Requirement, lines)
        for specifier in requirement.specifier
        if requirement.name == package and specifier.operator == ">="
    }
    assert len(bounds) == 1, f"pyproject.toml names {package} from {sorted(bounds)} on: one it should be"
    return bounds.pop()


def named(program: str) -> set[str]:
    """The libraries that a program imports, or names in a string by their module alone."""
    found = set()
    if not any(module in program for module in KINDS["libraries"].values()):
        return found
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in WORDS:
            found.add(node.value)
    return found & set(KINDS["libraries"].values())


# Values and gradients of all ops, how plans run, what surrounds a model, ranks: what a version of PyTorch may change.
TORCH = [
    *("tests/formula", "tests/ops", "tests/fuser/run", "tests/fuser/test_pipeline.py"),
    *("tests/csrc/test_guards.py", "tests/parallel/test_co*.py", "tests/test_*.py"),
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


# ---- the table of docs/works-with.md, from the lock and from what was tested


PAGE = ROOT / "docs" / "works-with.md"
BEGIN, END = "<!-- versions: ./dev versions --write -->\n", "<!-- /versions -->"
AGES = ("oldest", "newest")
HEAD = ("package", "oldest", "locked", "newest")
# Python below which some packages have no new releases any more, and the lock has others.
_PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}


def lock() -> dict[str, str]:
    """Package -> the version that ./dev installs."""
    (torch,) = re.findall(r"^readonly DEFAULT_TORCH=torch==(\S+)$", (ROOT / "dev").read_text(), re.MULTILINE)
    return {**locked(_PYTHON), "torch": torch}


def read(page: str) -> dict[str, dict[str, str]]:
    """Package -> column -> version, as the page has them."""
    text = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == [*HEAD] and set("".join(rows[1])) <= {"-"}, "the head of the table of versions"
    return {row[0]: dict(zip(HEAD[1:], row[1:], strict=True)) for row in rows[2:]}


def merged(cells: dict[str, dict[str, str]], records: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Cells with what the environments in the records have, where all their tests passed."""
    table = {package: {**cells.get(package, {}), "locked": lock()[package]} for package in MODULES}
    for kind, packages in KINDS.items():
        for age in AGES:
            record = records.get(f"{kind}-{age}")
            if record and record["code"] == 0:
                for package in packages.keys() & record["versions"].keys():  # a run of old may lack one
                    table[package][age] = record["versions"][package].partition("+")[0]
    return table


def written(page: str, records: dict[str, Any]) -> str:
    """The page with the table of these records; a column that they lack stays as it was."""
    table = merged(read(page), records)
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(f"`{package}`", *(cells.get(column, "") for column in HEAD[1:])) for package, cells in table.items()]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines).replace(
        "| --- | --- | --- | --- |", "|---|---|---|---|"
    )
    return page[: page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END) :]
