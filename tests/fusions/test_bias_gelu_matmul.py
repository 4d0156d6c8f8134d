"""bias_gelu_matmul_backward: GELU's slope and the bias's gradient in the epilogue, where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fuser.fusions import matmul
from tests.fusions.products import GELU_SLOPE_REFUSED, gelu_mlp, plan, reasons

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


def test_one_product_gives_the_gradients_of_input_and_bias(free: None) -> None:
    p = plan(*gelu_mlp(), memory="fast")
    dgrad, wgrad = (s for s in p.backward if s.name == NAME)
    assert [n for n, _ in dgrad.inputs] == ["dy", "2.weight", "0.output"] and dgrad.chain
    assert [n for n, _ in dgrad.outputs] == ["input", "0.bias"]
    assert [n for n, _ in wgrad.inputs] == ["dy", "1.output"] and not wgrad.chain
    assert {"bias.output", "gelu.output"} <= {k.name for k in p.kept}


@pytest.mark.parametrize("rows", [16, 8192])
def test_measured_it_loses_to_the_generated_kernel(rows: int) -> None:
    p = plan(*gelu_mlp(), memory="fast", rows=rows)
    assert any("us more than" in r for r in reasons(p, NAME))


@pytest.mark.parametrize(("gelu", "inner", "dtype", "reason"), GELU_SLOPE_REFUSED)
def test_reasons(gelu: str, inner: int, dtype: torch.dtype, reason: str) -> None:
    (why,) = reasons(plan(*gelu_mlp(gelu, inner), dtype=dtype), NAME)
    assert reason in why
