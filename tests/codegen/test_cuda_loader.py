"""Making kernels for a GPU: in parallel, once, with a message when it takes long. NVRTC and the GPU are imitated."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from te_fuser.codegen import cuda, cuda_loader, nvrtc, progress
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.cuda_source_kernel import MadeOnce
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.in_place import pairs
from te_fuser.codegen.nvrtc import Compiled, CompileError, Resources
from te_fuser.codegen.progress import Progress
from te_fuser.codegen.schedule import Kind, Schedule, Sums
from te_fuser.codegen.tuned_schedules import store_for
from tests.codegen import corpus
from tests.codegen.corpus import Kit
from tests.codegen.cuda_calls import sizes_of
from tests.fake_cuda import FakeDriver, as_new_process, in_place

CORPUS = corpus.descriptions()
GPU = torch.device("cuda", 0)
NOTHING = Compiled(b"nowhere:-", ())


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, on a machine with two GPUs of one kind."""
    as_new_process(monkeypatch, tmp_path)
    loads_of.cache_clear()
    monkeypatch.setattr(cuda_loader, "_is_capturing", lambda index: bool(fake.capturing))
    with in_place(library) as fake:
        yield fake


class Compiler:
    """Counts; waits for `company` others that compile at the same time, and else takes its time."""

    def __init__(self) -> None:
        self.seconds, self.names, self.at_once, self.most, self.company = 0.0, list[str](), 0, 0, 0
        self.lock, self.met = threading.Lock(), threading.Event()

    def __call__(self, source: str, arch: str, *, name: str, cache: Path | None) -> Compiled:
        with self.lock:
            self.names.append(name)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            if self.at_once > self.company:
                self.met.set()
        if self.company:
            self.met.wait(60)
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


def test_a_kernel_runs_after_it_was_loaded(driver: FakeDriver, compiler: Compiler) -> None:
    d = CORPUS["layer_norm_fwd-257-f32"]
    (kernel,) = cuda_loader.load([d], GPU)
    kernel.run((*corpus.inputs(d, 5).values(), *corpus.outputs(d, 5)), 5, 1, 1, ())
    assert driver.last_symbol == b"layer_norm_fwd" and driver.last_blocks == sizes_of(kernel.text, 5, 1, 3).blocks[0]


