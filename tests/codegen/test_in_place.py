"""Outputs stored over inputs: which pairs may be, the same bits by every schedule, and the text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from te_fuser import _native
from te_fuser.codegen import cuda, in_place, schedule
from te_fuser.codegen import schedule_model as model
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_loader import native_kernel
from te_fuser.codegen.description import KernelDescription, Target, describe
from te_fuser.formula import expr
from te_fuser.formula import functions as f
from te_fuser.formula.expr import Axes
from tests.codegen import corpus, ptx
from tests.codegen.corpus import Kit, inputs, outputs
from tests.codegen.cuda_calls import complaints
from tests.codegen.cuda_on_cpu import Emulated, build
from tests.codegen.test_cuda import CORPUS, H200, VARIED, variants
from tests.fake_cuda import CXX
from tests.needs import needs_compiler, needs_nvrtc


def over(d: KernelDescription) -> KernelDescription:
    """The kernel, every input of which dies."""
    return dataclasses.replace(d, overwrites=in_place.pairs(d, {t.name for t in d.loads}))


OVER = {name: over(d) for name, d in CORPUS.items()}
BIAS_GELU = next(d for d in corpus.bias_gelu(Kit("bfloat16", "bfloat16"), 1024) if d.sums)
LAYER_NORM = corpus.layer_norm(Kit("bfloat16", "bfloat16"), 1024)


# ------------------------------------------------------------------------------------------------ which pairs


def twice(store: str = "float32", load: str = "float32", axes: Axes = Axes.FULL, width: int = 16) -> KernelDescription:
    """y = 2 x, and x as asked for beside a full tensor."""
    x, full = expr.leaf("x", axes, width), expr.leaf("full", Axes.FULL, 16)
    e = full + x if width == 16 or not axes & Axes.FEATURE else full + f.split(x, 2)[1]
    tensors = {"x": (axes, width if axes & Axes.FEATURE else 1, load), "full": (Axes.FULL, 16, "float16")}
    return describe("twice", [Target("y", e, Axes.FULL, 16, store)], (), tensors)


REFUSED = {
    "x is float32, y is": (twice(store="bfloat16"), "y is bfloat16, x is float32"),
    "a parameter": (twice(axes=Axes.FEATURE), "x has no element for each row and feature (feature)"),
    "one a row": (twice(axes=Axes.ROWS), "x has no element for each row and feature (rows)"),
    "one a sample": (twice(axes=Axes.SAMPLE_FEATURES), "x has no element for each row and feature (batch+feature)"),
    "a scalar": (twice(axes=Axes.NONE), "x has no element for each row and feature (scalar)"),
    "wider": (twice(width=32), "y has 16 features, x has 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_overwritten(name: str) -> None:
    d, why = REFUSED[name]
    load = next(t for t in d.loads if t.name == "x")
    assert in_place.refusal(d, d.stores[0], load) == why
    assert in_place.pairs(d, {"x"}) == ()


def test_what_is_stored_for_each_row_takes_no_tensors_memory() -> None:
    d = CORPUS["layer_norm_fwd-40-bf16"]
    x = next(t for t in d.loads if t.axes == Axes.FULL)
    found = {s.name: in_place.refusal(d, s, x) for s in d.stores}
    assert [why for why in found.values() if not why] == [""]
    assert sum("no element for each row and feature (rows)" in why for why in found.values()) == 2


def test_a_tensor_read_at_shifted_features_is_not_overwritten() -> None:
    """A part that begins inside a vector of columns is read by other threads than those that store over it."""
    x = expr.make("input", (), ("x", 3, 16), Axes.FULL, 8)
    e = expr.concat([x + x, x])
    d = describe("shifted", [Target("y", e, Axes.FULL, 16, "float32")], (), {"x": (Axes.FULL, 16, "float32")})
    (load,), (store,) = d.loads, d.stores
    assert in_place.refusal(d, store, load) == "x is read by other threads than those that store its elements"


def test_parts_may_change_places() -> None:
    """One thread reads and stores the same columns of every part."""
    x = expr.leaf("x", Axes.FULL, 16)
    a, b = f.split(x, 2)
    d = describe(
        "turned", [Target("y", expr.concat([-b, a]), Axes.FULL, 16, "float32")], (), {"x": (Axes.FULL, 16, "float32")}
    )
    assert in_place.pairs(d, {"x"}) == (("y", "x"),)


def test_an_input_is_overwritten_once() -> None:
    x, y = (expr.leaf(n, Axes.FULL, 8) for n in "xy")
    targets = [Target(n, e, Axes.FULL, 8, "float32") for n, e in (("a", x + y), ("b", x * y), ("c", x - y))]
    d = describe("three", targets, (), dict.fromkeys("xy", (Axes.FULL, 8, "float32")))
    assert in_place.pairs(d, {"x"}) == (("a", "x"),)
    assert in_place.pairs(d, {"x", "y"}) == (("a", "x"), ("b", "y"))
    assert in_place.pairs(d, ()) == ()


# ----------------------------------------------------------------------------------------------- the same bits


def both(kernel: Emulated, d: KernelDescription, rows: int, batch: tuple[int, int], processors: int) -> None:
    """Right values in new memory, the same bits over the inputs; what is not overwritten stays."""
    read = inputs(d, rows, batch[1], seed=rows)
    wanted = outputs(d, rows, batch[1])
    kernel(d, read, wanted, rows, batch, processors)
    assert not complaints(d, read, wanted, rows, batch)
    again = {name: t.clone() for name, t in read.items()}
    made, pairs = outputs(d, rows, batch[1]), dict(d.overwrites)
    made = [again[pairs[s.name]] if s.name in pairs else t for s, t in zip(d.outputs, made, strict=True)]
    kernel(d, again, made, rows, batch, processors)
    for s, a, b in zip(d.outputs, wanted, made, strict=True):
        assert torch.equal(a.view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), s.name
    assert all(torch.equal(again[n], t) for n, t in read.items() if n not in pairs.values())


@needs_compiler
@pytest.mark.parametrize("name", VARIED)
def test_every_schedule_is_right_and_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """In two kernels nothing is overwritten."""
    every = [(CORPUS[name] if len(s) > 1 else OVER[name], s) for s in variants(CORPUS[name])]
    kernels = build(str(CXX), [cuda.generate(d, schedules=s) for d, s in every], tmp_path)
    for kernel, (d, _) in zip(kernels, every, strict=True):
        assert kernel.kernel.overwrites == d.overwrites
        # Fewer rows than a block does at once: the last one is computed several times.
        for rows, batch, processors in ((0, (1, 1), 1), (13, (1, 1), 3), (12, (4, 3), 1)):
            both(kernel, d, rows, batch, processors)


@needs_compiler
def test_all_kernels_give_the_same_bits(tmp_path: Path) -> None:
    found = {name: d for name, d in OVER.items() if d.overwrites}
    assert len(found) > len(CORPUS) / 2
    found = {name: d for name, d in found.items() if d.width < 1024}
    kernels = build(str(CXX), [cuda.generate(d) for d in found.values()], tmp_path)
    for kernel, d in zip(kernels, found.values(), strict=True):
        both(kernel, d, 13, (1, 1), 1)


# ---------------------------------------------------------------------------------------------------- the text


def test_only_kernels_that_overwrite_have_another_text() -> None:
    d = BIAS_GELU
    changed = over(d)
    assert dataclasses.replace(changed, overwrites=()).key == d.key != changed.key
    plain, text = cuda.generate(d).source, cuda.generate(changed).source
    assert cuda.generate(dataclasses.replace(changed, overwrites=())).source == plain
    body = [line for line in text.splitlines() if not line.startswith("//")]
    before = [line for line in plain.splitlines() if not line.startswith("//")]
    different = [(a, b) for a, b in zip(before, body, strict=True) if a != b]
    assert len(different) == 2 * len(changed.overwrites)
    assert all(a.replace(" __restrict__", "") == b for a, b in different)
    assert "may be stored over" in text


def test_a_kernel_cut_in_two_overwrites_nothing() -> None:
    (d,) = (d for d in corpus.layer_norm(Kit("bfloat16", "bfloat16"), 65536) if d.sums)
    assert in_place.is_cut(d, "sm_90a")
    changed = over(d)
    assert changed.overwrites
    kernel = cuda.generate(changed, "sm_90a")
    assert len(kernel.schedules) == 2 and kernel.overwrites == ()
    assert kernel.source == cuda.generate(d, "sm_90a").source
    rewritten = rewrite(changed)
    apart = [model.pick(part, H200) for part in schedule.split(rewritten)]
    assert all(apart) and not any(part.overwrites for part in schedule.split(rewritten))
    assert "overwritten" in model.misfit(rewritten, [s for s in apart if s], H200)


def test_no_variant_of_a_kernel_that_overwrites_is_cut_in_two() -> None:
    d = next(d for d in LAYER_NORM if d.sums)
    assert not in_place.is_cut(d, "sm_90a")
    assert any(len(s) == 2 for s in model.variants(rewrite(d), H200, 24))
    assert all(len(s) == 1 for s in model.variants(rewrite(over(d)), H200, 24))


def loads_of(lines: Sequence[str], parameter: int) -> list[str]:
    """The loads from global memory by addresses that come from a kernel's parameter, by its number."""
    addresses: set[str] = set()
    found = []
    for line in lines:
        if re.search(rf"ld\.param\.\w+\s+%\w+, \[\w+_param_{parameter}\]", line):
            addresses.add(re.findall(r"%\w+", line)[0])
        elif re.match(r"(add|cvta|mov|mad)\S*\s", line) and (names := re.findall(r"%\w+", line)):
            if addresses & set(names[1:]):
                addresses.add(names[0])
        elif re.search(r"\bld\.(global|volatile)", line) and addresses & set(re.findall(r"\[(%\w+)", line)):
            found.append(line)
    return found


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("plain", [BIAS_GELU, LAYER_NORM[0]], ids=lambda d: d.name)
def test_what_may_be_overwritten_is_not_read_by_way_of_constant_memory(plain: KernelDescription, arch: str) -> None:
    d = over(plain)
    numbers = [k for k, t in enumerate(d.loads) if t.name in dict(d.overwrites).values()]
    assert numbers
    for description, coherent in ((d, True), (plain, False)):
        kernel = cuda.generate(description, arch)
        lines = ptx.kernels(kernel.source, arch)[kernel.launches[0].symbol]
        for number in numbers:
            loads = loads_of(lines, number)
            assert loads
            assert all(".nc" not in line for line in loads) if coherent else any(".nc" in line for line in loads)


