"""Imports among the benchmarks' folders: parts and records import contests, and not each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.common import ROOT

FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
# Modules that all share, and each folder -> those that it may import beside itself.
SHARED = {"benchmarks", "benchmarks.common", "benchmarks.models", "benchmarks.presets"}
ROOMS = {"contest": set(), "parts": {"contest"}, "record": {"contest"}, "several": {"contest", "parts"}}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """The modules of benchmarks that a file imports."""
    known = {module_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "benchmarks":
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (whole & known) or {str(node.module)}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_know_each_other_one_way(room: str) -> None:
    allowed = {room, *ROOMS[room]}
    for path in sorted((ROOT / "benchmarks/gpu" / room).glob("*.py")):
        others = [name for name in imports(path) if name not in SHARED and name.split(".")[2] not in allowed]
        assert others == [], f"{module_of(path)} may know {sorted(allowed)}"


def test_what_all_share_knows_no_gpu() -> None:
    for name in SHARED - {"benchmarks"}:
        assert set(imports(ROOT / f"{name.replace('.', '/')}.py")) <= SHARED


def test_no_circle_of_modules() -> None:
    TopologicalSorter({module_of(path): set(imports(path)) for path in FILES}).prepare()


def test_packages_import_nothing() -> None:
    """A first call in a new process takes the time of its imports: none may come before its clock starts."""
    assert [path for path in FILES if path.name == "__init__.py" and path.read_text()] == []
