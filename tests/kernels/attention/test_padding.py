"""Padding by boolean tensors, wherever it lies, by providers that are told lengths and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from te_fuser import ops
from te_fuser.kernels.attention import AttentionProblem
from te_fuser.kernels.attention.lengths import blank_by_kernel, blank_by_torch
from te_fuser.kernels.attention.padding import CompactByKernel, CompactByTorch, Padded, reason_not, why_not_moved
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import Spec
from tests.fake_cuda import FakeDriver
from tests.kernels.attention import structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.emulated import row_kernels
from tests.kernels.attention.padded import KINDS, LAYOUTS, MASKS, ONE, SAME, TWO, B, case
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler


@pytest.fixture(params=["cuda_flash", "cuda_flash_attn_4"])
def provider(request: pytest.FixtureRequest) -> Iterator[Padded]:
    """Each, with what it calls in place."""
    with told.in_place(all_rows=False):
        yield Padded(BY_NAME[request.param], CompactByTorch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients(provider: Padded, name: str, layout: str, kind: str) -> None:
    """As the op's own."""
    op, tensors = case(name, layout, kind)
    settings, dy = op.settings(), structured.output_gradient(op, tensors)
    want = structured.by_op(op, tensors, dy)
    y, saved = provider.forward(settings, tensors, blank_by_torch)
    assert tuple(saved) == provider.provider.emits
    ours = provider.backward(settings, {**tensors, "output": y, **saved}, dy, blank_by_torch)
    assert {"output", *ours} == want.keys()
    for key, found in {"output": y, **ours}.items():
        torch.testing.assert_close(found, want[key], rtol=0, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


emulated = emulating(row_kernels)


@needs_compiler
@pytest.mark.parametrize("kind", ["end", "anywhere"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_by_kernels(name: str, layout: str, kind: str, emulated: FakeDriver) -> None:
    """As by PyTorch, to the bit, whichever provider attends in between."""
    provider = Padded(BY_NAME["cuda_flash"], CompactByTorch)
    op, tensors = case(name, layout, kind, dtype=torch.bfloat16)
    settings, dy = op.settings(), structured.output_gradient(op, tensors)
    found = []
    for way, blank in ((provider, blank_by_torch), (replace(provider, rows=CompactByKernel), blank_by_kernel)):
        with told.in_place(all_rows=False):
            y, saved = way.forward(settings, tensors, blank)
            made = way.backward(settings, {**tensors, "output": y, **saved}, dy, blank)
        found.append({"output": y, **made})
    for key, want in found[0].items():
        assert torch.equal(found[1][key], want), key


def test_nothing_to_attend_to(provider: Padded) -> None:
    op, tensors = case("packed", "batch_first", "end")
    tensors = {"input": tensors["input"][:, :0], "padding": tensors["padding"][..., :0]}
    y, saved = provider.forward(op.settings(), tensors, blank_by_torch)
    found = provider.backward(op.settings(), {**tensors, "output": y, **saved}, y, blank_by_torch)
    assert y.shape == (B, 0, 32) and found["input"].shape == tensors["input"].shape


@pytest.mark.parametrize(
    ("mask", "scores", "words"),
    [
        (AttentionMask(window=(2, 0), **ONE), {}, "a window or a corner counts that"),
        (AttentionMask(causal=True, corner="bottom_right", **TWO), {}, "a window or a corner counts that"),
        (AttentionMask(causal=True, **TWO), {}, "padded by tensors of two names"),
        (AttentionMask(lengths="n", **ONE), {}, "sequences have lengths or offsets as well"),
        (AttentionMask(**ONE), {"sink": "zero"}, "not called for a sink"),
        (AttentionMask(**ONE), {"alibi": True}, "not called for ALiBi"),
    ],
)
def test_why_not(mask: AttentionMask, scores: dict, words: str) -> None:
    packing = "apart" if mask.key_padding else "blocked"
    settings = ops.DotProductAttention(
        4, 8, mask=mask, packing=packing, scores=ops.AttentionScores(**scores), layout="sequence_first"
    ).settings()
    reason = why_not_moved(settings)
    assert reason is not None and words in reason and reason.startswith("padding by a boolean tensor is told by moving")


def test_which_providers_take_it() -> None:
    def reason(name: str, mask: AttentionMask, packing: str = "interleaved") -> str | None:
        op = ops.DotProductAttention(4, 64, mask=mask, packing=packing, layout="sequence_first")
        x = Spec((128, 4, op.packed.features), torch.bfloat16, torch.device("cuda"))
        keys = 128 if packing == "apart" else None
        return reason_not(BY_NAME[name], AttentionProblem.of(op.settings(), x, (9, 0), True, keys))

    assert reason("cuda_flash", AttentionMask(**ONE)) is None
    assert reason("cuda_flash", AttentionMask(causal=True, **SAME), "apart") is None
    assert reason("cuda_flash", AttentionMask(**TWO), "apart") is None
    words = reason("cuda_cudnn_frontend", AttentionMask(**ONE))
    assert words == (
        "padding by a boolean tensor is told by moving tokens together, and it is not called for sequences one behind "
        "the other"
    )
