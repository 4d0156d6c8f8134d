"""GELU in the epilogue of a product, forward and backward: which rows a plan takes, and why none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions import cublaslt
from tests.fusions.products import GELU_SLOPE_REFUSED, covered, gelu_mlp, plan, reasons

SLOPE, SLOPE_AND_BIAS = "gelu_matmul_backward", "bias_gelu_matmul_backward"


def test_backward_reads_the_value_before() -> None:
    p = plan(*gelu_mlp())
    assert covered(p.forward)[0] == ("matmul_bias_gelu_aux", 0, 3)
    assert [n for n, _ in p.forward[0].outputs] == ["output", "1.output"]
    assert "bias.output" in {k.name for k in p.kept}
    (why,) = reasons(p, "matmul_bias_gelu")
    assert why == "backward reads the value before the activation, and it gives only its output"


def test_without_a_backward_it_is_not_written() -> None:
    p = plan(*gelu_mlp(), grad=False)
    assert covered(p.forward)[0] == ("matmul_bias_gelu", 0, 3) and len(p.forward) == 2


@pytest.mark.parametrize(
    ("options", "gelu", "inner", "reason"),
    [
        ({}, "none", 16384, "the epilogue's GELU is the tanh form, and this one is exact (erf)"),
        ({"dtype": torch.float32}, "tanh", 16384, "the epilogue's tanh errs by 1e-5, too much for float32"),
        (
            {},
            "tanh",
            1004,
            "the value before GELU is read and written in rows of a multiple of 8, and this one has 1004",
        ),
        ({"device": None, "rows": 8}, "tanh", 64, "cuBLASLt runs on cuda, the input is on cpu"),
    ],
)
def test_reasons(options: dict[str, object], gelu: str, inner: int, reason: str) -> None:
    p = plan(*gelu_mlp(gelu, inner), **options)  # type: ignore[arg-type]
    assert reasons(p, "matmul_bias_gelu_aux") == {reason}


def test_a_bias_of_another_dtype() -> None:
    linear = ops.Linear(64, 64)
    model_bias = torch.nn.Parameter(torch.empty(64, dtype=torch.float32, device="meta"))
    linear.to("meta", torch.bfloat16).bias = model_bias
    p = te_fuser.Sequential(linear, ops.GELU()).plan(
        torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True), device="h200"
    )
    assert reasons(p, "matmul_bias_gelu_aux") == {"the bias is in torch.float32, the product in torch.bfloat16"}


# ---- its slope in the product that brings the gradient back --------------------------------------------------------


@pytest.fixture
def free(request: pytest.FixtureRequest) -> Iterator[None]:
    """As if epilogues cost nothing, but for those of the kinds that are named."""
    efficiency, launches = dict(cublaslt._EFFICIENCY), dict(cublaslt._LAUNCHES)
    cublaslt._EFFICIENCY.update(dict.fromkeys(efficiency.keys() - set(request.param), 1.0))
    cublaslt._LAUNCHES.clear()
    yield
    cublaslt._EFFICIENCY.update(efficiency)
    cublaslt._LAUNCHES.update(launches)


without_sums = pytest.mark.parametrize("free", [("dgrad_dgelu_sum",)], indirect=True)


@without_sums
def test_it_reads_the_value_before_gelu_and_keeps_its_output(free: None) -> None:
    p = plan(*gelu_mlp(), memory="fast")
    dgrad, wgrad = (s for s in p.backward if s.name == SLOPE)
    assert [n for n, _ in dgrad.inputs] == ["dy", "1.weight", "input"] and dgrad.chain
    assert [n for n, _ in wgrad.inputs] == ["dy", "0.output"] and not wgrad.chain
    assert {"bias.output", "gelu.output"} <= {k.name for k in p.kept}


@without_sums
def test_where_memory_counts_the_kernel_that_computes_gelu_again_wins(free: None) -> None:
    p = plan(*gelu_mlp(), memory="lean")
    assert SLOPE not in {s.name for s in p.backward}
    assert "gelu.output" not in {k.name for k in p.kept}


@pytest.mark.parametrize("free", [()], indirect=True)
def test_one_product_gives_the_gradients_of_input_and_bias(free: None) -> None:
    p = plan(*gelu_mlp(), memory="fast")
    dgrad, wgrad = (s for s in p.backward if s.name == SLOPE_AND_BIAS)
    assert [n for n, _ in dgrad.inputs] == ["dy", "2.weight", "0.output"] and dgrad.chain
    assert [n for n, _ in dgrad.outputs] == ["input", "0.bias"]
    assert [n for n, _ in wgrad.inputs] == ["dy", "1.output"] and not wgrad.chain
    assert {"bias.output", "gelu.output"} <= {k.name for k in p.kept}


@pytest.mark.parametrize(("name", "rows"), [(SLOPE, 8192), (SLOPE_AND_BIAS, 16), (SLOPE_AND_BIAS, 8192)])
def test_measured_it_loses_to_the_generated_kernel(name: str, rows: int) -> None:
    p = plan(*gelu_mlp(), memory="fast", rows=rows)
    assert any("us more than" in r for r in reasons(p, name))


@pytest.mark.parametrize("name", [SLOPE, SLOPE_AND_BIAS])
@pytest.mark.parametrize(("gelu", "inner", "dtype", "reason"), GELU_SLOPE_REFUSED)
def test_reasons_of_the_slope(name: str, gelu: str, inner: int, dtype: torch.dtype, reason: str) -> None:
    (why,) = reasons(plan(*gelu_mlp(gelu, inner), dtype=dtype), name)
    assert reason in why
