"""Steps checked on the data they see: right ones pass; forty wrong fusions and opaque ops are found, by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions import Cost, Details, fusion
from te_fuser.ops.base import OpCall, Spec
from te_fuser.verify import Row, VerificationError, steps
from te_fuser.verify.fusions import FusionCheck
from tests.test_verify import transformer_block
from tests.twins import sequential, tensor
from tests.verify import wrong_fusions

Listed = tuple[torch.nn.Module, ...]

LISTS: dict[str, Callable[[], Listed]] = {
    # No step makes what these hand through: the next op's data are found all the same.
    "handed_through": lambda: (ops.Linear(8, 8), ops.Identity(), ops.Linear(8, 8)),
    "handed_through_twice": lambda: (ops.Linear(8, 8), ops.Identity(), ops.Cast(torch.float64), ops.Linear(8, 8)),
    "named": lambda: (ops.Linear(8, 8), ops.Fork("a"), ops.Linear(8, 8), ops.Add("a"), ops.Linear(8, 8)),
    # Both ends of a fork enter one step: they are one value, however its gradient is shared among them.
    "fork": lambda: (ops.Linear(8, 8), te_fuser.Residual(), ops.GELU()),
    "fork_in_a_fork": lambda: (ops.Linear(8, 8), te_fuser.Residual(te_fuser.Residual(), ops.GELU()), ops.SiLU()),
    # Two parameters of one name in one step.
    "two_biases": lambda: (ops.Bias(8), ops.LayerNorm(8), ops.Scale(8), ops.Bias(8)),
}


@pytest.mark.parametrize("cut", [False, True], ids=["fused", "one by one"])
@pytest.mark.parametrize("name", LISTS)
def test_right_steps_pass(name: str, cut: bool) -> None:
    model, x = sequential(*LISTS[name](), verify=True), tensor(5, 8)
    with te_fuser.fusions.only(*(() if cut else te_fuser.fusions.names())):
        y = model(x)
        y.square().sum().backward()
    torch.testing.assert_close(y, model.reference(x))


def test_computed_parameters_are_those_of_the_call() -> None:
    """Power iteration goes on each time that the weight is computed: what is checked is what ran."""
    model, x = sequential(ops.Linear(8, 8), ops.GELU(), verify=True), tensor(5, 8)
    torch.nn.utils.parametrizations.spectral_norm(model[0], "weight")
    for _ in range(3):
        model(x).square().sum().backward()


def test_a_step_that_draws_nothing_gets_a_seed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As draw_seed gives them; whatever the default device is."""
    model, x = sequential(ops.Linear(8, 8), ops.GELU(), verify=True), tensor(5, 8)
    found, run_nodes = [], steps.run_nodes

    def watched(nodes: Any, values: Any, parameters: Any, seed: torch.Tensor, exact: bool) -> None:
        found.append(seed.device.type)
        run_nodes(nodes, values, parameters, seed, exact)

    monkeypatch.setattr(steps, "run_nodes", watched)
    with torch.device("meta"):
        model(x)
    assert set(found) == {"cpu"}


def first_bias_is_wrong(m: Any, dy: torch.Tensor) -> Any:
    """Backward of two biases; the second's gradient is right."""
    right = dy.reshape(-1, dy.shape[-1]).sum(0)
    return dy, {"0.bias": right * 1.5, "1.bias": right}


def test_a_wrong_gradient_is_found_beside_a_right_one_of_the_same_name() -> None:
    entry = fusion(backward=[ops.Bias, ops.Bias], details=Details(registered=False))(first_bias_is_wrong)
    model = sequential(ops.Bias(8), ops.Bias(8), verify=True)
    with te_fuser.fusions.only(dataclasses.replace(entry, cost=lambda m: Cost(seconds=0.0))):
        y = model(tensor(5, 8))
        with pytest.raises(VerificationError, match=r"gradient of bias of op 0 \(Bias '0'\)"):
            y.sum().backward()
    for kind in (wrong_fusions.SaysTwice, wrong_fusions.WritesIntoSaved):
        model = te_fuser.Sequential(ops.SiLU(), kind(), kernels="reference", verify=True)
        with pytest.raises(VerificationError, match=wrong_fusions.WRONG_OPS[kind]):
            model(torch.randn(5, 6, requires_grad=True)).sum().backward()


# ---- Sequential(verify=True)


