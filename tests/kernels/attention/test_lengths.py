"""Structure that providers are told: values and all gradients, rows that become zeros or NaN, also of a wrong call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.kernels.attention import AttentionProblem, lengths
from te_fuser.kernels.attention.lengths import Blanks, Side
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import Spec
from tests.fake_cuda import FakeDriver
from tests.kernels.attention import structured, told
from tests.kernels.attention.blanked import CASES as BLANKED
from tests.kernels.attention.blanked import blanked, numbers, rows_for
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.emulated import DTYPES, row_kernels
from tests.kernels.attention.told import TOLD
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

emulated = emulating(row_kernels)


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
