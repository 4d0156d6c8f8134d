"""What a call says beyond what there is: no provider that is told of it gives numbers that are wrong in silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fuser import ops
from te_fuser.ops.attention.mask import AttentionMask
from tests.kernels.attention import structured
from tests.kernels.attention.cases import BY_NAME
from tests.kernels.attention.providers.test_flash_structure import Operators
from tests.kernels.packages import fake_cudnn, fake_flash_attn

TOLD = ("cuda_flash", "cuda_flash_attn_4", "cuda_cudnn_frontend")


class Lenient(Operators):
    """The real ones compute something for sequences that are longer than they are told."""

    def _checked(self, *given: object) -> tuple[object, object]:
        return given[-2:]  # type: ignore[return-value]


@pytest.fixture(params=TOLD)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Each, with what it calls in place."""
    found, operators = BY_NAME[request.param], Lenient()
    monkeypatch.setattr(BY_NAME["cuda_flash"], "_forward_by_structure", operators.forward)
    monkeypatch.setattr(BY_NAME["cuda_flash"], "_backward_by_structure", operators.backward)
    for fake in (fake_flash_attn, fake_cudnn):
        fake.in_place(monkeypatch)
    yield found
    for fake in (fake_flash_attn, fake_cudnn):
        fake.forget()


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
def test_lengths_beyond_the_positions(provider: object, length: int) -> None:
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(lengths="lengths"), layout="batch_first").double()
    compared(provider, op, {"lengths": [5, length, 7]}, {"lengths": [5, 7, 7]})


def test_a_sequence_longer_than_the_longest(provider: object) -> None:
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(offsets="offsets", longest=4), layout="tokens").double()
    unbounded = ops.DotProductAttention(4, 8, mask=AttentionMask(offsets="offsets"), layout="tokens").double()
    compared(provider, op, {"offsets": [0, 4, 9, 11]}, {"offsets": [0, 4, 9, 11]}, unbounded)


@pytest.mark.parametrize("end", [12, 2**30])
def test_offsets_beyond_the_tokens(provider: object, end: int) -> None:
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    op = ops.DotProductAttention(4, 8, mask=AttentionMask(causal=True, offsets="offsets"), layout="tokens").double()
    compared(provider, op, {"offsets": [0, 6, end]}, {"offsets": [0, 6, 11]})


def test_lengths_beyond_the_room_of_a_sequence(provider: object) -> None:
    """The next sequence is right."""
    if provider is BY_NAME["cuda_cudnn_frontend"]:
        pytest.skip("it is told no offsets")
    mask = AttentionMask(causal=True, offsets="offsets", lengths="lengths")
    op = ops.DotProductAttention(4, 8, mask=mask, layout="tokens").double()
    cu = {"offsets": [0, 4, 7, 11]}
    compared(provider, op, cu | {"lengths": [3, 4, 4]}, cu | {"lengths": [3, 3, 4]})
