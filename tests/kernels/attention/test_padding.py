"""Padding by boolean tensors, wherever it lies: tokens that are moved together and back, and providers told of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from te_fuser import ops
from te_fuser.kernels.attention import AttentionProblem
from te_fuser.kernels.attention.lengths import blank_by_kernel, blank_by_torch
from te_fuser.kernels.attention.padding import (
    CompactByKernel,
    CompactByTorch,
    Padded,
    Tokens,
    reason_not,
    why_not_moved,
)
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import Spec
from tests.fake_cuda import FakeDriver
from tests.kernels.attention import structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.emulated import row_kernels
from tests.kernels.attention.padded import KINDS, LAYOUTS, MASKS, ONE, SAME, TWO, B, case
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

WAYS = ["torch", pytest.param("kernel", marks=needs_compiler)]


emulated = emulating(row_kernels)


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> type[CompactByTorch] | type[CompactByKernel]:
    """One of both ways."""
    if request.param == "torch":
        return CompactByTorch
    request.getfixturevalue("emulated")
    return CompactByKernel


def hidden(samples: int, positions: int, seed: int = 0) -> torch.Tensor:
    """[B, 1, 1, S]: nothing, all, the end, the begin, then anything."""
    mask = torch.rand(samples, positions, generator=torch.Generator().manual_seed(seed)) < 0.4
    at = torch.arange(positions)
    for n, said in enumerate((at < 0, at >= 0, at >= positions // 2, at < positions // 2)):
        mask[n : n + 1] = said
    return mask[:, None, None]


def expected(masks: list[torch.Tensor]) -> list[tuple[list[int], list[list[int]]]]:
    """Of each side: how many tokens samples without gaps begin with, and where the tokens of the others stand."""
    tokens = [[(~row).nonzero().flatten().tolist() for row in mask.flatten(1)] for mask in masks]
    gaps = [any(list(range(len(side[n]))) != side[n] for side in tokens) for n in range(len(masks[0]))]
    found = []
    for side in tokens:
        pairs = list(zip(side, gaps, strict=True))
        found.append(([0 if gap else len(t) for t, gap in pairs], [t if gap else [] for t, gap in pairs]))
    return found


def check(found: Tokens, lengths: list[int], places: list[list[int]]) -> None:
    assert found.lengths.tolist() == lengths and found.lengths.dtype == found.offsets.dtype == torch.int32
    assert found.offsets.diff().tolist() == [len(p) for p in places] and found.offsets[0] == 0
    for row, place in zip(found.places, places, strict=True):
        assert row[: len(place)].tolist() == place


@pytest.mark.parametrize("rows", WAYS, indirect=True)
@pytest.mark.parametrize("sizes", [(6, 9), (5, 300), (1, 1), (3, 1000)])
def test_find(rows: type[CompactByTorch] | type[CompactByKernel], sizes: tuple[int, int]) -> None:
    mask, other = hidden(*sizes), hidden(sizes[0], 7, seed=1).flip(0)
    positions, none = sizes[1], torch.zeros(sizes[0], 1, 1, sizes[1], dtype=torch.bool)
    found, nothing = rows.find(mask, None, positions, None)
    assert nothing is None
    check(found, *expected([mask])[0])
    for ours, theirs in ((mask, other), (None, other), (mask, None)):
        found, keys = rows.find(ours, theirs, positions, 7)
        want = expected([none if ours is None else ours, torch.zeros_like(other) if theirs is None else theirs])
        assert keys is not None
        check(found, *want[0])
        check(keys, *want[1])


@pytest.mark.parametrize("rows", WAYS, indirect=True)
@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("sizes", [(6, 9), (5, 70), (2, 3)])
def test_together_and_back(
    rows: type[CompactByTorch] | type[CompactByKernel], sizes: tuple[int, int], sequence_first: bool
) -> None:
    """Of rows that lie in many ways, and to those in pieces."""
    mask, x = hidden(*sizes), torch.randn(*sizes, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    tokens, _ = rows.find(mask, None, sizes[1], None)
    (_, places) = expected([mask])[0]
    flat = torch.stack([x[n, p] for n, place in enumerate(places) for p in place] or [x[0, 0]])[: sum(map(len, places))]
    lying = x.transpose(0, 1).contiguous().transpose(0, 1) if sequence_first else x
    for given in (lying, torch.cat((lying, lying), -1)[..., :24], torch.cat((lying[..., :1], lying), -1)[..., 1:]):
        made = rows.together(given, tokens)
        assert made.shape == (sizes[0] * sizes[1], 24)
        assert torch.equal(made[: len(flat)], flat)
        assert not len(flat) or not made[len(flat) : len(flat) + 256].any()
    made = rows.together(lying, tokens)
    for pieces in (1, 3):
        whole = torch.full((*sizes, pieces, 16 + 24 // pieces), 7.0).bfloat16()
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1) if sequence_first else whole
        to = whole[..., 8 : 8 + 24 // pieces]
        rows.back(made, tokens, to)
        assert (whole[..., :8] == 7).all() and (whole[..., -8:] == 7).all()
        for n, place in enumerate(places):
            others = [p for p in range(sizes[1]) if p not in place]
            assert torch.equal(to[n, place].flatten(1), x[n, place]) and (to[n, others] == 7).all()


@needs_compiler
def test_launches(emulated: FakeDriver) -> None:
    """One to find tokens, one for each tensor, and no copy."""
    x = torch.randn(3, 8, 16).bfloat16()
    emulated.launches = emulated.copies = 0
    tokens, _ = CompactByKernel.find(hidden(3, 8), None, 8, None)
    CompactByKernel.back(CompactByKernel.together(x, tokens), tokens, x[:, :, None])
    assert (emulated.launches, emulated.copies) == (3, 0)


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
