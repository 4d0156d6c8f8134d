"""The kernel for one query a sample, run on the CPU by an emulated driver, and compiled for the GPUs there are."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels import decode_attention
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.kernels.one_query_cases import CASES
from tests.needs import needs_compiler

CPU = torch.device("cpu")


emulated = emulating(lambda: (case.kernel for case in CASES.values()))


@needs_compiler
@pytest.mark.parametrize("room", [1, 40])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, room: int, emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in one part, and in several."""
    monkeypatch.setattr(decode_attention, "_room", lambda device, heads: room)
    assert CASES[name].complaint(CPU) is None


@needs_compiler
def test_what_is_behind_the_keys_is_not_read(emulated: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_room", lambda device, heads: 4)
    case = CASES["groups"]
    query, key, value = case.inputs(CPU)
    want = case.run(query, key, value)
    for t in (key, value):
        t[70:, 2] = torch.nan
        t[1:, 1] = torch.inf
    assert torch.equal(case.run(query, key, value), want)
    key[69, 2, :64] = torch.nan
    found = case.run(query, key, value)
    assert found[0, 2, :256].isnan().all() and torch.equal(found[0, 2, 256:], want[0, 2, 256:])


def test_heads_that_it_does_not_take() -> None:
    assert decode_attention.why_not_one_query(128, torch.bfloat16) is None
    assert "multiple of 8 features up to 256, these have 264" in str(
        decode_attention.why_not_one_query(264, torch.bfloat16)
    )
    assert "bfloat16 and float16, there is torch.float32" in str(decode_attention.why_not_one_query(64, torch.float32))
