"""Versions and tests that `./dev versions` takes, its table in docs/works-with.md; the lock, wheels and sdists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pip._vendor.packaging.version import Version

import te_fuser
from requirements import installed
from requirements.installed import project_table, tomllib
from te_fuser import _native
from tests.versions import packages, wheel
from tests.versions.environments import ENVIRONMENTS, made, packages_of, run
from tests.versions.packages import ROOT

PAGE = packages.PAGE.read_text()


def test_names_of_libraries() -> None:
    assert packages.named("import transformers.models as m\nfrom peft import x") == {"transformers", "peft"}
    assert packages.named("def f():\n    pytest.importorskip('accelerate')") == {"accelerate"}
    assert packages.named("from kernels import Mode") == {"kernels"}
    assert packages.named("def f():\n    options['kernels'] = 'kernels'") == set()
    assert packages.named("'transformers is a word here'\nfrom torch import nn\nimport mypeft") == set()


def test_tests_that_touch_libraries_are_taken() -> None:
    """By themselves, by a helper, by a name in a string, by a block of a document; and no others."""
    taken = packages.of_libraries()
    assert {
        "tests/convert/test_block.py",
        "tests/parallel/test_convert.py",
        "tests/parallel/test_engines.py",
        "tests/quantization/test_state.py",
        "tests/test_docs.py::test_blocks_run[docs/how-to/engines.md]",
    } <= {*taken}
    assert not [t for t in taken if t.startswith(("tests/ops", "tests/gpu", "tests/versions")) or t.endswith("docs.py")]
    assert {"tests/ops", "tests/formula", "tests/test_works_with.py"} <= {*packages.of_torch()}


def test_requirements() -> None:
    """The oldest by pyproject.toml, the newest by pip; libraries beside the torch that is there."""
    asked = ENVIRONMENTS["torch-oldest"].requirements()
    assert asked == [f"torch=={packages.oldest('torch')}"]
    assert ENVIRONMENTS["torch-newest"].requirements() == ["--upgrade", "torch"]
    *oldest, torch = ENVIRONMENTS["libraries-oldest"].requirements()
    assert oldest == [f"{name}=={packages.oldest(name)}" for name in packages.KINDS["libraries"]]
    assert re.fullmatch(r"torch==\d+\.\d+.*", torch)
    with pytest.raises(AssertionError, match="pyproject.toml names numpy"):
        packages.oldest("numpy")


def test_the_page_has_the_table() -> None:
    """Its form, what is locked, and the oldest; of the newest only that it is no older than what is locked."""
    cells = packages.read(PAGE)
    assert [*cells] == [*packages.MODULES]
    for package, versions in cells.items():
        numbers = {age: Version(version) for age, version in versions.items()}
        assert versions["locked"] == packages.lock()[package]
        assert f"{versions['oldest']}.".startswith(f"{packages.oldest(package)}.")
        assert numbers["oldest"] <= numbers["locked"] <= numbers["newest"], "./dev versions, ./dev versions --write"


def record(code: int, **versions: str) -> dict[str, Any]:
    return {"versions": versions, "code": code}


def test_the_table_is_written_by_what_passed() -> None:
    newer = packages.written(PAGE, {"torch-newest": record(0, torch="99.1.0+cpu")})
    assert packages.read(newer) == {
        **packages.read(PAGE),
        "torch": {**packages.read(PAGE)["torch"], "newest": "99.1.0"},
    }
    assert newer.replace("99.1.0", packages.read(PAGE)["torch"]["newest"]) == PAGE
    assert packages.written(PAGE, {"torch-newest": record(1, torch="99.1.0"), "torch-oldest": {"code": 1}}) == PAGE


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


def test_pythons_and_one_version() -> None:
    """Classifiers, wheels and the lock are for the same versions of Python."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert build.split() == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]
    classifiers = "\n".join(project_table()["classifiers"])
    assert re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE) == PYTHONS
    assert te_fuser.__version__ == project_table()["version"] == _native.version


def test_the_environment_sees_no_checkout(tmp_path: Path) -> None:
    python = made(tmp_path / "new", f"{tmp_path / 'torch'}\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "here.pth").write_text(f"{ROOT}\n")  # as an editable install leaves it
    path = run(python, "-I", "-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path).splitlines()
    assert path[-2:] == [packages_of(python), str(tmp_path / "torch")]
    assert not {str(ROOT), packages_of(sys.executable)} & {*path}


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
