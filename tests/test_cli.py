"""The command te-fuser."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_fuser import cli
from te_fuser.codegen import compiler, nvrtc
from te_fuser.config import config
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, optional, quack


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """An empty cache: the folders of CPU and GPU kernels, and of measured choices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config, "cache_dir", None)
    home = tmp_path / "te_fuser"
    return home / "cpu", home / "cubin", home / "tuned"


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    heading, *rows, legend = lines(capsys, "devices")
    assert [row.split()[0] for row in rows] == list(DEVICES)
    assert "bfloat16" in heading and "model.explain(x, device=NAME)" in legend
    h200 = next(row for row in rows if row.startswith("h200"))
    assert "4.2 T" in h200 and "790 T" in h200 and h200.endswith("9.0")
    assert len({len(heading), *map(len, rows)}) == 1


def test_an_empty_cache(capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path, Path]) -> None:
    cpu, gpu, tuned, total = lines(capsys, "cache")
    assert cpu == f"CPU kernels: 0 in {folders[0]} (0 bytes)"
    assert gpu == f"GPU kernels: 0 in {folders[1]} (0 bytes)"
    assert tuned == f"tuned choices: 0 in {folders[2]} (0 bytes)"
    assert total == "together: 0 files, 0 bytes"
    assert not folders[0].exists()


