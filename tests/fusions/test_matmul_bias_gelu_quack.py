"""matmul_bias_gelu_quack, matmul_bias_gelu_quack_aux: where plans take them, else why not; and they are right."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from te_fuser import fusions, ops
from te_fuser.fusions import cublaslt
from te_fuser.fusions.match import Match, MatchedOp
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS
from te_fuser.kernels.packages import quack_matmul
from te_fuser.ops.base import Spec
from tests.fusions.products import covered, gelu_mlp, plan, reasons
from tests.fusions.quack_models import (
    ALONE,
    AUX,
    BACKWARD,
    REFUSED,
    install,
    mlp,
    names,
    on_the_cpu,
    small_mlps,
    unreadable,
)
from tests.kernels.packages import fake_quack
from tests.twins import assert_as_meant

CUBLASLT = "matmul_bias_gelu_aux"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def test_backward_reads_the_value_before(installed: None) -> None:
    p = plan(*mlp())
    assert covered(p.forward)[1] == (AUX, 1, 4)
    assert [n for n, _ in p.forward[1].inputs] == ["input", "0.weight", "1.bias"]
    assert [n for n, _ in p.forward[1].outputs] == ["output", "1.output"]
    assert "bias.output" in {k.name for k in p.kept}
    (why,) = reasons(p, ALONE)
    assert why == "backward reads the value before the activation, and it gives only its output"
    with fusions.disabled(AUX):
        assert covered(plan(*mlp()).forward)[1] == (CUBLASLT, 1, 4)


def test_without_a_backward_it_is_not_written(installed: None) -> None:
    p = plan(*mlp(), grad=False)
    assert covered(p.forward)[1] == (ALONE, 1, 4) and not p.backward


def test_its_cost_is_what_was_measured(installed: None) -> None:
    """Of cuBLASLt's bytes, 3 % faster than a plain product, and as dear for the host as some launches."""
    for grad, other in ((True, CUBLASLT), (False, "matmul_bias_gelu")):
        ours = plan(*mlp(), grad=grad).forward[1].cost
        with fusions.disabled(AUX, ALONE):
            p = plan(*mlp(), grad=grad)
        theirs = next(s.cost for s in p.forward if s.name == other)
        assert (ours.read, ours.written, ours.flops) == (theirs.read, theirs.written, theirs.flops)
        assert (ours.efficiency, ours.launches, ours.calls) == (1.03, 1, CALLS)
        assert theirs.efficiency == cublaslt._EFFICIENCY["forward_bias_gelu_aux" if grad else "forward_bias_gelu"]


@pytest.mark.parametrize("rows", [16, 256])
def test_small_products_are_left_to_others(rows: int, installed: None) -> None:
    p = plan(*mlp(), rows=rows)
    assert not names(p.forward)
    (why,) = reasons(p, AUX)
    assert why.endswith((f"us more than {CUBLASLT}", f"no gain over {CUBLASLT}"))


@pytest.mark.parametrize(("options", "gelu", "reason"), REFUSED)
def test_reasons(options: dict[str, Any], gelu: str, reason: str, installed: None) -> None:
    assert reasons(plan(*gelu_mlp(gelu, 64), **options), AUX) == {reason}
    assert reasons(plan(*gelu_mlp(gelu, 64), **options, grad=False), ALONE) == {reason}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("n_in", "n_out"), [(68, 64), (64, 68), (0, 64)])
def test_features_that_its_loads_cannot_read(n_in: int, n_out: int, installed: None) -> None:
    p = plan(ops.Linear(n_in, n_out), ops.GELU(), features=n_in)
    assert reasons(p, AUX) == {unreadable(n_in, n_out)}


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((torch.float32, torch.bfloat16), "input and weight differ in dtype, torch.bfloat16 and torch.float32"),
        ((torch.bfloat16, torch.float32), "the bias is in torch.float32, the product in torch.bfloat16"),
        ((torch.bfloat16, torch.bfloat16), None),
    ],
)
def test_a_parameter_of_another_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], reason: str | None, installed: None
) -> None:
    x = Spec((8192, 64), torch.bfloat16, torch.device("cuda", 0))
    weight, bias = ({name: dtype} for name, dtype in zip(("weight", "bias"), dtypes, strict=True))
    parts = (
        MatchedOp(ops.MatMul(64, 64), {}, weight),
        MatchedOp(ops.Bias(64), {}, bias),
        MatchedOp(ops.GELU("tanh"), {}),
    )
    assert fusions.get(AUX).refusal(Match(parts, x, x, "cuda", True, (9, 0))) == reason


def test_the_package_missing_or_unusable(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quack_matmul, "unusable", lambda: "it does not load")
    assert reasons(plan(*mlp()), AUX) == reasons(plan(*mlp()), BACKWARD) == {"it does not load"}
    install(monkeypatch, None)
    p = plan(*mlp())
    assert reasons(p, AUX) == {'quack-kernels is not installed: pip install "quack-kernels>=0.6.5"'}
    assert covered(p.forward)[1] == (CUBLASLT, 1, 4)


def test_without_the_fusions_that_a_failure_names_it_is_not_called(installed: None) -> None:
    with fusions.disabled(*ast.literal_eval(quack_matmul._FUSIONS)):
        for grad in (True, False):
            p = plan(*mlp(), grad=grad)
            assert not names(p.forward) and not names(p.backward)


def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    package, (alone, aux, backward, _) = on_the_cpu(monkeypatch)
    for model, x in small_mlps():
        with fusions.only(alone, aux, "stretch"):
            assert names(model.plan(x).forward) == [AUX]
            assert_as_meant(model, x, tolerance=1e-10)
            with torch.no_grad():
                assert names(model.plan(x).forward) and not model.plan(x).backward
                assert_as_meant(model, x, tolerance=1e-10)
        with torch.no_grad(), fusions.only(alone, "stretch"):
            assert names(model.plan(x).forward) == [ALONE]
            assert_as_meant(model, x, tolerance=1e-10)
    kept = {"D" in given for _, given in package.calls}
    assert {name for name, _ in package.calls} == {"gelu_of_sum"} and kept == {True, False}
    fake_quack.forget()
