"""The kernel over packed heads is there before a plan's first call: compiled and loaded with the generated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser import Fuser, fusions, ops
from te_fuser.codegen import nvrtc
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.config import config
from te_fuser.fuser import pipeline
from te_fuser.ops.base import FusableOperation
from tests.fake_cuda import FakeDriver, as_new_process, forget_written, in_place
from tests.kernels.packed_cases import ATTENTION

HEADS, DIM = 4, 8
FEATURES = 3 * HEADS * DIM


IN_FORCE = ("stretch", "rotary_embedding_forward", "rotary_embedding_backward", ATTENTION)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were compiled, none of which does anything."""
    names: list[str] = []

    def compile_source(source: str, arch: str, *, name: str = "", cache: Path | None = None) -> Compiled:
        names.append(name)
        return Compiled(b"nowhere:-", ())

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    return names


@pytest.fixture(autouse=True)
def driver(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, with tensors on the CPU that stand for those on a GPU."""
    as_new_process(monkeypatch, tmp_path)
    monkeypatch.setattr(pipeline, "target_for", lambda *_: "cuda")
    monkeypatch.setattr("te_fuser.fusions.rotary.why_no_kernel", lambda m: None)
    with in_place(library) as fake:
        yield fake
    forget_written()


def rotary() -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(DIM, heads=HEADS, rotary_dim=4, position_offset=3)


def attention() -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, mask="causal", layout="sequence_first")


# The list, and how many kernels over packed heads it needs with a bias that trains and with a frozen one.
LISTS: dict[str, tuple[list[FusableOperation], int, int]] = {
    "rotation": ([ops.SiLU(), rotary()], 2, 2),
    "bias and rotation": ([ops.Bias(FEATURES), rotary()], 2, 2),
    "bias and attention": ([ops.Bias(FEATURES), attention()], 1, 1),
    "bias, rotation and attention": ([ops.Bias(FEATURES), rotary(), attention()], 2, 2),
    "rotation and attention": ([ops.SiLU(), rotary(), attention()], 2, 2),
    "attention alone": ([ops.SiLU(), attention()], 0, 0),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LISTS)
def test_the_first_call_compiles_and_loads_nothing(
    name: str, dtype: torch.dtype, frozen: bool, driver: FakeDriver, compiled: list[str]
) -> None:
    listed, *counts = LISTS[name]
    count = counts[frozen]
    for op in listed:
        op.to(dtype).requires_grad_(not frozen)
    fuser, x = Fuser(listed), torch.randn(5, 2, FEATURES, dtype=dtype, requires_grad=True)
    with fusions.only(*IN_FORCE):
        prepared, _ = fuser.prepare(x, {})
        written = [kernel.name for kernel in prepared.plan.written]
        assert written.count("packed_heads") == count == compiled.count("packed_heads")
        before = driver.loads, list(compiled)
        y = fuser(x)
        launches = driver.launches
        y.sum().backward()
    assert (driver.loads, compiled) == before
    assert driver.launches > launches or not count


def test_another_cache_folder_after_planning_changes_nothing(
    driver: FakeDriver, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first call of a plan nor another plan of the same kernels compiles or loads: both may be captured."""
    listed = [ops.Bias(FEATURES), rotary(), attention()]
    fuser, x = Fuser(listed), torch.randn(5, 2, FEATURES, requires_grad=True)
    with fusions.only(*IN_FORCE):
        fuser.prepare(x, {})
        before = driver.loads, list(compiled)
        assert before[1].count("packed_heads") == 2
        monkeypatch.setattr(config, "cache_dir", tmp_path / "another")
        fuser(x).sum().backward()
        Fuser(listed)(x).sum().backward()
    assert (driver.loads, compiled) == before


def test_no_gradients_need_no_kernel_of_backward(compiled: list[str]) -> None:
    with fusions.only(*IN_FORCE), torch.no_grad():
        Fuser([ops.Bias(FEATURES), rotary(), attention()]).prepare(torch.randn(5, 2, FEATURES), {})
    assert compiled.count("packed_heads") == 1


def test_equal_kernels_are_made_once(driver: FakeDriver, compiled: list[str]) -> None:
    two = [ops.SiLU(), rotary(), ops.SiLU(), rotary()]
    with fusions.only(*IN_FORCE):
        Fuser(two).prepare(torch.randn(5, 2, FEATURES, requires_grad=True), {})
        loads = driver.loads
        Fuser(two).prepare(torch.randn(5, 2, FEATURES, requires_grad=True), {})
    assert compiled.count("packed_heads") == 2 and driver.loads == loads
