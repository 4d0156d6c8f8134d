"""What hides by structure in plans for an H200: which kernel is told of it, and why others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.kernels.attention.blank_rows import BlankRows
from te_fuser.kernels.attention.moved_rows import FindTokens, MoveRows
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4
from tests.kernels.packages import fake_flash_attn

FLASH, FLASH_4 = "attention_cuda_flash", "attention_cuda_flash_attn_4"
Mask = ops.AttentionMask
WINDOW, LENGTHS = Mask(causal=True, window=(1023, 0)), Mask(lengths="lengths")
OFFSETS = Mask(causal=True, offsets="cu")
BOTH = {"lengths": "lengths", "key_lengths": "lengths"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if it were there, for plans of a GPU that is not."""
    monkeypatch.setattr(flash_attn_4.PACKAGE, "version", lambda: fake_flash_attn.VERSION)
    monkeypatch.setattr(flash_attn_4, "unusable", lambda: None)


def plan(mask: Mask, rows: tuple[int, ...], keys: int | None = None, **options: Any) -> Plan:
    """Of an attention of heads with 128 features, the keys apart where there is a number of them."""
    apart = {"packing": "apart"} if keys else {}
    layout = "tokens" if mask.offsets else "batch_first"
    with torch.device("meta"):
        op = ops.DotProductAttention(32, 128, mask=mask, layout=layout, **{**apart, **options}).to(torch.bfloat16)
        x = torch.empty(*rows, op.packed.features, dtype=torch.bfloat16, requires_grad=True)
        inputs = {name: torch.empty(5 if "cu" in name else 4, dtype=torch.int32) for name in mask.names.values()}
        if keys:
            other = (*rows[:-1], keys, 32 * 128)
            inputs |= {n: torch.empty(other, dtype=torch.bfloat16, requires_grad=True) for n in ("key", "value")}
    return Sequential(op).plan(x, **inputs, device="h200")


def taken(p: Plan) -> list[str]:
    return [step.name for step in (*p.forward, *p.backward)]


def reason(p: Plan, name: str) -> str:
    return next(r.reason for r in p.refusals if r.name == name)


ROWS = {"window": (WINDOW, (1, 16384)), "lengths": (LENGTHS, (4, 2048)), "offsets": (OFFSETS, (8192,))}


@pytest.mark.parametrize("name", ROWS)
def test_pytorchs_flash_attention_is_told(name: str) -> None:
    assert taken(plan(*ROWS[name])) == [FLASH, FLASH]


@pytest.mark.parametrize("name", ROWS)
def test_flash_attention_4_where_it_is_installed(name: str, installed: None) -> None:
    assert taken(plan(*ROWS[name])) == [FLASH_4, FLASH_4]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_flash_attention_4_beside_the_front_end(
    name: str, causal: bool, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: "1.32")
    mask, rows = ROWS[name]
    p = plan(replace(mask, causal=causal), rows)
    assert taken(p) == [FLASH_4, FLASH_4]


def test_the_front_end_where_later_positions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_frontend.PACKAGE, "version", lambda: "1.32")
    front_end, words = "attention_cuda_cudnn_frontend", "bounds later positions without hiding all of them"
    for window in ((512, 512), (None, 512)):
        p = plan(Mask(window=window), (1, 16384))
        assert taken(p) == [FLASH, FLASH] and words in reason(p, front_end)
    for mask in (WINDOW, Mask(window=(512, 0)), Mask(window=(512, None))):
        assert taken(plan(mask, (1, 16384))) == [front_end, front_end], mask


@pytest.mark.parametrize("scores", [{"soft_cap": 30.0}, {"sink": "zero"}, {"sink": "learned"}])
def test_soft_caps_and_sinks(scores: dict[str, Any], installed: None) -> None:
    p = plan(Mask(causal=True), (4, 2048), scores=ops.AttentionScores(**scores))
    assert taken(p) == [FLASH_4, FLASH_4]
    words = "a soft cap" if "soft_cap" in scores else "a sink"
    assert reason(p, FLASH) == f"it is not called for {words}"


