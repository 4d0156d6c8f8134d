"""Instructions of a kernel's PTX that come before it waits for earlier kernels."""

from __future__ import annotations

import re

from te_fuser.codegen import nvrtc

ACCESS = re.compile(r"\b(ld|st|red|atom|cp\.async|prefetch)[\w.]*\.(global|L1|L2)|\bld\.(volatile|relaxed|acquire)")


def too_early_in(text: str) -> list[str]:
    """Faults of the kernels of a PTX: those that never wait, and what is read or written before.

    Jumps cannot hide anything: whatever stands above the wait is looked at, and no label may.
    """
    found = []
    for symbol, lines in _bodies(text).items():
        before = lines[: next((k for k, line in enumerate(lines) if "griddepcontrol.wait" in line), len(lines))]
        if len(before) == len(lines):
            found.append(f"{symbol} never waits")
        found += [f"{symbol}: {line}" for line in before if ACCESS.search(line) or line.startswith(("$", "@", "bra"))]
    return found


def kernels(source: str, arch: str) -> dict[str, list[str]]:
    """The instructions of each kernel."""
    return _bodies(_virtual(source, arch))


def _virtual(source: str, arch: str) -> str:
    return compiled(source, arch.replace("sm", "compute"))[0]


def _bodies(text: str) -> dict[str, list[str]]:
    bodies = re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", text, re.DOTALL)
    return {symbol: [line.strip() for line in body.splitlines() if line.strip()] for symbol, body in bodies}


def compiled(source: str, arch: str) -> tuple[str, tuple[nvrtc.Resources, ...]]:
    """The PTX, and what kernels take; nothing of an architecture that is virtual, for which nothing is assembled."""
    from cuda.bindings import nvrtc as bindings

    folders = (nvrtc.INCLUDE, *nvrtc.cuda_include_folders())
    options = [f"-arch={arch}", *nvrtc._OPTIONS, *(f"-I{folder}" for folder in folders)]

    def done(error: bindings.nvrtcResult, *values: int) -> int:
        assert error == bindings.nvrtcResult.NVRTC_SUCCESS, error
        return values[0] if values else 0

    program = done(*bindings.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    done(*bindings.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
    text = b" " * done(*bindings.nvrtcGetPTXSize(program))
    log = b" " * (
        done(*bindings.nvrtcGetProgramLogSize(program)) + 1
    )  # bytes of one are Python's own, and not to be written
    done(*bindings.nvrtcGetPTX(program, text))
    done(*bindings.nvrtcGetProgramLog(program, log))
    done(*bindings.nvrtcDestroyProgram(program))
    return text.decode(), nvrtc._resources(log.decode())
