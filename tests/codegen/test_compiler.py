"""The system's compiler and the cache of its libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cache_files, compiler, cpp
from te_fuser.codegen.compiler import Compiler, KernelCompileError, LoadedKernel, NoCompiler, find_compiler, load
from te_fuser.codegen.description import KernelDescription
from tests.codegen.corpus import Kit
from tests.parallel.ranks import forking

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def scaled(factor: float, name: str = "scale_fwd") -> KernelDescription:
    """A kernel that multiplies by a number."""
    kit = Kit()
    return kit.forward(name, {"y": (kit.full("x", 4) * factor, 4)})


def works(handle: LoadedKernel, factor: float) -> bool:
    x, y = torch.arange(8.0).reshape(2, 4), torch.empty(2, 4)
    handle.run((x, y), 2, 1, 1, ())
    return torch.equal(y, x * factor)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of every run of the compiler, except questions for its version."""
    commands: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if "--version" not in command:
            commands.append(command)
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(compiler.subprocess, "run", run)
    return commands


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Empty the table of loaded libraries for a test, and restore it afterwards."""
    before = dict(compiler._loaded)
    compiler._loaded.clear()
    yield
    compiler._loaded.clear()
    compiler._loaded.update(before)


@pytest.fixture
def usual() -> Compiler:
    """The compiler of this machine."""
    found = find_compiler()
    assert found is not None
    return found


def forget() -> None:
    """As in a new process."""
    compiler._loaded.clear()


# ------------------------------------------------------------------------------------------- loading


def test_kernels_are_compiled_together_and_once(tmp_path: Path, compilations: list[list[str]]) -> None:
    assert load([], cache_dir=tmp_path) == []
    factors = (2.0, 3.0, 4.0, 3.0)
    handles = load([scaled(k) for k in factors], cache_dir=tmp_path)
    assert handles[1] is handles[3]
    assert all(works(h, k) for h, k in zip(handles, factors, strict=True))
    assert len(compilations) == 1
    assert len({os.stat(p).st_ino for p in tmp_path.glob("*.so")}) == 1
    assert len(list(tmp_path.iterdir())) == 3

    again = load([scaled(4.0), scaled(2.0)], cache_dir=tmp_path)
    assert again[0] is handles[2] and again[1] is handles[0]
    forget()
    found = load([scaled(3.0)], cache_dir=tmp_path)[0]
    assert found is not handles[1] and works(found, 3.0)
    assert len(compilations) == 1


def test_only_what_is_missing_is_compiled(tmp_path: Path, compilations: list[list[str]]) -> None:
    load([scaled(2.0)], cache_dir=tmp_path)
    forget()
    handles = load([scaled(2.0), scaled(5.0)], cache_dir=tmp_path)
    assert works(handles[0], 2.0) and works(handles[1], 5.0)
    assert len(compilations) == 2
    assert len({os.stat(p).st_ino for p in tmp_path.glob("*.so")}) == 2


def test_a_handle_shows_what_it_runs(tmp_path: Path) -> None:
    d = scaled(2.0)
    (handle,) = load([d], cache_dir=tmp_path)
    assert handle.description.key == d.key
    assert handle.source == compiler.source_of(d) == cpp.generate(d).source
    assert handle.library.parent == tmp_path
    assert cpp.symbol_of(d) in repr(handle.run)


def test_another_compiler_flag_or_header_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include"
    shutil.copytree(compiler.INCLUDE, include)
    cache = tmp_path / "cache"

    def compiled() -> int:
        forget()
        load([scaled(2.0)], cache_dir=cache, compiler=find_compiler())
        return len(list(cache.iterdir()))

    assert compiled() == compiled() == 1
    monkeypatch.setattr(compiler, "INCLUDE", include)
    assert compiled() == 1
    header = include / "te_cpu_functions.h"
    header.write_text(header.read_text() + "\n")
    assert compiled() == 2
    forget()
    load([scaled(2.0)], cache_dir=cache, compiler=find_compiler(flags=()))
    assert len(list(cache.iterdir())) == 3


# ------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("harm", ["empty", "cut", "flip", "text", "folder link"])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, compilations: list[list[str]], harm: str) -> None:
    load([scaled(2.0)], cache_dir=tmp_path)
    (library,) = tmp_path.glob("*.so")
    content = library.read_bytes()
    library.unlink()  # this process has the old file in use
    if harm == "folder link":
        library.symlink_to(tmp_path / "nowhere")
    else:
        flipped = bytes([*content[:5000], content[5000] ^ 1, *content[5001:]])
        library.write_bytes({"empty": b"", "cut": content[:-4096], "flip": flipped, "text": b"hello"}[harm])
    forget()
    (handle,) = load([scaled(2.0)], cache_dir=tmp_path)
    assert works(handle, 2.0)
    assert len(compilations) == 2
    forget()
    assert works(load([scaled(2.0)], cache_dir=tmp_path)[0], 2.0)
    assert len(compilations) == 2


def test_a_whole_file_without_the_kernel_is_compiled_again(tmp_path: Path, compilations: list[list[str]]) -> None:
    two = load([scaled(2.0)], cache_dir=tmp_path)[0].library
    three = load([scaled(3.0)], cache_dir=tmp_path)[0].library
    os.replace(three, two)
    forget()
    assert works(load([scaled(2.0)], cache_dir=tmp_path)[0], 2.0)
    assert len(compilations) == 3


def _load_three(folder: Path, together: Barrier) -> None:
    together.wait(120)
    handles = load([scaled(float(k)) for k in range(2, 5)], cache_dir=folder)
    assert all(works(h, float(k)) for k, h in enumerate(handles, 2))


def test_processes_that_compile_at_once_do_not_meet(tmp_path: Path) -> None:
    context = forking()
    together = context.Barrier(2)
    processes = [context.Process(target=_load_three, args=(tmp_path, together)) for _ in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_refused_kernel_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cpp.generate

    def generate(d: KernelDescription) -> cpp.CppKernel:
        kernel = real(d)
        wrong = kernel.source.replace("te::store(", "te::stoer(") if d.name == "wrong" else kernel.source
        return dataclasses.replace(kernel, source=wrong)

    monkeypatch.setattr(compiler.cpp, "generate", generate)
    with pytest.raises(KernelCompileError) as caught:
        load([scaled(11.0, "right"), scaled(12.0, "wrong")], cache_dir=tmp_path)
    compiler._generated.clear()
    message = str(caught.value)
    head, line, rest = message.split("\n", 2)
    assert "refused kernel wrong (wrong_" in head
    assert line.strip().startswith("te::stoer(y_tensor, at, ")
    assert "stoer" in rest and "error" in rest
    assert not list(tmp_path.iterdir())


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_compiler("no-such-compiler") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    with pytest.raises(NoCompiler, match="apt-get install g"):
        load([scaled(2.0)], cache_dir=tmp_path)


@pytest.mark.parametrize("command", ["{}", " {} ", "'{}' -DSPARE", "env '{}'"])
def test_cxx_names_the_compiler(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual: Compiler) -> None:
    mine = tmp_path / "a b" / "mine"
    mine.parent.mkdir()
    mine.symlink_to(usual.path)
    monkeypatch.setenv("CXX", command.format(mine))
    found = find_compiler()
    assert found is not None and found.path == (shutil.which("env") if "env" in command else str(mine))
    assert works(load([scaled(2.0)], cache_dir=tmp_path / "cache")[0], 2.0)
    assert find_compiler(usual.path) == usual  # what config.compiler says counts more


@pytest.mark.parametrize("command", ["no-such-compiler -O1", "false", '"'])
def test_a_cxx_that_cannot_be_run_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    assert find_compiler() is None
    with pytest.raises(NoCompiler, match=f"{re.escape(repr(command))} that CXX names cannot be run"):
        load([scaled(2.0)])
    assert "that te_fuser.config.compiler names" in compiler.why_no_compiler("mine")


def test_something_that_is_no_compiler_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usual: Compiler
) -> None:
    broken, working = tmp_path / "c++", tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    working.symlink_to(usual.path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    chosen = find_compiler()
    assert chosen is not None and chosen.path == str(working)


def test_a_folder_that_cannot_be_made_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with replaced(file / "cache", "Not a directory"):
        (handle,) = load([scaled(2.0)], cache_dir=file / "cache")
    assert works(handle, 2.0) and tmp_path not in handle.library.parents
    forget()
    (again,) = load([scaled(2.0)], cache_dir=file / "cache")  # without another word, and not compiled again
    assert again.library == handle.library and again is not handle


@contextlib.contextmanager
def replaced(folder: Path, why: str) -> Iterator[None]:
    """Inside, a warning says why the folder cannot be used, what is used instead, and what to do."""
    because = rf"because {re.escape(str(folder))} cannot be used \(.*{why}"
    with pytest.warns(RuntimeWarning, match=rf"in \S+te_fuser-\S+, .* {because}.*set te_fuser.config.cache_dir"):
        yield


def program(path: Path, text: str) -> Compiler:
    """A program in the place of a compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    found = find_compiler(str(path))
    assert found is not None
    return found


