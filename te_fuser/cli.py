"""The command te-fuser: a model explained, verified and timed; devices, the kernel cache, and this installation.

Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from te_fuser import model_commands

if TYPE_CHECKING:
    from te_fuser.recipe import Recipe


@dataclass(frozen=True)
class Command:
    """One word after te-fuser: what it does, and which options it takes."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    options: Callable[[argparse.ArgumentParser], None] | None = None
    example: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="te-fuser",
        description="Explain, verify and time a model; look into this installation.",
        epilog="exit status: 0 if all is well, 1 if something is missing or differs, 2 for a wrong command",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        epilog = f"example: te-fuser {command.name} {command.example}".rstrip()
        sub = commands.add_parser(command.name, help=command.help, description=command.help, epilog=epilog)
        sub.set_defaults(run=command.run)
        if command.options is not None:
            command.options(sub)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # who read it has enough, as `head` has; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except model_commands.UsageError as error:
        print(f"te-fuser {chosen.command}: {error}", file=sys.stderr)
        return 2
    return status


def _devices(_: argparse.Namespace) -> int:
    from te_fuser.fuser.plan.device import DEVICES

    dtypes = ("float32", "bfloat16", "float16", "float64")
    table = [["device", "copy", *dtypes, "other float32", "launch", "capability"]]
    for d in DEVICES.values():
        rates = [_rate(d.matrix_rate[dtype]) for dtype in dtypes]
        capability = "-" if d.capability is None else ".".join(map(str, d.capability))
        launch = f"{d.launch * 1e6:g} us"
        table.append([d.name, _rate(d.bandwidth), *rates, _rate(d.vector_rate), launch, capability])
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    for name, *cells in table:
        print("  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip())
    estimated = ", ".join(d.name for d in DEVICES.values() if d.estimate)
    print(
        "copy: bytes/s; dtypes: operations/s of large matrix products. Use one by model.explain(x, device=NAME). "
        f"Not measured but estimated: {estimated}."
    )
    return 0


def _rate(number: float) -> str:
    unit, size = ("T", 1e12) if number >= 1e12 else ("G", 1e9)
    return f"{number / size:.4g} {unit}"


# -------------------------------------------------------------------------------------------------------- cache


def _cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="look there: where a program set te_fuser.config.cache_dir")
    parser.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=("kernels", "tuned", "all"),
        help="delete kernels, which are compiled again when needed, or what tune() found, or (by default) all of it",
    )


def _cache(chosen: argparse.Namespace) -> int:
    from te_fuser.codegen import cache_files, compiler, nvrtc
    from te_fuser.codegen.cache_files import abandoned
    from te_fuser.config import config

    given = chosen.folder or config.cache_dir
    folders = (
        ("kernels", "CPU kernels", given or compiler.default_cache_dir(), "*.so"),
        ("kernels", "GPU kernels", given or nvrtc.cache_folder(), "*.cubin"),
        ("tuned", "tuned choices", cache_files.tuned_folder(given), "*.json"),
    )
    shown = deleted = shown_size = deleted_size = 0
    for kind, what, folder, pattern in folders:
        files = sorted(folder.glob(pattern)) if folder.is_dir() else []
        sizes = {}  # kernels that were compiled together are one file under several names: it counts once
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # another process may delete them
                status = path.stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
        taken = sum(sizes.values())
        print(f"{what}: {len(files)} in {folder} ({_size(taken)})")
        shown, shown_size = shown + len(files), shown_size + taken
        if chosen.clear in (kind, "all"):
            for path in (*files, *abandoned(folder)):
                path.unlink(missing_ok=True)
            deleted, deleted_size = deleted + len(files), deleted_size + taken
    word, files_of, size = ("deleted", deleted, deleted_size) if chosen.clear else ("together", shown, shown_size)
    print(f"{word}: {files_of} files, {_size(size)}")
    return 0


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


# -------------------------------------------------------------------------------------------- version and doctor


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _version(chosen: argparse.Namespace) -> int:
    from te_fuser import __version__

    python, parts = sys.version.split()[0], _parts()
    if chosen.json:
        print(json.dumps({"te_fuser": __version__, "Python": python, **parts}, indent=1))
        return 0
    print(f"te_fuser {__version__}, Python {python}")
    for name, text in parts.items():
        print(f"{name + ':':23}{text}")
    return 0


_ABSENT = ("missing", "not installed", "refused")


