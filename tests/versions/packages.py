"""Packages that are tested in several versions: their oldest by pyproject.toml, and what an environment has."""

from __future__ import annotations

import ast
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

from requirements.installed import tomllib

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