def full(path: Path, real: Compiler, folder: object = "") -> Compiler:
    """A compiler that finds no room in a folder, or anywhere."""
    says = 'echo "error writing to $TMPDIR/unit.s: No space left on device" >&2; exit 1'
    return program(path, f'case "$*" in *"-o {folder}/"*) {says};; esac\nexec {real.path} "$@"')


def test_a_full_disk_is_no_refused_kernel(tmp_path: Path, usual: Compiler) -> None:
    cache = tmp_path / "cache"
    with replaced(cache, "No space left on device"):
        (handle,) = load([scaled(2.0)], cache_dir=cache, compiler=full(tmp_path / "c++", usual, cache))
    assert works(handle, 2.0) and not list(cache.iterdir())


def test_a_program_that_makes_no_library_is_named_with_its_words(tmp_path: Path, usual: Compiler) -> None:
    """Also where no disk has room."""
    for one, words in (
        (full(tmp_path / "c++", usual), "failed on kernels scale_fwd_.*: error writing .*: No space left"),
        (program(tmp_path / "idle", "echo idle 1.0"), "idle 1.0. failed on kernels .*: it wrote no library"),
    ):
        with pytest.raises(KernelCompileError, match=words):
            load([scaled(2.0)], cache_dir=tmp_path / "cache", compiler=one)


