"""How kernels are made for a GPU: in parallel, once, with a word when it takes long. NVRTC and the GPU are imitated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from te_fuser.codegen import cuda_loader, nvrtc
from te_fuser.codegen.description import KernelDescription, Target, describe
from te_fuser.codegen.nvrtc import Compiled, CompileError
from te_fuser.formula import expr
from te_fuser.formula.expr import Axes
from tests.codegen import corpus
from tests.codegen.corpus import Kit
from tests.fake_cuda import FakeDriver, compile_driver, in_place

CORPUS = corpus.descriptions()
GPU = torch.device("cuda", 0)
NOTHING = Compiled(b"nowhere:-", ())
Compile = Callable[..., Compiled]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, on a machine with two GPUs of one kind."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda_loader, "_is_capturing", lambda index: bool(fake.capturing))
    monkeypatch.setattr(cuda_loader, "_made", {})
    monkeypatch.setattr(cuda_loader, "_ready", set())
    with in_place(library) as fake:
        yield fake


class Compiler:
    """Counts, and takes its time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.names, self.at_once, self.most = seconds, list[str](), 0, 0
        self.lock = threading.Lock()

    def __call__(self, source: str, arch: str, *, name: str, cache: Path | None) -> Compiled:
        with self.lock:
            self.names.append(name)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(self.seconds)
        with self.lock:
            self.at_once -= 1
        return NOTHING


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(nvrtc, "compile_source", made)
    return made


def pair() -> list[KernelDescription]:
    return list(corpus.layer_norm(Kit(), 40))


def test_kernels_are_made_once_and_loaded_on_each_device(driver: FakeDriver, compiler: Compiler) -> None:
    forward, backward = pair()
    first = cuda_loader.load([forward, backward, forward], GPU)
    assert [k.description for k in first] == [forward, backward, forward] and first[0] is first[2]
    assert sorted(compiler.names) == ["layer_norm_bwd", "layer_norm_fwd"]
    assert driver.loads == 2
    again = cuda_loader.load([backward], GPU)
    assert again[0] is first[1] and driver.loads == 2
    cuda_loader.load([forward], torch.device("cuda", 1))
    assert len(compiler.names) == 2 and driver.loads == 3


def test_an_equal_description_is_the_same_kernel(driver: FakeDriver, compiler: Compiler) -> None:
    assert cuda_loader.load(pair(), GPU)[1] is cuda_loader.load(pair(), GPU)[1]


def test_kernels_compile_at_the_same_time(driver: FakeDriver, compiler: Compiler) -> None:
    compiler.seconds = 0.3
    with mock.patch("os.cpu_count", return_value=4):
        cuda_loader.load(list(CORPUS.values())[:4], GPU)
    assert compiler.most > 1


def test_a_kernel_runs_after_it_was_loaded(driver: FakeDriver, compiler: Compiler) -> None:
    d = CORPUS["layer_norm_fwd-257-f32"]
    (kernel,) = cuda_loader.load([d], GPU)
    kernel.run((*corpus.inputs(d, 5).values(), *corpus.outputs(d, 5)), 5, 1, 1, ())
    assert driver.last_symbol == b"layer_norm_fwd" and driver.last_blocks == kernel.text.sizes(5, 1, 3).blocks[0]


def test_quick_work_is_silent(driver: FakeDriver, compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    cuda_loader.load(pair(), GPU)
    assert capsys.readouterr().err == ""


def test_slow_work_says_what_it_waits_for(
    driver: FakeDriver, compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_loader, "_PATIENCE", 0.05)
    compiler.seconds = 0.5
    cuda_loader.load(pair(), GPU)
    started, done = capsys.readouterr().err.splitlines()
    assert started == "te_fuser: compiling 2 kernels for sm_90a (0 of 2 so far) ..."
    assert done.startswith("te_fuser: compiling 2 kernels for sm_90a: done after 0.")


def test_an_error_of_the_compiler_reaches_the_caller(
    driver: FakeDriver, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, arch: str, *, name: str, cache: Path | None) -> Compiled:
        raise CompileError(f"kernel {name} does not compile")

    forward, backward = pair()
    with monkeypatch.context() as patch, pytest.raises(CompileError, match="kernel layer_norm_fwd does not compile"):
        patch.setattr(nvrtc, "compile_source", refuse)
        cuda_loader.load([forward, backward], GPU)
    assert len(cuda_loader.load([forward, backward], GPU)) == 2  # nothing half made is left behind


def test_a_captured_stream_makes_nothing(driver: FakeDriver, compiler: Compiler) -> None:
    forward, backward = pair()
    cuda_loader.load([forward], GPU)
    driver.capturing = 1
    cuda_loader.load([forward], GPU)
    with pytest.raises(RuntimeError, match="not there yet .layer_norm_bwd., and its stream is being captured"):
        cuda_loader.load([forward, backward], GPU)
    with pytest.raises(RuntimeError, match="not there yet .layer_norm_fwd."):
        cuda_loader.load([forward], torch.device("cuda", 1))
    assert compiler.names == ["layer_norm_fwd"]


def test_float64_is_refused(driver: FakeDriver, compiler: Compiler) -> None:
    x = expr.leaf("x", Axes.FULL, 8)
    d = describe("wide", [Target("y", x + x, Axes.FULL, 8, "float64")], (), {"x": (Axes.FULL, 8, "float64")})
    with pytest.raises(ValueError, match="kernel wide: x is float64"):
        cuda_loader.load([d], GPU)


@pytest.mark.parametrize("threads", [4])
def test_threads_that_want_the_same_share_the_work(driver: FakeDriver, compiler: Compiler, threads: int) -> None:
    compiler.seconds = 0.1
    found: list[object] = []
    workers = [threading.Thread(target=lambda: found.append(cuda_loader.load(pair(), GPU)[0])) for _ in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(found) == threads and len(set(map(id, found))) == 1 and len(compiler.names) == 2


# ---- what the runtime is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPUS)
def test_every_kernel_can_be_told_to_the_runtime(name: str) -> None:
    d = CORPUS[name]
    text = cuda_loader.cuda.generate(d)
    assert d.name in repr(cuda_loader.native_kernel(d, text, b""))


def alignments(d: KernelDescription) -> dict[str, int]:
    text = cuda_loader.cuda.generate(d)
    return {t.name: cuda_loader._alignment(t, text) for t in (*d.loads, *d.stores, *d.sums)}


def test_tensors_need_the_alignment_of_one_access() -> None:
    _, backward = corpus.layer_norm(Kit("bfloat16", "float32"), 1024)
    assert alignments(backward) == {
        "x": 16, "layer_norm.weight": 16, "dy": 16, "mean": 4, "rstd": 4,
        "dx": 16, "dlayer_norm.weight": 4, "dlayer_norm.bias": 4,
    }  # fmt: skip
    odd, _ = corpus.layer_norm(Kit("bfloat16", "bfloat16"), 257)
    assert set(alignments(odd).values()) == {2, 4}
