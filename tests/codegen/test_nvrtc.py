"""NVRTC as the compiler of CUDA kernels: what is kept on disk, what it says of errors, what it needs."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from te_fuser.codegen import nvrtc
from tests.needs import needs_nvrtc
from tests.parallel.ranks import in_a_fork

TINY = 'extern "C" __global__ void tiny(float* y) { y[threadIdx.x] = 1.0f; }\n'


@needs_nvrtc
def test_cubins_are_kept_and_truncated_ones_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvrtc.compile_source(TINY, "sm_90a", cache=tmp_path)
    assert made.cubin[:4] == b"\x7fELF" and {r.symbol for r in made.resources} <= {"tiny"}
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole[:-5] + b"wrong"):
        file.write_bytes(damaged)
        assert nvrtc.compile_source(TINY, "sm_90a", cache=tmp_path) == made
        assert file.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert nvrtc.compile_source(TINY, "sm_90a", cache=tmp_path) == made


@needs_nvrtc
def test_the_key_covers_text_architecture_version_options_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {nvrtc.key(TINY, "sm_90a"), nvrtc.key(TINY, "sm_80"), nvrtc.key(TINY + " ", "sm_90a")}
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compiler_version", lambda: (99, 0))
        keys.add(nvrtc.key(TINY, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--generate-line-info"))
        keys.add(nvrtc.key(TINY, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_headers_digest", lambda: "other headers")
        keys.add(nvrtc.key(TINY, "sm_90a"))
    assert len(keys) == 6


def test_headers_count_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "te_cuda.cuh").write_text("1")
    monkeypatch.setattr(nvrtc, "INCLUDE", tmp_path)
    before = nvrtc._headers_digest.__wrapped__()
    (tmp_path / "te_cuda.cuh").write_text("2")
    assert nvrtc._headers_digest.__wrapped__() != before


@needs_nvrtc
def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    below, compiled = tmp_path / "file" / "below", []
    real = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *given: compiled.append(given) or real(*given))
    with pytest.warns(RuntimeWarning, match="below cannot be used .Not a directory.; set te_fuser.config.cache_dir"):
        assert nvrtc.compile_source(TINY, "sm_90a", cache=below).cubin[:4] == b"\x7fELF"
    nvrtc.compile_source(TINY, "sm_90a", cache=below)
    assert len(compiled) == 1  # it is kept for this process


@needs_nvrtc
def test_a_disk_that_is_full_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvrtc.write_whole

    def write(path: Path, data: bytes) -> None:
        if path.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(nvrtc, "write_whole", write)
    with pytest.warns(RuntimeWarning, match="cannot be used .No space left on device.; set te_fuser.config.cache_dir"):
        assert nvrtc.compile_source(TINY, "sm_90a", cache=tmp_path).cubin[:4] == b"\x7fELF"


@needs_nvrtc
def test_errors_name_the_kernel_and_show_the_line(tmp_path: Path) -> None:
    wrong = TINY + 'extern "C" __global__ void two(float* y) {\n  y[0] = missing_name;\n}\n'
    with pytest.raises(nvrtc.CompileError, match="kernel tiny does not compile for sm_90a: tiny.cu line 3") as caught:
        nvrtc.compile_source(wrong, "sm_90a", cache=tmp_path)
    assert "y[0] = missing_name;" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.compiler_version.cache_clear()
    with pytest.raises(nvrtc.CompilerMissing, match="pip install cuda-bindings"):
        nvrtc.compiler_version()


def test_why_the_compiler_is_missing_is_one_line() -> None:
    with pytest.raises(nvrtc.CompilerMissing) as caught, nvrtc._needing_compiler():
        raise RuntimeError("not found:\n  here\n  nor there")
    assert "(not found: here nor there)" in str(caught.value)


@needs_nvrtc
def test_the_bindings_of_a_cuda_pytorch_are_enough(tmp_path: Path) -> None:
    """PyTorch's wheels bring cuda-bindings and NVRTC, and neither cuda-core nor CUDA's headers."""
    in_a_fork(_compile_without_more, tmp_path)


def _compile_without_more(cache: Path) -> None:
    assert "cuda.core" not in sys.modules
    sys.modules["cuda.core"] = None  # type: ignore[assignment]
    nvrtc.cuda_include_folders = lambda: ()
    found = nvrtc.compile_source(TINY, "sm_90a", cache=cache)
    assert found.cubin[:4] == b"\x7fELF" and found.resources[0].registers > 0


@needs_nvrtc
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_who_may_read_compiled_kernels_is_up_to_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        nvrtc.compile_source(TINY, "sm_90a", cache=tmp_path)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
def test_architectures(capability: tuple[int, int], arch: str) -> None:
    assert nvrtc.arch_of(capability) == arch
