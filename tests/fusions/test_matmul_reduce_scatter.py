"""Pipelines of a product and a scattering: what they cost, and what stands behind."""

from __future__ import annotations

import pytest

from te_fuser.fuser.plan.device import DEVICES
from tests.fusions.test_all_gather_matmul import FEATURES, INNER, half_hidden, planned
from tests.symmetric import NAMES


def test_the_terms_are_added_up_behind_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added up is read and written apart from the product, and half of it is sent."""
    half_hidden(monkeypatch)
    step = next(s for s in planned().forward if s.name == "matmul_reduce_scatter")
    cost, device, whole = step.cost, DEVICES["h200"], 8192 * FEATURES * 2
    assert (cost.apart, cost.sent, cost.ranks, cost.beside) == (1.5 * whole, whole / 2, 2, 0.37)
    assert cost.flops == 2.0 * 8192 * FEATURES * INNER / 2
    apart = cost.launches * device.launch + cost.apart / device.bandwidth
    product = cost.flops / device.matrix_rate["bfloat16"]
    assert step.seconds == pytest.approx(product + apart + 0.63 * cost.sent / 204e9)


def test_row_ops_behind_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scattered is a rank's rows, and what follows reads these alone."""
    half_hidden(monkeypatch)
    plan = planned()
    at = next(k for k, s in enumerate(plan.forward) if s.name == "matmul_reduce_scatter")
    behind = plan.forward[at + 1]
    assert behind.name == "gelu_fwd" and behind.reads()[0] == plan.forward[at].writes()[0]
    assert plan.graph.values[behind.reads()[0].index].spec.shape == (4096, FEATURES)
    assert [s.name for s in plan.forward[at:] if s.name in NAMES] == ["matmul_reduce_scatter"]
