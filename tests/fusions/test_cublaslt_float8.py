"""Products of 8 bits by cuBLASLt: by one scale, by a scale for each block, some of three; those of plans are right."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions import Cost, Fusion, FusionCall, cublaslt_float8, cublaslt_own_scales
from te_fuser.fusions.cublaslt_float8 import ProductRow8
from te_fuser.fusions.pattern import Optional
from te_fuser.guards import Facts
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import quack
from te_fuser.kernels.quantizers import QuantizeWeights
from te_fuser.ops.blockwise_scaling import dequantized
from te_fuser.ops.casts import QuantizeGradient
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul
from te_fuser.params.concatenated_parameter import _JOINED, Joined
from te_fuser.quantization import QuantizedTensor, lowering, quantize
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MMParams, QParams, Recipe
from tests import fake_cublaslt
from tests.fake_cublaslt import FakeCublasLt
from tests.fake_cuda import running
from tests.float8 import E4M3, E5M2, OURS
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.models import BF16, F32, installed
from tests.fusions.plans import blocks, float8, quantized
from tests.fusions.products import reasons
from tests.needs import needs_compiler

pytestmark = needs_compiler
Y, BIASED, BACK, MAIN = "float8_matmul", "float8_matmul_bias", "float8_matmul_backward", "float8_matmul_main_grad"
ROWS_BACK, ROWS_MAIN = "float8_matmul_rows_backward", "float8_matmul_rows_main_grad"
OWN = ("own_scales_matmul", "own_scales_matmul_bias")
BLOCKS: dict[str, Recipe] = {
    "blocks": Float8BlockScaling(),
    "blocks by any scales": Float8BlockScaling(fp8_quant_fwd_inp=QParams(power_2_scale=False)),
}
DTYPES = [(BF16, BF16), (F32, F32), (BF16, F32)]  # of the call, of the weight
ROWS = 17


def taken(p: Plan, *names: str, produces: str = "output") -> Step:
    """The one step of these fusions that gives this."""
    (found,) = [s for s in (*p.forward, *p.backward) if s.name in names and produces in dict(s.outputs)]
    return found


def weights(dtype: torch.dtype, own: torch.dtype) -> dict[str, Any]:
    """A call in a dtype, its weight in one of its own."""
    return {"dtype": dtype, "dtypes": {"1.weight": own} if own != dtype else None}


def close(found: torch.Tensor, exact: torch.Tensor, units: int = 2) -> None:
    eps = torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=units * eps, atol=units * eps * exact.abs().max().item())


def kernels() -> Iterator[Any]:
    """All that bodies may launch."""
    yield QuantizeWeights()
    for recipe, (dtype, own) in itertools.product(BLOCKS.values(), DTYPES):
        for role, scaling in enumerate(recipe.own_scales or ()):
            for wanted in ("rows", "turned", "both"):
                yield quantizers.kernel_of(own if role == 1 else dtype, E4M3, scaling, wanted)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCublasLt]:
    """Kernels and products that are computed on the CPU."""
    products.product_of.cache_clear()
    with (
        running(set(kernels()), tmp_path_factory.mktemp("float8")),
        fake_cublaslt.in_place(fake_cublaslt.compile_library()) as fake,
    ):
        yield fake
    products.product_of.cache_clear()


@pytest.fixture
def cublaslt(everything: FakeCublasLt) -> FakeCublasLt:
    """One that takes factors along what is summed alone."""
    everything.any_layout = 0
    return everything


# --------------------------------------------------------------------------------------------------------- the rows


def _one_scale() -> Fusion:
    pattern = Float8MatMul, Optional(QuantizeGradient), ops.Bias, ops.Dropout
    return cublaslt_float8.declare(ProductRow8("new", "", pattern, kind="bias", adds=("-2.bias",)))


def _blocks() -> Fusion:
    pattern = OwnScalesMatMul, ops.Bias, ops.Dropout
    return cublaslt_own_scales._declare(ProductRow8("new", "", pattern, kind="bias", adds=("1.bias",)))


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize(
    ("declare", "recipe"), [(_one_scale, DelayedScaling()), (_blocks, BLOCKS["blocks"])], ids=["one scale", "blocks"]
)
def test_row_declared_is_taken_or_says_why_not(declare: Callable[[], Fusion], recipe: Recipe, drops: float) -> None:
    """Its ops, its kind and what it adds say all."""
    new = declare()
    try:
        model = te_fuser.Sequential(ops.MatMul(512, 256), ops.Bias(256), ops.Dropout(drops))
        x = torch.empty(4096, 512, dtype=BF16, device="meta", requires_grad=True)
        with fusions.disabled(BIASED, *OWN), te_fuser.autocast(recipe=recipe):
            p = model.to("meta", BF16).plan(x, device="h200")
    finally:
        fusions.unregister(new)
    if drops:
        assert "an epilogue drops nothing, and this Dropout does" in reasons(p, "new")
        return
    found = next(s for s in p.forward if s.name == "new")
    assert [p.graph.parameters[r.index].name for name, r in found.inputs if name.endswith(".bias")] == ["bias"]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, (True, False, False)),
        ({"fp8_gemm_fprop": True, "fp8_gemm_dgrad": False}, (False, True, False)),
        ({"fp8_gemm_wgrad": False}, (True, False, True)),
    ],
)
def test_sums_of_products_are_as_the_recipe_says(how: dict[str, bool], wanted: tuple[bool, bool, bool]) -> None:
    p = float8(recipe=DelayedScaling(**{n: MMParams(use_split_accumulator=s) for n, s in how.items()}))()
    steps = (taken(p, BIASED), taken(p, BACK, produces="input"), taken(p, BACK, produces="0.weight"))
    factors = (E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)
    for kind, s, fast, two in zip(("bias", "plain", "plain"), steps, wanted, factors, strict=True):
        form = products.form_of_8(kind, *two, BF16, fast)
        assert s.task.body.function.__self__ is products.product_of(form)  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"])
def test_products_without_any_fusion_are_emulated(recipe: Recipe) -> None:
    """Plans that tests on a GPU compare those of fusions with."""
    with installed(quack), fusions.disabled(*OURS):
        for device in ("h200", "b200"):
            p = float8(device=device, recipe=recipe)()
            assert not {s.name for s in (*p.forward, *p.backward)} & {*fusions.names()}


def test_rates_of_8_bits_are_about_twice_those_of_16() -> None:
    """On GPUs that have them; a cost says that its products are such."""
    for device in DEVICES.values():
        has = device.capability is not None and device.capability >= (8, 9)
        assert ("float8_e4m3fn" in device.matrix_rate) == ("float8_e5m2" in device.matrix_rate) == has, device.name
    h200 = DEVICES["h200"]
    narrow, wide = Cost(flops=1e15, dtype="float8_e5m2"), Cost(flops=1e15)
    faster = h200.limits(wide, "bfloat16")["products"] / h200.limits(narrow, "bfloat16")["products"]
    assert faster == pytest.approx(1.85)
    assert (wide + narrow).dtype == "float8_e5m2"
    with pytest.raises(ValueError, match="a100: the rate of matrix products in float8_e5m2 is not known"):
        DEVICES["a100"].limits(narrow, "bfloat16")


# ------------------------------------------------------------------------------------------------------- one scale


def layouts(x: QuantizedTensor, dy: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Both factors by rows and transposed, as fusions name them."""
    by_rows = {"input": x.data, "dy": dy.data}
    return {**by_rows, "input.transposed": x.transposed, "dy.transposed": dy.transposed}


