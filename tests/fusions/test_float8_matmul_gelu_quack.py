"""float8_matmul_gelu_quack, float8_matmul_gelu_quack_aux: where plans take them, else why not; and they are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions
from te_fuser.quantization import states
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.products import reasons
from tests.fusions.quack_float8_models import (
    ALONE,
    AUX,
    BF16,
    FFN,
    RECIPE,
    REFUSED,
    ROWS,
    F,
    apart,
    as_installed,
    cheap,
    installed,  # noqa: F401
    planned,
    small_mlps,
    step_of,
    trained,
)
from tests.kernels.packages import fake_quack_float8
from tests.needs import needs_compiler


@pytest.mark.usefixtures("installed")
def test_backward_reads_the_value_before() -> None:
    """No kernel stands between the products, and what is kept is as without it."""
    p = planned()
    found = step_of(p, AUX)
    assert [name for name, _ in found.outputs] == ["output", "2.output"]
    assert "4.amax" in dict(found.inputs) and "gelu_quantize_fwd" not in {s.name for s in p.forward}
    assert (found.cost.read, found.cost.written) == (F * (ROWS + FFN), 3 * ROWS * FFN)
    with fusions.disabled(AUX):
        other = planned()
    assert "gelu_quantize_fwd" in {s.name for s in other.forward}
    assert {k.name for k in p.kept} == {k.name for k in other.kept}
    assert [s.name for s in p.backward] == [s.name for s in other.backward]


@pytest.mark.usefixtures("installed")
def test_without_a_backward_it_is_not_written() -> None:
    p = planned(grad=False)
    found = step_of(p, ALONE)
    assert [name for name, _ in found.outputs] == ["output"] and found.cost.written == ROWS * FFN
    assert "float8_matmul_bias" in {s.name for s in p.forward}  # which sums many terms


OF_GELU = {"gelu": "none"}, "the epilogue's GELU is the tanh form, and this one is exact (erf)"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("how", "why"), [*REFUSED, OF_GELU])
def test_refused(how: dict[str, Any], why: str) -> None:
    assert why in reasons(planned(**how), AUX)


@needs_compiler
@pytest.mark.usefixtures("on_an_emulated_gpu")
def test_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In values, gradients, scales and histories, over some steps; without gradients it gives the same."""
    package = as_installed(monkeypatch)
    model, twin = small_mlps()
    for seed in range(3):
        with fusions.only(*cheap(AUX), "stretch", "float8_matmul_bias", "float8_matmul_backward"):
            found = trained(model, seed)
        with fusions.disabled(AUX, ALONE, "float8_matmul_bias_quack"):
            wanted = trained(twin, seed)
        for name, exact in wanted.items():
            assert apart(found[name], exact) < 0.02, name
    for (scale, history), other in zip(states(model).values(), states(twin).values(), strict=True):
        torch.testing.assert_close(scale, other[0], rtol=0.01, atol=0.0)
        torch.testing.assert_close(history, other[1], rtol=0.01, atol=0.0)
    x = torch.randn(7, 32).to(BF16)
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE), torch.no_grad():
        with fusions.only(*cheap(ALONE), "stretch", "float8_matmul_bias"):
            found_alone = model(x)
        with fusions.disabled(AUX, ALONE, "float8_matmul_bias_quack"):
            assert apart(found_alone, model(x)) < 0.02
    assert [name for name, _ in package.calls] == ["gelu_in_8_bits"] * 3 + ["gelu_in_8_bits_alone"]
    fake_quack_float8.forget()