def test_verified_steps_give_the_normal_result_also_under_autocast() -> None:
    plain, watched = (transformer_block(kernels="reference", verify=v) for v in (False, True))
    x = torch.randn(6, 16, requires_grad=True)
    torch.manual_seed(0)
    y = plain(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(0)
    z = watched(x)
    (dz,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(y, z) and torch.equal(dx, dz)
    with torch.autocast("cpu"):
        y = watched(x)
    y.float().square().sum().backward()
    assert all(p.grad is not None for p in watched.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_verified_steps_in_every_dtype(dtype: torch.dtype) -> None:
    model = transformer_block(kernels="reference", verify=True).to(dtype)
    x = torch.randn(2, 9, 16, dtype=dtype, requires_grad=True)
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dtype: rounds in between", "forward step 'dtype:_rounds_in_between' over op 1 .*SiLU"),
        ("write: clamps its input", "changed its input"),
        ("gradient: sums a row twice", "backward step 'gradient:_sums_a_row_twice'.*gradient of bias"),
    ],
)
def test_step_that_is_wrong_is_named(name: str, words: str) -> None:
    wrong, backward = wrong_fusions.WRONG[name][0], name in wrong_fusions.BACKWARD
    behind = ops.ReLU() if backward else ops.SiLU()
    model = te_fuser.Sequential(ops.Linear(8, 8), behind, kernels="reference", verify=True)
    wrong = dataclasses.replace(wrong, cost=lambda m: Cost(seconds=0.0))
    with te_fuser.fusions.only(wrong), pytest.raises(VerificationError, match=words), torch.set_grad_enabled(backward):
        y = model(3.0 * torch.randn(3, 8))
        y.sum().backward()


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "verify.md"


@pytest.mark.parametrize("name", wrong_fusions.WRONG)
def test_a_wrong_fusion_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases behind the first that finds it are not run."""
    wrong, words, given = wrong_fusions.WRONG[name]
    options = {"dtypes": [torch.float32], "kernels": "reference", "device": "cpu", **given}
    check_case = FusionCheck._check_case

    def found(rows: Iterable[Row]) -> bool:
        return any(re.search(words, str(row)) for row in rows if not row.passed)

    def until_found(self: FusionCheck, *case: Any) -> None:
        if not found(self.rows):
            check_case(self, *case)

    monkeypatch.setattr(FusionCheck, "_check_case", until_found)
    report = te_fuser.verify(wrong, raise_on_failure=False, **options)
    assert found(report.failures), report.failures[:4]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind another"])
@pytest.mark.parametrize("kind", wrong_fusions.WRONG_OPS)
def test_a_wrong_op_is_found(kind: type[ops.UnfusedOperation], behind: bool) -> None:
    model = te_fuser.Sequential(*([ops.SiLU()] if behind else []), kind(), kernels="reference")
    many = kind is wrong_fusions.ErrsAtManyRows
    x = None if many else torch.randn(5, 7, 6)
    report = te_fuser.verify(model, x, dtypes=[torch.float32] if many else None, raise_on_failure=False)
    said = [str(row) for row in report.failures]
    assert any(re.search(wrong_fusions.WRONG_OPS[kind], text) for text in said), said[:4]


def errs_above_a_million_elements(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = wrong_fusions.bias_silu(m, x)
    return y * 1.5 if x.numel() > 2_000_000 else y


class NotTheCube(wrong_fusions.Cube):
    """x^3, says its name; its forward and its backward agree on 2 x^3."""

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().op_forward(call, x)

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> Any:
        return 2.0 * super().op_backward(call, dy)


class SaysTooFewBytes(wrong_fusions.EmitsTheFirstRow):
    def emitted_bytes(self, x: Spec) -> dict[str, int]:
        return {"norm": 1}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        call.emit("norm", x.norm(dim=-1, keepdim=True))
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.usefixtures("few_rows")
def test_what_it_does_not_see_stands_in_its_page() -> None:
    page = " ".join(PAGE.read_text().split("## What it does not see")[1].split("\n## ")[0].split())
    large = fusion(forward=[ops.Bias, ops.SiLU], emits=["0.output"], details=Details(registered=False))
    options = {"dtypes": [torch.float32], "kernels": "reference", "device": "cpu"}
    assert te_fuser.verify(large(errs_above_a_million_elements), **options).passed and "with more rows" in page
    for op, words in (
        (NotTheCube(), "its own `op_forward`, unless it has a `reference`"),
        (SaysTooFewBytes(), "`emitted_bytes`"),
    ):
        assert te_fuser.verify(te_fuser.Sequential(op, kernels="reference"), torch.randn(5, 6)).passed and words in page
    assert "**Streams.**" in page and "**Two threads at once**" in page
    documented = 5  # a stream, a size, a meaning, bytes, threads
    assert len(wrong_fusions.WRONG) + len(wrong_fusions.WRONG_OPS) + documented >= 40
