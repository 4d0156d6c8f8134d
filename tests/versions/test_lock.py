"""The lock and ./dev: what is locked fits pyproject.toml, and set-up says what it could not have of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from requirements import installed
from tests.versions import packages

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
REQUIREMENTS = [r for group in installed.declared().values() for r in group]


@pytest.mark.parametrize("python", PYTHONS)
def test_what_is_locked_fits(python: str) -> None:
    """./dev lock was run behind the last change of pyproject.toml."""
    lock = installed.locked({"python_version": python, "python_full_version": f"{python}.0"})
    assert [str(r) for r in REQUIREMENTS if not r.specifier.contains(lock[r.name], prereleases=True)] == []
    assert not {"torch", "triton", "cuda-toolkit"} & {*lock}


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what is locked and installed: name -> version, name -> (version, requirements)."""

    def have(lock: dict[str, str], there: dict[str, tuple[str, list[str]]]) -> None:
        (tmp_path / "lock.txt").write_text("".join(f"{name}=={version}  # via x\n" for name, version in lock.items()))
        for name, (version, needs) in there.items():
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(installed, "LOCK", tmp_path / "lock.txt")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return have


def test_what_is_left_to_install(have: Any) -> None:
    have({"a-b": "2.0", "c": "1.0", "d": "3.0"}, {"A_b": ("1.0", []), "c": ("1.0", []), "torch": ("2.13.0", [])})
    assert installed.main("lock") == ["a-b==2.0", "d==3.0"]
    assert installed.main("differing") == ["a-b 1.0, locked: 2.0", "d is missing, locked: 3.0"]


def test_what_torch_pins_stays(have: Any) -> None:
    """A build for CUDA has libraries in exact versions, by a package of its own, of which extras ask."""
    toolkit = ['nvrtc==13.0.*; extra == "rtc"', 'old<1; extra == "other"']
    torch = ["toolkit[rtc]==13.0", 'new>9; python_version < "3"']
    there = {"torch": ("2.11.0", torch), "toolkit": ("13.0", toolkit), "nvrtc": ("13.0.8", [])}
    have({"nvrtc": "13.5", "old": "2.0", "new": "1.0"}, there)
    assert installed.main("lock") == ["old==2.0", "new==1.0"]
    assert installed.main("differing")[0] == "nvrtc 13.0.8, locked: 13.5 (toolkit 13.0 asks for nvrtc==13.0.*)"


def test_what_torch_asks_for_on_every_platform(have: Any) -> None:
    have({}, {"torch": ("2.13.0", ["sympy>=1.13", 'triton==3; platform_system == "Linux"'])})
    assert installed.main("torch") == ["sympy>=1.13"]


FAKE = """#!/bin/sh
if [ "$2" != pip ]; then exec {python} "$@"; fi
echo "$@" >> calls.txt
for argument in "$@"; do if [ "$argument" = {missing} ]; then exit 1; fi; done
"""


def set_up(folder: Path, missing: str) -> tuple[str, str]:
    """./dev setup in a copy with another lock, by a pip that installs nothing: what it wrote, pip's calls."""
    (folder / "te_fuser" / "codegen" / "include").mkdir(parents=True)
    for name in ("dev", "pyproject.toml", "CMakeLists.txt", "requirements/installed.py", "requirements/lock.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(packages.ROOT / name, folder / name)
    shutil.copytree(packages.ROOT / "csrc", folder / "csrc")
    (folder / "te_fuser" / "codegen" / "include" / "te_kernel_abi.h").touch()
    lock = folder / "requirements" / "lock.txt"
    lock.write_text(lock.read_text() + "numpy==0.0.1\n")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE.format(python=sys.executable, missing=missing))
    python.chmod(0o755)
    done = subprocess.run(["./dev", "setup"], cwd=folder, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr, (folder / "calls.txt").read_text()


def test_set_up_asks_for_the_lock(tmp_path: Path) -> None:
    said, calls = set_up(tmp_path, missing="nothing")
    assert "--no-deps" in calls and "numpy==0.0.1" in calls.splitlines()[0]
    assert "packages of requirements/lock.txt" in said and "not all of" not in said


def test_set_up_goes_on_and_says_what_differs(tmp_path: Path) -> None:
    said, calls = set_up(tmp_path, missing="numpy==0.0.1")
    assert "not all of requirements/lock.txt can be had here" in said
    assert f"\nnumpy {metadata.version('numpy')}, locked: 0.0.1\n" in said
    assert calls.splitlines()[-1].endswith("-e .")
