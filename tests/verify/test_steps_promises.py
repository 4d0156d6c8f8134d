"""Forty wrong fusions and opaque ops: each is found, by name; what verify cannot see stands in its page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions import Details, fusion
from te_fuser.ops.base import OpCall, Spec
from te_fuser.verify import Row, VerificationError
from te_fuser.verify.fusions import FusionCheck
from tests.verify import wrong_fusions, wrong_ops

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
@pytest.mark.parametrize("kind", wrong_ops.WRONG)
def test_a_wrong_op_is_found(kind: type[ops.UnfusedOperation], behind: bool) -> None:
    model = te_fuser.Sequential(*([ops.SiLU()] if behind else []), kind(), kernels="reference")
    many = kind is wrong_ops.ErrsAtManyRows
    x = None if many else torch.randn(5, 7, 6)
    report = te_fuser.verify(model, x, dtypes=[torch.float32] if many else None, raise_on_failure=False)
    said = [str(row) for row in report.failures]
    assert any(re.search(wrong_ops.WRONG[kind], text) for text in said), said[:4]


def errs_above_a_million_elements(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = wrong_fusions.bias_silu(m, x)
    return y * 1.5 if x.numel() > 2_000_000 else y


class NotTheCube(wrong_ops.Cube):
    """x^3, says its name; its forward and its backward agree on 2 x^3."""

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().op_forward(call, x)

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> Any:
        return 2.0 * super().op_backward(call, dy)


class SaysTooFewBytes(wrong_ops.EmitsTheFirstRow):
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


def test_steps_of_a_running_model_keep_their_promises() -> None:
    for kind in (wrong_ops.SaysTwice, wrong_ops.WritesIntoSaved):
        model = te_fuser.Sequential(ops.SiLU(), kind(), kernels="reference", verify=True)
        with pytest.raises(VerificationError, match=wrong_ops.WRONG[kind]):
            model(torch.randn(5, 6, requires_grad=True)).sum().backward()


def test_there_are_forty() -> None:
    documented = 5  # a stream, a size, a meaning, bytes, threads
    assert len(wrong_fusions.WRONG) + len(wrong_ops.WRONG) + documented >= 40
