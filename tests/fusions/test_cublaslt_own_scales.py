"""OwnScalesMatMul by cuBLASLt: where plans take it, else why not; and its three products are right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.facts import Facts
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions import FusionCall
from te_fuser.kernels import own_scales, quantized_matmul
from te_fuser.ops.float8_matmul import OwnScalesMatMul
from te_fuser.ops.own_scales import Scaling, dequantized
from te_fuser.params.joined import _JOINED, Joined
from te_fuser.quantization import product_scaling
from te_fuser.quantization.scaling import scalings_of
from te_fuser.recipe import Float8BlockScaling, MXFP8BlockScaling, QParams, Recipe
from tests import fake_cublaslt
from tests.fake_cublaslt import FakeCublasLt
from tests.fake_cuda import compile_driver, emulate, in_place, in_place_of_written
from tests.float8 import E4M3
from tests.fusions.products import autocast_on_cuda, reasons
from tests.needs import needs_compiler

IN, OUT, ROWS = 128, 256, 17
BOTH, ALONE = "own_scales_matmul", "own_scales_matmul_alone"
BIASED = {BOTH: "own_scales_matmul_bias", ALONE: "own_scales_matmul_bias_alone"}
SHIFT = 2.0  # what a bias adds
SAVED = ("turned", "inverse", "weight_turned", "weight_inverse")
BLOCKS = Float8BlockScaling()
RECIPES: dict[str, Recipe] = {
    "blocks": BLOCKS,
    "blocks by any scales": Float8BlockScaling(fp8_quant_fwd_inp=QParams(power_2_scale=False)),
}
ROW, SQUARE = scalings_of(BLOCKS)[:2]  # type: ignore[index]


def planned(
    device: str | None = "h200",
    dtype: torch.dtype = torch.bfloat16,
    recipe: Recipe = BLOCKS,
    weight: torch.dtype | None = None,
    grad: bool = True,
    main_grad: bool = False,
    kernels: str = "auto",
    last: Any = None,
    frozen: tuple[str, ...] = (),
) -> Plan:
    """A norm, a product with its bias, and maybe something behind; without a name, for the CPU."""
    where = "meta" if device else "cpu"
    product = ops.MatMul(IN, OUT, accumulate_into_main_grad=main_grad)
    behind = () if last is None else (last,)
    model = te_fuser.Sequential(ops.LayerNorm(IN), product, ops.Bias(OUT), *behind, kernels=kernels)
    model = model.to(dtype).to_empty(device=where)
    model[1].to(weight or dtype)
    x = torch.empty(ROWS, IN, dtype=dtype, device=where, requires_grad=grad and "x" not in frozen)
    for name, p in model.named_parameters():
        p.requires_grad_(grad and name not in frozen)
    autocast = autocast_on_cuda() if weight else contextlib.nullcontext()
    with te_fuser.autocast(recipe=recipe), autocast, torch.set_grad_enabled(grad):
        return model.plan(x, device=device)


def step(p: Plan, name: str, backward: bool = False) -> Step:
    (found,) = [s for s in (p.backward if backward else p.forward) if s.name in (name, BIASED[name])]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_taken(dtype: torch.dtype) -> None:
    """One step forward with the bias, one backward for both gradients, and what they launch."""
    p = planned(dtype=dtype)
    assert [s.name for s in p.forward] == ["layer_norm_fwd", BIASED[BOTH]]
    assert [s.name for s in p.backward] == ["bias_bwd", BIASED[BOTH], "layer_norm_bwd"]
    forward, backward = step(p, BOTH), step(p, BOTH, True)
    flops = 2.0 * ROWS * IN * OUT
    assert (forward.cost.flops, backward.cost.flops) == (flops, 2 * flops)
    assert forward.cost.dtype == backward.cost.dtype == "float8_e4m3fn"
    assert forward.task.written == (kernel(dtype, ROW, "both"), kernel(dtype, SQUARE, "both"))
    assert backward.task.written == (kernel(dtype, ROW, "both"),)


def kernel(dtype: torch.dtype, scaling: Scaling, wanted: str) -> own_scales.QuantizeBlocks:
    return own_scales.kernel_of(dtype, E4M3, scaling, wanted)


def test_what_is_taken_away_is_turned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fully_shard` takes weights away after forward."""
    monkeypatch.setattr(product_scaling, "is_taken_away", lambda owner: True)
    p, dtype = planned(), torch.bfloat16
    assert step(p, BOTH).task.written == (kernel(dtype, ROW, "both"), kernel(dtype, SQUARE, "rows"))
    assert step(p, BOTH, True).task.written == (kernel(dtype, ROW, "both"), kernel(dtype, SQUARE, "turned"))


