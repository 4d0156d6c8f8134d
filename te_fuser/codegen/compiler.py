"""From kernel descriptions to callable kernels on the CPU: the system's C++ compiler, and a cache on disk.

A library is called by the digest of its text, the headers, the compiler and the processor; kernels that are compiled
together share one under several names (hard links). A checksum at its end tells a torn file, which is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from te_fuser.codegen import cache_files, cpp
from te_fuser.codegen.cpp import CppKernel
from te_fuser.codegen.description import KernelDescription

if TYPE_CHECKING:
    from te_fuser._native import CpuKernel

INCLUDE = Path(__file__).parent / "include"

# No -ffast-math: NaN and infinity mean something, and compensated sums would be "simplified" away.
_FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast",
    "-fno-exceptions", "-fno-rtti", "-w", "-shared", "-fPIC",
)  # fmt: skip
# The flags that choose the processor, by the name of this machine's architecture.
TARGET_FLAGS = {"x86_64": ("-march=native",), "AMD64": ("-march=native",), "aarch64": ("-mcpu=native",)}


class NoCompiler(RuntimeError):
    """Raised where this machine has no C++ compiler; the message says which ones were looked for."""


class KernelCompileError(RuntimeError):
    """The compiler refused a kernel; the message has the generated line and the compiler's words."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that takes g++'s options."""

    path: str
    version: str
    flags: tuple[str, ...]

    @functools.cached_property
    def identity(self) -> str:
        """A digest of what a library depends on besides its text."""
        headers = [path.read_text() for path in sorted(INCLUDE.glob("*.h"))]
        parts = [self.path, self.version, *self.flags, _processor(), *headers]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def find_compiler(name: str | None = None, *, flags: Sequence[str] | None = None) -> Compiler | None:
    """The compiler `name` (a path or a command), else CXX's, else c++, g++ or clang++.

    Args:
        flags: the flags that choose the processor, instead of those for the one at hand.
    """
    asked = _asked(name)
    for candidate in (asked,) if asked else ("c++", "g++", "clang++"):
        command, words = candidate, list[str]()
        if not shutil.which(candidate):  # no path, which may have spaces, but the words of a command
            with contextlib.suppress(ValueError):  # a quote that does not end
                command, *words = shlex.split(candidate)
        path = shutil.which(command)
        version = _version((path, *words)) if path else None
        if path and version:
            target = TARGET_FLAGS.get(platform.machine(), ()) if flags is None else tuple(flags)
            return Compiler(path, version, (*words, *_FLAGS, *target))
    return None


def why_no_compiler(name: str | None = None) -> str:
    """Error message for when `find_compiler(name)` finds none, with what to do."""
    asked = _asked(name)
    if asked:
        whose = "te_fuser.config.compiler" if name else "CXX"
        return f"the C++ compiler {asked!r} that {whose} names cannot be run; set {whose} to one that can"
    return (
        "no C++ compiler was found: install g++ or clang++ (Debian, Ubuntu: apt-get install g++), or set "
        "te_fuser.config.compiler or CXX"
    )


def _asked(name: str | None) -> str:
    return name or os.environ.get("CXX", "").strip()


@functools.cache
def _version(command: tuple[str, ...]) -> str | None:
    """The compiler's first line about itself; None when it cannot be run."""
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.partition("\n")[0]


@functools.cache
def _processor() -> str:
    """The processor's model and abilities, on which native code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


# -------------------------------------------------------------------------------------------------- cache

_MARK = b"te_fuser"


def default_cache_dir() -> Path:
    """Folder of compiled libraries: `te_fuser/cpu` in the user's cache folder."""
    return cache_files.user_cache_dir() / "cpu"


def _checksum(content: bytes) -> bytes:
    return _MARK + hashlib.blake2b(content, digest_size=24).digest()


def _publish(library: Path, names: Sequence[Path]) -> None:
    """Make the finished file known under each name at once."""
    for name in names:
        link = library.with_name(f"{library.name}-{name.stem}")
        try:
            os.link(library, link)
        except OSError:  # a file system without hard links
            shutil.copyfile(library, link)
        os.replace(link, name)
        link.unlink(missing_ok=True)  # renaming a link to the same file leaves both


# ------------------------------------------------------------------------------------------------ compiling


