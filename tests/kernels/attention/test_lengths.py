"""Providers that are told the structure: values and all gradients, and no wrong numbers in silence of a wrong call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.kernels.attention import AttentionProblem
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.base import Spec
from tests.kernels.attention import structured, told
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.told import TOLD

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
    """What each provider calls, in place."""
    with told.in_place() as found:
        yield found


def refused_by_the_front_end(op: ops.DotProductAttention, tensors: structured.Tensors, name: str) -> bool:
    """Whether a plan for an H200 has a reason against it, which is the right one."""
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


@pytest.fixture(params=TOLD)
def provider(request: pytest.FixtureRequest) -> Iterator[object]:
    """Each, with what it calls in place."""
    with told.in_place(told.Lenient):
        yield BY_NAME[request.param]


def compared(
    provider: object,
    op: ops.DotProductAttention,
    wrong: dict[str, list[int]],
    right: dict[str, list[int]],
    other: ops.DotProductAttention | None = None,
) -> None:
    """By `wrong` numbers all is as the op, or the `other`, has it by `right` ones, but NaN in sequence 1."""
    tensors = structured.inputs_for(op, torch.float64)
    dy = structured.output_gradient(op, tensors)
    said, meant = ({**tensors, **{n: torch.tensor(c) for n, c in given.items()}} for given in (wrong, right))
    ours, want = structured.by_provider(provider, op, said, dy), structured.by_op(other or op, meant, dy)
    for name, tensor in ours.items():
        bad = torch.zeros(tensor.shape[:-1], dtype=torch.bool)
        if "offsets" in right:
            bad[right["offsets"][1] : right["offsets"][2]] = True
        else:
            bad[1] = True
        assert tensor[bad].isnan().all(), name
        torch.testing.assert_close(tensor[~bad], want[name][~bad], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("length", [8, 1000, -1])
def test_lengths_beyond_the_positions_give_nan(provider: object, length: int) -> None:
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(lengths="lengths"), layout="batch_first").double()
    compared(provider, op, {"lengths": [5, length, 7]}, {"lengths": [5, 7, 7]})


def test_sequence_longer_than_the_longest_gives_nan(provider: object) -> None:
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(offsets="offsets", longest=4), layout="tokens").double()
    unbounded = ops.DotProductAttention(4, 8, mask=AttentionMask(offsets="offsets"), layout="tokens").double()
    compared(provider, op, {"offsets": [0, 4, 9, 11]}, {"offsets": [0, 4, 9, 11]}, unbounded)


@pytest.mark.parametrize("end", [12, 2**30])
def test_offsets_beyond_the_tokens_give_nan(provider: object, end: int) -> None:
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(causal=True, offsets="offsets"), layout="tokens").double()
    compared(provider, op, {"offsets": [0, 6, end]}, {"offsets": [0, 6, 11]})


def test_lengths_beyond_the_room_of_a_sequence_give_nan(provider: object) -> None:
    """The next sequence is right."""
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    mask = AttentionMask(causal=True, offsets="offsets", lengths="lengths")
    op = ops.DotProductAttention(4, 8, mask=mask, layout="tokens").double()
    cu = {"offsets": [0, 4, 7, 11]}
    compared(provider, op, cu | {"lengths": [3, 4, 4]}, cu | {"lengths": [3, 3, 4]})
