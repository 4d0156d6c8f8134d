"""Values in other layouts, and scales that a call makes: products by them are right. Plans: tests/plans/passes.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.refs import GRADIENT, RECOMPUTED, VALUE, Form
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run.loading import execute, load
from te_fuser.fuser.show.step_rows import step_rows
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.match import Body, Cost, FusionCall, Match
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.base import Gradient
from te_fuser.ops.casts import QuantizeGradient
from te_fuser.ops.float8_matmul import Float8MatMul, quantized
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests import fake_cublaslt
from tests.fake_cublaslt import FakeCublasLt
from tests.fake_cuda import Emulation, FakeDriver
from tests.float8 import FORMATS, models
from tests.fusions.emulated_gpu import on_an_emulated_gpu as emulated_gpu  # noqa: F401
from tests.needs import needs_compiler
from tests.plans.passes import by_scales_of_now, layer8, mlp8, transposed
from tests.twins import randomize

F, FFN, ROWS = 64, 128, 37
BF16 = torch.bfloat16
TURNED = Form(layout="transposed")
MODELS: dict[str, Callable[[], Any]] = {
    **models(F, FFN),
    "main_grad": lambda: te.Sequential(
        ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F, accumulate_into_main_grad=True)
    ),
}


def turned(plan: Plan, direction: str) -> dict[str, list[str]]:
    """The steps that store transposed, and what."""
    steps = plan.forward if direction == "forward" else plan.backward
    found = {s.name: [r.label(plan.graph) for r in s.writes() if r.form == TURNED] for s in steps}
    return {name: labels for name, labels in found.items() if labels}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_compute_capability_10_alone_takes_them_so(capability: Any) -> None:
    """Whatever its minor number; 12 is as Hopper."""
    p = transposed(capability)
    assert bool(turned(p, "backward")) is (capability[0] != 10)
    made = [name for name, _ in p.before[0].outputs]
    assert any(name.endswith("turned") for name in made) is (capability[0] != 10)


def plan_of(model: Any, rows: int, features: int, device: str = "h200") -> Plan:
    """For so many rows in bfloat16, without memory."""
    x = torch.empty(rows, features, dtype=BF16, device="meta", requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
        return model.plan(x, device=device)  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize(("rows", "features"), [(1, 16), (8, 4096), (3000, 768)])
def test_nothing_is_stored_that_nobody_reads(rows: int, features: int, memory: str) -> None:
    """Also where little is to do: the emulation, which reads rows, is no choice beside products of 8 bits."""
    with torch.device("meta"):
        parts = [ops.LayerNorm(features), ops.Linear(features, features), ops.GELU(), ops.Linear(features, features)]
        model = te.Sequential(*parts, memory=memory).to(BF16)
    p = plan_of(model, rows, features)
    read = {r for s in p.steps for r in s.reads()}
    assert not [r for s in p.steps for r in s.writes() if r.form == TURNED and r not in read]
    assert "float8_mat_mul" not in "".join(s.name for s in p.steps)


def test_rows_of_plans_say_what_lies_transposed() -> None:
    """Values that a layer keeps so, makes again, and the steps that store them."""
    p = layer8()
    rows = [*step_rows(p, "forward"), *step_rows(p, "backward")]
    assert sum("quantize.output transposed (32.00 MiB)" in row.keeps for row in rows) == 3
    assert [row.again for row in rows if row.again] == [("quantize.output transposed",)]
    said = {row.name for row in rows if row.transposed == ("gradient of float8_mat_mul.output transposed",)}
    assert said == {"bias_dropout_add_bwd", "bias_gelu_quantize_bwd", "transposed8", "attention_cuda_cudnn"}


# --------------------------------------------------------------------------------------------- values and gradients


@contextlib.contextmanager
def on_an_emulated_gpu(emulation: Emulation) -> Iterator[FakeCublasLt]:
    """Plans for an H200 run on the CPU: kernels, and products of 8 bits."""
    library = fake_cublaslt.compile_library()
    products.product_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch, emulation.in_plans(), fake_cublaslt.in_place(library) as fake:
        patch.setattr(pipeline, "device_of", lambda device: DEVICES["h200"])
        patch.setattr(products, "obstacle_on", lambda *given, **more: None)
        patch.setattr(products, "refusal_of", lambda *given, **more: None)
        try:
            yield fake
        finally:
            products.product_of.cache_clear()


@needs_compiler
def test_a_failure_leaves_nothing_emulated(driver: FakeDriver, emulation: Emulation) -> None:
    """Tests behind one that failed find the GPU that there is."""
    before = pipeline.device_of, products.obstacle_on, products.refusal_of
    with pytest.raises(ZeroDivisionError), on_an_emulated_gpu(emulation):
        raise ZeroDivisionError
    assert (pipeline.device_of, products.obstacle_on, products.refusal_of) == before


def trained(
    model: Any, run: Callable[[Any, torch.Tensor], torch.Tensor], dtype: torch.dtype = BF16
) -> list[torch.Tensor]:
    """The output and all gradients of a second call, whose scales are of the first."""
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=2)):
        for k in range(2):
            rng = torch.Generator().manual_seed(k)
            x = torch.randn(ROWS, F, generator=rng).to(dtype).requires_grad_()
            for p in model.parameters():
                p.grad, p.main_grad = None, torch.ones(p.shape)
            y = run(model, x)
            y.backward(torch.randn(y.shape, generator=rng).to(dtype))
    grads = [p.main_grad if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *grads]  # type: ignore[list-item]


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float = 0.02) -> None:
    """A byte may be a step apart where kernels do not round twice."""
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= share * b.double().norm()


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str, driver: FakeDriver, emulation: Emulation) -> None:
    """As the emulation has them, with kernels that store both layouts, in generated CUDA; and each step is right."""
    model = randomize(MODELS[name]()).to(BF16)
    twin, looked_at = copy.deepcopy(model), copy.deepcopy(model)
    looked_at.verify = True
    wanted = trained(twin, lambda m, x: m(x))
    with on_an_emulated_gpu(emulation) as library:
        agree(trained(model, lambda m, x: m(x)), wanted)
        agree(trained(looked_at, lambda m, x: m(x)), wanted)
        assert library.products


def _turned_weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, gradient_inverse: torch.Tensor
) -> torch.Tensor:
    return (dy.float() * gradient_inverse) @ (x.float() * inverse).mT


def _input_gradient(
    dy: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, gradient_inverse: torch.Tensor
) -> torch.Tensor:
    w8 = quantized(w, scale, torch.float8_e4m3fn).float() * inverse
    return (dy.float() * gradient_inverse) @ w8


def backward_by_pytorch(m: Match, method: str) -> Body:
    """Of what lies transposed, wherever."""
    return Body({"input_gradient": _input_gradient, "weight_gradient": _turned_weight_gradient}[method], plain=True)


ANYWHERE = Fusion(
    "float8_by_pytorch",
    "backward",
    (Float8MatMul,),
    run_forward=None,
    run_backward=None,
    gradients=(
        Gradient(
            ("input",),
            ("0.weight", "0.weight_scale", "0.weight_inverse", "0.output_gradient_inverse"),
            "input_gradient",
        ),
        te.fusions.get("float8_matmul_backward").gradients[1],
    ),
    cost=lambda m: (Cost(seconds=1e-9), Cost(seconds=1e-9)),
    choose=backward_by_pytorch,
    takes_gradients_in=FORMATS,
)


@pytest.mark.parametrize(
    ("name", "memory", "kernels"),
    [("linear", "fast", "auto"), ("mlp", "lean", "auto"), ("gated", "fast", "auto"), ("gated", "lean", "auto")]
    + [("mlp", "fast", "reference"), ("linear", "lean", "reference")],
)
def test_on_a_cpu(name: str, memory: str, kernels: str) -> None:
    """Any target stores so; in float32 with the same bytes."""
    model = randomize(MODELS[name]())
    model.memory, model.kernels = memory, kernels
    twin, looked_at = copy.deepcopy(model), copy.deepcopy(model)
    looked_at.verify = True
    wanted = trained(twin, lambda m, x: m(x), torch.float32)
    with fusions.only(fusions.STRETCH, ANYWHERE):
        found = trained(model, lambda m, x: m(x), torch.float32)
        agree(trained(looked_at, lambda m, x: m(x), torch.float32), wanted)
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            plan = model.plan(torch.empty(ROWS, F, requires_grad=True))
    agree(found, wanted)
    dw = [s for s in plan.backward if s.name == ANYWHERE.name and "0.weight" in dict(s.outputs)]
    read = [r for s in dw for r in s.reads() if r.form == TURNED]
    assert len(read) == 2 * len(dw) > 0 and {r.kind for r in read} <= {VALUE, GRADIENT, RECOMPUTED}


class BothLayouts:
    """The backward of what stands behind a product of 8 bits, which gives both layouts of its gradient, or one."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def __call__(self, m: FusionCall, dy: torch.Tensor) -> Any:
        dy8 = quantized(dy, m[0].scale, torch.float8_e5m2)
        m[0].amax.copy_(torch.maximum(m[0].amax, dy.abs().max()))
        self.asked.append(m.needs("input.transposed"))
        others = {"1.bias": dy.sum(0)}
        if self.asked[-1]:
            others["input.transposed"] = transpose_by_torch(dy8)
        return dy8, others


