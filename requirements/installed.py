"""How what is installed differs from the lock and from pyproject.toml; ./dev calls it before anything is installed.

    python requirements/installed.py unmet needed   requirements in pyproject.toml that are not met: to import, to build
    python requirements/installed.py unmet wanted   those of tests, lint, CUDA text without a GPU, engines
    python requirements/installed.py lock           lines of the lock that are left to install
    python requirements/installed.py differing      what is installed in another version than the lock's, and why
    python requirements/installed.py torch          what the torch that is installed needs on every platform
    python requirements/installed.py docs           the requirements of the site, which has an environment of its own

It uses the standard library and pip, which every environment of ./dev has.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
BUILD = {"pybind11", "scikit-build-core", "cmake", "ninja"}


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def project_table() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> dict[str, list[Requirement]]:
    """The requirements in pyproject.toml that ./dev installs, `needed` or `wanted`; torch it treats apart."""
    project = project_table()
    extras = project["optional-dependencies"]
    lines = [line for extra in ("dev", "nvrtc", "engines") for line in extras[extra]]
    optional = [Requirement(line) for line in lines]
    needed = [Requirement(line) for line in project["dependencies"]]
    return {
        "needed": [r for r in needed if r.name != "torch"] + [r for r in optional if r.name in BUILD],
        "wanted": [r for r in optional if r.name not in BUILD],
    }


def is_met(requirement: Requirement) -> bool:
    if requirement.name in ("cmake", "ninja") and shutil.which(requirement.name):
        return True
    version = version_of(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def locked(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Name -> version in the lock, for this Python on this machine or for the environment that markers shall read."""
    lines = [line.split("#")[0].strip() for line in LOCK.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line]
    found = [r for r in found if r.marker is None or r.marker.evaluate(environment)]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in found}


def asked_by_torch() -> Iterator[tuple[str, Requirement]]:
    """(who asks, requirement) of torch and of what it alone brings: libraries for CUDA, in exact versions."""
    lock, waiting, seen = locked(), [Requirement("torch")], set()
    while waiting:
        asked = waiting.pop()
        if str(asked) in seen or version_of(asked.name) is None:
            continue
        seen.add(str(asked))
        package = metadata.distribution(asked.name)
        for requirement in map(Requirement, package.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ["", *asked.extras]):
                yield f"{asked.name} {package.version}", requirement
                if canonicalize_name(requirement.name) not in lock:
                    waiting.append(requirement)


def refused_by_torch() -> dict[str, str]:
    """Name -> who asks for what, of packages whose version in the lock the torch at hand does not go together with."""
    lock = locked()
    asked = [(who, canonicalize_name(r.name), r) for who, r in asked_by_torch()]
    return {
        name: f"{who} asks for {r.name}{r.specifier}"
        for who, name, r in asked
        if name in lock and not r.specifier.contains(lock[name], prereleases=True)
    }


def other_versions() -> dict[str, tuple[str, str | None]]:
    """Name -> the version in the lock and the one that is installed, where they differ."""
    pairs = {name: (version, version_of(name)) for name, version in locked().items()}
    return {name: (want, got) for name, (want, got) in pairs.items() if got != want}


def main(what: str, group: str = "") -> list[str]:
    if what == "unmet":
        return [str(r) for r in declared()[group] if not is_met(r)]
    if what == "docs":
        return list(project_table()["optional-dependencies"]["docs"])
    if what == "torch":
        return [line for line in metadata.requires("torch") or [] if ";" not in line]
    refused = refused_by_torch()
    if what == "lock":
        return [f"{name}=={want}" for name, (want, _) in other_versions().items() if name not in refused]
    why = {name: f" ({refused[name]})" if name in refused else "" for name in locked()}
    return [
        f"{name} {got or 'is missing'}, locked: {want}{why[name]}" for name, (want, got) in other_versions().items()
    ]


if __name__ == "__main__":
    print(*main(*sys.argv[1:]), sep="\n")
