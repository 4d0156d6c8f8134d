"""Targets of row kernels by device, and the words where generated kernels cannot be had."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from te_fuser import Fuser, Sequential, _native, fusions, ops
from te_fuser.codegen import compiler, nvrtc
from te_fuser.fuser import pipeline
from te_fuser.fuser.run import loading
from te_fuser.fuser.run.loading import draw_seed, missing_notes, obstacle, target_for
from te_fuser.fusions import Cost, Details, fusion
from te_fuser.fusions.match import Match
from te_fuser.kernels.cublaslt import products

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose GPU can run generated kernels."""
    for cached in (loading._cuda_obstacle, loading._warn_once):
        cached.cache_clear()
    monkeypatch.setattr(products, "obstacle", lambda: None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(_native, "cuda_driver_refusal", lambda: None)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "known_architectures", lambda: frozenset({75, 90}))
    yield
    for cached in (loading._cuda_obstacle, loading._warn_once):
        cached.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_runs_generated_kernels(dtype: torch.dtype) -> None:
    assert target_for(GPU, dtype, "auto") == target_for(GPU, dtype, "generated") == "cuda"
    assert target_for(GPU, dtype, "reference") == "torch"


def test_float64_is_the_reference_without_a_word_unless_kernels_were_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in (GPU, CPU):
            assert target_for(device, torch.float64, "auto") == "torch"
            assert target_for(device, torch.float64, "auto", "error") == "torch"
    words = r"generated kernels were asked for, but torch.float64 runs the reference; kernels='auto' takes"
    model = Sequential(ops.GELU(), kernels="generated")
    x = torch.randn(2, 3, dtype=torch.float64)
    for call in (model, model.plan, lambda x: model.plan(x, device="h200")):
        with pytest.raises(RuntimeError, match=words):
            call(x)
    assert torch.equal(Sequential(ops.GELU(), fallback="error")(x), model.reference(x))


def missing_nvrtc() -> None:
    raise nvrtc.CompilerMissing("kernels are compiled by NVRTC, which cannot be loaded; pip install it")


