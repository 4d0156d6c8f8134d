"""matmul_bias_gelu, matmul_bias_gelu_aux: which of them a plan takes, and why none."""

from __future__ import annotations

import pytest
import torch

from te_fuser import ops
from tests.fusions.products import covered, gelu_mlp, plan, reasons


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
    import te_fuser

    p = te_fuser.Sequential(linear, ops.GELU()).plan(
        torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True), device="h200"
    )
    assert reasons(p, "matmul_bias_gelu_aux") == {"the bias is in torch.float32, the product in torch.bfloat16"}