@pytest.mark.parametrize("both", [True, False])
def test_fusions_give_both_layouts_or_steps_turn(both: bool) -> None:
    body = BothLayouts()
    behind = Fusion(
        "bias_by_pytorch",
        "backward",
        (QuantizeGradient, ops.Bias),
        run_forward=None,
        run_backward=None,
        cost=lambda m: Cost(seconds=1e-9),
        choose=lambda m, method: Body(body, transposed=("input",) if both else ()),
    )
    model = randomize(te.Sequential(ops.Linear(F, FFN)))
    twin = copy.deepcopy(model)
    wanted = trained(twin, lambda m, x: m(x), torch.float32)
    with fusions.only(fusions.STRETCH, ANYWHERE, behind):
        agree(trained(model, lambda m, x: m(x), torch.float32), wanted)
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            plan = model.plan(torch.empty(ROWS, F, requires_grad=True))
    assert body.asked == [both] * 2
    gradient = "gradient of float8_mat_mul.output transposed"
    assert turned(plan, "backward")["bias_by_pytorch" if both else "transposed8"] == [gradient]


# -------------------------------------------------------------------------------------------------- what is refused


def reading(pattern: type[ops.FusableOperation], *reads: str) -> Fusion:
    """A backward that reads so."""
    gradient = Gradient(("0.weight",), reads, "weight_gradient")
    return replace(
        ANYWHERE, pattern=(pattern,), gradients=(Gradient(("input",), ("0.weight",), "input_gradient"), gradient)
    )


