"""Generated CUDA kernels without a GPU: their text, their schedules, their machine code, their values on the CPU."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cpp, cuda, in_place, schedule
from te_fuser.codegen import schedule_model as model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_loader import compile_kernel
from te_fuser.codegen.description import KernelDescription, Store, Sum, Target, describe
from te_fuser.codegen.schedule import Kind, Schedule, Sums
from te_fuser.formula import expr
from te_fuser.formula import functions as f
from te_fuser.formula.expr import Axes
from tests.codegen import corpus, ptx
from tests.codegen.corpus import Kit, descriptions, inputs, outputs, reference
from tests.codegen.cuda_calls import complaints, sizes_of
from tests.codegen.cuda_on_cpu import Emulated, build
from tests.needs import needs_compiler, needs_nvrtc

ROOT = Path(__file__).parents[2]
CORPUS = descriptions()
COMPILER = shutil.which("g++") or shutil.which("clang++")
H200 = schedule.limits_of("sm_90a")
BF16 = ("bfloat16", "bfloat16")


# ------------------------------------------------------------------------------------------------ machine code


@needs_nvrtc
def test_a_kernel_that_is_cut_because_it_would_spill_overwrites_nothing(tmp_path: Path) -> None:
    """The plan thinks that it is one kernel; the second of two reads again what the first would have overwritten."""
    plain = next(d for d in corpus.dropout_add_layer_norm(Kit(*BF16), 12288) if d.sums)
    d = dataclasses.replace(plain, overwrites=in_place.pairs(plain, {t.name for t in plain.loads}))
    assert d.overwrites and not in_place.is_cut(d, "sm_90a")
    for _ in range(2):  # the second time from what is kept on disk
        kernel, made = compile_kernel(d, "sm_90a", cache=tmp_path)
        assert len(kernel.schedules) == 2 and kernel.overwrites == ()
        assert kernel.schedules == compile_kernel(plain, "sm_90a", cache=tmp_path)[0].schedules
        assert not [r for r in made.resources if r.spilled_bytes > 16]
        assert "may be stored over" not in kernel.source


@needs_nvrtc
def test_older_gpus_have_nothing_to_wait_for() -> None:
    kernels = ptx.kernels(cuda.generate(CORPUS["layer_norm_bwd-1024-bf16-f32"], "sm_80").source, "sm_80")
    assert len(kernels) == 2
    assert not [line for lines in kernels.values() for line in lines if "griddepcontrol" in line]


# ------------------------------------------------------------------------------------------------------ values


def check(kernel: Emulated, d: KernelDescription, rows: int, batch: tuple[int, int] = (1, 1)) -> list[torch.Tensor]:
    tensors, made = inputs(d, rows, batch[1], seed=rows), outputs(d, rows, batch[1])
    kernel(d, tensors, made, rows, batch)
    assert not complaints(d, tensors, made, rows, batch)
    return made


@needs_compiler
def test_many_blocks_add_up_the_same_sums_as_one(tmp_path: Path) -> None:
    d = CORPUS["layer_norm_bwd-40-bf16"]
    (kernel,) = build(str(COMPILER), [cuda.generate(d)], tmp_path)
    tensors = inputs(d, 300)
    for multiprocessors in (1, 3, 50):
        made, again = outputs(d, 300), outputs(d, 300)
        for out in (made, again):
            kernel(d, tensors, out, 300, multiprocessors=multiprocessors)
        assert not complaints(d, tensors, made, 300)
        assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


VARIED = [
    "layer_norm_fwd-40-bf16", "layer_norm_bwd-257-f32", "rms_norm_recomputed_bwd-257-f32", "rms_norm_bwd-1024-bf16",
    "layer_norm_swiglu_bwd-40-f32", "dropout_add_layer_norm_fwd-1024-bf16-f32",
    "dropout_add_layer_norm_bwd-1024-bf16-f32", "softmax_bwd-1024-bf16", "gains_bwd-40-f32", "two_operands-16-f32",
    "geglu_chain_bwd-257-f32", "scale_shift_bwd-1024-bf16-f32", "bias_gelu_bwd-257-f16",
]  # fmt: skip


def variants(d: KernelDescription) -> list[tuple[Schedule, ...]]:
    """One schedule of each kind, whatever would be picked, and the stores and sums in two kernels."""
    d = rewrite(d)
    fitting = model.candidates(d, H200)
    first: dict[object, Schedule] = {}
    for s in fitting:
        first.setdefault((s.kind, s.ahead, s.sums, s.lanes > 32), s)
    found = [(s,) for s in first.values()]
    if d.sums and d.reductions:
        shared = next(s for s in fitting if s.kind != Kind.COLUMNS)
        found.append((dataclasses.replace(shared, kind=Kind.SHARED, sums=Sums.SHARED),))
        rows, columns = (model.pick(part, H200) for part in schedule.split(d))
        assert rows and columns
        found += [(rows, columns), (dataclasses.replace(rows, kind=Kind.REREAD), columns)]
    return found


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_kind_of_schedule_compiles_and_waits_before_it_touches_memory(arch: str) -> None:
    """Kernels are launched so that they may start while those before them still run, from Hopper on."""
    names = ["layer_norm_bwd-1024-bf16-f32", "dropout_add_layer_norm_fwd-257-f32", "scale_shift_bwd-17-f32"]
    kernels = [cuda.generate(CORPUS[n], arch, schedules=s) for n in names for s in variants(CORPUS[n])]
    # For others one for each way to keep rows and sums, however far it loads ahead.
    kinds = {(k.source.split("\n", 1)[0], *((s.kind, s.sums) for s in k.schedules)): k for k in kernels}
    compiled = kernels if arch == "sm_90a" else kinds.values()
    with ThreadPoolExecutor(2) as pool:
        texts = [text for text, _ in pool.map(lambda k: ptx.compiled(k.source, arch), compiled)]
    assert arch == "sm_80" or not [complaint for text in texts for complaint in ptx.too_early_in(text)]
    used = {(s.kind, s.sums) for k in kernels for s in k.schedules}
    assert used >= {(kind, Sums.NONE) for kind in (Kind.REGISTERS, Kind.SHARED, Kind.REREAD)}
    assert used >= {(kind, Sums.REGISTERS) for kind in (Kind.COLUMNS, Kind.REGISTERS, Kind.SHARED)}
    assert (Kind.SHARED, Sums.SHARED) in used
    assert {s.ahead for k in kernels for s in k.schedules if s.kind == Kind.SHARED} == {1, 2, 3}


# The widths at which something else is picked: registers, shared memory, stores and sums in two kernels.
@needs_compiler
@pytest.mark.parametrize("width", [4096, *(pytest.param(w, marks=pytest.mark.slow) for w in (5000, 16384, 65536))])
def test_real_widths(width: int, tmp_path: Path) -> None:
    kernels = corpus.layer_norm(Kit(*BF16), width)
    for d, kernel in zip(kernels, build(str(COMPILER), [cuda.generate(d) for d in kernels], tmp_path), strict=True):
        check(kernel, d, 7)


@needs_compiler
def test_tanh_gelu_keeps_its_negative_tail(tmp_path: Path) -> None:
    fwd, bwd = corpus.bias_gelu(Kit(), 32)
    x = torch.linspace(-12, -4, 32)[None].contiguous()
    tensors = {"x": x, "bias": torch.zeros(32), "dy": torch.ones(1, 32)}
    for kernel, d in zip(
        build(str(COMPILER), [cuda.generate(fwd), cuda.generate(bwd)], tmp_path), (fwd, bwd), strict=True
    ):
        used = {t.name: tensors[t.name] for t in d.loads}
        made = outputs(d, 1)
        kernel(d, used, made, 1)
        exact = _gelu_tail(x.double())[d is bwd]
        assert ((made[0].double() - exact).abs() <= 1e-4 * exact.abs() + 1e-37).all()


def _gelu_tail(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU and its derivative through the sigmoid, which float64 does not lose in the tail."""
    c = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(c * (x + 0.044715 * x**3))
    return x * s, s + x * s * (1 - s) * c * (1 + 3 * 0.044715 * x**2)


