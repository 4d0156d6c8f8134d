"""What an error is measured against."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

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