def fill(folders: tuple[Path, Path, Path]) -> list[Path]:
    """Two kernels in one file, one alone, one for the GPU, measured choices, and a file that is none."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    first, second, third = (folders[0] / f"{name}.so" for name in "abc")
    first.write_bytes(b"x" * 3000)
    os.link(first, second)
    third.write_bytes(b"x" * 1000)
    cubin, tuned, other = folders[1] / "d.cubin", folders[2] / "gpu.json", folders[0] / "notes.txt"
    cubin.write_bytes(b"x" * 24)
    tuned.write_text("{}")
    other.write_text("mine")
    return [first, second, third, cubin, tuned, other]


def test_the_cache_counts_kernels_and_bytes_on_disk(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path, Path]
) -> None:
    fill(folders)
    cpu, gpu, tuned, total = lines(capsys, "cache")
    assert cpu.startswith("CPU kernels: 3 in ") and cpu.endswith("(3.9 KiB)")
    assert gpu.startswith("GPU kernels: 1 in ") and gpu.endswith("(24 bytes)")
    assert tuned.startswith("tuned choices: 1 in ") and total == "together: 5 files, 3.9 KiB"


def test_clearing_the_cache_deletes_kernels_alone(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path, Path]
) -> None:
    *kernels, other = fill(folders)
    assert lines(capsys, "cache", "--clear")[-1] == "deleted: 5 files, 3.9 KiB"
    assert not any(path.exists() for path in kernels) and other.exists()
    assert lines(capsys, "cache")[-1] == "together: 0 files, 0 bytes"


@pytest.mark.parametrize(("what", "left"), [("kernels", [4]), ("tuned", [0, 1, 2, 3]), ("all", [])])
def test_a_part_of_the_cache_is_cleared(
    what: str, left: list[int], capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path, Path]
) -> None:
    *files, _ = fill(folders)
    assert lines(capsys, "cache", "--clear", what)[-1].startswith(f"deleted: {5 - len(left)} files, ")
    assert [k for k, path in enumerate(files) if path.exists()] == left


def test_the_cache_is_where_the_setting_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    fill((mine, mine, mine / "tuned"))
    # Kernels for either device lie in the one folder that was set.
    found = lines(capsys, "cache", "--folder", str(mine))
    assert [line.split()[2] for line in found] == ["3", "1", "1", "files,"]
    assert all(str(mine) in line for line in found[:3])
    monkeypatch.setattr(config, "cache_dir", mine)
    assert lines(capsys, "cache") == found


def test_version_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    first, *parts = lines(capsys, "version")
    assert first.startswith("te_fuser 0.") and "Python 3." in first
    assert [p.partition(":")[0] for p in parts] == [
        "torch", "C++ compiler", "native module", "NVRTC", "cuBLASLt",
        "nvidia-cudnn-frontend", "flash-attn-4", "quack-kernels",
        "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling",
    ]  # fmt: skip


def test_version_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvrtc() -> tuple[int, int]:
        raise nvrtc.CompilerMissing("install something")

    monkeypatch.setattr(compiler, "find_compiler", lambda name=None: None)
    monkeypatch.setattr(nvrtc, "compiler_version", no_nvrtc)
    monkeypatch.setattr(products, "obstacle", lambda: "it is not there")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    text = "\n".join(lines(capsys, "version"))
    assert "missing, so on the CPU row ops run as PyTorch operations: no C++ compiler was found: install g++" in text
    assert "NVRTC:                 missing: install something" in text
    assert (
        "cuBLASLt:              missing: it is not there; products run by PyTorch, with nothing fused into them" in text
    )


NOT_THERE, OLD, NEW, CUTLASS = {}, {"flash-attn-4": "3.0"}, {"flash-attn-4": "4.0.0b36"}, "nvidia-cutlass-dsl-libs-cu13"
FITTING = {
    "cpu": (NOT_THERE, None, None, "not installed; of no use here: PyTorch is built without CUDA"),
    "cuda_12": (NOT_THERE, "12.9", None, 'not installed; fits CUDA 12.9: pip install "flash-attn-4>=4.0.0b36"'),
    "cuda_13": (NOT_THERE, "13.0", (9, 0), 'not installed; fits CUDA 13.0: pip install "flash-attn-4[cu13]>=4.0.0b36"'),
    "old": (OLD, "12.9", (9, 0), 'version 3.0; too old: pip install "flash-attn-4>=4.0.0b36"'),
    "there": (NEW, "12.9", (9, 0), "version 4.0.0b36; fits CUDA 12.9"),
    "without_libraries": (NEW, "13.0", (9, 0),
     "version 4.0.0b36; its libraries for CUDA 13.0 are missing: pip install"),
    "with_libraries": (NEW | {CUTLASS: "4.8.1"}, "13.0", (9, 0), "version 4.0.0b36; fits CUDA 13.0"),
    "other_gpu": (NEW, "12.9", (8, 0), "used on compute capability 9 alone, this GPU has 8.0"),
}  # fmt: skip


def a_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None, cublaslt: int) -> None:
    """One of this capability, if any, and a version of cuBLASLt."""
    patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda k: "one")
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(products, "obstacle", lambda: None)
    patch.setattr(products, "version", lambda: cublaslt)


@pytest.mark.parametrize("case", FITTING)
def test_version_says_which_packages_fit(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, cuda, capability, words = FITTING[case]
    monkeypatch.setattr(optional, "version_of", installed.get)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    a_gpu(monkeypatch, capability, 1)
    (line,) = [line for line in lines(capsys, "version") if line.startswith("flash-attn-4:")]
    assert words in line


RECIPES = {
    None: "DelayedScaling:        FP8, emulated on the CPU",
    (8, 0): "DelayedScaling:        FP8, refused: products of 8 bits take compute capability 8.9, this GPU has 8.0; "
    "te_fuser.config.emulate_fp8 = True has it emulated",
    (9, 0): "DelayedScaling:        FP8, products by cuBLASLt",
}
OTHER_RECIPES = {
    None: ["Float8BlockScaling:    FP8, emulated on the CPU", "MXFP8BlockScaling:     FP8, emulated on the CPU"],
    (8, 0): ["Float8CurrentScaling:  FP8, refused: products of 8 bits take compute capability 8.9, this GPU has 8.0; "],
    (9, 0): [
        "Float8CurrentScaling:  FP8, products by cuBLASLt",
        "Float8BlockScaling:    FP8, refused: products with a scale for each block of 128 numbers take cuBLAS 12.9, "
        "this PyTorch has 12.8; ",
        "MXFP8BlockScaling:     FP8, refused: products with a scale for each 32 numbers are emulated alone; ",
    ],
}


@pytest.mark.parametrize("capability", RECIPES)
def test_version_says_which_recipes_run(
    capability: tuple[int, int] | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, capability, 120804)
    text = lines(capsys, "version")
    assert RECIPES[capability] in text
    for row in OTHER_RECIPES[capability]:
        assert any(line.startswith(row) for line in text), row


def test_the_extras_bring_what_the_code_asks_for() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(cli.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for module in (cudnn_frontend, flash_attn_4, quack):
        assert [module.PACKAGE.requirement("12.9")] in extras.values()
        assert module.PACKAGE.requirement("13.0") in [*extras["hopper-cu13"], *extras["cudnn"]]
    assert extras["hopper"] == ["te_fuser[cudnn,flash-attn-4,quack]"]


def test_clearing_deletes_what_killed_processes_left(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path, Path]
) -> None:
    folders[1].mkdir(parents=True)
    old, new = (folders[1] / f"a.cubin.{process}.0.new" for process in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    lines(capsys, "cache")
    assert old.exists() and new.exists()
    lines(capsys, "cache", "--clear")
    assert not old.exists() and new.exists()  # somebody may be writing it


@pytest.mark.parametrize("words", [(), ("nonsense",), ("cache", "--nonsense")])
def test_a_wrong_command_shows_the_usage(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: te-fuser" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(command.name in out and command.help in out for command in cli.COMMANDS)


def test_the_module_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python -m te_fuser.cli`."""
    monkeypatch.setattr(sys, "argv", ["te-fuser", "devices"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(cli.__file__, run_name="__main__")
    assert ended.value.code == 0 and "h200" in capsys.readouterr().out


def test_who_reads_may_stop() -> None:
    """As `te-fuser devices | head -1` does."""
    command = [sys.executable, "-c", "import sys; from te_fuser import cli; sys.exit(cli.main(['devices']))"]
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody:
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0 and not ended.stderr