# ----------------------------------------------------------------------------------------- the native kernel


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (((2, 0), (3, 0)), "is overwritten once"),
        (((2, 0), (2, 1)), "overwrites one other"),
        (((0, 1),), "a tensor that is written, over one that is read"),
        (((2, 3),), "a tensor that is written, over one that is read"),
        (((9, 0),), "a tensor that is written, over one that is read"),
        (((2, -1),), "a tensor that is written, over one that is read"),
        (((4, 0),), "another of its own dtype"),
        ((2, 0), "(written, read)"),
    ],
)
def test_the_native_kernel_refuses_what_cannot_be(
    pairs: tuple[object, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dy = (expr.leaf(n, Axes.FULL, 8) for n in ("x", "dy"))
    stored = ("a", x + dy, "float32"), ("b", x * dy, "float32"), ("c", x, "float16")
    targets = [Target(n, e, Axes.FULL, 8, t) for n, e, t in stored]
    d = describe("three", targets, (), dict.fromkeys(("x", "dy"), (Axes.FULL, 8, "float32")))
    made = _native.CudaKernel
    monkeypatch.setattr(_native, "CudaKernel", lambda *a, **k: made(*a, **k | {"overwrites": pairs}))
    with pytest.raises(ValueError, match=re.escape(why)):
        native_kernel(d, cuda.generate(d), b"")