def planned_where_it_reads(*reads: str) -> Plan:
    """Of a product in bfloat16, with that backward alone."""
    with torch.device("meta"):
        model = te.Sequential(ops.MatMul(F, F)).to(BF16)
        x = torch.empty(5, F, dtype=BF16, requires_grad=True)
    with fusions.only(reading(ops.MatMul, *reads)):
        return model.plan(x, device="h200")  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["input", "dy"])
def test_what_is_not_in_8_bits_is_not_turned(name: str) -> None:
    why = f"it reads {name}.transposed, and only 8 bits lie transposed, this is bfloat16"
    assert why in [r.reason for r in planned_where_it_reads(f"{name}.transposed", "input").refusals]


def test_what_cannot_be_named() -> None:
    with pytest.raises(ValueError, match='names nothing in its match; .* or "dy.transposed" for a gradient'):
        planned_where_it_reads("0.weight.transposed")


# -------------------------------------------------------------------------------------------- by blocks, scales of now

IN, WIDE = 128, 256
BY_BLOCKS = ("blocks", "transposed_blocks")


def by_blocks(steps: tuple[Step, ...]) -> list[str]:
    """Names of tensors that steps take by blocks."""
    return [name for s in steps for name, ref in s.inputs if ref.form.layout in BY_BLOCKS]


