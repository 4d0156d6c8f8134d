"""A GPU that a CPU stands for: kernels and cuBLASLt's products, those of 8 bits too, run on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from te_fuser.fuser import pipeline
from te_fuser.fuser.plan.device import device_named
from te_fuser.kernels.cublaslt import products
from tests import fake_cublaslt
from tests.fake_cuda import Emulation, FakeDriver


@pytest.fixture
def on_an_emulated_gpu(emulation: Emulation, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are those of an H200."""
    monkeypatch.setattr(products, "obstacle_on", lambda *_: None)
    monkeypatch.setattr(products, "refusal_of", lambda *_: None)
    monkeypatch.setattr("te_fuser.fusions.mixed_precision_fp8.why_no_product", lambda *_: None)
    monkeypatch.setattr(pipeline, "device_of", lambda device: device_named("h200"))
    for configured in (products.product_of, products.configured):
        configured.cache_clear()
    with fake_cublaslt.in_place(fake_cublaslt.compile_library()), emulation.in_plans():
        yield
    for configured in (products.product_of, products.configured):
        configured.cache_clear()
