"""Tokens that are found, moved together and back: by PyTorch, by kernels run on the CPU; and compiled for GPUs."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.attention.padding import CompactByKernel, CompactByTorch, Tokens
from tests.fake_cuda import FakeDriver
from tests.kernels.attention.emulated import row_kernels
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