def run_by_blocks(model: te.Sequential, x: torch.Tensor, dy: torch.Tensor, grad: bool) -> list[torch.Tensor]:
    """The output, and all gradients if they are wanted."""
    given = x.clone().requires_grad_(grad)
    with te.autocast(recipe=Float8BlockScaling()), torch.set_grad_enabled(grad):
        taken = by_blocks(model.plan(given).steps)
        assert bool(taken) == fusions.enabled(fusions.BY_BLOCKS) and {name.split(".")[0] for name in taken} <= {
            "input",
            "dy",
        }
        y = model(given)
        return [y.detach(), *(torch.autograd.grad(y, [given, *model.parameters()], dy) if grad else ())]


def attending() -> list[Any]:
    heads = ops.DotProductAttention(8, 16, mask="none", layout="sequence_first")
    return [ops.LayerNorm(IN), ops.MatMul(IN, 3 * IN), ops.Bias(3 * IN), heads]


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize(
    ("make", "shape", "out", "only"),
    [
        (lambda: mlp8(ops.GELU, True), (2, 3, 4), IN, fusions.names()),
        (lambda: mlp8(ops.SwiGLU), (36,), IN, fusions.names()),
        (attending, (9, 4), IN, (fusions.STRETCH, "own_scales_matmul", "attention_cuda_cudnn", fusions.BY_BLOCKS)),
    ],
    ids=["residual", "gated", "attention"],
)
def test_values_by_blocks_are_those_of_products_that_quantize(
    make: Any, shape: Any, out: int, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with and without gradients; behind attention a bias's gradient is that of what is rounded once."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    torch.manual_seed(1)
    model = te.Sequential(*make()).to(BF16)
    x, dy = torch.randn(*shape, IN).to(BF16), torch.randn(*shape, out).to(BF16)
    for grad in (True, False) if make is not attending else (True,):
        with fusions.only(*only):
            found = run_by_blocks(model, x, dy, grad)
            with fusions.disabled(fusions.BY_BLOCKS):
                wanted = run_by_blocks(model, x, dy, grad)
        for a, b in zip(found, wanted, strict=True):
            once = make is attending and a.dim() == 1
            torch.testing.assert_close(a, b, rtol=0, atol=0.01 * b.abs().max().item() if once else 0)


def numbers_of_a_call(rows: int) -> list[float]:
    """Scales, and their reciprocals, that the steps of a call make."""
    model = te.Sequential(ops.LayerNorm(IN), ops.Linear(IN, WIDE), ops.GELU(), ops.Linear(WIDE, IN)).to(BF16)
    x, found = torch.randn(rows, IN).to(BF16).requires_grad_(), []

    def wrap(step: Any, runner: Any, slots: Any) -> Any:
        def run(tensors: Any) -> None:
            runner(tensors)
            if step.name == "scale_of_amax":
                found.extend([float(tensors[slots[ref]]) for ref in step.writes()])

        return run

    with te.autocast(recipe=Float8CurrentScaling()):
        (part,) = model._prepared()
        known, call = part.fuser.prepare(x, {}, ())  # type: ignore[union-attr]
        execute(load(known.plan, (), wrap=wrap), x, {}, call.parameters).sum().backward()
    return found


@needs_compiler
@pytest.mark.usefixtures("emulated_gpu")
def test_scales_where_there_are_no_rows_are_those_of_an_amax_of_zero() -> None:
    """A kernel that has no rows is not launched."""
    assert numbers_of_a_call(0) == [1.0] * 8
    assert all(number not in (0.0, 1.0) for number in numbers_of_a_call(17))


def test_scales_without_rows_that_pytorch_makes_are_the_same() -> None:
    assert numbers_of_a_call(0) == [1.0] * 8


def test_what_quantizes_on_its_way_says_why_not() -> None:
    @fusions.fusion(forward=[ops.GELU, ops.Quantize], details=fusions.Details(registered=False))
    def gelu_quantize(m: Any, x: Any) -> Any:
        """Would read a scale that nobody has made."""

    with fusions.only(gelu_quantize):
        p = by_scales_of_now(training=False, grad=False)
    (refused,) = [r for r in p.refusals if r.name == "gelu_quantize"]
    assert "the scale of" in refused.reason and "which has to be there first" in refused.reason
