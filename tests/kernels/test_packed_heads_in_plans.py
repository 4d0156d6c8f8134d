"""The kernel over packed heads in plans: compiled before the first call, its sums, and gradients stored in 8 bits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import Fuser, fusions, ops
from te_fuser.codegen import nvrtc
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.config import config
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.refs import GRADIENT, Ref
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fusions.match import Match
from te_fuser.kernels import packed_heads
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.recipe import DelayedScaling
from te_fuser.verify import VerificationError
from tests.fake_cuda import Emulation, FakeDriver, as_new_process, forget_written, in_place
from tests.fuser.plan.test_layouts_transposed import agree, on_an_emulated_gpu, trained
from tests.kernels.emulated import launched
from tests.kernels.packed_cases import ATTENTION
from tests.needs import needs_compiler
from tests.twins import randomize

HEADS, DIM = 4, 16
WIDTH, FEATURES = HEADS * DIM, 3 * HEADS * DIM
BF16 = torch.bfloat16
ROTARY = ("rotary_embedding_forward", "rotary_embedding_backward")


def only(*others: Any) -> Any:
    """Plans of these, row ops, rotations, and attention whose gradients the kernel packs."""
    return fusions.only("stretch", *ROTARY, ATTENTION, *others)


def rotary(**options: int) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(DIM, heads=HEADS, **options)


def attention(mask: str = "causal") -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, mask=mask, layout="sequence_first")


def source(features: int, *rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*rows, features, dtype=dtype, requires_grad=True)


# ----------------------------------------------------------------------------------------- before the first call


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were compiled, none of which does anything."""
    names: list[str] = []

    def compile_source(source: str, arch: str, *, name: str = "", cache: Path | None = None) -> Compiled:
        names.append(name)
        return Compiled(b"nowhere:-", ())

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    return names