def test_slow_work_says_what_it_waits_for(
    driver: FakeDriver, compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
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
    with pytest.raises(RuntimeError, match="not there yet .by_hand., and its stream is being captured"):
        cuda_loader.load([], GPU, written=[ByHand(1)])
    assert compiler.names == ["layer_norm_fwd"]


# ---- kernels written by hand ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A kernel for some constant."""

    constant: int
    name = "by_hand"

    def compile(self, arch: str, cache: Path | None) -> Loads:
        return loads_of(self, arch, cache)


class Loads(list[int]):
    """The devices that a kernel was loaded on."""

    def load(self, device: int) -> None:
        self.append(device)


@MadeOnce
def loads_of(kernel: ByHand, arch: str, cache: Path | None) -> Loads:
    nvrtc.compile_source(f"// {kernel.constant}", arch, name=kernel.name, cache=cache)
    return Loads([])


def test_kernels_written_by_hand_are_made_beside_the_generated_ones(
    driver: FakeDriver, compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.05)
    compiler.seconds = 0.5
    with mock.patch("os.cpu_count", return_value=4):
        (kernel,) = cuda_loader.load(pair()[:1], GPU, written=[ByHand(1), ByHand(2), ByHand(1)])
    assert kernel.description == pair()[0] and compiler.most == 3
    assert sorted(compiler.names) == ["by_hand", "by_hand", "layer_norm_fwd"]
    assert capsys.readouterr().err.startswith("te_fuser: compiling 3 kernels for sm_90a (0 of 3 so far) ...")


def test_a_kernel_written_by_hand_is_made_once_and_loaded_on_each_device(
    driver: FakeDriver, compiler: Compiler
) -> None:
    for device in (GPU, GPU, torch.device("cuda", 1)):
        cuda_loader.load([], device, written=[ByHand(1)])
    assert compiler.names == ["by_hand"]
    assert loads_of(ByHand(1), "sm_90a", None) == [0, 1]


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


# ---- schedules that were measured -----------------------------------------------------------------------------


def test_measured_schedules_are_used_for_their_rows(driver: FakeDriver, compiler: Compiler, tmp_path: Path) -> None:
    _, d = corpus.layer_norm(Kit(), 1024)
    usual, *others = cuda_loader.variants(d, GPU)
    few, many = others[0], others[1]
    (kernel,) = cuda_loader.load([d], GPU, cache_dir=tmp_path)
    assert kernel.text.schedules == usual
    store = store_for("NVIDIA H200", tmp_path)
    store.put(d.key, few, rows=100, ms=0.01)
    store.put(d.key, many)
    for rows, schedules in ((100, few), (70, few), (5000, many), (None, many)):
        (kernel,) = cuda_loader.load([d], GPU, rows=None if rows is None else {d.key: rows}, cache_dir=tmp_path)
        assert kernel.text.schedules == schedules
    assert len(compiler.names) == 3


def test_measured_schedules_that_do_not_fit_are_left_out(
    driver: FakeDriver, compiler: Compiler, tmp_path: Path
) -> None:
    _, d = corpus.layer_norm(Kit(), 1024)
    (usual,) = cuda_loader.variants(d, GPU)[0]
    store_for("NVIDIA H200", tmp_path).put(d.key, [dataclasses.replace(usual, chunks=1, lanes=1)])
    assert cuda_loader.load([d], GPU, cache_dir=tmp_path)[0].text.schedules == (usual,)


def test_variants_can_be_made_one_by_one(driver: FakeDriver, compiler: Compiler) -> None:
    _, d = corpus.layer_norm(Kit(), 1024)
    listed = cuda_loader.variants(d, GPU, most=5)
    assert len(listed) == len(set(listed)) == 6 and len(listed[-1]) == 2  # the last does stores and sums apart
    for schedules in listed:
        assert cuda_loader.load_variant(d, GPU, schedules).text.schedules == schedules


MISFITS = [
    ({"kind": Kind.COLUMNS}, "kind columns is not for a kernel with row sums"),
    ({"kind": Kind.REREAD}, "column sums in registers with kind reread, where there are 2 of them"),
    ({"sums": Sums.NONE}, "column sums in none"),
    ({"vector": 3}, "1024 features are not covered"),
    ({"chunks": 1, "lanes": 8}, "1024 features are not covered"),
    ({"blocks_per_multiprocessor": 0}, "a count is too small"),
    ({"rounds": 0}, "a count is too small"),
    ({"lanes": 96}, "96 threads cannot share a row"),
    ({"lanes": 2048}, "2048 threads, 1 times, are too many"),
    ({"ahead": 1000}, "bytes of shared memory are too much"),
]


@pytest.mark.parametrize(("change", "reason"), MISFITS, ids=[reason for _, reason in MISFITS])
def test_schedules_that_do_not_fit_are_refused_with_the_reason(
    change: dict[str, object], reason: str, driver: FakeDriver, compiler: Compiler
) -> None:
    _, d = corpus.layer_norm(Kit(), 1024)
    s = Schedule(Kind.SHARED, 4, 256, 1, 1, 2, 1, Sums.REGISTERS, keeps=True)
    cuda_loader.load_variant(d, GPU, [s])
    with pytest.raises(ValueError, match=f"kernel layer_norm_bwd: .*{reason}"):
        cuda_loader.load_variant(d, GPU, [dataclasses.replace(s, **change)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 schedules, where one or two are possible"):
        cuda_loader.load_variant(d, GPU, [s, s, s])


def test_registers_that_do_not_suffice_cost_blocks(
    driver: FakeDriver, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that spills gets more registers, until it does not or nothing is left to give."""
    _, d = corpus.layer_norm(Kit(), 1024)
    usual = cuda_loader.variants(d, GPU)[0][0].blocks_per_multiprocessor
    enough = [usual]
    assert usual > 2

    def spilling(source: str, arch: str, *, name: str, cache: Path | None) -> Compiled:
        (bounds,) = re.findall(r"__launch_bounds__\(\d+, (\d+)\) layer_norm_bwd\(", source)
        spilled = 40 if int(bounds) > enough[0] else 8  # 8 bytes are not worth a block
        return Compiled(b"nowhere:-", (Resources("layer_norm_bwd", 64, spilled, 0, 0),))

    monkeypatch.setattr(nvrtc, "compile_source", spilling)
    for enough[0], most in ((usual, usual), (usual - 1, usual - 1), (0, usual)):
        (schedule,) = compile_kernel(d, "sm_90a")[0].schedules
        assert schedule.blocks_per_multiprocessor == most
    given = dataclasses.replace(schedule, blocks_per_multiprocessor=usual)
    enough[0] = 1
    assert compile_kernel(d, "sm_90a", schedules=[given])[0].schedules == (given,)


def cut_in_two(s: tuple[Schedule, ...]) -> bool:
    return len(s) == 2


# Schedules that spill little -> how many are compiled before they are found, at most.
SPILLING_LITTLE: dict[str, tuple[Callable[[tuple[Schedule, ...]], bool], int]] = {
    "sums in shared memory": (lambda s: s[0].sums == Sums.SHARED, 8),
    "stores and sums apart": (cut_in_two, 9),
    "apart, the row read again": (lambda s: cut_in_two(s) and s[0].kind == Kind.REREAD, 14),
    "nothing": (lambda s: False, 24),
}


@pytest.mark.parametrize("which", SPILLING_LITTLE)
def test_where_no_block_is_left_to_give_another_schedule_is_tried(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = next(d for d in corpus.dropout_add_layer_norm(Kit("bfloat16", "bfloat16"), 10240) if d.sums)
    little, most = SPILLING_LITTLE[which]
    generated: list[cuda.CudaKernel] = []

    def generate(*args: Any, **options: Any) -> cuda.CudaKernel:
        generated.append(right(*args, **options))
        return generated[-1]

    def spilling(source: str, arch: str, *, name: str, cache: Path | None) -> Compiled:
        text = generated[-1]
        assert text.source == source
        spilled = 64 if little(text.schedules) else 100 * text.schedules[0].lanes
        return Compiled(
            b"", tuple(Resources(x.symbol, 64, spilled * (k == 0), 0, 0) for k, x in enumerate(text.launches))
        )

    right = cuda.generate
    monkeypatch.setattr(cuda, "generate", generate)
    monkeypatch.setattr(nvrtc, "compile_source", spilling)
    over = dataclasses.replace(plain, overwrites=pairs(plain, {t.name for t in plain.loads}))
    chosen = set()
    for d in (plain, over, plain):
        generated.clear()
        kernel, _ = compile_kernel(d, "sm_90a")
        assert len(generated) <= most and kernel in generated
        chosen.add(kernel.schedules)
        assert kernel.overwrites == (() if cut_in_two(kernel.schedules) else d.overwrites)
        if which == "nothing":  # then the one that spills least
            assert kernel.schedules[0].lanes == min(k.schedules[0].lanes for k in generated)
        else:
            assert little(kernel.schedules) and sum(little(k.schedules) for k in generated) == 1
    assert over.overwrites and len(chosen) == 1


# ---- what the runtime is told ---------------------------------------------------------------------------------


def alignments(d: KernelDescription) -> dict[str, int]:
    text = cuda.generate(d)
    return {t.name: cuda_loader._alignment(t, text) for t in (*d.loads, *d.stores, *d.sums)}


def test_tensors_need_the_alignment_of_one_access() -> None:
    _, backward = corpus.layer_norm(Kit("bfloat16", "float32"), 1024)
    assert alignments(backward) == {
        "x": 16, "layer_norm.weight": 16, "dy": 16, "mean": 4, "rstd": 4,
        "dx": 16, "dlayer_norm.weight": 4, "dlayer_norm.bias": 4,
    }  # fmt: skip
    odd, _ = corpus.layer_norm(Kit("bfloat16", "bfloat16"), 257)
    assert set(alignments(odd).values()) == {2, 4}


def test_what_is_quick_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1000.0)
    with Progress("looking"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("fails", "end", "why"),
    [(None, "done", ""), ("lost\nhere", "failed", ": ValueError: lost"), ("", "failed", ": ValueError")],
)
def test_what_is_slow_is_named_with_its_end(
    fails: str | None, end: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes out, and the first word before the last, however long it takes to say how far it is."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    asked = threading.Event()

    def state() -> str:
        asked.set()
        threading.Event().wait(0.05)
        return " (1 of 2)"

    error = contextlib.nullcontext() if fails is None else pytest.raises(ValueError)
    with error, Progress("looking", state):
        assert asked.wait(30)
        if fails is not None:
            raise ValueError(fails)
    started, ended = capsys.readouterr().err.splitlines()
    assert started == "te_fuser: looking (1 of 2) ..."
    assert re.fullmatch(rf"te_fuser: looking: {end} after \d+\.\d s{why}", ended)


def test_a_first_word_that_comes_too_late_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1000.0)
    with Progress("looking") as over:
        pass
    over._say()  # as a timer that had fired already
    assert capsys.readouterr().err == ""