# --------------------------------------------------------------------------------------------------- schedules

# family, width, forward or backward -> kinds, threads that share a row, column sums
PICKED = [
    (corpus.layer_norm, 64, 0, [(Kind.REGISTERS, 8, Sums.NONE)]),
    (corpus.layer_norm, 1024, 0, [(Kind.REGISTERS, 32, Sums.NONE)]),
    (corpus.layer_norm, 4096, 0, [(Kind.REGISTERS, 128, Sums.NONE)]),
    (corpus.layer_norm, 4096, 1, [(Kind.SHARED, 256, Sums.REGISTERS)]),
    (corpus.layer_norm, 8192, 1, [(Kind.SHARED, 512, Sums.REGISTERS)]),
    (corpus.layer_norm, 16384, 0, [(Kind.REGISTERS, 512, Sums.NONE)]),
    (corpus.layer_norm, 16384, 1, [(Kind.SHARED, 512, Sums.REGISTERS)]),
    (corpus.layer_norm, 65536, 0, [(Kind.SHARED, 1024, Sums.NONE)]),
    (corpus.layer_norm, 65536, 1, [(Kind.REREAD, 512, Sums.NONE), (Kind.COLUMNS, 32, Sums.REGISTERS)]),
    (corpus.layer_norm, 4097, 1, [(Kind.SHARED, 1024, Sums.REGISTERS)]),
    (corpus.bias_gelu, 16384, 0, [(Kind.COLUMNS, 128, Sums.NONE)]),
    (corpus.bias_gelu, 16384, 1, [(Kind.COLUMNS, 32, Sums.REGISTERS)]),
    (corpus.bias_gelu, 64, 0, [(Kind.COLUMNS, 8, Sums.NONE)]),
    (corpus.bias_gelu, 64, 1, [(Kind.COLUMNS, 8, Sums.REGISTERS)]),
    (corpus.bias_gelu, 1, 1, [(Kind.COLUMNS, 1, Sums.REGISTERS)]),
]


