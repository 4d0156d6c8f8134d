"""The command te-fuser: named devices, the kernel cache, and what this installation can do.

Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_fuser.fuser.plan.device import Device
    from te_fuser.fusions.library import Library
    from te_fuser.recipe import Recipe


@dataclass(frozen=True)
class Command:
    """One word after te-fuser: what it does, and which options it takes."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    options: Callable[[argparse.ArgumentParser], None] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="te-fuser", description="Look into te_fuser: devices, kernel cache, version.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        sub.set_defaults(run=command.run)
        if command.options is not None:
            command.options(sub)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


# ------------------------------------------------------------------------------------------------------ devices


def _devices(_: argparse.Namespace) -> int:
    from te_fuser.fuser.plan.device import DEVICES

    dtypes = ("float32", "bfloat16", "float16", "float64")
    heading = ["device", "copy", *dtypes, "other float32", "launch", "capability"]
    _print_table([heading, *(_device_row(d, dtypes) for d in DEVICES.values())])
    estimated = ", ".join(d.name for d in DEVICES.values() if d.estimate)
    print(
        "copy: bytes/s; dtypes: operations/s of large matrix products. Use one by model.explain(x, device=NAME). "
        f"Not measured but estimated: {estimated}."
    )
    return 0


def _device_row(device: Device, dtypes: Sequence[str]) -> list[str]:
    rates = [_rate(device.matrix_rate[d]) for d in dtypes]
    capability = "-" if device.capability is None else ".".join(map(str, device.capability))
    launch = f"{device.launch * 1e6:g} us"
    return [device.name, _rate(device.bandwidth), *rates, _rate(device.vector_rate), launch, capability]


def _rate(number: float) -> str:
    unit, size = ("T", 1e12) if number >= 1e12 else ("G", 1e9)
    return f"{number / size:.4g} {unit}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(w) if k else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


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
    from te_fuser.codegen.whole_file import abandoned

    shown = deleted = shown_size = deleted_size = 0
    for kind, what, folder, pattern in _cache_folders(chosen.folder):
        files = sorted(folder.glob(pattern)) if folder.is_dir() else []
        taken = _bytes_on_disk(files)
        print(f"{what}: {len(files)} in {folder} ({_size(taken)})")
        shown, shown_size = shown + len(files), shown_size + taken
        if chosen.clear in (kind, "all"):
            for path in (*files, *abandoned(folder)):
                path.unlink(missing_ok=True)
            deleted, deleted_size = deleted + len(files), deleted_size + taken
    word, files_of, size = ("deleted", deleted, deleted_size) if chosen.clear else ("together", shown, shown_size)
    print(f"{word}: {files_of} files, {_size(size)}")
    return 0


def _cache_folders(given: Path | None) -> Iterator[tuple[str, str, Path, str]]:
    from te_fuser.codegen import compiler, entry_file, nvrtc
    from te_fuser.config import config

    folder = given or config.cache_dir
    yield "kernels", "CPU kernels", folder or compiler.default_cache_dir(), "*.so"
    yield "kernels", "GPU kernels", folder or nvrtc.cache_folder(), "*.cubin"
    yield "tuned", "tuned choices", entry_file.tuned_folder(folder), "*.json"


def _bytes_on_disk(files: Sequence[Path]) -> int:
    """Kernels that were compiled together are one file under several names: it counts once."""
    found = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # another process may delete them
            status = path.stat()
            found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


# ------------------------------------------------------------------------------------------------------ version


def _version(_: argparse.Namespace) -> int:
    from te_fuser import __version__
    from te_fuser.fusions.library import libraries

    print(f"te_fuser {__version__}, Python {sys.version.split()[0]}")
    parts = {name: look() for name, look in _PARTS} | {found.name: _library_part(found) for found in libraries()}
    parts |= _optional_parts() | _recipe_parts()
    for name, text in parts.items():
        print(f"{name + ':':23}{text}")
    return 0


def _optional_parts() -> dict[str, str]:
    """The packages that the extra `hopper` brings -> whether they are there and fit this machine."""
    import torch

    from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack_matmul

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    packages = (cudnn_frontend.PACKAGE, flash_attn_4.PACKAGE, quack_matmul.PACKAGE)
    return {package.name: package.state(torch.version.cuda, capability) for package in packages}


def _recipe_parts() -> dict[str, str]:
    """The recipes of FP8 -> whether they run on this machine, and if not, why."""
    from te_fuser import recipe

    found = [t for name in recipe.__all__ if isinstance(t := getattr(recipe, name), type)]
    return {t.__name__: f"FP8, {_runs(t())}" for t in found if issubclass(t, recipe.Recipe) and t is not recipe.Recipe}


def _runs(recipe: Recipe) -> str:
    """How products run by a recipe here."""
    import torch

    from te_fuser.kernels.quantized_matmul import obstacle_on

    if not torch.cuda.is_available():
        return "emulated on the CPU"
    why = obstacle_on(torch.device("cuda"), scales=recipe.scales)
    if why is None:
        return "products by cuBLASLt"
    return f"refused: {why}; te_fuser.config.emulate_fp8 = True has it emulated"


def _torch_part() -> str:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        return f"{torch.__version__}, GPU: {names}"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__} ({built}), no GPU at hand: models run on the CPU"


def _compiler_part() -> str:
    from te_fuser.codegen.compiler import find_compiler, why_no_compiler
    from te_fuser.config import config

    found = find_compiler(config.compiler)
    if found is None:
        return f"missing, so on the CPU row ops run as PyTorch operations: {why_no_compiler(config.compiler)}"
    return f"{found.path} ({found.version})"


def _native_part() -> str:
    from te_fuser import _native

    return f"version {_native.version}, kernels run on {_native.num_threads()} threads ({_native.thread_backend()})"


def _nvrtc_part() -> str:
    from te_fuser.codegen import nvrtc

    try:
        major, minor = nvrtc.compiler_version()
    except nvrtc.CompilerMissing as error:
        return f"missing: {error}"
    headers = nvrtc.cuda_include_folders()
    if not headers:
        return f"{major}.{minor}; no headers of CUDA for kernels of your own: pip install nvidia-cuda-runtime"
    return f"{major}.{minor}, headers in {headers[0]}"


def _library_part(library: Library) -> str:
    import torch

    why = library.obstacle(torch.device("cuda"))
    instead = f"; {library.note_without}" if torch.version.cuda else ""
    return f"version {library.version()}" if why is None else f"missing: {why}{instead}"


_PARTS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("torch", _torch_part),
    ("C++ compiler", _compiler_part),
    ("native module", _native_part),
    ("NVRTC", _nvrtc_part),
)

COMMANDS = (
    Command("devices", "list the devices that plans can be made for by name", _devices),
    Command("cache", "show or clear the folders of compiled kernels and tuned choices", _cache, _cache_options),
    Command("version", "show versions, and what is missing here", _version),
)


if __name__ == "__main__":
    sys.exit(main())
