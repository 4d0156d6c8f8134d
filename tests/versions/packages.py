"""Packages that are tested in several versions: their oldest by pyproject.toml, and the tests that touch them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

from requirements.installed import tomllib
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
    *("tests/formula", "tests/ops", "tests/fuser/run", "tests/fuser/test_pipeline.py", "tests/csrc/test_known_call.py"),
    *("tests/parallel/test_co*.py", "tests/test_*.py"),
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
