"""Float8MatMul by cuBLASLt: where plans take it, else why not, what it costs; and its three products are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions import cublaslt_float8, cublaslt_own_scales
from te_fuser.fusions.cublaslt_quantized import ProductRow8
from te_fuser.fusions.pattern import Optional
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels import quantized_matmul
from te_fuser.kernels.packages import quack_matmul
from te_fuser.kernels.quantize_weights import QuantizeWeights
from te_fuser.kernels.transposed8 import Transposed8
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.quantization import QuantizedTensor, quantize
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MMParams, Recipe
from te_fuser.recipe.region import microbatch
from tests import fake_cublaslt
from tests.fake_cublaslt import FakeCublasLt
from tests.fake_cuda import compile_driver, emulate, in_place, in_place_of_written
from tests.float8 import E4M3, E5M2, OURS
from tests.fusions.products import autocast_on_cuda, reasons
from tests.kernels.packages import fake_quack_float8
from tests.needs import needs_compiler

IN, OUT, ROWS = 64, 48, 17
Y, BIASED, BACK, MAIN = (
    "float8_matmul",
    "float8_matmul_bias",
    "float8_matmul_backward",
    "float8_matmul_main_grad",
)
WEIGHTS = "quantize_weights"
ROWS_BACK, ROWS_MAIN = "float8_matmul_rows_backward", "float8_matmul_rows_main_grad"
HYBRID = DelayedScaling()


def planned(
    device: str | None = "h200",
    dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe = HYBRID,
    weight: torch.dtype | None = None,
    grad: bool = True,
    main_grad: bool = False,
    kernels: str = "auto",
    first: bool | None = None,
) -> Plan:
    """A norm, a product with its bias, an activation; without a name, for the CPU."""
    where = "meta" if device else "cpu"
    product = ops.MatMul(IN, OUT, accumulate_into_main_grad=main_grad)
    model = te_fuser.Sequential(ops.LayerNorm(IN), product, ops.Bias(OUT), ops.GELU(), kernels=kernels)
    model = model.to(dtype).to_empty(device=where)
    model[1].to(weight or dtype)
    x = torch.empty(ROWS, IN, dtype=dtype, device=where, requires_grad=grad)
    for p in model.parameters():
        p.requires_grad_(grad)
    autocast = autocast_on_cuda() if weight else contextlib.nullcontext()
    region = te_fuser.fp8_autocast(enabled=True, fp8_recipe=recipe)
    with region, microbatch(first), autocast, torch.set_grad_enabled(grad):
        return model.plan(x, device=device)


def step(p: Plan, name: str, produces: str = "output") -> Step:
    (found,) = [s for s in (*p.forward, *p.backward) if s.name == name and produces in dict(s.outputs)]
    return found


@pytest.mark.parametrize("device", ["h200", "l4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_taken(device: str, dtype: torch.dtype) -> None:
    """With the bias in forward, past what quantizes its gradient; the weight in 8 bits made before all."""
    p = planned(device, dtype)
    assert [s.name for s in p.forward] == [WEIGHTS, "layer_norm_quantize_fwd", BIASED, "gelu_fwd"]
    assert [s.name for s in p.backward] == ["bias_gelu_bwd", BACK, "layer_norm_quantize_bwd", "transposed8", BACK]
    forward, dx, dw = step(p, BIASED), step(p, BACK, "input"), step(p, BACK, "0.weight")
    flops = 2.0 * ROWS * IN * OUT
    assert (forward.cost.flops, dx.cost.flops, dw.cost.flops) == (flops, flops, 2.0 * 32 * IN * OUT)
    assert (forward.cost.dtype, dx.cost.dtype, dw.cost.dtype) == ("float8_e4m3fn", "float8_e5m2", "float8_e5m2")
    assert forward.cost.apart == dx.cost.apart == 0 == dw.cost.apart
    assert dw.task.written == dx.task.written == forward.task.written == ()
    assert step(p, "transposed8", "transposed").task.written == (Transposed8(E4M3),)
    (weights,) = p.before
    assert weights.task.written == (QuantizeWeights(),) and weights.cost.launches == 1
    assert [name for name, _ in weights.inputs] == ["2.weight", "2.weight_scale", "2.weight_amax"]
    assert [name for name, _ in weights.outputs] == ["2.weight_data", "2.weight_turned"]
    assert weights.cost.read == weights.cost.written == 2 * IN * OUT


def test_where_factors_are_taken_as_they_lie() -> None:
    """Nothing is turned, the weight neither, and sums go over the tokens that there are."""
    p = planned("b200")
    assert [s.name for s in p.forward] == [WEIGHTS, "layer_norm_quantize_fwd", BIASED, "gelu_fwd"]
    assert [s.name for s in p.backward] == ["bias_gelu_bwd", ROWS_BACK, "layer_norm_quantize_bwd", ROWS_BACK]
    assert [name for name, _ in p.before[0].outputs] == ["2.weight_data"]
    assert step(p, ROWS_BACK, "0.weight").cost.flops == 2.0 * ROWS * IN * OUT
    assert reasons(p, BACK) == {"factors of 8 bits may lie by rows on this device"}
    assert reasons(planned(), ROWS_BACK) == {"factors of 8 bits lie along what is summed on this device"}
    assert {s.name for s in planned("b200", main_grad=True).backward} >= {ROWS_MAIN}
    kept = step(planned("b200", first=False), ROWS_BACK, "input")
    assert "0.weight_data" in dict(kept.inputs) and kept.task.written == ()


def test_without_gradients() -> None:
    """Nothing is recorded, nothing stands between the product and its bias, and no weight is turned."""
    p = planned(grad=False)
    assert [s.name for s in p.forward][2] == BIASED and len(p.graph.nodes) == 5
    (weights,) = p.before
    assert [name for name, _ in weights.inputs] == ["2.weight", "2.weight_scale"]
    assert [name for name, _ in weights.outputs] == ["2.weight_data"]


def test_main_grad() -> None:
    p = planned(main_grad=True)
    assert {s.name for s in p.backward} >= {MAIN} and BACK not in {s.name for s in p.backward}
    assert reasons(p, BACK) == {"the weight's gradient goes to its main_grad"}


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_kept(first: bool) -> None:
    """Nothing quantizes them in a plan, which is the same in all else."""
    p, q = planned(first=first), planned()
    assert p.before == () and [s.name for s in p.forward] == [s.name for s in q.forward[1:]]
    assert [s.name for s in p.backward] == [s.name for s in q.backward]
    forward, dx = step(p, BIASED), step(p, BACK, "input")
    assert forward.cost.launches == dx.cost.launches == 1
    assert forward.cost.read == IN * (ROWS + OUT) and dx.cost.read == OUT * (ROWS + IN)


def test_sums_are_as_the_recipe_says() -> None:
    fast, split = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
    for recipe, wanted in (
        (HYBRID, (True, False, False)),
        (DelayedScaling(fp8_gemm_fprop=split, fp8_gemm_dgrad=fast), (False, True, False)),
        (DelayedScaling(fp8_gemm_wgrad=fast), (True, False, True)),
    ):
        p = planned(recipe=recipe)
        bodies = (step(p, BIASED), step(p, BACK, "input"), step(p, BACK, "0.weight"))
        factors = (E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)
        for s, fast_sums, two in zip(bodies, wanted, factors, strict=True):
            kind = "bias" if s is bodies[0] else "plain"
            form = quantized_matmul.form_of(kind, *two, torch.bfloat16, fast_sums)
            assert s.task.body.function.__self__ is quantized_matmul.configured(form)  # type: ignore[union-attr]


def _one_scale() -> Fusion:
    pattern = Float8MatMul, Optional(QuantizeGradient), ops.Bias, ops.Dropout
    return cublaslt_float8._declare(ProductRow8("new", "", pattern, kind="bias", adds=("-2.bias",)))


def _blocks() -> Fusion:
    pattern = OwnScalesMatMul, ops.Bias, ops.Dropout
    return cublaslt_own_scales._declare(ProductRow8("new", "", pattern, kind="bias", adds=("1.bias",)), keeps=True)


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize(("declare", "recipe"), [(_one_scale, HYBRID), (_blocks, Float8BlockScaling())])
def test_another_one_is_a_row(declare: Callable[[], Fusion], recipe: Recipe, drops: float) -> None:
    """Its ops, its kind and what it adds say all: where it is taken, by which product, and why not."""
    new = declare()
    try:
        model = te_fuser.Sequential(ops.MatMul(512, 256), ops.Bias(256), ops.Dropout(drops))
        model = model.to(torch.bfloat16).to_empty(device="meta")
        x = torch.empty(4096, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
        others = BIASED, "own_scales_matmul", "own_scales_matmul_bias"
        with fusions.disabled(*others), te_fuser.autocast(recipe=recipe):
            p = model.plan(x, device="h200")
    finally:
        fusions.unregister(new)
    if drops:
        assert "an epilogue drops nothing, and this Dropout does" in reasons(p, "new")
        return
    taken = next(s for s in p.forward if s.name == "new")
    assert [p.graph.parameters[r.index].name for name, r in taken.inputs if name.endswith(".bias")] == ["bias"]


REFUSED = [
    ({"device": None}, Y, "cuBLASLt runs on cuda, the input is on cpu; it is emulated"),
    ({"device": "a100"}, BACK, "products of 8 bits take compute capability 8.9, this GPU has 8.0; it is emulated"),
    ({"dtype": torch.float32}, BIASED, "not every cuBLASLt adds a bias in float32 to products of 8 bits"),
    ({}, MAIN, "accumulate_into_main_grad is off"),
]


@pytest.mark.parametrize(("options", "name", "why"), REFUSED)
def test_reasons(options: dict[str, Any], name: str, why: str) -> None:
    p = planned(**options)
    assert why in reasons(p, name)
    assert name not in [s.name for s in (*p.forward, *p.backward)]


def test_a_bias_in_float32_stays_a_row_op() -> None:
    names = [s.name for s in planned(dtype=torch.float32).forward]
    assert names == [WEIGHTS, "layer_norm_quantize_fwd", Y, "bias_gelu_fwd"]


def test_without_generated_kernels() -> None:
    p = planned(kernels="reference")
    (why,) = reasons(p, Y)
    assert "compiled for the GPU at hand" in why


# ------------------------------------------------------------------------------------------- what runs is right

KERNELS = [QuantizeWeights()]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCublasLt]:
    """Kernels and products that are computed on the CPU."""
    folder = tmp_path_factory.mktemp("float8")
    native = emulate(KERNELS, folder)
    quantized_matmul.configured.cache_clear()
    with (
        in_place_of_written(native.__getitem__),
        in_place(compile_driver()),
        fake_cublaslt.in_place(fake_cublaslt.compile_library()) as fake,
    ):
        yield fake
    quantized_matmul.configured.cache_clear()


def layouts(x: QuantizedTensor, dy: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Both factors by rows and transposed, as fusions name them."""
    by_rows = {"input": x.data, "dy": dy.data}
    return {**by_rows, "input.transposed": x.transposed, "dy.transposed": dy.transposed}


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=2 * eps * exact.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("format", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize(("device", "back"), [("h200", BACK), ("b200", ROWS_BACK)])
def test_products(
    library: FakeCublasLt, device: str, back: str, dtype: torch.dtype, weight: torch.dtype | None, format: Format
) -> None:
    """In the dtype of the call, the weight's gradient in the weight's; tokens are no multiple of 16."""
    library.any_layout = back == ROWS_BACK
    p, own = planned(device, dtype, DelayedScaling(fp8_format=format), weight), weight or dtype
    rng = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=rng) for shape in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    w, bias, slot = w.to(own), torch.randn(OUT, generator=rng).to(dtype), torch.tensor(0.25)
    gradients = E5M2 if format is Format.HYBRID else E4M3
    x8, w8, dy8 = quantize(x, E4M3, 70.0), quantize(w, E4M3, 60.0), quantize(dy, gradients, 50.0)
    wide_x, wide_w, wide_dy = (t.data.double() * t.scale_inverse.double() for t in (x8, w8, dy8))
    (weights,) = p.before
    quantized = weights.task.maker.function(weights.task.wanted, w.device)(w, torch.tensor(60.0), slot)  # type: ignore[attr-defined]
    both = quantized if isinstance(quantized, tuple) else (quantized,)
    numbers = {
        "0.weight": w,
        **dict(zip(("0." + name.rpartition(".")[2] for name, _ in weights.outputs), both, strict=True)),
        "0.weight_inverse": w8.scale_inverse,
        "0.input_inverse": x8.scale_inverse,
        "0.output_gradient_inverse": dy8.scale_inverse,
        **layouts(x8, dy8),
    }
    biased = dtype != torch.float32
    forward = step(p, BIASED if biased else Y)
    tensors = numbers | {"-1.bias": bias}
    y = forward.task.body.function(*[tensors[name] for name in forward.task.fusion.takes])  # type: ignore[union-attr]
    assert library.last_fast and y.dtype == dtype
    close(y, wide_x @ wide_w.mT + (bias.double() if biased else 0.0))
    assert slot == w8.amax
    for name, exact, made in (("input", wide_dy @ wide_w, dtype), ("0.weight", wide_dy.mT @ wide_x, own)):
        task = step(p, back, name).task
        found = task.body.function(*[numbers[name] for name in task.gradient.takes])  # type: ignore[union-attr]
        assert found.dtype == made and not library.last_fast
        close(found, exact)