@pytest.mark.parametrize(
    ("family", "width", "which", "wanted"), PICKED, ids=[f"{c[0].__name__}-{c[1]}-{c[2]}" for c in PICKED]
)
def test_picked_schedule(family: corpus.Family, width: int, which: int, wanted: list[tuple[Kind, int, Sums]]) -> None:
    kernel = cuda.generate(family(Kit(*BF16), width)[which])
    assert [(s.kind, s.lanes, s.sums) for s in kernel.schedules] == wanted


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 31, 100, 1000, 1022, 4095, 30000, 65535, 65536])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_every_width_has_a_schedule_within_the_limits(width: int, arch: str) -> None:
    device = schedule.limits_of(arch)
    for family in (corpus.layer_norm, corpus.bias_gelu):
        for dtypes in (BF16, ("float32", "float32")):
            for d in family(Kit(*dtypes), width):
                kernel = cuda.generate(d, arch)
                for launch in kernel.launches:
                    assert launch.threads <= 1024 and launch.shared_bytes <= device.shared_bytes
                for s in kernel.schedules:
                    assert s.tiles(width) * s.covered >= width and width % s.vector == 0
                    assert s.threads * s.blocks_per_multiprocessor <= device.resident_threads


def test_what_waits_is_cheap() -> None:
    """A raw tensor waits rather than what costs little to compute from it; an expensive value waits itself."""
    cases = {
        "layer_norm_fwd-1024-bf16-f32": [["x"], ["x"], []],
        "rms_norm_bwd-1024-bf16": [["dy", "x"], []],
        "dropout_add_layer_norm_fwd-1024-bf16-f32": [["add"], ["add"], []],
        "geglu_chain_fwd-257-f32": [["mul"], []],
    }
    for name, wanted in cases.items():
        found = [
            sorted(str(n.attrs[0]) if n.op == "input" else n.op for n in p.waits)
            for p in schedule.passes(rewrite(CORPUS[name]), Kind.REGISTERS)
        ]
        assert found == wanted, name