def test_the_factors_are_kept_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward reads what forward turned, and nothing else of x."""
    p = planned(last=ops.GELU())
    assert {name for name, _ in step(p, BOTH, True).inputs} == {"dy", "0.weight", *SAVED}
    monkeypatch.setattr(product_scaling, "is_taken_away", lambda owner: True)
    assert p.kept_bytes() - planned(last=ops.GELU()).kept_bytes() == IN * OUT


def test_without_gradients() -> None:
    p = planned(grad=False)
    assert [s.name for s in p.forward] == ["layer_norm_fwd", BIASED[ALONE]]
    assert step(p, ALONE).task.written == (kernel(torch.bfloat16, ROW, "rows"), kernel(torch.bfloat16, SQUARE, "rows"))
    frozen = planned(frozen=("x", "0.weight", "0.bias", "1.weight"))
    assert step(frozen, ALONE) and not {BOTH, BIASED[BOTH]} & {s.name for s in frozen.backward}


@pytest.mark.parametrize("frozen", [("1.weight",), ("x", "0.weight", "0.bias")])
def test_only_what_is_needed(frozen: tuple[str, ...]) -> None:
    wanted = "rows" if frozen[0] == "1.weight" else "turned"
    p = planned(frozen=frozen)
    assert step(p, BOTH, True).task.written == (kernel(torch.bfloat16, ROW, wanted),)


REFUSED = [
    ({"device": None}, BOTH, "cuBLASLt runs on cuda, the input is on cpu; it is emulated"),
    ({"device": "a100"}, BOTH, "products of 8 bits take compute capability 8.9, this GPU has 8.0; it is emulated"),
    ({}, ALONE, "it keeps nothing that backward reads"),
    ({"dtype": torch.float32}, BIASED[BOTH], "not every cuBLASLt adds a bias in float32 to products of 8 bits"),
    ({"kernels": "reference"}, BOTH, "this plan has none of these"),
    ({"recipe": MXFP8BlockScaling()}, BOTH, "products with a scale for each 32 numbers are emulated alone"),
    ({"device": "l4"}, BOTH, "take compute capability 9.0, this GPU has 8.9"),
    ({"device": "b200"}, BOTH, "take compute capability 9.0, this GPU has 10.0"),
]


@pytest.mark.parametrize(("options", "name", "why"), REFUSED)
def test_reasons(options: dict[str, Any], name: str, why: str) -> None:
    p = planned(**options)
    assert any(why in words for words in reasons(p, name))
    assert name not in [s.name for s in (*p.forward, *p.backward)]


# ------------------------------------------------------------------------------------------- what runs is right


def kernels_for(recipe: Recipe, dtype: torch.dtype, own: torch.dtype) -> Iterator[Any]:
    """All that its bodies may launch."""
    scalings = scalings_of(recipe)
    assert scalings is not None
    for role, scaling in enumerate(scalings):
        for wanted in ("rows", "turned", "both"):
            yield kernel(own if role == 1 else dtype, scaling, wanted)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCublasLt]:
    """Kernels and products that are computed on the CPU."""
    folder = tmp_path_factory.mktemp("own_scales")
    pairs = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32))
    native = emulate({k for r in RECIPES.values() for pair in pairs for k in kernels_for(r, *pair)}, folder)
    quantized_matmul.configured.cache_clear()
    with (
        in_place_of_written(native.__getitem__),
        in_place(compile_driver()),
        fake_cublaslt.in_place(fake_cublaslt.compile_library()) as fake,
    ):
        yield fake
    quantized_matmul.configured.cache_clear()


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    eps = torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=2 * eps, atol=2 * eps * exact.abs().max().item())


def factor(t: torch.Tensor, op: OwnScalesMatMul, role: int, turned: bool) -> torch.Tensor:
    """What t stands for where a product sums over its columns, or over its rows."""
    assert op.form.scalings is not None
    rows = t.reshape(-1, t.shape[-1])
    by = op.form.formats[role], op.form.scalings[role]
    return (dequantized(rows.mT, *by).mT if turned else dequantized(rows, *by)).double()


def tensors(shape: tuple[int, ...], dtype: torch.dtype, own: torch.dtype) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.arange(IN) / 16.0)
    x = torch.randn(*shape, IN, generator=rng) * spread
    w, dy = torch.randn(OUT, IN, generator=rng) / spread, torch.randn(*shape, OUT, generator=rng) * 1e-3
    return x.to(dtype), w.to(own), dy.to(dtype)


def run(p: Plan, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, *needed: str) -> Any:
    """y, dx and dW, by the bodies of a plan."""
    forward, backward = step(p, BOTH), step(p, BOTH, True)
    bias = () if forward.name == BOTH else (x.new_full((OUT,), SHIFT),)
    y, *saved = forward.task.body.function(x, w, *bias)  # type: ignore[union-attr]
    reads = {"0.weight": w, **dict(zip(SAVED, saved, strict=True))}
    op = p.graph.nodes[forward.start].op
    call = FusionCall([op], reads, frozenset(needed or ("input", "0.weight")), {})
    dx, others = backward.task.body.function(call, dy)  # type: ignore[union-attr]
    return op, y, dx, others.get("0.weight")


@needs_compiler
@pytest.mark.parametrize("taken_away", [False, True])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(ROWS,), (2, 3), (64,), (1,)])
@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, torch.float32)]
)
def test_products(
    library: FakeCublasLt,
    name: str,
    dtype: torch.dtype,
    weight: torch.dtype | None,
    shape: tuple[int, ...],
    taken_away: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the dtype of the call, the weight's gradient in the weight's; any number of tokens."""
    own = weight or dtype
    monkeypatch.setattr(product_scaling, "is_taken_away", lambda owner: taken_away)
    p = planned(dtype=dtype, weight=weight, recipe=RECIPES[name])
    x, w, dy = tensors(shape, dtype, own)
    op, y, dx, dw = run(p, x, w, dy)
    wanted = factor(x, op, 0, False) @ factor(w, op, 1, False).mT
    biased = step(p, BOTH).name == BIASED[BOTH]
    assert biased == (dtype != torch.float32)
    close(y, (wanted + biased * SHIFT).view(y.shape))
    close(dx, (factor(dy, op, 2, False) @ factor(w, op, 1, True)).view(x.shape))
    close(dw, factor(dy, op, 2, True).mT @ factor(x, op, 0, True))
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, own)
    for one in ("input", "0.weight"):
        _, _, only_dx, only_dw = run(p, x, w, dy, one)
        found, right, other = (only_dx, dx, only_dw) if one == "input" else (only_dw, dw, only_dx)
        assert torch.equal(found, right) and other is None


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
def test_main_grad_takes_the_product(library: FakeCublasLt, name: str, main: torch.dtype) -> None:
    """Added to what it holds, or written over it."""
    p = planned(main_grad=True, recipe=RECIPES[name])
    x, w, dy = tensors((ROWS,), torch.bfloat16, torch.bfloat16)
    weight = torch.nn.Parameter(w)
    weight.main_grad = torch.ones(OUT, IN, dtype=main)  # type: ignore[attr-defined]
    op, *_ = run(p, x, weight, dy)
    exact = factor(dy, op, 2, True).mT @ factor(x, op, 0, True)
    close(weight.main_grad, exact + 1.0)  # type: ignore[attr-defined]
    weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    run(p, x, weight, dy)
    close(weight.main_grad, exact)  # type: ignore[attr-defined]


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
def test_main_grads_of_joined_weights(library: FakeCublasLt, name: str) -> None:
    """Each part has the rows that are its own."""
    p = planned(main_grad=True, recipe=RECIPES[name])
    x, w, dy = tensors((ROWS,), torch.bfloat16, torch.bfloat16)
    parts = [torch.nn.Parameter(part) for part in w.split((48, 128, 80))]
    for part in parts:
        part.main_grad = torch.zeros(part.shape, dtype=torch.float32)  # type: ignore[attr-defined]
    whole = w.clone()
    whole.__dict__[_JOINED] = Joined(tuple(parts), Facts(), True)
    op, *_ = run(p, x, whole, dy)
    exact = factor(dy, op, 2, True).mT @ factor(x, op, 0, True)
    close(torch.cat([part.main_grad for part in parts]), exact)  # type: ignore[attr-defined]


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
def test_nothing(library: FakeCublasLt, name: str) -> None:
    """An empty batch gives empty results, and a gradient of zeros."""
    p = planned(recipe=RECIPES[name])
    x, w, dy = tensors((0,), torch.bfloat16, torch.bfloat16)
    _, y, dx, dw = run(p, x, w, dy)
    assert y.shape == (0, OUT) and dx.shape == (0, IN) and torch.equal(dw, torch.zeros_like(w))


@needs_compiler
def test_sums_are_as_the_recipe_says(library: FakeCublasLt) -> None:
    p = planned()
    x, w, dy = tensors((ROWS,), torch.bfloat16, torch.bfloat16)
    run(p, x, w, dy)
    assert not library.last_fast