@needs_compiler
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "name"), [("h200", MAIN), ("b200", ROWS_MAIN)])
def test_main_grad_takes_the_product(library: FakeCublasLt, device: str, name: str, main: torch.dtype) -> None:
    """Added to what it holds, or written over it; of joined weights each part has its rows."""
    library.any_layout = name == ROWS_MAIN
    p = planned(device, main_grad=True)
    rng = torch.Generator().manual_seed(0)
    x8 = quantize(torch.randn(ROWS, IN, generator=rng), E4M3, 70.0)
    dy8 = quantize(torch.randn(ROWS, OUT, generator=rng), E5M2, 50.0)
    exact = (dy8.data.double() / 50.0).mT @ (x8.data.double() / 70.0)
    task = step(p, name, "0.weight").task
    run = task.body.function  # type: ignore[union-attr]
    w = torch.nn.Parameter(torch.zeros(OUT, IN, dtype=torch.bfloat16))
    w.main_grad = torch.ones(OUT, IN, dtype=main)  # type: ignore[attr-defined]
    factors = layouts(x8, dy8)
    given = (*[factors[n] for n in task.gradient.takes[:2]], dy8.scale_inverse, x8.scale_inverse, w)  # type: ignore[union-attr]
    run(*given)
    close(w.main_grad, exact + 1.0)
    assert w.main_grad._version == 1
    w.overwrite_main_grad = True  # type: ignore[attr-defined]
    run(*given)
    close(w.main_grad, exact)


@needs_compiler
def test_nothing(library: FakeCublasLt) -> None:
    """An empty batch gives empty results, and a gradient of zeros."""
    p = planned()
    one, w = torch.ones(()), torch.ones(IN, OUT).to(E4M3)
    x, dy = torch.zeros(0, IN).to(E4M3), torch.zeros(0, OUT).to(E5M2)
    dx = step(p, BACK, "input").task.body.function(dy, w, one, one)  # type: ignore[union-attr]
    dw = step(p, BACK, "0.weight").task.body.function(dy.mT, x.mT, one, one)  # type: ignore[union-attr]
    assert dx.shape == (0, IN) and torch.equal(dw, torch.zeros(OUT, IN, dtype=torch.bfloat16))


@pytest.mark.parametrize("recipe", [HYBRID, Float8CurrentScaling()])
def test_without_any_of_them_products_are_emulated(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what tests on a GPU hold them against."""
    monkeypatch.setattr(quack_matmul.PACKAGE, "version", lambda: fake_quack_float8.VERSION)
    for device in ("h200", "b200"):
        with fusions.disabled(*OURS):
            p = planned(device, recipe=recipe)
        assert not {s.name for s in (*p.forward, *p.backward)} & {*fusions.names()}
