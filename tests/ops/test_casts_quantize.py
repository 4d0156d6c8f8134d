"""Quantize and QuantizeGradient: in lists, fused with what is before or behind, with gradients that pass by."""

from __future__ import annotations

import math

import pytest
import torch

import te_fuser
import te_fuser as te
from te_fuser import ops, verify
from te_fuser.formula.float8 import rounded
from tests.float8 import E4M3, E5M2, FORMATS, Dequantized, codes, nearest_codes, telling_numbers
from tests.needs import needs_compiler
from tests.ops.check import normal
from tests.refused import refusals

WIDTH = 64
SCALE = torch.tensor(37.3)
formats = pytest.mark.parametrize("dtype", FORMATS)
KERNELS = ("reference", pytest.param("generated", marks=needs_compiler))


def model(dtype: torch.dtype, kernels: str = "auto", **options: object) -> te_fuser.Sequential:
    """A norm, an activation and numbers of 8 bits, read by one op."""
    return te_fuser.Sequential(
        ops.LayerNorm(WIDTH),
        ops.GELU(),
        ops.Quantize(dtype),
        Dequantized(),
        ops.Bias(WIDTH),
        kernels=kernels,
        **options,
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@formats
def test_bytes_of_the_op_alone(dtype: torch.dtype, given: torch.dtype, kernels: str) -> None:
    x = telling_numbers(dtype)[: 2**13].reshape(-1, WIDTH).to(given)
    op = te_fuser.Sequential(ops.Quantize(dtype, scale="by"), kernels=kernels)
    for scale in (torch.tensor(1.0), torch.tensor([0.3])):
        y = op(x, by=scale)
        assert y.dtype == dtype and y.shape == x.shape
        assert torch.equal(codes(y), nearest_codes(x.float() * scale, dtype))
        assert torch.equal(codes(op.reference(x, by=scale)), codes(y))


@pytest.mark.parametrize("kernels", KERNELS)
@formats
def test_one_kernel_makes_it_with_what_is_before(dtype: torch.dtype, kernels: str) -> None:
    ours, x = model(dtype, kernels), normal(33, WIDTH).float().requires_grad_()
    plan = ours.plan(x, scale=SCALE)
    assert plan.forward[0].stop == 3
    (value,) = [v for v in plan.graph.values if v.spec.dtype == dtype]
    assert value.name == "quantize.output" and value.gradient_dtype == torch.float32
    leaves = [x, *ours.parameters()]
    found, wanted = (run(x, scale=SCALE) for run in (ours, ours.reference))
    torch.testing.assert_close(found, wanted)
    dy = 1e-4 * normal(33, WIDTH).float()  # less than either format can say
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (found, wanted)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)
    unquantized = te_fuser.Sequential(ours[0], ours[1], ours[4])
    for a, b in zip(gradients[0], torch.autograd.grad(unquantized(x), leaves, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


@needs_compiler
@pytest.mark.parametrize(("given", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@formats
def test_fused_against_unfused(dtype: torch.dtype, given: torch.dtype, share: float) -> None:
    """Bytes differ by one step where what is quantized differs in its last bits; in bfloat16 that is rounded before."""
    ours = te_fuser.Sequential(ops.LayerNorm(WIDTH), ops.GELU(), ops.Quantize(dtype), kernels="generated").to(given)
    x = normal(2048, WIDTH).to(given)
    found, wanted = (codes(run(x, scale=SCALE)).int() for run in (ours, ours.reference))
    apart = (found - wanted).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() <= share


@pytest.mark.usefixtures("few_rows")
@needs_compiler
def test_verified() -> None:
    """Also where every step is looked at on its own, and in float64, which is quantized too."""
    verify(model(E4M3, "generated"), dtypes=[torch.float64, torch.float32])
    verify(te_fuser.Sequential(ops.GELU(), ops.Quantize(E5M2)))
    ours, x = model(E5M2, verify=True), normal(9, WIDTH).float().requires_grad_()
    ours(x, scale=SCALE).sum().backward()


@pytest.mark.parametrize("rows", [0, 1, 5])
@formats
def test_few_rows_and_without_a_list(dtype: torch.dtype, rows: int) -> None:
    x = normal(rows, WIDTH).float().requires_grad_()
    y = model(dtype)(x, scale=SCALE)
    y.sum().backward()
    assert y.shape == x.grad.shape == (rows, WIDTH)
    x.grad, y = None, ops.Quantize(dtype)(x, scale=SCALE)
    assert torch.equal(codes(y), codes(rounded(x.detach() * SCALE, dtype)))
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones_like(x))


@formats
def test_infinities_and_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1e30]])
    y = ops.Quantize(dtype)(x, scale=torch.tensor(1.0)).float()
    largest = torch.finfo(dtype).max
    assert y[0, [0, 1, 3]].tolist() == [largest, -largest, largest] and y[0, 2].isnan()


