"""Structure and padding that providers are told: values, gradients, rows blanked, moved, or NaN of a wrong call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.kernels.attention import AttentionProblem, lengths, padding
from te_fuser.kernels.attention.lengths import BlankRows, Blanks, Side, blank_by_kernel, blank_by_torch
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import Spec
from tests.fake_cuda import FakeDriver
from tests.kernels.attention import structured, told
from tests.kernels.attention.blanked import CASES as BLANKED
from tests.kernels.attention.blanked import blanked, numbers, rows_for
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.padded import KINDS, LAYOUTS, MASKS, ONE, SAME, TWO, B, case
from tests.kernels.attention.told import TOLD
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

DTYPES = (torch.bfloat16, torch.float16)
# Kernels that blank rows, find tokens and move them.
emulated = emulating(
    lambda: [padding.FindTokens(), *(kind(dtype) for kind in (BlankRows, padding.MoveRows) for dtype in DTYPES)]
)


@pytest.mark.parametrize("name", BLANKED)
def test_by_torch(name: str) -> None:
    x = rows_for(BLANKED[name], torch.float64)
    want = blanked(x, BLANKED[name])
    lengths.blank_by_torch(x, BLANKED[name])
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLANKED)
def test_by_the_kernel(name: str, dtype: torch.dtype, emulated: FakeDriver) -> None:
    """In one launch."""
    x = rows_for(BLANKED[name], dtype)
    want = blanked(x, BLANKED[name])
    emulated.launches = emulated.copies = 0
    lengths.blank_by_kernel(x, BLANKED[name])
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)
    assert (emulated.launches, emulated.copies) == (1, 0)


@needs_compiler
def test_nothing_to_do(emulated: FakeDriver) -> None:
    emulated.launches = 0
    for x, blanks in (
        (torch.ones(2, 3, 8, dtype=torch.bfloat16), Blanks(Side(3))),
        (torch.ones(0, 3, 8, dtype=torch.bfloat16), Blanks(Side(3, lengths=numbers()))),
    ):
        for way in (lengths.blank_by_kernel, lengths.blank_by_torch):
            way(x, blanks)
            assert (x == 1).all()
    assert emulated.launches == 0


def test_dtypes() -> None:
    assert lengths.why_not_blanked(torch.bfloat16) is None
    assert lengths.why_not_blanked(torch.float32) == (
        "the kernel that blanks rows takes bfloat16, float16, there is torch.float32"
    )


SCORES: tuple[dict[str, Any], ...] = ({}, {"soft_cap": 0.7}, {"sink": "zero"}, {"sink": "learned", "soft_cap": 2.0})
FLASH, FOUR, FRONT = (BY_NAME[name] for name in TOLD)
# Provider, how far values may be off, and what it is told.
CASES: dict[str, tuple[Any, float, ops.DotProductAttention, structured.Tensors]] = {
    **{f"flash {n}": (FLASH, 1e-10, op, t) for n, op, t in structured.cases() if op.settings().mask.beyond},
    **{
        f"flash, longer {n}": (FLASH, 1e-10, op, t)
        for n, op, t in structured.cases(times=3)
        if "no longer than" in n  # whose bounds grow with sequences
    },
    **{
        f"flash_attn_4 {n} {scores}": (FOUR, 1e-6, op, t)
        for scores in SCORES
        for n, op, t in structured.cases(**scores)
    },
    **{f"front end {n}": (FRONT, 1e-10, op, t) for n, op, t in structured.cases() if op.layout != "tokens"},
}


@pytest.fixture
def called() -> Iterator[dict[str, Any]]:
    """Fakes of the functions that each provider calls, in place."""
    with told.in_place() as found:
        yield found


def refused_by_the_front_end(op: ops.DotProductAttention, tensors: structured.Tensors, name: str) -> bool:
    """True if a plan for an H200 has a reason against it, which is the right one."""
    x, key = tensors["input"], tensors.get("key")
    keys = None if key is None else op.packed.lengths(key.shape)[1]
    spec = Spec(tuple(x.shape), torch.bfloat16, torch.device("cuda"))
    why = FRONT.reason_not(AttentionProblem.of(op.settings(), spec, (9, 0), True, keys))
    if why is not None and "bounds later positions" in why:
        assert op.settings().mask.sides[1] not in (None, 0), why
    elif why is not None:
        assert "apart" in name and why.startswith("queries and keys that are apart may differ"), why
        assert not name.endswith((": none", "of queries", "window")) or tensors["key"].shape != tensors["input"].shape
    return why is not None


@pytest.mark.parametrize("name", CASES)
def test_provider_told_the_structure_is_as_the_op(name: str, called: dict[str, Any]) -> None:
    """As a package computes it, and launched again: by addresses, and by tensors."""
    provider, tolerance, op, tensors = CASES[name]
    if provider is FRONT and refused_by_the_front_end(op, tensors, name):
        return
    if op.sink is not None:
        op.sink.data.copy_(torch.linspace(-1, 1, op.heads))
    dy = structured.output_gradient(op, tensors)
    want = structured.by_op(op, tensors, dy)
    for by_addresses in (True, False):
        called[FRONT.name].takes_addresses = by_addresses
        ours = structured.by_provider(provider, op, tensors, dy)
        assert ours.keys() == want.keys()
        for key, tensor in want.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=tolerance, check_dtype=key != "sink", msg=key)
    if provider is FRONT:
        assert len(called[FRONT.name].graphs) == 2
    else:
        assert called[provider.name].calls


def test_flash_attn_4_stores_gradients_where_they_lie(called: dict[str, Any]) -> None:
    op = ops.DotProductAttention(4, 8, mask=ops.AttentionMask(causal=True, offsets="cu"), layout="tokens")
    tensors = structured.inputs_for(op, torch.float64)
    found = structured.by_provider(FOUR, op, tensors, structured.output_gradient(op, tensors))
    (_, ahead), (_, back) = called[FOUR.name].calls  # how many tokens there are is no part of a form
    inside = {"q": "input", "k": "input", "v": "input", "out": "output", "dq": "input", "dk": "input", "dv": "input"}
    for name, tensor in (ahead | back).items():
        if name in inside:
            whole = tensors["input"] if name in "qkv" else found[inside[name]]
            assert tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), name


def test_flash_attn_4_of_no_sequence_is_zeros(called: dict[str, Any]) -> None:
    op = ops.DotProductAttention(4, 8, mask=ops.AttentionMask(causal=True, offsets="cu"), layout="tokens")
    tensors = structured.inputs_for(op, torch.float64) | {"offsets": torch.zeros(1, dtype=torch.int64)}
    found = structured.by_provider(FOUR, op, tensors, structured.output_gradient(op, tensors))
    assert (found["output"] == 0).all() and (found["input"] == 0).all() and not called[FOUR.name].calls


# ------------------------------------------------------------------------------------------------------ wrong calls


def compared(
    provider: object,
    op: ops.DotProductAttention,
    wrong: dict[str, list[int]],
    right: dict[str, list[int]],
    other: ops.DotProductAttention,
) -> None:
    """By `wrong` numbers all is as the `other` op has it by `right` ones, but NaN in sequence 1."""
    tensors = structured.inputs_for(op, torch.float64)
    dy = structured.output_gradient(op, tensors)
    said, meant = ({**tensors, **{n: torch.tensor(c) for n, c in given.items()}} for given in (wrong, right))
    ours, want = structured.by_provider(provider, op, said, dy), structured.by_op(other, meant, dy)
    for name, tensor in ours.items():
        bad = torch.zeros(tensor.shape[:-1], dtype=torch.bool)
        if "offsets" in right:
            bad[right["offsets"][1] : right["offsets"][2]] = True
        else:
            bad[1] = True
        assert tensor[bad].isnan().all(), name
        torch.testing.assert_close(tensor[~bad], want[name][~bad], rtol=0, atol=1e-6, msg=name)


Numbers = dict[str, list[int]]
ROOM: Numbers = {"offsets": [0, 4, 7, 11]}
CAUSAL: dict[str, Any] = {"causal": True, "offsets": "offsets"}
# The mask, wrong numbers, right ones, and what the right ones' mask is without.
WRONG: dict[str, tuple[dict[str, Any], Numbers, Numbers, tuple[str, ...]]] = {
    **{
        f"a length of {n}, of 7 positions": ({"lengths": "lengths"}, {"lengths": [5, n, 7]}, {"lengths": [5, 7, 7]}, ())
        for n in (8, 1000, -1)
    },
    "longer than the longest": (
        {"offsets": "offsets", "longest": 4}, {"offsets": [0, 4, 9, 11]}, {"offsets": [0, 4, 9, 11]}, ("longest",)
    ),
    **{
        f"an end at {n}, of 11 tokens": (CAUSAL, {"offsets": [0, 6, n]}, {"offsets": [0, 6, 11]}, ())
        for n in (12, 2**30)
    },
    "longer than its room, of which the next one is right": (
        {**CAUSAL, "lengths": "lengths"}, ROOM | {"lengths": [3, 4, 4]}, ROOM | {"lengths": [3, 3, 4]}, ()
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in TOLD for case in WRONG if name != FRONT.name or "offsets" not in WRONG[case][0]],
)
def test_numbers_that_cannot_be_give_nan(name: str, case: str) -> None:
    mask, wrong, right, without = WRONG[case]
    layout = "tokens" if "offsets" in mask else "batch_first"
    op, other = (
        ops.DotProductAttention(4, 8, mask=AttentionMask(**how), layout=layout).double()
        for how in (mask, {key: value for key, value in mask.items() if key not in without})
    )
    with told.in_place(told.Lenient):
        compared(BY_NAME[name], op, wrong, right, other)


WAYS = ["torch", pytest.param("kernel", marks=needs_compiler)]


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> type[padding.CompactByTorch] | type[padding.CompactByKernel]:
    """One of both ways."""
    if request.param == "torch":
        return padding.CompactByTorch
    request.getfixturevalue("emulated")
    return padding.CompactByKernel


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


def check(found: padding.Tokens, lengths: list[int], places: list[list[int]]) -> None:
    assert found.lengths.tolist() == lengths and found.lengths.dtype == found.offsets.dtype == torch.int32
    assert found.offsets.diff().tolist() == [len(p) for p in places] and found.offsets[0] == 0
    for row, place in zip(found.places, places, strict=True):
        assert row[: len(place)].tolist() == place


@pytest.mark.parametrize("rows", WAYS, indirect=True)
@pytest.mark.parametrize("sizes", [(6, 9), (5, 300), (1, 1), (3, 1000)])
def test_find(rows: type[padding.CompactByTorch] | type[padding.CompactByKernel], sizes: tuple[int, int]) -> None:
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
    rows: type[padding.CompactByTorch] | type[padding.CompactByKernel], sizes: tuple[int, int], sequence_first: bool
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
    tokens, _ = padding.CompactByKernel.find(hidden(3, 8), None, 8, None)
    padding.CompactByKernel.back(padding.CompactByKernel.together(x, tokens), tokens, x[:, :, None])
    assert (emulated.launches, emulated.copies) == (3, 0)


@pytest.fixture(params=["cuda_flash", "cuda_flash_attn_4"])
def provider(request: pytest.FixtureRequest) -> Iterator[padding.Padded]:
    """Each, with what it calls in place."""
    with told.in_place(all_rows=False):
        yield padding.Padded(BY_NAME[request.param], padding.CompactByTorch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients(provider: padding.Padded, name: str, layout: str, kind: str) -> None:
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
    provider = padding.Padded(BY_NAME["cuda_flash"], padding.CompactByTorch)
    op, tensors = case(name, layout, kind, dtype=torch.bfloat16)
    settings, dy = op.settings(), structured.output_gradient(op, tensors)
    found = []
    for way, blank in ((provider, blank_by_torch), (replace(provider, rows=padding.CompactByKernel), blank_by_kernel)):
        with told.in_place(all_rows=False):
            y, saved = way.forward(settings, tensors, blank)
            made = way.backward(settings, {**tensors, "output": y, **saved}, dy, blank)
        found.append({"output": y, **made})
    for key, want in found[0].items():
        assert torch.equal(found[1][key], want), key


def test_nothing_to_attend_to(provider: padding.Padded) -> None:
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
    reason = padding.why_not_moved(settings)
    assert reason is not None and words in reason and reason.startswith("padding by a boolean tensor is told by moving")


def test_which_providers_take_it() -> None:
    def reason(name: str, mask: AttentionMask, packing: str = "interleaved") -> str | None:
        op = ops.DotProductAttention(4, 64, mask=mask, packing=packing, layout="sequence_first")
        x = Spec((128, 4, op.packed.features), torch.bfloat16, torch.device("cuda"))
        keys = 128 if packing == "apart" else None
        return padding.reason_not(BY_NAME[name], AttentionProblem.of(op.settings(), x, (9, 0), True, keys))

    assert reason("cuda_flash", AttentionMask(**ONE)) is None
    assert reason("cuda_flash", AttentionMask(causal=True, **SAME), "apart") is None
    assert reason("cuda_flash", AttentionMask(**TWO), "apart") is None
    words = reason("cuda_cudnn_frontend", AttentionMask(**ONE))
    assert words == (
        "padding by a boolean tensor is told by moving tokens together, and it is not called for sequences one behind "
        "the other"
    )