OBSTACLES = {
    "too old": ("torch.cuda.get_device_capability", lambda index: (7, 5), "has compute capability 7.5, .* need 8.0"),
    "no driver": ("te_fuser._native.cuda_driver_refusal", lambda: "libcuda is gone", "libcuda is gone"),
    "no NVRTC": ("te_fuser.codegen.nvrtc.compiler_version", missing_nvrtc, "NVRTC, which cannot be loaded"),
    "AMD": ("torch.version.hip", "7.0", "this PyTorch is built for AMD's"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_is_missing_is_said_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, value, text = OBSTACLES[case]
    monkeypatch.setattr(path, value)
    with pytest.warns(RuntimeWarning, match=rf"by PyTorch's kernels.*{text}.*print\(model.explain\(x\)\)"):
        assert target_for(GPU, torch.bfloat16, "auto") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target_for(GPU, torch.float32, "auto") == "torch"
    with pytest.raises(RuntimeError, match=f"generated kernels were asked for, but .*{text}"):
        target_for(GPU, torch.bfloat16, "generated")


def test_a_missing_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda *_: None)
    words = r"row operations on the CPU by PyTorch's kernels.* no C\+\+ compiler was found: .*apt-get install g\+\+"
    model, x = Sequential(ops.GELU()), torch.randn(2, 3)
    with pytest.warns(RuntimeWarning, match=words):
        assert torch.equal(model(x), model.reference(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sequential(ops.SiLU())(x)
        assert target_for(CPU, torch.float64, "auto") == target_for(CPU, torch.float32, "reference") == "torch"


def test_a_missing_cublaslt_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "obstacle", lambda: "libcublasLt is gone")
    words = "matrix products on the GPU by PyTorch.*because libcublasLt is gone.*fallback='error'"
    with pytest.warns(RuntimeWarning, match=words):
        assert target_for(GPU, torch.bfloat16, "auto") == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert target_for(GPU, torch.float32, "auto") == "cuda"
        assert target_for(GPU, torch.bfloat16, "reference") == "torch"
    with pytest.raises(RuntimeError, match="cuBLASLt's products were asked for, but libcublasLt is gone"):
        target_for(GPU, torch.bfloat16, "generated")


def test_other_devices_have_none() -> None:
    assert "no generated kernels for mps" in str(obstacle(torch.device("mps"), torch.float32))


def test_a_seed_is_two_numbers_of_the_devices_generator() -> None:
    torch.manual_seed(3)
    first, second = draw_seed(CPU), draw_seed(CPU)
    torch.manual_seed(3)
    assert torch.equal(first, draw_seed(CPU)) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,) and (first >= 0).all()


def test_a_fallback_may_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sequential(ops.GELU(), fallback="error")
    copied = pickle.loads(pickle.dumps(model))
    monkeypatch.setattr(compiler, "find_compiler", lambda *_: None)
    Sequential(ops.GELU(), fallback="error", kernels="reference")(torch.randn(2, 3))
    for m in (model, copied, model[:1], Fuser([ops.GELU()], fallback="error")):
        with pytest.raises(RuntimeError, match=r"generated kernels were asked for, but no C\+\+ compiler"):
            m(torch.randn(2, 3))
    with pytest.raises(ValueError, match="fallback is one of warn, error, got 'ignore'"):
        Sequential(ops.GELU(), fallback="ignore")


def test_a_fusion_is_asked_for_its_kernels_in_each_direction() -> None:
    asked: list[tuple[int, str, frozenset[str]]] = []

    def compiles(m: Match, direction: str, needed: frozenset[str]) -> Iterator[Kernel]:
        asked.append((len(m), direction, needed))
        yield Kernel("shared")
        yield Kernel(direction)

    @fusion(
        joint=[ops.Bias, ops.SiLU],
        details=Details(forward_ops=1, registered=False, compiles=compiles),
        reads=("-1.input",),
        cost=lambda m: (Cost(seconds=1e-9), Cost(seconds=1e-9)),
    )
    class both:
        @staticmethod
        def forward(m: object, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

        @staticmethod
        def backward(m: object, dy: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    with fusions.only(both):
        plan = Sequential(ops.Bias(4), ops.SiLU()).plan(torch.ones(3, 4, requires_grad=True))
    assert [k.name for k in plan.written] == ["shared", "forward", "backward"]
    assert asked == [(1, "forward", frozenset()), (2, "backward", frozenset({"input", "0.bias"}))]


class Kernel(NamedTuple):
    """A kernel written by hand, as far as plans go."""

    name: str

    def compile(self, arch: str, cache: Path | None) -> _native.CudaKernel:
        raise NotImplementedError


class Philox:
    """A GPU's generator, as far as seeds go."""

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize(("seed", "signed"), [(5, 5), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_a_gpus_seed_comes_from_its_generator_without_a_kernel(
    seed: int, signed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Philox(seed)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    drawn = [draw_seed(torch.device("cuda", 1)) for _ in range(2)]
    assert [t.tolist() for t in drawn] == [[signed, 8], [signed, 12]] and generator.offset == 16
    assert all(t.device == CPU and t.dtype == torch.int64 for t in drawn)
    with torch.device("meta"):
        assert draw_seed(torch.device("cuda", 1)).tolist() == [signed, 16]


def test_threads_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they are interrupted, no two calls get one offset."""

    class Slow(Philox):
        def get_offset(self) -> int:
            found = self.offset
            others.wait(0.2)  # for the other thread to come as far as this, if it can
            return found

    others = threading.Event()
    generator = Slow(5)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with ThreadPoolExecutor(2) as pool:
        drawn = list(pool.map(lambda _: draw_seed(torch.device("cuda", 1)).tolist(), range(2)))
    assert sorted(offset for _, offset in drawn) == [8, 12] and generator.offset == 16


def test_a_gpu_newer_than_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (13, 0))
    why = str(obstacle(GPU, torch.bfloat16))
    version = ".".join(map(str, nvrtc.compiler_version()))
    assert f"capability 13.0, which NVRTC {version} does not compile for; install a newer" in why


def test_a_plan_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(missing_notes("cuda", GPU, torch.bfloat16)) == []
    monkeypatch.setattr(products, "obstacle", lambda: "libcublasLt is gone")
    monkeypatch.setattr(nvrtc, "compiler_version", missing_nvrtc)
    (note,) = missing_notes("cuda", GPU, torch.bfloat16)
    assert note == "products run by PyTorch, with nothing fused into them: libcublasLt is gone"
    rows, again = missing_notes("torch", GPU, torch.bfloat16)
    assert "row kernels are not generated: kernels are compiled by NVRTC" in rows and again == note
    model = Sequential(ops.Linear(8, 8))
    x = torch.randn(4, 8)
    # Libraries that this machine lacks are not named for another one.
    assert not model.plan(x, device="h200").notes and not model.plan(x).notes
    monkeypatch.setattr(pipeline, "target_for", lambda *_: "torch")
    monkeypatch.setattr(pipeline, "missing_notes", lambda target, device, dtype: missing_notes(target, GPU, dtype))
    assert model.plan(x).notes == (rows, note)
    assert Sequential(*model, kernels="reference").plan(x).notes == ()


def test_a_captured_streams_seed_is_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each replay draws anew: what the host read would be the same for all."""
    empty, where = torch.empty, []

    def made(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        where.append(device)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "default_generators", ())  # its seed and offset cannot be read now
    seed = draw_seed(GPU)
    assert where == [GPU] and seed.dtype == torch.int64 and seed.shape == (2,)