@formats
def test_kept_in_8_bits_or_made_again(dtype: torch.dtype) -> None:
    """Values that only their reader's backward reads are kept in 8 bits, or stored again by backward's kernel."""

    class Reading(Dequantized):
        reads = ("input",)

        def op_backward(self, call: ops.base.OpCall, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            assert call["input"].dtype == dtype
            return dy

    x, results = normal(17, WIDTH).float().requires_grad_(), []
    for memory in ("fast", 0):
        ours = te_fuser.Sequential(ops.GELU(), ops.Quantize(dtype), Reading(), memory=memory)
        results.append(torch.autograd.grad(ours(x, scale=SCALE).square().sum(), x)[0])
    assert torch.equal(*results)


REFUSED = {
    "bfloat16": (lambda: ops.Quantize(torch.bfloat16), TypeError, "torch.float8_e4m3fn or torch.float8_e5m2, got"),
    "a name": (lambda: ops.Quantize(E4M3, scale="a b"), ValueError, "usable as a keyword argument"),
    "no scale": (lambda: model(E4M3)(torch.ones(2, WIDTH)), ValueError, r"op 2 \(Quantize.*pass it: model\(x, scale="),
    "several": (lambda: model(E4M3)(torch.ones(2, WIDTH), scale=torch.ones(2)), ValueError,
     r"op 2 \(Quantize.*'scale' has shape \[2\], needs \[\]"),
    "wide": (lambda: model(E4M3)(torch.ones(2, WIDTH), scale=SCALE.double()), TypeError,
     r"op 2 \(Quantize.*'scale' is float64, the main input float32"),
    "of a gradient": (lambda: ops.QuantizeGradient(torch.bfloat16), TypeError, "float8_e4m3fn or"),
    "no scale of a gradient": (lambda: te_fuser.Sequential(ops.QuantizeGradient(E5M2))(torch.ones(2, WIDTH)),
     ValueError, "scale"),
    "a row op behind it": (lambda: te_fuser.Sequential(ops.Quantize(E5M2), ops.GELU())(torch.ones(2, WIDTH),
     scale=SCALE), TypeError, r"op 1 \(GELU.*takes float32, bfloat16, float16, float64, got float8_e5m2"),
}  # fmt: skip


test_refused_in_words = refusals(REFUSED)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_values_as_they_are_and_gradients_rounded(dtype: torch.dtype, given: torch.dtype, kernels: str) -> None:
    model = te.Sequential(ops.QuantizeGradient(dtype), ops.Bias(WIDTH), kernels=kernels).to(given)
    x, dy = (normal(9, WIDTH).to(given) for _ in range(2))
    for run in (model, model.reference):
        x.requires_grad_()
        y = run(x, scale=SCALE)
        torch.testing.assert_close(y, x + model[1].bias)
        dx, dbias = torch.autograd.grad(y, [x, model[1].bias], dy)
        assert torch.equal(dx, rounded(dy.float() * SCALE, dtype).to(given))
        torch.testing.assert_close(dbias, dy.float().sum(0).to(given))


@needs_compiler
def test_gradient_verified_and_costs_nothing_in_forward() -> None:
    model = te.Sequential(ops.Bias(WIDTH), ops.QuantizeGradient(E5M2), ops.GELU(), ops.LayerNorm(WIDTH))
    assert verify(model, normal(9, WIDTH).float(), scale=SCALE).passed
    plan = te.Sequential(ops.GELU(), ops.QuantizeGradient(E5M2)).plan(normal(9, WIDTH).float(), scale=SCALE)
    assert [step.name for step in plan.forward if step.cost.launches] == ["gelu_fwd"]