def test_the_grid_fills_the_gpu_and_no_more() -> None:
    kernel = cuda.generate(corpus.layer_norm(Kit(*BF16), 4096)[1])
    per_gpu = 132 * kernel.schedules[0].blocks_per_multiprocessor
    for rows, groups in ((3, 3), (100, 64), (400, 100), (10**6, per_gpu)):
        sizes = sizes_of(kernel, rows, 1, 132)
        assert sizes.groups == groups and sizes.blocks == (groups, 2 * 4096 // 32)
        assert sizes.partials == (groups * 4096,) * 2
    for rows in (0, 1, 2):  # one block stores the sums itself
        sizes = sizes_of(kernel, rows, 1, 132)
        assert sizes.groups == 1 and sizes.blocks == (1, 0) and sizes.partials == (0, 0)
    owned = cuda.generate(CORPUS["scale_shift_bwd-1024-bf16-f32"])
    assert sizes_of(owned, 4096, 8, 132).groups % 8 == 0
    assert sizes_of(owned, 4096, 1000, 132).groups == 1000
    assert sizes_of(owned, 4096, 1000, 132).blocks[-1] == 0  # each sample's sums come from one block
    assert sizes_of(owned, 8192, 2, 132).blocks[-1] > 0
    plain = cuda.generate(CORPUS["bias_gelu_fwd-16-f32"])
    assert sizes_of(plain, 0, 1, 132).blocks == (0,)
    rows = cuda.generate(corpus.layer_norm(Kit(*BF16), 4096)[0])
    assert sizes_of(rows, 10**6, 1, 132).blocks == (10**6,)  # a block for each row
    assert sizes_of(rows, 10**12, 1, 132).blocks[0] < 2**31


# -------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("name", CORPUS)
def test_text_says_what_it_is(name: str) -> None:
    d = CORPUS[name]
    kernel = cuda.generate(d)
    assert kernel.source.startswith("".join(f"// {line}\n" for line in str(d).splitlines()))
    assert "atomic" not in kernel.source and "tanh.approx" not in kernel.source
    assert all(
        len(launch.parameters) == len({(p.kind, p.name) for p in launch.parameters}) for launch in kernel.launches
    )
    kinds = [p.kind for p in kernel.launches[0].parameters]
    order = [
        *("load", "seed", "seed_value", "seed_offset", "store", "row_value"),
        *("partial", "sum", "rows", "batch_inner", "batch_size", "stream"),
    ]
    assert kinds == sorted(kinds, key=order.index)
    assert kinds.count("load") == len(d.loads) and kinds.count("stream") == len(d.streams)


def test_text_is_the_same_in_every_process() -> None:
    """In C++, too."""
    script = textwrap.dedent("""
        from te_fuser.codegen import cpp, cuda
        from tests.codegen.corpus import descriptions
        for d in [*{d.name: d for d in descriptions().values()}.values()][::4]:
            print(cpp.generate(d).source, cuda.generate(d, "sm_90a").source)
    """)
    env = {"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    once = [*{d.name: d for d in CORPUS.values()}.values()][::4]
    here = [f"{cpp.generate(d).source} {cuda.generate(d, 'sm_90a').source}\n" for d in once]
    assert done.stdout == "".join(here)


def test_formulas_lose_instructions_and_keep_their_meaning() -> None:
    for name in ("bias_gelu_bwd-16-f32", "swiglu_bwd-1024-bf16", "layer_norm_bwd-257-f32"):
        d = CORPUS[name]
        new = rewrite(d)
        assert schedule.instructions(new) < schedule.instructions(d)
        assert len(new.reductions) == len(d.reductions)
    tensors = inputs(d, 9)
    for a, b in zip(reference(new, tensors, 9), reference(d, tensors, 9), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_split_kernels_pass_one_number_a_row() -> None:
    kernel = cuda.generate(corpus.layer_norm(Kit(*BF16), 65536)[1])
    assert [launch.symbol for launch in kernel.launches] == [
        "layer_norm_bwd", "layer_norm_bwd_columns", "layer_norm_bwd_finish"
    ]  # fmt: skip
    passed = [p.name for p in kernel.launches[0].parameters if p.kind == "row_value"]
    assert passed == [p.name for p in kernel.launches[1].parameters if p.kind == "row_value"] == list(kernel.row_values)


def test_a_store_of_nothing_but_sums() -> None:
    """Column sums that need row reductions, beyond what fits one kernel, without any other store."""
    d = dataclasses.replace(corpus.layer_norm(Kit(*BF16), 65536)[1], stores=())
    kernel = cuda.generate(d)
    assert not any(isinstance(s, Store) for s in d.stores) and kernel.launches[-1].symbol == "layer_norm_bwd_finish"


def test_kernels_of_long_formulas_are_written() -> None:
    """3,000 operations, one above the other, before a row reduction and after it."""
    e = expr.leaf("x", Axes.FULL, 64)
    for _ in range(1500):
        e = f.tanh(e)
    e = e - f.row_mean(e)
    for _ in range(1500):
        e = f.tanh(e)
    targets = [Target("y", e, Axes.FULL, 64, "bfloat16")]
    d = describe("long_fwd", targets, targets[:0], {"x": (Axes.FULL, 64, "bfloat16")})
    assert cuda.generate(d).source.count("tanh(") >= 3000
    rows, columns = schedule.split(
        dataclasses.replace(d, sums=(Sum("s", d.stores[0].parts, Axes.FEATURE, 64, "float32"),))
    )
    assert rows.stores and columns.sums


def test_a_sum_of_many_terms_is_written() -> None:
    term = total = expr.leaf("x", Axes.FULL, 64)
    for _ in range(1200):
        term = f.tanh(term)
        total = total + term
    targets = [Target("y", total, Axes.FULL, 64, "bfloat16")]
    d = describe("sum_fwd", targets, targets[:0], {"x": (Axes.FULL, 64, "bfloat16")})
    assert cuda.generate(d).source.count("tanh(") >= 1200
