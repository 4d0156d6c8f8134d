"""gelu_matmul_backward: GELU's slope in the epilogue of the gradient's product, where that is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fuser.fusions import matmul
from tests.fusions.products import GELU_SLOPE_REFUSED, gelu_mlp, plan, reasons


@pytest.fixture
def free() -> Iterator[None]:
    """As if the epilogue cost nothing."""
    before = dict(matmul._EFFICIENCY)
    matmul._EFFICIENCY.update(dict.fromkeys(before.keys() - {"dgrad_dgelu_sum"}, 1.0))
    yield
    matmul._EFFICIENCY.update(before)


def test_it_reads_the_value_before_gelu_and_keeps_its_output(free: None) -> None:
    p = plan(*gelu_mlp(), memory="fast")
    dgrad, wgrad = (s for s in p.backward if s.name == "gelu_matmul_backward")
    assert [n for n, _ in dgrad.inputs] == ["dy", "1.weight", "input"] and dgrad.chain
    assert [n for n, _ in wgrad.inputs] == ["dy", "0.output"] and not wgrad.chain
    assert {"bias.output", "gelu.output"} <= {k.name for k in p.kept}


def test_where_memory_counts_the_kernel_that_computes_gelu_again_wins(free: None) -> None:
    p = plan(*gelu_mlp(), memory="lean")
    assert "gelu_matmul_backward" not in {s.name for s in p.backward}
    assert "gelu.output" not in {k.name for k in p.kept}


def test_measured_it_loses_to_the_generated_kernel() -> None:
    p = plan(*gelu_mlp(), memory="fast")
    assert any("us more than" in r for r in reasons(p, "gelu_matmul_backward"))


@pytest.mark.parametrize(("gelu", "inner", "dtype", "reason"), GELU_SLOPE_REFUSED)
def test_reasons(gelu: str, inner: int, dtype: torch.dtype, reason: str) -> None:
    (why,) = reasons(plan(*gelu_mlp(gelu, inner), dtype=dtype), "gelu_matmul_backward")
    assert reason in why
