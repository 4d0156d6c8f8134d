"""Environments beside .venv, which see what it has and have other versions of a few packages over it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.versions import packages

# Folder of this Python's packages, those of a Python below it included: site reads its .pth files, too.
_SEES = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
QUIET = ("-q", "--disable-pip-version-check", "--no-warn-script-location")
_COUNTS = ("tests", "failures", "errors", "skipped")


class NotMade(Exception):
    """A command that failed: packages that pip does not install together, or that cannot be imported."""


@dataclass(frozen=True)
class Environment:
    """The oldest or the newest versions of one kind of packages."""

    kind: str
    age: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.age}"

    @property
    def folder(self) -> Path:
        return packages.ROOT / ".venv" / "versions" / self.name

    def requirements(self) -> list[str]:
        """Arguments of pip install; PyTorch stays where it is not what is tested."""
        names = [*packages.KINDS[self.kind]]
        if self.age == "oldest":
            asked = [f"{name}=={packages.oldest(name)}" for name in names]
        else:
            asked = ["--upgrade", *names]
        return asked if self.kind == "torch" else [*asked, f"torch=={metadata.version('torch')}"]

    def make(self) -> str:
        """Its Python, once it has what it shall have. One package comes as source, which .venv's setuptools build."""
        python = self.folder / "bin" / "python"
        if not python.exists():
            made(self.folder, _SEES)
        run(str(python), "-m", "pip", "install", *QUIET, "--no-build-isolation", *self.requirements())
        return str(python)

    def test(self) -> dict[str, Any]:
        """Package -> version of what there is, how many tests passed and were skipped, and pytest's exit status."""
        python = self.make()
        modules = json.dumps(packages.KINDS[self.kind])
        versions = json.loads(run(python, "-c", packages.IMPORTED, modules).splitlines()[-1])
        print(f"{self.name}: {', '.join(' '.join(pair) for pair in versions.items())}", flush=True)
        report = self.folder / "tests.xml"
        report.unlink(missing_ok=True)
        tests = packages.of_torch() if self.kind == "torch" else packages.of_libraries()
        quiet = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", f"--junitxml={report}"]
        code = subprocess.run([python, "-m", "pytest", *quiet, *tests], cwd=packages.ROOT).returncode
        counts = ElementTree.parse(report).getroot()[0].attrib if report.exists() else {}
        return {"versions": versions, **{name: int(counts.get(name, 0)) for name in _COUNTS}, "code": code}


ENVIRONMENTS = {e.name: e for e in (Environment(kind, age) for kind in packages.KINDS for age in ("oldest", "newest"))}


def made(folder: Path, sees: str) -> str:
    """The Python of a new environment without pip, with lines for a .pth file: other packages that it sees."""
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    python = str(folder / "bin" / "python")
    (Path(packages_of(python)) / "te_fuser_sees.pth").write_text(sees)
    return python


def packages_of(python: str) -> str:
    """The folder of a Python's own packages."""
    return run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def run(*command: str, cwd: Path = packages.ROOT) -> str:
    """Output of a command that succeeds."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    if done.returncode:
        raise NotMade(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout
