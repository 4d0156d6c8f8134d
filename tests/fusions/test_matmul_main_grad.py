"""matmul_main_grad: the body with cuBLASLt's products replaced; plans and flags are in tests/ops/test_main_grad.py."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from te_fuser import fusions
from te_fuser.kernels import matmul


@pytest.mark.parametrize("over", [True, False])
def test_its_body_adds_or_writes_over(over: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 6))
    weight.main_grad = torch.ones(5, 6)
    weight.overwrite_main_grad = over
    weight.grad_added_to_main_grad = False
    dy, x = torch.ones(3, 5), torch.ones(3, 6)
    with mock.patch.object(matmul, "put_weight_gradient") as put:
        given = fusions.get("matmul_main_grad").run_backward.weight_gradient(dy, x, weight)
    (got_dy, got_x, held), options = put.call_args
    assert got_dy is dy and got_x is x and held.data_ptr() == weight.main_grad.data_ptr()
    assert options == {"add": not over}
    assert weight.grad_added_to_main_grad and given.shape == weight.shape and not given.any()
