"""Attention by FlashAttention-4 on a GPU: values, gradients, captures, threads, launches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.kernels.attention import PROVIDERS
from te_fuser.kernels.packages import flash_attn_4
from tests.gpu import packing_providers as providers
from tests.gpu.test_attention_in_plans import check, gradients, launched, names, projected
from tests.kernels.attention.cases import by_provider
from tests.twins import randomize

pytestmark = providers.NEEDS_PACKAGE
PROVIDER = next(p for p in PROVIDERS if p.name == "cuda_flash_attn_4")
NAME = f"attention_{PROVIDER.name}"


@pytest.fixture(autouse=True)
def _in_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of small attention."""
    monkeypatch.setattr(flash_attn_4.PACKAGE, "version", lambda: providers.FLASH_4)
    monkeypatch.setattr(type(PROVIDER), "calls", (1.0, 1.0))


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients(layout: str, packing: str, dtype: torch.dtype) -> None:
    options = {"layout": layout, "packing": packing}
    # Each dtype and number of groups is compiled anew: of float16 there is one.
    groups = (4, 2, 1) if dtype == torch.bfloat16 else (4,)
    for rope, kv_heads, positions in itertools.product((True, False), groups, (65, 1000)):
        if (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue  # there are no strides for its gradient
        with providers.alone():
            plan = check(projected(4, kv_heads, 128, rope, **options), 3, positions, dtype, layout)
        forward, backward = names(plan)
        assert forward[NAME] == backward[NAME] == (1 + rope, 2 + rope)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_it_agrees_with_the_meaning(layout: str, packing: str, mask: str) -> None:
    """Called by itself, also for heads that plans leave to others, one sample, and odd lengths."""
    wide = itertools.product((128,), (65, 301), (1, 3), (4, 2, 1))
    for dim, positions, samples, kv_heads in (*wide, (64, 301, 3, 4), (96, 301, 3, 4)):
        common = {"kv_heads": kv_heads, "layout": layout, "packing": packing}
        if samples > 1 and (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue
        op = ops.DotProductAttention(4, dim, mask=mask, **common)
        rows = (positions, samples) if layout == "sequence_first" else (samples, positions)
        x, dy = (torch.randn(*rows, n, device="cuda", dtype=torch.bfloat16) for n in (op.packed.features, 4 * dim))
        with torch.no_grad():
            y, dx = by_provider(PROVIDER, op, x, dy)
        want = gradients(Sequential(op).double(), x.double(), dy, reference=True)
        sizes = (dim, positions, samples, kv_heads)
        assert all(providers.close(one, other) for one, other in zip((y, dx), want, strict=True)), sizes


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_later_calls_compute_what_the_package_does(kv_heads: int) -> None:
    """Launched again without it: other data, and memory that begins as zeros where keys have several query heads."""
    op = ops.DotProductAttention(4, 128, kv_heads=kv_heads, mask="causal", layout="batch_first", packing="blocked")
    inputs = [[torch.randn(2, 301, n, device="cuda", dtype=torch.bfloat16) for n in (op.packed.features, 512)]]
    inputs += [[3 * t.flip(1) for t in inputs[0]], inputs[0]]
    with torch.no_grad():
        later = [by_provider(PROVIDER, op, *given) for given in inputs]
        for found, (x, dy) in zip(later, inputs, strict=True):
            flash_attn_4.runs.forget()
            want = by_provider(PROVIDER, op, x, dy)
            assert torch.equal(found[0], want[0]) and providers.close(found[1], want[1])


def test_later_calls_are_the_packages_launches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, op, dy = providers.one_backward(PROVIDER, 128, 216)
    want = PROVIDER.backward(op.settings(), tensors, dy)["input"]
    for name in flash_attn_4._TAKEN:
        monkeypatch.setattr(flash_attn_4._module(), name, lambda **named: pytest.fail("the package was called"))
    assert providers.close(PROVIDER.backward(op.settings(), tensors, dy)["input"], want)
    with torch.no_grad():
        assert torch.equal(PROVIDER.forward(op.settings(), {"input": tensors["input"]})[0], tensors["output"])


def test_one_position() -> None:
    """A row that sees itself alone: the output is its value."""
    op = ops.DotProductAttention(4, 128, mask="causal", layout="sequence_first")
    x, dy = (torch.randn(1, 3, n, device="cuda", dtype=torch.bfloat16) for n in (op.packed.features, 512))
    with torch.no_grad():
        y, dx = by_provider(PROVIDER, op, x, dy)
    _, _, v = op.packed.split(x)
    assert torch.equal(y, op.packed.merge_output(v.unsqueeze(2)))
    dq, dk, dv = op.packed.split(dx)
    assert torch.equal(op.packed.merge_output(dv.unsqueeze(2)), dy) and max(dq.abs().max(), dk.abs().max()) < 0.05


def test_captures() -> None:
    op = ops.DotProductAttention(4, 128, mask="causal", layout="batch_first")
    model = randomize(Sequential(ops.Linear(64, op.packed.features), op)).to("cuda", torch.bfloat16)
    x, dy = (torch.randn(2, 136, n, device="cuda", dtype=torch.bfloat16) for n in (64, 512))
    with providers.alone():
        assert NAME in names(model.plan(x.clone().requires_grad_()))[1]
        want = gradients(model, x, dy)
        replayed = te_fuser.cuda_graph(model, x.clone().requires_grad_())
        assert all(
            torch.equal(y, want[0]) and providers.close(dx, want[1])
            for y, dx in providers.replays(replayed, model, x, dy)
        )


def test_a_capture_of_a_form_that_did_not_run_is_refused() -> None:
    providers.check_refused_in_a_capture(PROVIDER, 128)


def test_another_stream() -> None:
    """Its kernels wait for what is on PyTorch's current stream."""
    tensors, op, dy = providers.one_backward(PROVIDER, 128, 2048)
    want = PROVIDER.backward(op.settings(), tensors, dy)["input"]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(dy)
        late.copy_(dy)
        found = PROVIDER.backward(op.settings(), tensors, late)["input"]
    side.synchronize()
    assert providers.close(found, want)


def test_a_thread_of_its_own() -> None:
    providers.check_a_thread_of_its_own(PROVIDER, 128)


def test_the_first_run_in_a_thread_of_its_own() -> None:
    """There it is compiled, as in a backward pass."""
    tensors, op, dy = providers.one_backward(PROVIDER, 128, 184)
    flash_attn_4.runs.forget()
    found = providers.in_a_thread_of_its_own(PROVIDER, op, tensors, dy)
    assert providers.close(found, PROVIDER.backward(op.settings(), tensors, dy)["input"])


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
def test_nothing_is_copied_or_packed(layout: str, packing: str, tmp_path: Path) -> None:
    """Forward and backward are its own kernels alone."""
    op = ops.DotProductAttention(8, 128, mask="causal", layout=layout, packing=packing)
    rows = (256, 8) if layout == "sequence_first" else (8, 256)
    x, dy = (torch.randn(*rows, n, device="cuda", dtype=torch.bfloat16) for n in (op.packed.features, 1024))
    _, tensors = providers.ran_forward(PROVIDER, op, x)
    with torch.no_grad():
        PROVIDER.backward(op.settings(), tensors, dy)["input"]
        forward = launched(lambda: PROVIDER.forward(op.settings(), {"input": x}), tmp_path)
        backward = launched(lambda: PROVIDER.backward(op.settings(), tensors, dy)["input"], tmp_path)
    assert len(forward) == 1 and len(backward) == 3, (forward, backward)
