"""quantized_matmul, quantized_matmul_bias: where plans take them, else why not, what they cost; and they are right."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost
from te_fuser.kernels import quantized_matmul
from te_fuser.quantization import quantize
from tests.float8 import E4M3, E5M2
from tests.fusions.products import library_on_the_cpu, reasons
from tests.needs import needs_compiler

IN, OUT, ROWS = 64, 32, 16
PLAIN, BIAS = "quantized_matmul", "quantized_matmul_bias"


def planned(
    device: str | None = "h200",
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = E4M3,
    kernels: str = "auto",
    bias: torch.dtype | None = None,
) -> Plan:
    """Behind a norm that gives 8 bits; without a name, for the CPU."""
    where = "meta" if device else "cpu"
    product = ops.QuantizedMatMul(IN, OUT, dtype=dtype, fast_accumulation=False)
    parts = ops.LayerNorm(IN), ops.Quantize(E4M3), product, ops.Bias(OUT), ops.GELU()
    model = te_fuser.Sequential(*parts, kernels=kernels).to(dtype).to_empty(device=where)
    model[3].to(bias)
    x = torch.empty(ROWS, IN, dtype=dtype, device=where, requires_grad=True)
    scales = {name: torch.ones((), device=where) for name in ("scale", "input_scale", "weight_scale")}
    return model.plan(x, device=device, weight=torch.empty(OUT, IN, dtype=weight, device=where), **scales)


@pytest.mark.parametrize("weight", [E4M3, E5M2])
@pytest.mark.parametrize("device", ["h200", "l4", "b200"])
def test_taken_with_the_bias(device: str, weight: torch.dtype) -> None:
    p = planned(device, weight=weight)
    assert [s.name for s in p.forward] == ["layer_norm_quantize_fwd", BIAS, "gelu_fwd"]
    step = p.forward[1]
    assert [n for n, _ in step.inputs] == ["input", "0.weight", "0.input_scale", "0.weight_scale", "1.bias"]
    cost = step.cost
    assert (cost.read, cost.written) == (IN * (ROWS + OUT), 2 * ROWS * OUT)
    assert (cost.flops, cost.dtype) == (2.0 * ROWS * IN * OUT, "float8_e4m3fn")


REFUSED = [
    ({"device": None}, PLAIN, "cuBLASLt runs on cuda, the input is on cpu; it is emulated"),
    ({"kernels": "reference"}, PLAIN, "this plan is one of PyTorch's operations alone"),
    ({"device": "a100"}, PLAIN, "products of 8 bits take compute capability 8.9, this GPU has 8.0; it is emulated"),
    ({"dtype": torch.float32}, BIAS, "not every cuBLASLt adds a bias in float32 to products of 8 bits"),
    ({"bias": torch.float32}, BIAS, "the bias is in float32, the product in bfloat16"),
]


@pytest.mark.parametrize(("options", "name", "why"), REFUSED)
def test_reasons(options: dict[str, object], name: str, why: str) -> None:
    p = planned(**options)  # type: ignore[arg-type]
    assert reasons(p, name) == {why}
    assert name not in [s.name for s in p.forward]


def test_a_bias_that_it_refuses_stays_a_row_op() -> None:
    names = [s.name for s in planned(dtype=torch.float32).forward]
    assert names == ["layer_norm_quantize_fwd", PLAIN, "bias_gelu_fwd"]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_is_right(dtype: torch.dtype) -> None:
    """What plans for a GPU chose, by a library that computes on the CPU."""
    step = planned(dtype=dtype).forward[1]
    rng = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(n, IN, generator=rng), E4M3, 100.0) for n in (ROWS, OUT))
    bias = torch.randn(OUT, generator=rng).to(dtype)
    exact = a.data.double() / 100.0 @ (b.data.double() / 100.0).mT
    given = [a.data, b.data, a.scale_inverse, b.scale_inverse, *([bias] if step.name == BIAS else [])]
    quantized_matmul.configured.cache_clear()
    with library_on_the_cpu() as library:
        found = step.task.body.function(*given)  # type: ignore[union-attr]
        assert not library.last_fast
    quantized_matmul.configured.cache_clear()
    wanted = exact + bias.double() if step.name == BIAS else exact
    eps = torch.finfo(dtype).eps
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=4 * eps, atol=4 * eps * wanted.abs().max().item())


def test_rates() -> None:
    """8 bits at about twice the rate of 16, on GPUs that have them; a cost says that its products are such."""
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