def drawn(*shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    yield from (torch.randn(*shape, generator=rng) for shape in shapes)


@pytest.mark.parametrize("format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize(("dtype", "own"), DTYPES)
@pytest.mark.parametrize(("device", "back"), [("h200", BACK), ("b200", ROWS_BACK)])
def test_products_by_one_scale_are_those_of_float64(
    cublaslt: FakeCublasLt, device: str, back: str, dtype: torch.dtype, own: torch.dtype, format: Format
) -> None:
    """In the dtype of the call, the weight's gradient in the weight's; tokens are no multiple of 16."""
    cublaslt.any_layout = back == ROWS_BACK
    p = float8(device=device, recipe=DelayedScaling(fp8_format=format), **weights(dtype, own))()
    x, w, dy, bias = drawn((ROWS, 64), (48, 64), (ROWS, 48), (48,))
    w, bias, slot = w.to(own), bias.to(dtype), torch.tensor(0.25)
    gradients = E5M2 if format is Format.HYBRID else E4M3
    x8, w8, dy8 = quantize(x, E4M3, 70.0), quantize(w, E4M3, 60.0), quantize(dy, gradients, 50.0)
    wide_x, wide_w, wide_dy = (t.data.double() * t.scale_inverse.double() for t in (x8, w8, dy8))
    (before,) = p.before
    made = before.task.maker.function(before.task.wanted, w.device)(w, torch.tensor(60.0), slot)  # type: ignore[attr-defined]
    names = ["0." + name.rpartition(".")[2] for name, _ in before.outputs]
    numbers = {
        "0.weight": w,
        **dict(zip(names, made if isinstance(made, tuple) else (made,), strict=True)),
        "0.weight_inverse": w8.scale_inverse,
        "0.input_inverse": x8.scale_inverse,
        "0.output_gradient_inverse": dy8.scale_inverse,
        **layouts(x8, dy8),
        "-1.bias": bias,
    }
    biased = dtype != F32
    forward = taken(p, BIASED if biased else Y)
    y = forward.task.body.function(*[numbers[name] for name in forward.task.fusion.takes])  # type: ignore[union-attr]
    assert cublaslt.last_fast and y.dtype == dtype
    close(y, wide_x @ wide_w.mT + (bias.double() if biased else 0.0))
    assert slot == w8.amax
    for name, exact, in_dtype in (("input", wide_dy @ wide_w, dtype), ("0.weight", wide_dy.mT @ wide_x, own)):
        task = taken(p, back, produces=name).task
        found = task.body.function(*[numbers[name] for name in task.gradient.takes])  # type: ignore[union-attr]
        assert found.dtype == in_dtype and not cublaslt.last_fast
        close(found, exact)


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "name"), [("h200", MAIN), ("b200", ROWS_MAIN)])
def test_main_grad_by_one_scale_takes_the_product(
    cublaslt: FakeCublasLt, device: str, name: str, main: torch.dtype
) -> None:
    """Added to what it holds, or written over it."""
    cublaslt.any_layout = name == ROWS_MAIN
    x, dy = drawn((ROWS, 64), (ROWS, 48))
    x8, dy8 = quantize(x, E4M3, 70.0), quantize(dy, E5M2, 50.0)
    task = taken(float8(device=device, main_grad=True)(), name, produces="0.weight").task
    weight, factors = torch.nn.Parameter(torch.zeros(48, 64, dtype=BF16)), layouts(x8, dy8)
    given = [factors[n] for n in task.gradient.takes[:2]]  # type: ignore[union-attr]
    run = functools.partial(task.body.function, *given, dy8.scale_inverse, x8.scale_inverse, weight)  # type: ignore[union-attr]
    assert_main_grad(weight, run, (dy8.data.double() / 50.0).mT @ (x8.data.double() / 70.0), main)