def _doctor(chosen: argparse.Namespace) -> int:
    """Exit status 1 where no kernel can be generated for the device that models run on."""
    import torch

    parts = _parts()
    needed = "NVRTC" if torch.cuda.is_available() else "C++ compiler"
    found = {
        name: {"ok": not text.startswith(_ABSENT), "needed": name == needed, "state": text}
        for name, text in parts.items()
    }
    well = bool(found[needed]["ok"])
    if chosen.json:
        print(json.dumps({"ok": well, "parts": found}, indent=1))
        return 0 if well else 1
    for name, part in found.items():
        mark = "ok" if part["ok"] else "FAILS" if part["needed"] else "-"
        print(f"{mark:<6}{name + ':':23}{part['state']}")
    missing = [name for name, part in found.items() if not part["ok"] and not part["needed"]]
    more = f"; optional, and not here: {', '.join(missing)}" if missing else ""
    print(f"te_fuser runs here as it is meant to{more}" if well else f"{needed} is missing, and kernels need it")
    return 0 if well else 1


def _parts() -> dict[str, str]:
    """State of all that te_fuser builds on, with optional packages and recipes."""
    from te_fuser import recipe

    parts = _own_parts() | _optional_parts()
    for name in recipe.__all__:
        kind = getattr(recipe, name)
        if isinstance(kind, type) and issubclass(kind, recipe.Recipe) and kind is not recipe.Recipe:
            parts[kind.__name__] = f"FP8, {_runs(kind())}"
    return parts


def _own_parts() -> dict[str, str]:
    """Version of each thing that te_fuser builds on, or what follows where it is missing."""
    import torch

    from te_fuser import _native
    from te_fuser.codegen import nvrtc
    from te_fuser.codegen.compiler import find_compiler, why_no_compiler
    from te_fuser.config import config

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    pytorch = f"{torch.__version__} ({built}), no GPU at hand: models run on the CPU"
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        pytorch = f"{torch.__version__}, GPU: {names}"
    found = find_compiler(config.compiler)
    if found is None:
        compiler = f"missing, so on the CPU row ops run as PyTorch operations: {why_no_compiler(config.compiler)}"
    else:
        compiler = f"{found.path} ({found.version})"
    threads = f"kernels run on {_native.num_threads()} threads ({_native.thread_backend()})"
    parts = {"torch": pytorch, "C++ compiler": compiler, "native module": f"version {_native.version}, {threads}"}
    try:
        version = ".".join(map(str, nvrtc.compiler_version()))
    except nvrtc.CompilerMissing as error:
        return {**parts, "NVRTC": f"missing: {error}"}
    headers = nvrtc.cuda_include_folders()
    without = "; no headers of CUDA for kernels of your own: pip install nvidia-cuda-runtime"
    return {**parts, "NVRTC": version + (f", headers in {headers[0]}" if headers else without)}


def _optional_parts() -> dict[str, str]:
    """Fit to this machine of PyTorch's libraries, and of packages of the extra `hopper`."""
    import torch

    from te_fuser.fusions.registry import libraries
    from te_fuser.kernels.packages.optional import PACKAGES

    parts = {}
    for library in libraries():
        why = library.obstacle(torch.device("cuda"))
        instead = f"; {library.note_without}" if torch.version.cuda else ""
        parts[library.name] = f"version {library.version()}" if why is None else f"missing: {why}{instead}"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for package in PACKAGES.values():
        parts[package.name] = package.state(torch.version.cuda, capability)
    return parts


def _runs(recipe: Recipe) -> str:
    """Description of how products run by a recipe on this machine."""
    import torch

    from te_fuser.kernels.cublaslt.products import obstacle_on

    if not torch.cuda.is_available():
        return "emulated on the CPU"
    why = obstacle_on(torch.device("cuda"), scales=recipe.scales)
    if why is None:
        return "products by cuBLASLt"
    return f"refused: {why}; te_fuser.config.emulate_fp8 = True has it emulated"


_EXAMPLE = "model.py:build --input 8,128,512 --dtype bfloat16"
COMMANDS = (
    Command("doctor", "say what works here, what is missing, and the line that installs it", _doctor, _json_option),
    Command(
        "explain", "show the plans of a model: which kernels run, what is kept, what was not fused and why",
        model_commands.explain, model_commands.explain_options, f"{_EXAMPLE} --device h200 --html plan.html",
    ),
    Command(
        "verify", "compare a model with its ops one by one in float64, values and all gradients",
        model_commands.verify_model, model_commands.add_model, _EXAMPLE,
    ),
    Command(
        "bench", "time a model beside its ops one by one, and these compiled by torch.compile",
        model_commands.bench, model_commands.bench_options, f"{_EXAMPLE} --plot times.svg",
    ),
    Command("devices", "list the devices that plans can be made for by name", _devices),
    Command(
        "cache", "show or clear the folders of compiled kernels and tuned choices",
        _cache, _cache_options, "--clear kernels",
    ),
    Command("version", "show versions, and what is missing here", _version, _json_option, "--json"),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
