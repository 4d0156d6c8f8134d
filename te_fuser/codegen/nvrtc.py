"""CUDA text to machine code, through NVRTC and the official bindings; no GPU and no CUDA toolkit is needed.

Machine code is kept on disk by text, headers, the compiler's version, its options and the architecture.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_fuser.codegen.cache_files import current, give_up, usable, user_cache_dir, write_whole

INCLUDE = Path(__file__).parent / "include"
# 177: a constant or an index that a kernel happens not to need.
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--diag-suppress=177")
_LOADING = threading.Lock()  # the bindings do not survive being imported by two threads at once
_INSTALL = "install a PyTorch built for CUDA, or pip install cuda-bindings nvidia-cuda-nvrtc"
_MAGIC = b"te_fuser cubin 1\n"


class CompilerMissing(RuntimeError):
    """NVRTC or its bindings cannot be loaded; the message says what to install."""


class CompileError(RuntimeError):
    """NVRTC refused a text; the message names the kernel and shows the line."""


@dataclass(frozen=True)
class Resources:
    """Registers of a thread, bytes that it spills, and static shared memory of a kernel."""

    symbol: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Machine code, and what its kernels take, if NVRTC passes the report on."""

    cubin: bytes
    resources: tuple[Resources, ...]


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for: from 9.0 on the one with the features of exactly that GPU."""
    number = capability[0] * 10 + capability[1]
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def compile_source(source: str, arch: str, *, name: str = "", cache: Path | None = None) -> Compiled:
    """Compile CUDA C++ text, or take it from the cache; errors call it `name`."""
    if not name:
        kernel = re.search(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", source)
        name = kernel[1] if kernel else "kernel"
    folder, file = cache or cache_folder(), f"{key(source, arch)}.cubin"
    found = _read(current(folder) / file)
    if found is None:
        found = _compile(source, arch, name)
        _keep(folder, file, found)
    return found


def cache_folder() -> Path:
    """Folder of compiled machine code: `te_fuser/cubin` in the user's cache folder."""
    return user_cache_dir() / "cubin"


def key(source: str, arch: str) -> str:
    """A digest of everything that the machine code depends on."""
    parts = [source, arch, repr(compiler_version()), repr(_OPTIONS), _headers_digest()]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


@functools.cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version; CompilerMissing when it cannot be loaded."""
    with _needing_compiler():
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def known_architectures() -> frozenset[int]:
    """The architectures that NVRTC compiles for: 90 for compute capability 9.0."""
    with _needing_compiler():
        from cuda.bindings import nvrtc

        _, found = nvrtc.nvrtcGetSupportedArchs()
    return frozenset(found)


@contextlib.contextmanager
def _needing_compiler() -> Iterator[None]:
    try:
        with _LOADING:
            yield
    except (ImportError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split())  # the loader's words may be several lines
        raise CompilerMissing(f"kernels are compiled by NVRTC, which cannot be loaded ({why}); {_INSTALL}") from error


@functools.cache
def _headers_digest() -> str:
    """Our own headers by content, CUDA's by their version."""
    digest = hashlib.blake2b(digest_size=16)
    headers = sorted(p for p in INCLUDE.rglob("*") if p.suffix in (".h", ".cuh"))
    headers += [folder / "cuda.h" for folder in cuda_include_folders()]
    for path in headers:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def nvidia_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


@functools.cache
def cuda_include_folders() -> tuple[Path, ...]:
    """The folder with CUDA's own headers, for kernels written by hand, if there is one."""
    candidates = [p / inner / "include" for p in nvidia_folders() for inner in ("cu13", "cuda_runtime")]
    candidates += [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    return tuple(p for p in candidates if (p / "cuda.h").is_file())[:1]


# ------------------------------------------------------------------------------------------------- compiling


def _compile(source: str, arch: str, name: str) -> Compiled:
    folders = (INCLUDE, *cuda_include_folders())
    options = [f"--gpu-architecture={arch}", *_OPTIONS, *(f"--include-path={folder}" for folder in folders)]
    with _needing_compiler():
        from cuda.bindings import nvrtc
    program = _done(nvrtc, *nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        said = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        log = said.rstrip(b"\0").decode(errors="replace")
        if error:
            raise CompileError(_explained(log or f"{error.name}, and nothing in its log", source, arch, name))
        cubin = _text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, _resources(log))


def _text(nvrtc: Any, program: Any, size_of: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    """Bytes that NVRTC holds for a program, by its functions for size and copy."""
    text = bytearray(_done(nvrtc, *size_of(program)))
    _done(nvrtc, *get(program, text))
    return bytes(text)


def _done(nvrtc: Any, error: Any, *values: Any) -> Any:
    if error:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")
    return values[0] if values else None


def _explained(message: str, source: str, arch: str, name: str) -> str:
    """NVRTC's message, with the line that it means."""
    head = f"kernel {name} does not compile for {arch}"
    where = re.search(r"^(\S+)\((\d+)\): (?:catastrophic )?error: *(.*)", message, re.MULTILINE)
    if not where:
        return f"{head}: {message.strip()}"
    file, number, lines = where[1], int(where[2]), source.splitlines()
    line = f"\n    {lines[number - 1].strip()}" if file == f"{name}.cu" and number <= len(lines) else ""
    return f"{head}: {file} line {number}: {where[3].strip()}{line}\n\n{message.strip()}"


_NUMBERS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "shared_bytes": r"(\d+) bytes smem",
}


def _resources(log: str) -> tuple[Resources, ...]:
    """The assembler's report."""
    found = []
    for part in log.split("Compiling entry function")[1:]:
        symbol = re.search(r"'(\w+)'", part)
        numbers = {n: int(m[1]) if (m := re.search(p, part)) else 0 for n, p in _NUMBERS.items()}
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        found.append(Resources(symbol=symbol[1] if symbol else "", spilled_bytes=spilled, **numbers))
    return tuple(found)


def _read(path: Path) -> Compiled | None:
    """Code that is kept at `path`; None where the file is missing or incomplete."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    if not data.startswith(_MAGIC) or hashlib.sha256(data[start:]).digest() != data[len(_MAGIC) : start]:
        return None
    report, _, cubin = data[start:].partition(b"\n")
    return Compiled(cubin, tuple(Resources(**r) for r in json.loads(report)))


def _keep(folder: Path, file: str, compiled: Compiled) -> None:
    """Keep it in the folder, or for this process alone; where neither can be, it costs only time."""
    body = json.dumps([asdict(r) for r in compiled.resources]).encode() + b"\n" + compiled.cubin
    data = _MAGIC + hashlib.sha256(body).digest() + body
    with contextlib.suppress(OSError):
        try:
            write_whole(usable(folder) / file, data)
        except OSError as error:
            write_whole(give_up(folder, error.strerror or str(error)) / file, data)
