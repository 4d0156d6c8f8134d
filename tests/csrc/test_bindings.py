"""te_fuser/_native.pyi, by which mypy knows the native module: it names what the module has."""

from __future__ import annotations

import ast

from te_fuser import _native
from tests.documents import ROOT


def declared(body: list[ast.stmt]) -> set[str]:
    """Public names of functions, classes, and annotated names."""
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}


def public(names: dict[str, object]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_stubs_name_the_module_and_its_classes() -> None:
    tree = ast.parse((ROOT / "te_fuser" / "_native.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert declared(tree.body) >= public(vars(_native))
    kinds = {name: kind for name, kind in vars(_native).items() if isinstance(kind, type)}
    assert kinds and {n: declared(classes[n].body) for n in kinds} == {n: public(vars(k)) for n, k in kinds.items()}