def _compile(kernels: Sequence[CppKernel], compiler: Compiler, names: Sequence[Path]) -> None:
    """Compile the kernels together, into one file with all these names."""
    folder = names[0].parent
    with tempfile.TemporaryDirectory(prefix="unit-", dir=folder) as work:
        source, library = Path(work) / "unit.cpp", Path(work) / "unit.so"
        # One translation unit; its line numbers count within each kernel, under the kernel's symbol.
        texts = [f'#line 1 "{k.symbol}"\n{k.source}' for k in kernels]
        source.write_text("\n".join(['#include "te_cpu.h"', *texts]))
        command = [compiler.path, *compiler.flags, "-I", str(INCLUDE), str(source), "-o", str(library)]
        # A session of its own: Ctrl-C is for the caller, who may want to save something, not for the compiler. What it
        # writes on its way goes where the rest does, so that one folder needs room.
        with_room = {**os.environ, "TMPDIR": work}
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, start_new_session=True, env=with_room
        )
        if answer.returncode != 0 or not library.exists():
            raise KernelCompileError(_explain(kernels, compiler, answer.stderr or "it wrote no library, and no words"))
        with library.open("r+b") as file:
            file.write(_checksum(file.read()))
        _publish(library, names)


def _explain(kernels: Sequence[CppKernel], compiler: Compiler, message: str) -> str:
    """The first place in a kernel that the compiler complains about, and its words."""
    found = re.search(rf"({'|'.join(re.escape(k.symbol) for k in kernels)}):(\d+)", message)
    who = f"{compiler.path} ({compiler.version})"
    if found is None:
        return f"{who} failed on kernels {', '.join(k.symbol for k in kernels)}: {message.strip()}"
    kernel, number = next(k for k in kernels if k.symbol == found[1]), int(found[2])
    lines = kernel.source.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"{who} refused kernel {kernel.description.name} ({kernel.symbol}), line {number}:\n  {line}\n{message}"


# -------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that is ready to run: `run` is the native one, the rest is to be looked at."""

    description: KernelDescription
    source: str
    library: Path
    run: CpuKernel


_loaded: dict[str, LoadedKernel] = {}
_generated: dict[str, CppKernel] = {}
_lock = threading.RLock()


def load(
    descriptions: Sequence[KernelDescription], *, cache_dir: Path | None = None, compiler: Compiler | None = None
) -> list[LoadedKernel]:
    """The kernels for these descriptions, in their order.

    What this process has loaded is used again; what lies in the cache is loaded; the rest is compiled in one run.

    Raises:
        NoCompiler, KernelCompileError: without a compiler; where it refuses a kernel.
        ValueError: for a description that generated kernels do not cover, such as one with float64.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise NoCompiler(why_no_compiler())
    with _lock:
        kernels = [_generate(d) for d in descriptions]
        texts = [f"{kernel.source}\n{compiler.identity}".encode() for kernel in kernels]
        keys = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts]
        wanted = {key: kernel for key, kernel in zip(keys, kernels, strict=True) if key not in _loaded}
        if wanted:
            _load(wanted, compiler, cache_dir or default_cache_dir())
        return [_loaded[key] for key in keys]


def source_of(description: KernelDescription) -> str:
    return _generate(description).source


def _generate(description: KernelDescription) -> CppKernel:
    if description.key not in _generated:
        _generated[description.key] = cpp.generate(description)
    return _generated[description.key]


def _load(wanted: dict[str, CppKernel], compiler: Compiler, folder: Path) -> None:
    here = cache_files.current(folder)
    missing = {key: kernel for key, kernel in wanted.items() if not _open(key, kernel, here)}
    if not missing:
        return
    here = cache_files.usable(folder)
    try:
        _make(missing, compiler, here)
    except (OSError, KernelCompileError) as error:
        elsewhere = cache_files.private_folder()
        if here == elsewhere:
            raise
        _make(missing, compiler, elsewhere)  # a kernel that is refused is refused there, too
        cache_files.give_up(folder, str(error).partition("\n")[0])


def _make(missing: dict[str, CppKernel], compiler: Compiler, folder: Path) -> None:
    """Compile kernels into the folder, and load them from there."""
    _compile(list(missing.values()), compiler, [_library(folder, key) for key in missing])
    for key, kernel in missing.items():
        if not _open(key, kernel, folder):
            raise KernelCompileError(
                f"the library of kernel {kernel.symbol} cannot be loaded from {_library(folder, key)}"
            )


def _library(folder: Path, key: str) -> Path:
    return folder / f"{key}.so"


def _open(key: str, kernel: CppKernel, folder: Path) -> bool:
    """Load one kernel; False when its library is not there, torn, or not for this machine."""
    from te_fuser._native import CpuKernel

    library, size = _library(folder, key), len(_checksum(b""))
    try:
        content = library.read_bytes()
        if len(content) <= size or content[-size:] != _checksum(content[:-size]):  # of the rest of it
            return False
        run = CpuKernel(
            str(library),
            kernel.symbol,
            kernel.dtypes,
            kernel.partial_floats,
            kernel.partial_floats_per_sample,
            kernel.scratch_floats,
            kernel.row_elements,
        )
    except (OSError, RuntimeError):
        return False
    _loaded[key] = LoadedKernel(kernel.description, kernel.source, library, run)
    return True