def test_a_folder_where_a_library_should_be(tmp_path: Path) -> None:
    (library,) = (k.library for k in load([scaled(2.0)], cache_dir=tmp_path))
    library.unlink()
    library.mkdir()
    forget()
    with replaced(tmp_path, "directory"):
        assert works(load([scaled(2.0)], cache_dir=tmp_path)[0], 2.0)


def test_a_folder_from_which_nothing_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is mounted so that nothing on it is run."""
    real = compiler._open
    monkeypatch.setattr(compiler, "_open", lambda key, kernel, folder: folder != tmp_path and real(key, kernel, folder))
    with replaced(tmp_path, "cannot be loaded"):
        assert works(load([scaled(2.0)], cache_dir=tmp_path)[0], 2.0)


def test_what_lies_in_a_folder_that_cannot_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[list[str]]
) -> None:
    load([scaled(2.0)], cache_dir=tmp_path)
    forget()
    real = os.access
    monkeypatch.setattr(cache_files.os, "access", lambda path, mode: path != tmp_path and real(path, mode))
    (handle,) = load([scaled(2.0)], cache_dir=tmp_path)
    assert works(handle, 2.0) and handle.library.parent == tmp_path and len(compilations) == 1
    with replaced(tmp_path, "Permission denied"):
        load([scaled(3.0)], cache_dir=tmp_path)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(compiler.os, "link", link)
    handles = load([scaled(2.0), scaled(3.0)], cache_dir=tmp_path)
    assert works(handles[0], 2.0) and works(handles[1], 3.0)
    assert len(list(tmp_path.iterdir())) == 2


def test_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and no entry in the list of users, as in some containers."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_files.Path, "home", home)
    monkeypatch.setattr(cache_files, "_given_up", set())
    with replaced(Path("~/.cache/te_fuser"), "Could not determine home directory"):
        assert works(load([scaled(2.0)])[0], 2.0)
    assert cache_files.tuned_folder() == cache_files.private_folder() / "tuned"


def test_the_default_folder_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.default_cache_dir() == tmp_path / "te_fuser" / "cpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler.default_cache_dir() == Path.home() / ".cache" / "te_fuser" / "cpu"
