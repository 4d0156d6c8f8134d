"""The wheel and the sdist: which files they have, and for which Pythons; ./dev wheel builds them and tries them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import te_fuser
from requirements.installed import project_table, tomllib
from te_fuser import _native
from tests.versions import wheel
from tests.versions.environments import made, packages_of, run
from tests.versions.packages import ROOT
from tests.versions.test_lock import PYTHONS

SOURCES = {"pyproject.toml", "csrc/a.cpp", "te_fuser/a.py", "te_fuser/py.typed", "te_fuser/kernels/a.cu", ".ci/run"}
SDIST = SOURCES - {".ci/run"} | {"PKG-INFO"}
NATIVE = "te_fuser/_native.cpython-311-x86_64-linux-gnu.so"
WHEEL = {name for name in SOURCES if name.startswith("te_fuser/")} | {NATIVE}


def test_archives_with_all_files() -> None:
    assert wheel.faults_of_files(SDIST, WHEEL, SOURCES) == []


@pytest.mark.parametrize(
    ("sdist", "files", "fault"),
    [
        (SDIST - {"csrc/a.cpp"}, WHEEL, "the sdist lacks csrc/a.cpp"),
        (SDIST | {"tests/__pycache__/a.pyc"}, WHEEL, "the sdist has tests/__pycache__/a.pyc"),
        (SDIST, WHEEL - {"te_fuser/kernels/a.cu"}, "the wheel lacks te_fuser/kernels/a.cu"),
        (SDIST, WHEEL - {"te_fuser/py.typed"}, "the wheel lacks te_fuser/py.typed"),
        (SDIST, WHEEL | {"tests/a.py"}, "the wheel has tests/a.py"),
        (SDIST, WHEEL - {NATIVE}, "the wheel has 0 native modules"),
    ],
)
def test_a_file_that_is_missing_or_too_much(sdist: set[str], files: set[str], fault: str) -> None:
    assert wheel.faults_of_files(sdist, files, SOURCES) == [fault]


def test_pythons() -> None:
    """Classifiers, wheels and the lock are for the same versions of Python."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert build.split() == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]
    classifiers = "\n".join(project_table()["classifiers"])
    assert re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE) == PYTHONS


def test_one_version() -> None:
    assert te_fuser.__version__ == project_table()["version"] == _native.version


def test_the_environment_sees_no_checkout(tmp_path: Path) -> None:
    python = made(tmp_path / "new", f"{tmp_path / 'torch'}\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "here.pth").write_text(f"{ROOT}\n")  # as an editable install leaves it
    path = run(python, "-I", "-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path).splitlines()
    assert path[-2:] == [packages_of(python), str(tmp_path / "torch")]
    assert not {str(ROOT), packages_of(sys.executable)} & {*path}
