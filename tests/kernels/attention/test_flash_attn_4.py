"""The provider that calls FlashAttention-4, with a package that computes on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_fuser.kernels.packages import flash_attn_4
from tests.kernels.attention.cases import (
    BY_NAME,
    LAYOUTS,
    PACKINGS,
    assert_matches,
    assert_takes_any_strides,
    by_provider,
    each_packed,
    make,
    problem,
)
from tests.kernels.packages import fake_flash_attn

PROVIDER = BY_NAME["cuda_flash_attn_4"]


@pytest.fixture
def package(monkeypatch):
    """A package in place."""
    yield fake_flash_attn.in_place(monkeypatch)
    fake_flash_attn.forget()


def wide(**changes):
    """A problem on an H200, of heads of 128 features."""
    return problem(**{"head_dim": 128, **changes})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_heads_are_read_and_stored_where_they_lie_packed(layout, packing, package):
    for _, x, dy, y, dx in each_packed(PROVIDER, layout, packing):
        assert y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes and not y._is_view()
        (_, ahead), (_, back) = package.calls[-2:]
        inside = {"q": x, "k": x, "v": x, "out": y, "dq": dx, "dk": dx, "dv": dx, "dout": dy}
        for name, tensor in (ahead | back).items():
            assert tensor.untyped_storage().data_ptr() == inside[name].untyped_storage().data_ptr(), name
        for name in "qkv":
            assert back[f"d{name}"].stride() == back[name].stride()


def test_the_scale_and_the_mask_are_passed(package):
    for mask, scale in itertools.product(("none", "causal"), (None, 0.7)):
        op, x, dy = make(mask=mask, scale=scale)
        assert_matches(PROVIDER, op, x, dy)


def test_inputs_of_other_strides(package):
    assert_takes_any_strides(PROVIDER)


@pytest.fixture
def at_hand(package, monkeypatch):
    """A machine with a GPU, on which the package is imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return package


def test_on_a_machine_with_a_gpu_it_is_imported_while_planning(at_hand):
    assert PROVIDER.reason_not(wide()) is None and PROVIDER.reason_not(wide(dropout=0.1)) is not None
    assert at_hand.calls == []


def test_functions_that_changed_are_a_reason(at_hand, monkeypatch):
    def changed(q, k, v, softmax_scale, causal, lse):
        raise AssertionError

    monkeypatch.setattr(at_hand, "_flash_attn_fwd", changed, raising=False)
    monkeypatch.delattr(at_hand, "_flash_attn_bwd")
    assert PROVIDER.reason_not(wide()) == (
        "flash-attn-4 4.0.0b36 is not as it was in 4.0.0b36: "
        "_flash_attn_fwd takes no out, return_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap, "
        "window_size_left, window_size_right, learnable_sink; it has no _flash_attn_bwd; "
        "it has no _flash_attn_fwd.compile_cache; it has no _flash_attn_bwd.compile_cache"
    )


def test_later_calls_launch_what_the_first_did_without_the_package(package):
    """New memory each time, with zeros where the package wants them."""
    for mask, kv_heads, positions in itertools.product(("none", "causal"), (4, 1), (7, 9)):
        op, x, dy = make(mask=mask, kv_heads=kv_heads, positions=positions)
        by_provider(PROVIDER, op, x, dy)
        entered, others = package.entered, (t.flip(0).contiguous() for t in (x, dy))
        assert_matches(PROVIDER, op, *others)
        assert_matches(PROVIDER, op, x, dy)
        assert package.entered == entered
    assert len(flash_attn_4.runs) == 16


def test_a_call_in_which_pytorch_computes_something_goes_by_the_package(package):
    package.copies = True
    op, x, dy = make(mask="causal")
    for k in range(3):
        entered = package.entered
        assert_matches(PROVIDER, op, x, dy + k)
        assert k == 0 or package.entered == entered + 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_fails_in_a_run_is_raised_in_words(direction, package):
    op, x, dy = make(mask="causal")
    with torch.no_grad():
        y, saved = PROVIDER.forward(op.settings(), {"input": x})
        runs = {
            "forward": lambda: PROVIDER.forward(op.settings(), {"input": x.flip(0)}),
            "backward": lambda: PROVIDER.backward(op.settings(), {"input": x, "output": y, **saved}, dy)["input"],
        }
        package.fails = AssertionError("inputs must be on CUDA device")
        words = rf"flash-attn-4's {direction} of attention failed for queries \[.*causal=True: AssertionError: inputs"
        with pytest.raises(RuntimeError, match=words + r".*disabled\('attention_cuda_flash_attn_4'\) plans without it"):
            runs[direction]()
        package.fails = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            runs[direction]()