@pytest.fixture
def fresh(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A process that has made no kernel yet, with tensors on the CPU that stand for those on a GPU."""
    as_new_process(monkeypatch, tmp_path)
    monkeypatch.setattr(pipeline, "target_for", lambda *_: "cuda")
    monkeypatch.setattr("te_fuser.fusions.rotary.why_no_kernel", lambda m: None)
    with in_place(library) as fake:
        yield fake
    forget_written()


def turning() -> ops.RotaryEmbedding:
    return rotary(rotary_dim=4, position_offset=3)


# The list, and how many kernels over packed heads it needs with a bias that trains and with a frozen one.
LISTS: dict[str, tuple[list[FusableOperation], int, int]] = {
    "rotation": ([ops.SiLU(), turning()], 2, 2),
    "bias and rotation": ([ops.Bias(FEATURES), turning()], 2, 2),
    "bias and attention": ([ops.Bias(FEATURES), attention()], 1, 1),
    "bias, rotation and attention": ([ops.Bias(FEATURES), turning(), attention()], 2, 2),
    "rotation and attention": ([ops.SiLU(), turning(), attention()], 2, 2),
    "attention alone": ([ops.SiLU(), attention()], 0, 0),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", LISTS)
def test_the_first_call_compiles_and_loads_nothing(
    name: str, dtype: torch.dtype, frozen: bool, fresh: FakeDriver, compiled: list[str]
) -> None:
    listed, *counts = LISTS[name]
    count = counts[frozen]
    for op in listed:
        op.to(dtype).requires_grad_(not frozen)
    fuser, x = Fuser(listed), source(FEATURES, 5, 2, dtype=dtype)
    with only():
        prepared, _ = fuser.prepare(x, {})
        written = [kernel.name for kernel in prepared.plan.written]
        assert written.count("packed_heads") == count == compiled.count("packed_heads")
        before = fresh.loads, list(compiled)
        y = fuser(x)
        launches = fresh.launches
        y.sum().backward()
    assert (fresh.loads, compiled) == before
    assert fresh.launches > launches or not count


def test_another_cache_folder_after_planning_changes_nothing(
    fresh: FakeDriver, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first call of a plan nor another plan of the same kernels compiles or loads: both may be captured."""
    listed = [ops.Bias(FEATURES), turning(), attention()]
    fuser, x = Fuser(listed), source(FEATURES, 5, 2)
    with only():
        fuser.prepare(x, {})
        before = fresh.loads, list(compiled)
        assert before[1].count("packed_heads") == 2
        monkeypatch.setattr(config, "cache_dir", tmp_path / "another")
        fuser(x).sum().backward()
        Fuser(listed)(x).sum().backward()
    assert (fresh.loads, compiled) == before


def test_no_gradients_need_no_kernel_of_backward(fresh: FakeDriver, compiled: list[str]) -> None:
    with only(), torch.no_grad():
        Fuser([ops.Bias(FEATURES), turning(), attention()]).prepare(source(FEATURES, 5, 2), {})
    assert compiled.count("packed_heads") == 1


def test_equal_kernels_are_made_once(fresh: FakeDriver, compiled: list[str]) -> None:
    two = [ops.SiLU(), turning(), ops.SiLU(), turning()]
    with only():
        Fuser(two).prepare(source(FEATURES, 5, 2), {})
        loads = fresh.loads
        Fuser(two).prepare(source(FEATURES, 5, 2), {})
    assert compiled.count("packed_heads") == 2 and fresh.loads == loads


# ---------------------------------------------------------------------- sums, beside those of generated kernels


@pytest.fixture
def emulated(driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Plans run emulated kernels, those over packed heads included."""
    monkeypatch.setattr("te_fuser.fusions.rotary.why_no_kernel", lambda m: None)
    with emulation.in_plans():
        yield driver


# Ops behind a norm and a product, and the fusion that makes the bias's gradient.
SUMMED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "bias and attention": (lambda: [ops.Bias(FEATURES), attention()], ATTENTION.name),
    "bias, rotation and attention": (lambda: [ops.Bias(FEATURES), rotary(), attention()], ATTENTION.name),
    "bias and rotation": (lambda: [ops.Bias(FEATURES), rotary()], "rotary_embedding_backward"),
}


def layer(name: str, **options: Any) -> tuple[te.Sequential, torch.Tensor]:
    """The list, and an input."""
    parts = [ops.LayerNorm(WIDTH), ops.MatMul(WIDTH, FEATURES), *SUMMED[name][0]()]
    return randomize(te.Sequential(*parts, **options)).float(), source(WIDTH, 60, 3)


def gradients(model: te.Sequential, x: torch.Tensor, reference: bool = False) -> list[torch.Tensor]:
    y = model.reference(x) if reference else model(x)
    dy = torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape)
    return [*torch.autograd.grad(y, [x, *model.parameters()], dy)]


def assert_exact(found: list[torch.Tensor], model: te.Sequential, x: torch.Tensor) -> None:
    exact = gradients(model.double(), x.detach().double().requires_grad_(), reference=True)
    model.float()
    for got, want in zip(found, exact, strict=True):
        # Sums of both signs: PyTorch errs as much in float32.
        assert (got.double() - want).abs().max() <= 5e-5 * want.abs().max()


@needs_compiler
@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_two_kernels(name: str, emulated: FakeDriver) -> None:
    """The norm's kernel has sums, and that over packed heads, which each adds up by a launch of its own."""
    model, x = layer(name)
    with only():
        (step,) = (s for s in model.plan(x).backward if s.name == SUMMED[name][1])
        assert [k for k, _ in step.outputs] == ["input", "0.bias"]
        found, _, last = launched(emulated, gradients, model, x)
    assert last.endswith(b"_finish")
    assert_exact(found, model, x)


@needs_compiler
def test_where_no_generated_kernel_has_sums(emulated: FakeDriver) -> None:
    model, x = randomize(te.Sequential(ops.Bias(FEATURES), attention())).float(), source(FEATURES, 40, 2)
    with only():
        found, launches, last = launched(emulated, gradients, model, x)
    # The bias in forward; the packing and its sums in backward.
    assert (launches, last) == (3, b"packed_heads_finish")
    assert_exact(found, model, x)


@needs_compiler
def test_sums_that_a_step_reads(emulated: FakeDriver) -> None:
    """The gradient of a bias in two places is the sum of two, which is made within the program."""
    shared = ops.Bias(FEATURES)
    model = te.Sequential(shared, attention(), ops.MatMul(WIDTH, FEATURES), shared, attention())
    randomize(model).float()
    x = source(FEATURES, 60, 3)
    with only():
        found, _, last = launched(emulated, gradients, model, x)
    assert last == b"packed_heads_finish"
    assert_exact(found, model, x)


@needs_compiler
def test_verify_sees_wrong_sums(emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed_heads.Packing.__call__

    def wrong(*arguments: Any, **options: Any) -> Any:
        dx, sums = pack(*arguments, **options)
        return dx, 2 * sums

    model, x = layer("bias and attention", verify=True)
    with only():
        assert_exact(gradients(model, x), model, x)
        monkeypatch.setattr(packed_heads.Packing, "__call__", wrong)
        with pytest.raises(VerificationError, match="gradient of bias"):
            gradients(model, x)


@needs_compiler
def test_one_block_that_has_it_all_needs_no_second_launch(emulated: FakeDriver) -> None:
    with only():
        Fuser([ops.Bias(FEATURES), attention()])(source(FEATURES, 2, 1)).sum().backward()
    assert emulated.last_symbol == b"packed_heads"


# ------------------------------------------------------- in 8 bits, for the product of 8 bits before packed heads


def by_angles() -> ops.RotaryByAngles:
    return ops.RotaryByAngles(DIM, heads=HEADS, kv_heads=HEADS, angles="angles")


# What turns behind the product, and the step that stores its gradient: where attention does not pack it, and does.
TURNS: dict[str, tuple[Callable[[], list[Any]], tuple[str, str]]] = {
    "": (list, (ATTENTION.name, "bwd")),
    "rotation": (lambda: [rotary()], (ATTENTION.name, "rotary_embedding_backward")),
    "angles": (lambda: [by_angles()], ("turned_heads_backward", "turned_heads_backward")),
}


@needs_compiler
@pytest.mark.parametrize(("bias", "packs"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("turns", TURNS)
def test_gradients_stored_in_8_bits(
    turns: str, bias: bool, packs: bool, driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass packs, turns, adds up and quantizes; where attention packs by itself, that of the rotation does."""
    made, by = TURNS[turns]
    model = randomize(
        te.Sequential(ops.Linear(WIDTH, FEATURES, bias=bias), *made(), attention("none"), ops.Linear(WIDTH, WIDTH))
    ).to(BF16)
    with torch.no_grad():
        model[0].weight.mul_(0.125)  # scores near 0: else attention takes steps of 8 bits for more than they are
    named = {"angles": torch.arange(40.0)[:, None, None, None] / 8 + torch.ones(DIM)} if turns == "angles" else {}
    twin, looked_at = copy.deepcopy(model), copy.deepcopy(model)
    looked_at.verify = True

    def one_sample(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x.unsqueeze(1), **named)  # type: ignore[no-any-return]

    wanted = trained(twin, one_sample)
    products = [n for n in fusions.names() if n.startswith("float8_matmul")]
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    # Of so few rows bytes decide, as of many.
    monkeypatch.setitem(DEVICES, "h200", dataclasses.replace(DEVICES["h200"], launch=0.0, replayed=True))
    taken = ("turned_heads_forward", "turned_heads_backward", *products, "attention_cpu_flash" if packs else ATTENTION)
    with on_an_emulated_gpu(emulation), fusions.only("stretch", *ROTARY, *taken):
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=2)):
            plan = model.plan(source(WIDTH, 37, 1, dtype=BF16), **named)
        agree(trained(model, one_sample), wanted, share=0.04)
        agree(trained(looked_at, one_sample), wanted, share=0.04)
    product = next(n for n in plan.graph.nodes if n.op.kind is Float8MatMul)
    (stores,) = {s.name for s in plan.backward if Ref(GRADIENT, product.output) in s.writes()}
    assert by[packs] in stores
