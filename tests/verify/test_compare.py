"""What an error is measured against."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.verify.compare import UPSTREAM, judge

EPS = torch.finfo(torch.float32).eps


def cancelling(data: Mapping[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
    """A gradient whose terms cancel where all that arrives is equal, as that of a softmax's sum does."""
    dy = data[f"{UPSTREAM}y"]
    return {"dx": dy * data["x"] - dy.flip(-1) * data["x"]}


@pytest.mark.parametrize(("error", "passes"), [(EPS, True), (5 * EPS, False)])
def test_what_cancels_has_the_size_of_its_terms(error: float, passes: bool) -> None:
    # It is 0, and plain PyTorch is exact by chance: the terms, which are 1, say what rounding may leave.
    data = {"x": torch.ones(3, 8), f"{UPSTREAM}y": torch.ones(3, 8)}
    (row,) = judge("case", {"dx": torch.full((3, 8), error)}, data, cancelling)
    assert row.passed is passes


@pytest.mark.parametrize("seed", range(4))
def test_a_model_with_a_narrower_dtype_inside_may_err_by_its_ulp(seed: int) -> None:
    """What rounds to bfloat16 on the way may round to the other side; an ulp of its float32 data does not show that."""
    torch.manual_seed(seed)
    model = te_fuser.Sequential(
        ops.LayerNorm(32), ops.GELU(), ops.Linear(32, 32), ops.LayerNorm(32), kernels="reference"
    )
    with torch.autocast("cpu", torch.bfloat16):
        te_fuser.verify(model, torch.randn(9, 32))
