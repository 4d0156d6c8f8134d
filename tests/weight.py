"""Figures of how much code has to be read and known, whose ceilings tests/test_weight.py holds.

`python -m tests.weight` prints them, `--names` also what is behind each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCES = (".py", ".pyi", ".h", ".cpp", ".cuh", ".cu")
SHORT = 8  # lines of a helper


DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Trees = dict[Path, ast.Module]
Definitions = dict[Path, list[ast.AST]]


class Figure(NamedTuple):
    """A number, and what it counts."""

    value: float
    behind: list[str]


def figures(root: Path = ROOT) -> dict[str, Figure]:
    """All figures of a checkout, by title."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / "te_fuser").rglob("*.py"))}
    defined = {path: [n for n in ast.walk(tree) if isinstance(n, DEFINED)] for path, tree in trees.items()}
    found = {
        "lines of te_fuser and csrc": _lines(root, "te_fuser", "csrc"),
        "files in te_fuser": Figure(len(trees), []),
        "files flat in te_fuser/ops": Figure(len([*(root / "te_fuser" / "ops").glob("*.py")]), []),
        "lines of tests": _lines(root, "tests"),
        "lines of docs/design.md": Figure((root / "docs" / "design.md").read_text().count("\n"), []),
        "mean length of a line of code": _mean_length(trees),
        "helpers of at most 8 lines that are used once": _counted(_used_once(trees)),
        "class names defined in several files": _counted(_in_several_files(defined)),
        "dataclasses of more than 14 fields": _counted(_wide_records(defined)),
        "docstrings that begin with a pronoun": _counted(_pronouns(defined)),
        "members of FusableOperation": _counted(_members(defined, "FusableOperation")),
    }
    return found


def _counted(behind: Iterator[str]) -> Figure:
    found = [*behind]
    return Figure(len(found), found)


def _lines(root: Path, *folders: str) -> Figure:
    sizes = {
        path: path.read_text(errors="replace").count("\n")
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in SOURCES
    }
    return Figure(sum(sizes.values()), [f"{n:,} {p}" for p, n in sorted(sizes.items(), key=lambda item: -item[1])[:20]])


def _mean_length(trees: Trees) -> Figure:
    lines = [line for path in trees for line in path.read_text().split("\n") if line.strip()]
    code = [len(line) for line in lines if not line.strip().startswith("#")]
    return Figure(round(sum(code) / len(code), 1), [])


def _used_once(trees: Trees) -> Iterator[str]:
    for path, tree in trees.items():
        text = path.read_text()
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("_") or node.decorator_list:
                continue
            short = (node.end_lineno or 0) - node.lineno < SHORT
            if short and len(re.findall(rf"\b{re.escape(node.name)}\b", text)) == 2:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _in_several_files(defined: Definitions) -> Iterator[str]:
    files = defaultdict(set)
    for path, nodes in defined.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    yield from (f"{name}: {', '.join(sorted(found))}" for name, found in sorted(files.items()) if len(found) > 1)


def _pronouns(defined: Definitions) -> Iterator[str]:
    pronouns = r"(What|Whether|That|Those|These|This|Which|Who|Whatever|Where|When|Why|How|It|They|The same)\b"
    for path, nodes in defined.items():
        for node in nodes:
            text = ast.get_docstring(node) or ""
            if re.match(pronouns, text):
                yield f"{path.relative_to(ROOT)} {getattr(node, 'name', '')}: {text.splitlines()[0]}"


def _wide_records(defined: Definitions) -> Iterator[str]:
    for path, nodes in defined.items():
        for node in (n for n in nodes if isinstance(n, ast.ClassDef)):
            declared = [m for m in node.body if isinstance(m, ast.AnnAssign)]
            fields = [m for m in declared if "ClassVar" not in ast.unparse(m.annotation)]
            if len(fields) > 14:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({len(fields)})"


def _members(defined: Definitions, name: str) -> Iterator[str]:
    classes = [n for nodes in defined.values() for n in nodes if isinstance(n, ast.ClassDef) and n.name == name]
    for member in (m for one in classes for m in one.body):
        if isinstance(member, ast.FunctionDef):
            yield member.name
        elif isinstance(member, ast.AnnAssign):
            yield ast.unparse(member.target)
        elif isinstance(member, ast.Assign):
            yield ast.unparse(member.targets[0])


if __name__ == "__main__":
    for title, figure in figures().items():
        print(f"{title:<60} {figure.value:,}")
        if "--names" in sys.argv:
            print("".join(f"    {line}\n" for line in figure.behind), end="")
