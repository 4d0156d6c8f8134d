"""bias_gelu_matmul_backward: GELU's slope and the bias's gradient in the epilogue, where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fuser import ops
from te_fuser.fusions import matmul
from tests.fusions.products import plan, reasons

NAME = "bias_gelu_matmul_backward"


@pytest.fixture
def free() -> Iterator[None]:
    """As if the epilogue cost nothing."""
    efficiency, launches = dict(matmul._EFFICIENCY), dict(matmul._LAUNCHES)
    matmul._EFFICIENCY.update(dict.fromkeys(efficiency, 1.0))
    matmul._LAUNCHES.clear()
    yield
    matmul._EFFICIENCY.update(efficiency)
    matmul._LAUNCHES.update(launches)


def mlp(gelu: str = "tanh", inner: int = 16384) -> tuple[ops.FusableOperation, ...]:
    return ops.Linear(4096, inner), ops.GELU(gelu), ops.Linear(inner, 4096)


def test_one_product_gives_the_gradients_of_input_and_bias(free: None) -> None:
    p = plan(*mlp(), memory="fast")
    dgrad, wgrad = (s for s in p.backward if s.name == NAME)
    assert [n for n, _ in dgrad.inputs] == ["dy", "2.weight", "0.output"] and dgrad.chain
    assert [n for n, _ in dgrad.outputs] == ["input", "0.bias"]
    assert [n for n, _ in wgrad.inputs] == ["dy", "1.output"] and not wgrad.chain
    assert {"bias.output", "gelu.output"} <= {k.name for k in p.kept}


@pytest.mark.parametrize("rows", [16, 8192])
def test_measured_it_loses_to_the_generated_kernel(rows: int) -> None:
    p = plan(*mlp(), memory="fast", rows=rows)
    assert any("us more than" in r for r in reasons(p, NAME))


@pytest.mark.parametrize(
    ("gelu", "inner", "dtype", "reason"),
    [
        ("none", 16384, torch.bfloat16, "the epilogue's GELU is the tanh form, and this one is exact (erf)"),
        ("tanh", 1004, torch.bfloat16, "in rows of a multiple of 8, and this one has 1004"),
        ("tanh", 16384, torch.float32, "the epilogue's tanh errs by 1e-5, too much for float32"),
    ],
)
def test_reasons(gelu: str, inner: int, dtype: torch.dtype, reason: str) -> None:
    (why,) = reasons(plan(*mlp(gelu, inner), dtype=dtype), NAME)
    assert reason in why
