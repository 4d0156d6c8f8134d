"""Attention whose backward is by cuDNN's front end, on a GPU: values, gradients, dropout, captures, launches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.kernels.attention import PROVIDERS
from te_fuser.kernels.packages import cudnn_frontend
from tests.gpu import packing_providers as providers
from tests.gpu.test_attention_in_plans import check, gradients, launched, names, projected
from tests.twins import randomize

pytestmark = providers.NEEDS_FRONT_END
PROVIDER = next(p for p in PROVIDERS if p.name == "cuda_cudnn_frontend")
NAME = f"attention_{PROVIDER.name}"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: providers.FRONT_END)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients(layout: str, packing: str, dtype: torch.dtype) -> None:
    options = {"layout": layout, "packing": packing}
    for rope, kv_heads, (dim, positions) in itertools.product((True, False), (4, 2, 1), ((64, 136), (128, 1000))):
        if (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue  # there are no strides for its gradient
        with providers.alone():
            plan = check(projected(4, kv_heads, dim, rope, **options), 3, positions, dtype, layout)
        assert names(plan)[1][NAME] == (1 + rope, 2 + rope)


def test_without_a_mask() -> None:
    for dim, positions, packing in itertools.product((64, 128), (33, 136, 520), ("interleaved", "blocked")):
        op = ops.DotProductAttention(4, dim, layout="batch_first", packing=packing, mask="none")
        with providers.alone():
            plan = check([ops.Bias(op.packed.features), op], 2, positions, torch.bfloat16, "batch_first")
        assert NAME in names(plan)[1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
def test_it_agrees_with_pytorchs_backward(dropout: float, layout: str, packing: str) -> None:
    """Both run one kernel of cuDNN, on equal draws."""
    for kv_heads, mask, dtype in itertools.product((4, 1), ("none", "causal"), (torch.bfloat16, torch.float16)):
        common = {"kv_heads": kv_heads, "layout": layout, "packing": packing}
        op = ops.DotProductAttention(4, 64, mask=mask, dropout=dropout, **common)
        model = randomize(Sequential(ops.Bias(op.packed.features), op)).to("cuda", dtype)
        x, dy = (torch.randn(136, 3, n, device="cuda", dtype=dtype) for n in (op.packed.features, 256))
        found = []
        for off in (providers.OTHERS, (NAME, *providers.OTHERS[1:])):
            with fusions.disabled(*off):
                assert (NAME in names(model.plan(x.clone().requires_grad_()))[1]) == (NAME not in off)
                torch.manual_seed(3)
                found.append(gradients(model, x, dy))
        assert torch.equal(found[0][0], found[1][0])
        assert all(providers.close(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_captures(dropout: float) -> None:
    op = ops.DotProductAttention(4, 64, mask="causal", dropout=dropout, layout="batch_first")
    model = randomize(Sequential(ops.Linear(64, op.packed.features), op)).to("cuda", torch.bfloat16)
    x, dy = (torch.randn(2, 136, n, device="cuda", dtype=torch.bfloat16) for n in (64, 256))
    with providers.alone():
        replayed = te_fuser.cuda_graph(model, x.clone().requires_grad_())
        want = gradients(model, x, dy)
        seen = providers.replays(replayed, model, x, dy)
    if dropout:
        assert not torch.equal(seen[0][0], seen[1][0]) and all(t.isfinite().all() for pair in seen for t in pair)
    else:
        assert all(torch.equal(y, want[0]) and providers.close(dx, want[1]) for y, dx in seen)


def test_a_capture_without_its_graph_is_refused() -> None:
    providers.check_refused_in_a_capture(PROVIDER, 64)


def test_a_thread_of_its_own() -> None:
    providers.check_a_thread_of_its_own(PROVIDER, 64)


@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
def test_nothing_is_packed(packing: str, tmp_path: Path) -> None:
    """Backward is cuDNN's own kernels, and the sums for the bias."""
    with providers.alone():
        model = Sequential(*projected(8, 8, 64, rope=False, packing=packing)).to("cuda", torch.bfloat16)
        x = torch.randn(256, 64, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
    dy = torch.randn_like(y)
    again = lambda: torch.autograd.grad(y, [x, *model.parameters()], dy, retain_graph=True)  # noqa: E731
    again()
    found = launched(again, tmp_path)
    assert not [n for n in found if "packed_heads" in n or "CatArray" in n or "elementwise" in n], found
