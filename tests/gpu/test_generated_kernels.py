"""Generated CUDA kernels on a GPU, against the interpreter in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cuda, schedule
from te_fuser.codegen import schedule_model as model
from te_fuser.codegen.cuda import CudaKernel
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.schedule import Kind, Schedule
from tests.codegen import corpus
from tests.codegen.corpus import Kit, descriptions, inputs, outputs
from tests.codegen.cuda_calls import arguments, complaints
from tests.gpu.cuda_driver import GpuKernel, arch, compile_all, multiprocessors

CORPUS = descriptions()
GUARD = 64  # elements before and after each output that no kernel may touch


@pytest.fixture(scope="module")
def kernels(folder: Path) -> dict[str, GpuKernel]:
    made = [cuda.generate(d, arch()) for d in CORPUS.values()]
    compiled = compile_all(made, folder)
    return {name: GpuKernel(k, c) for name, k, c in zip(CORPUS, made, compiled, strict=True)}


def guarded(d: KernelDescription, rows: int, samples: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Unwritten outputs, each inside a larger buffer of NaN; and those buffers."""
    inner, whole = [], []
    for like in outputs(d, rows, samples):
        buffer = torch.full((like.numel() + 2 * GUARD,), math.nan, dtype=like.dtype, device="cuda")
        whole.append(buffer)
        inner.append(buffer[GUARD : GUARD + like.numel()].view(like.shape))
    return inner, whole


def check(kernel: GpuKernel, d: KernelDescription, rows: int, batch: tuple[int, int] = (1, 1)) -> None:
    on_cpu = inputs(d, rows, batch[1], seed=rows)
    tensors = {name: t.cuda() for name, t in on_cpu.items()}
    runs = []
    for _ in range(2):
        made, buffers = guarded(d, rows, batch[1])
        values = arguments(kernel.kernel, d, tensors, made, rows, batch, multiprocessors(), "cuda")
        kernel.call(values, rows, batch[1])()
        torch.cuda.synchronize()
        runs.append(made)
        for buffer in buffers:
            assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all()
    assert not complaints(d, on_cpu, runs[0], rows, batch), kernel.kernel.schedules
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("name", CORPUS)
def test_values_and_repeatability(name: str, kernels: dict[str, GpuKernel]) -> None:
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (7, (1, 1)), (513, (1, 1)), (513, (3, 19)), (512, (128, 4))):
        check(kernels[name], CORPUS[name], rows, batch)


VARIED = [
    "layer_norm_fwd-1024-bf16-f32", "layer_norm_bwd-257-f32", "layer_norm_bwd-1024-bf16-f32",
    "rms_norm_bwd-1024-bf16", "layer_norm_swiglu_bwd-40-f32", "dropout_add_layer_norm_fwd-1024-bf16-f32",
    "dropout_add_layer_norm_bwd-1024-bf16-f32", "softmax_bwd-1024-bf16", "gains_bwd-40-f32",
    "geglu_chain_bwd-257-f32", "scale_shift_bwd-1024-bf16-f32", "bias_gelu_bwd-257-f16",
]  # fmt: skip


def variants(d: KernelDescription) -> list[CudaKernel]:
    """One kernel of each kind of schedule that fits this device, and with stores and sums in two kernels."""
    device, new = schedule.limits_of(arch()), rewrite(d)
    first: dict[object, tuple[Schedule, ...]] = {}
    for s in model.candidates(new, device):
        first.setdefault((s.kind, s.ahead, s.sums, s.keeps, s.lanes > 32, s.slots > 1), (s,))
    return [cuda.generate(d, arch(), schedules=s) for s in (*first.values(), *model.variants(new, device, 3))]


@pytest.mark.parametrize("name", VARIED)
def test_every_schedule(name: str, folder: Path) -> None:
    d = CORPUS[name]
    made = variants(d)
    for kernel, compiled in zip(made, compile_all(made, folder), strict=True):
        loaded = GpuKernel(kernel, compiled)
        check(loaded, d, 0)
        check(loaded, d, 301, (7, 43))


LARGE = [
    (corpus.layer_norm, 4096), (corpus.layer_norm, 8192), (corpus.layer_norm, 16384), (corpus.layer_norm, 20000),
    (corpus.layer_norm, 65536), (corpus.layer_norm, 4097), (corpus.bias_gelu, 16384), (corpus.swiglu, 14336),
    (corpus.dropout_add_layer_norm, 4096), (corpus.dropout_add_layer_norm, 65536), (corpus.softmax, 50257),
]  # fmt: skip


@pytest.mark.parametrize(("family", "width"), LARGE, ids=lambda v: str(getattr(v, "__name__", v)))
def test_large_rows(family: corpus.Family, width: int, folder: Path) -> None:
    for d in family(Kit("bfloat16", "bfloat16"), width):
        kernel = cuda.generate(d, arch())
        (compiled,) = compile_all([kernel], folder)
        check(GpuKernel(kernel, compiled), d, 37)


SPILLING = [
    (corpus.dropout_add_layer_norm, 10240), (corpus.dropout_add_layer_norm, 12288),
    (corpus.dropout_add_layer_norm, 16384), (corpus.geglu_chain, 12288), (corpus.geglu_chain, 16384),
]  # fmt: skip


@pytest.mark.parametrize(("family", "width"), SPILLING, ids=lambda v: str(getattr(v, "__name__", v)))
def test_schedules_in_place_of_those_that_spill(family: corpus.Family, width: int, folder: Path) -> None:
    for d in family(Kit("bfloat16", "bfloat16"), width):
        kernel, compiled = compile_kernel(d, arch(), cache=folder)
        loaded = GpuKernel(kernel, compiled)
        check(loaded, d, 37)
        check(loaded, d, 154, (7, 22))


def test_second_reads_through_l2(folder: Path) -> None:
    """The schedule of rows that fit nowhere, on rows that would."""
    d = corpus.softmax(Kit("bfloat16", "bfloat16"), 4096)[0]
    s = next(s for s in model.candidates(rewrite(d), schedule.limits_of(arch())) if s.kind == Kind.REREAD)
    kernel = cuda.generate(d, arch(), schedules=(s,))
    (compiled,) = compile_all([kernel], folder)
    check(GpuKernel(kernel, compiled), d, 101)