def assert_main_grad(weight: Any, run: Callable[[], Any], exact: torch.Tensor, main: torch.dtype) -> None:
    """The product is added to a main_grad, or written over it."""
    weight.main_grad = torch.ones(exact.shape, dtype=main)
    run()
    close(weight.main_grad, exact + 1.0)
    assert weight.main_grad._version == 1
    weight.overwrite_main_grad = True
    run()
    close(weight.main_grad, exact)


def test_products_by_one_scale_of_nothing_are_empty_or_zeros(cublaslt: FakeCublasLt) -> None:
    p, one, w = float8()(), torch.ones(()), torch.ones(64, 48).to(E4M3)
    x, dy = torch.zeros(0, 64).to(E4M3), torch.zeros(0, 48).to(E5M2)
    dx = taken(p, BACK, produces="input").task.body.function(dy, w, one, one)  # type: ignore[union-attr]
    dw = taken(p, BACK, produces="0.weight").task.body.function(dy.mT, x.mT, one, one)  # type: ignore[union-attr]
    assert dx.shape == (0, 64) and torch.equal(dw, torch.zeros(48, 64, dtype=BF16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_product_is_that_of_float64(cublaslt: FakeCublasLt, dtype: torch.dtype) -> None:
    """The body in a plan for a GPU, run on the CPU."""
    found = quantized("h200", dtype=dtype).forward[1]
    a, b, bias = drawn((16, 64), (32, 64), (32,))
    a8, b8, bias = quantize(a, E4M3, 100.0), quantize(b, E4M3, 100.0), bias.to(dtype)
    biased = found.name == "quantized_matmul_bias"
    given = [a8.data, b8.data, a8.scale_inverse, b8.scale_inverse, *([bias] if biased else [])]
    y = found.task.body.function(*given)  # type: ignore[union-attr]
    assert not cublaslt.last_fast and y.dtype == dtype
    close(y, a8.data.double() / 100.0 @ (b8.data.double() / 100.0).mT + (bias.double() if biased else 0.0), units=4)


# ------------------------------------------------------------------------------------------- a scale for each block

SAVED = ("turned", "inverse", "weight_turned", "weight_inverse")
SHIFT = 2.0  # what a bias adds


def factor(t: torch.Tensor, op: OwnScalesMatMul, role: int, turned: bool) -> torch.Tensor:
    """Values of t after quantization, for a product that sums over its columns, or over its rows."""
    assert op.form.scalings is not None
    rows = t.reshape(-1, t.shape[-1])
    by = op.form.formats[role], op.form.scalings[role]
    return (dequantized(rows.mT, *by).mT if turned else dequantized(rows, *by)).double()


def tensors(shape: tuple[int, ...], dtype: torch.dtype = BF16, own: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    """x, W and dy, whose columns are of many sizes."""
    x, w, dy = drawn((*shape, 128), (256, 128), (*shape, 256))
    spread = torch.exp2(torch.arange(128) / 16.0)
    return (x * spread).to(dtype), (w / spread).to(own), (dy * 1e-3).to(dtype)


def run(p: Plan, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, *needed: str) -> Any:
    """The op, y, dx and dW, by the bodies of a plan."""
    forward = taken(p, *OWN)
    (backward,) = [s for s in p.backward if s.name in OWN]
    bias = () if forward.name == OWN[0] else (x.new_full((256,), SHIFT),)
    y, *saved = forward.task.body.function(x, w, *bias)  # type: ignore[union-attr]
    op = p.graph.nodes[forward.start].op
    reads = {"0.weight": w, **dict(zip(SAVED, saved, strict=True))}
    call = FusionCall([op], reads, frozenset(needed or ("input", "0.weight")), {})
    dx, others = backward.task.body.function(call, dy)  # type: ignore[union-attr]
    return op, y, dx, others.get("0.weight")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("shape", "taken_away"), [((ROWS,), False), ((2, 3), True), ((64,), False), ((1,), True), ((0,), False)]
)
@pytest.mark.parametrize(("dtype", "own"), DTYPES)
def test_products_by_blocks_are_those_of_float64(
    cublaslt: FakeCublasLt,
    name: str,
    dtype: torch.dtype,
    own: torch.dtype,
    shape: tuple[int, ...],
    taken_away: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the dtype of the call, the weight's gradient in the weight's; any number of tokens."""
    monkeypatch.setattr(lowering, "is_taken_away", lambda owner: taken_away)
    p = blocks(**{"recipe": BLOCKS[name], **weights(dtype, own)})()
    x, w, dy = tensors(shape, dtype, own)
    op, y, dx, dw = run(p, x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, own) and not cublaslt.last_fast
    if not x.numel():
        assert y.shape == (0, 256) and dx.shape == (0, 128) and torch.equal(dw, torch.zeros_like(w))
        return
    biased = taken(p, *OWN).name == OWN[1]
    assert biased == (dtype != F32)
    close(y, (factor(x, op, 0, False) @ factor(w, op, 1, False).mT + biased * SHIFT).view(y.shape))
    close(dx, (factor(dy, op, 2, False) @ factor(w, op, 1, True)).view(x.shape))
    close(dw, factor(dy, op, 2, True).mT @ factor(x, op, 0, True))
    for one in ("input", "0.weight"):
        _, _, only_dx, only_dw = run(p, x, w, dy, one)
        found, right, other = (only_dx, dx, only_dw) if one == "input" else (only_dw, dw, only_dx)
        assert torch.equal(found, right) and other is None


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_main_grad_by_blocks_takes_the_product(cublaslt: FakeCublasLt, name: str, main: torch.dtype) -> None:
    """Each part of a joined weight has the rows that are its own."""
    p = blocks(main_grad=True, recipe=BLOCKS[name])()
    x, w, dy = tensors((ROWS,))
    weight = torch.nn.Parameter(w)
    op = p.graph.nodes[taken(p, *OWN).start].op
    exact = factor(dy, op, 2, True).mT @ factor(x, op, 0, True)
    assert_main_grad(weight, lambda: run(p, x, weight, dy), exact, main)
    parts = [torch.nn.Parameter(part) for part in w.split((48, 128, 80))]
    for part in parts:
        part.main_grad = torch.zeros(part.shape, dtype=main)  # type: ignore[attr-defined]
    whole = w.clone()
    whole.__dict__[_JOINED] = Joined(tuple(parts), Facts(), True)
    run(p, x, whole, dy)
    close(torch.cat([part.main_grad for part in parts]), exact)  # type: ignore[attr-defined]