@pytest.mark.parametrize("name", [FLASH, FLASH_4])
def test_positions_are_counted_from_the_end(name: str, installed: None) -> None:
    words = "it counts positions from the last query and key, and there may be more of one: take corner='bottom_right'"
    causal, lower = {"causal": True}, {"causal": True, "corner": "bottom_right"}
    assert reason(plan(Mask(**causal, window=(5, 0)), (4, 2048), 1024), name) == words
    assert reason(plan(Mask(**causal, lengths="lengths"), (4, 2048), 2048), name) == words
    assert reason(plan(Mask(**causal, lengths="one", key_lengths="other"), (4, 2048), 2048), name) == words
    for mask, keys in (
        (Mask(**lower), 1024),
        (Mask(**causal, **BOTH), 2048),
        (Mask(**lower, key_lengths="key_lengths"), 2048),
        (Mask(key_lengths="key_lengths"), 1024),
        (Mask(**causal, window=(5, 0)), 2048),
    ):
        refused = [r.reason for r in plan(mask, (4, 2048), keys).refusals if r.name == name]
        assert words not in refused, mask


def test_keys_with_offsets_of_their_own(installed: None) -> None:
    p = plan(Mask(offsets="cu", key_offsets="cu_keys"), (8192,), 4096)
    assert taken(p) == [FLASH, FLASH]
    assert reason(p, FLASH_4) == (
        "sequences of keys have offsets or lengths of their own, and one without keys would read another's"
    )


def test_the_reasons_of_others() -> None:
    p = plan(OFFSETS, (8192,))
    assert reason(p, "attention_cuda_cudnn_frontend") == "it is not called for sequences one behind the other"
    given = Mask(causal=True, window=(7, 0), given="mask")
    with torch.device("meta"):
        op = ops.DotProductAttention(32, 128, mask=given, layout="batch_first").to(torch.bfloat16)
        x = torch.empty(4, 2048, op.packed.features, dtype=torch.bfloat16, requires_grad=True)
        p = Sequential(op).plan(x, mask=torch.empty(4, 1, 2048, 2048, dtype=torch.bool), device="h200")
    assert reason(p, FLASH) == "it takes no mask tensor, only none or causal"
    p = plan(WINDOW, (1, 16384), scores=ops.AttentionScores(alibi=True))
    assert reason(p, FLASH) == "it is not called for ALiBi"


def padded(mask: Mask, positions: int = 2048, samples: int = 4, **options: Any) -> Plan:
    """Of padding by a boolean tensor."""
    with torch.device("meta"):
        op = ops.DotProductAttention(32, 128, mask=mask, layout="batch_first", **options).to(torch.bfloat16)
        x = torch.empty(samples, positions, op.packed.features, dtype=torch.bfloat16, requires_grad=True)
        pad = torch.empty(samples, 1, 1, positions, dtype=torch.bool)
    return Sequential(op).plan(x, pad=pad, device="h200")


@pytest.mark.parametrize("causal", [True, False])
def test_padding_by_a_boolean_tensor_is_told(causal: bool) -> None:
    p = padded(Mask(causal=causal, padding="pad"))
    assert taken(p) == [FLASH, FLASH]
    kernels = [BlankRows(torch.bfloat16), FindTokens(), MoveRows(torch.bfloat16)]
    assert [k for k in p.written if k.name in ("blank_rows", "find_tokens", "move_rows")] == kernels


def test_flash_attention_4_is_told_padding(installed: None) -> None:
    assert taken(padded(Mask(padding="pad"))) == [FLASH_4, FLASH_4]


def test_short_samples_take_a_bias() -> None:
    """There a second call costs more than it saves."""
    assert FLASH not in taken(padded(Mask(padding="pad"), positions=128))


def test_where_positions_count_padding_is_a_bias() -> None:
    p = padded(Mask(window=(5, 0), padding="pad"))
    assert FLASH not in taken(p)
    assert reason(p, FLASH) == (
        "padding by a boolean tensor is told by moving tokens together, which changes how far apart they are, and a "
        "window or a corner counts that"
    )
