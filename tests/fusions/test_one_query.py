"""Attention of one query a sample in plans for a GPU: where its kernels are taken, what they give, why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions.match import Match
from te_fuser.kernels import one_query
from tests.fake_cuda import Emulation, FakeDriver
from tests.fusions.decoding import MASK, attention, cache, inputs, planned, reasons
from tests.needs import needs_compiler

NAME = "one_query_attention"


def row(positions: int = 1, samples: int = 3, dtype: torch.dtype = torch.bfloat16, features: int = 128) -> torch.Tensor:
    return torch.randn(positions, samples, features, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_step_of_decoding() -> None:
    p = planned(row(features=192), inputs(), cache(), attention())
    assert [s.name for s in p.forward] == ["key_value_cache", NAME]
    (step,) = (s for s in p.forward if s.name == NAME)
    assert step.cost.launches == 2 and 2 * 41 * 3 * 32 * 2 <= step.cost.read < 4 * 41 * 3 * 32 * 2


def test_attention_to_another_sequence() -> None:
    given = {name: tensor for name, tensor in inputs().items() if name.endswith("cache")}
    assert [s.name for s in planned(row(), given, attention("none")).forward] == [NAME]


@pytest.mark.parametrize(
    ("x", "changed", "options", "reason"),
    [
        (row(2), {}, {}, "it takes one query of each sample, there are several"),
        (row(dtype=torch.float32), {"dtype": torch.float32}, {}, "it takes bfloat16 and float16, there is"),
        (row(), {}, {"mask": ops.AttentionMask(causal=True)}, "its query stands at the last key: take"),
        (row(), {}, {"scores": ops.AttentionScores(soft_cap=3.0)}, "it is not called for a soft cap"),
        (row(), {}, {"scores": ops.AttentionScores(sink="zero")}, "it is not called for a sink"),
        (row(), {"dtype": torch.float16}, {}, "queries are bfloat16, keys or values float16"),
    ],
)  # fmt: skip
def test_what_it_does_not_take(x: torch.Tensor, changed: Any, options: Any, reason: str) -> None:
    given = inputs(**changed)
    (found,) = reasons(planned(x, given, attention(**options)), NAME)
    assert found.startswith(reason)


def test_a_given_mask_packed_heads_and_a_gradient() -> None:
    given = {**inputs(), "attention_mask": torch.zeros(3, 1, 1, 41, dtype=torch.bool)}
    assert reasons(planned(row(), given, attention("given")), NAME) == {"it is not called for a boolean mask"}
    packed = planned(row(features=192), {}, attention("none", packing="interleaved"))
    assert reasons(packed, NAME) == {"it reads keys and values from two inputs, and queries from a third"}
    p = planned(row(), inputs(), attention(), grad=True)
    assert reasons(p, NAME) == {"it has no backward"}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, emulation: Emulation) -> Iterator[FakeDriver]:
    """Plans take the kernels, and an emulated driver runs them."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    monkeypatch.setattr(one_query, "_room", lambda device, heads: 12)
    with emulation.in_plans():
        yield driver


@needs_compiler
@pytest.mark.parametrize("window", [None, (9, 0)])
@torch.no_grad()
def test_values_in_plans(window: Any, played: FakeDriver) -> None:
    mask = ops.AttentionMask(**MASK, window=window)
    model = te_fuser.Sequential(cache(), attention(mask), kernels="generated")
    x, ours = row(features=192), inputs()
    exact = {name: t.double() if t.is_floating_point() else t for name, t in ours.items()}
    want = model.reference(x.double(), **exact)
    plain = model.reference(x, **{name: t.clone() for name, t in ours.items()})
    assert [s.name for s in model.plan(x, **ours).forward] == ["key_value_cache", NAME]
    allowed = 2 * (plain.double() - want).abs().max()
    assert (model(x, **ours).double() - want).abs().max() <= allowed
    for name in ("key_cache", "value_cache"):
        assert torch.equal(ours[name][:-1].double(), exact[name][:-1])
