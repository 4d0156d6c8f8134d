"""float8_matmul_bias_quack: where plans take it, else why not; and it is right."""

from __future__ import annotations

from typing import Any

import pytest

from te_fuser import fusions
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS
from te_fuser.kernels.packages import quack_matmul
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.products import reasons
from tests.fusions.quack_float8_models import (
    AUX,
    BIASED,
    FFN,
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
@pytest.mark.parametrize("grad", [True, False])
def test_taken_where_few_terms_are_summed(grad: bool) -> None:
    """Past what quantizes the gradient, as it was measured, and as dear for the host as some launches."""
    with fusions.disabled(AUX, "float8_matmul_gelu_quack"):
        p = planned(grad=grad)
        found, names = step_of(p, BIASED), [s.name for s in p.forward]
        assert names.count("float8_matmul_bias") == 1
        assert reasons(p, BIASED) == {f"of {FFN} terms cuBLASLt's is faster, it was up to 8192"}
    cost = found.cost
    assert (cost.read, cost.written) == (F * (ROWS + FFN), 2 * ROWS * FFN)
    assert (cost.flops, cost.dtype, cost.calls) == (2.0 * ROWS * F * FFN, "float8_e4m3fn", CALLS)
    assert cost.efficiency == 1.06 and cost.launches == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("how", "why"), REFUSED)
def test_refused(how: dict[str, Any], why: str) -> None:
    assert why in reasons(planned(inner=8192, **how), BIASED)


@pytest.mark.parametrize("version", [None, "0.6.4"])
def test_without_the_package(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack_matmul.PACKAGE, "version", lambda: version)
    (why,) = reasons(planned(inner=8192), BIASED)
    assert 'pip install "quack-kernels>=0.6.5"' in why


@needs_compiler
@pytest.mark.usefixtures("on_an_emulated_gpu")
def test_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In values and gradients, over some steps by the scales of then."""
    package = as_installed(monkeypatch)
    model, twin = small_mlps()
    for seed in range(3):
        with fusions.only(*cheap(BIASED), "stretch", "float8_matmul_backward"):
            found = trained(model, seed)
        with fusions.disabled(BIASED, AUX):
            wanted = trained(twin, seed)
        for name, exact in wanted.items():
            assert apart(found[name], exact) < 0.02, name
    assert [name for name, _ in package.calls] == ["sum_with_bias"] * 6
    fake_quack_float8.forget()
