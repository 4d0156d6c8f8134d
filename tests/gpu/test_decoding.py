"""The kernels of a decoding step on a GPU: the caches' and attention of one query, alone and in plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from tests.gpu.packing_providers import nothing_waits
from tests.kernels.test_decode_attention import CASES, KERNELS, Case, check_caches

GPU = torch.device("cuda", 0)
LONG = {
    "a long cache": Case(128, kv_heads=8, per_group=4, samples=2, keys=5000, key_lengths=(5000, 4097)),
    "many samples": Case(64, kv_heads=4, per_group=2, samples=70, keys=300, dtype=torch.float16),
    "heads of two turns": Case(128, kv_heads=2, per_group=16, samples=2, keys=900, sequence_first=False),
}


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_one_query(name: str) -> None:
    case = {**CASES, **LONG}[name]
    assert case.complaint(GPU) is None
    given = case.inputs(GPU)
    first = case.run(*given)
    assert all(torch.equal(case.run(*given).nan_to_num(), first.nan_to_num()) for _ in range(3))


@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_caches(name: str, sequence_first: bool) -> None:
    check_caches(name, sequence_first, GPU)


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@torch.no_grad()
def test_in_a_plan(layout: str) -> None:
    """Steps of a list that writes its keys and values, some samples of the caches alone, and one that begins later."""
    mask = ops.AttentionMask(
        causal=True, corner="bottom_right", lengths="counts", key_lengths="filled", window=(20, None)
    )
    apart = ops.Apart("key_cache", "value_cache")
    model = te_fuser.Sequential(
        ops.KeyValueCache(64, heads=8, kv_heads=2, layout=layout, packing="blocked"),
        ops.DotProductAttention(8, 64, kv_heads=2, mask=mask, layout=layout, packing=apart),
    )
    batch = int(layout == "sequence_first")
    rng = torch.Generator(GPU).manual_seed(0)
    shape = (41, 4, 128) if batch else (4, 41, 128)
    ours = [torch.zeros(shape, dtype=torch.bfloat16, device=GPU).narrow(batch, 0, 3) for _ in range(2)]
    theirs = [t.clone() for t in ours]
    for at in range(36):
        x = torch.randn((1, 3, 768) if batch else (3, 1, 768), device=GPU, generator=rng).bfloat16()
        starts = torch.tensor([at, at + 4, max(at - 9, 0)], device=GPU)
        counts = torch.tensor([1, 1, int(at >= 9)], device=GPU)
        given: dict[str, Any] = {"starts": starts, "counts": counts, "filled": starts + counts}
        y = model(x, key_cache=ours[0], value_cache=ours[1], **given)
        wide = [t.double() for t in theirs]
        exact = model.reference(x.double(), key_cache=wide[0], value_cache=wide[1], **given)
        for cache, after in zip(theirs, wide, strict=True):
            cache.copy_(after)
        torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
    found = [s.name for s in model.plan(x, key_cache=ours[0], value_cache=ours[1], **given).forward]
    assert found == ["key_value_cache", "one_query_attention"]


OWN = ("stretch", "key_value_cache", "one_query_attention")


def attention_and_text() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A MultiheadAttention in bfloat16, x of 40 positions, and its output in float64."""
    torch.manual_seed(0)
    made = te_fuser.MultiheadAttention(
        256, 4, attention_dropout=0.0, layer_number=1, params_dtype=torch.bfloat16, device=GPU
    ).eval()
    x = torch.randn(40, 2, 256, device=GPU).bfloat16()
    return made, x, copy.deepcopy(made).double().reference(x.double())


def assert_close(y: torch.Tensor, want: torch.Tensor) -> None:
    assert y.isfinite().all()
    torch.testing.assert_close(y.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("end", [te_fuser.InferenceParams.reset, lambda params: None], ids=["reset", "not named"])
@pytest.mark.parametrize("provider", ["cuda_flash", "cuda_cudnn", "cuda_efficient", ""])
@torch.no_grad()
def test_nan_of_a_sequence_reaches_no_later_one(provider: str, end: Callable[[Any], None]) -> None:
    """By each provider that takes prompts over caches, then token by token; padding of prompts holds NaN, too."""
    made, x, want = attention_and_text()
    broken, params = x.clone(), te_fuser.InferenceParams(2, 64)
    broken[5:, 0] = broken[9:, 1] = torch.nan
    with fusions.only(*OWN, *([f"attention_{provider}"] if provider else [])):
        params.pre_step({"broken": 40, "short": 9})
        assert_close(made(broken, inference_params=params)[:9, 1], want[:9, 1])
        end(params)
        params.pre_step({"new": 24, "later": 9})
        padded = torch.stack((x[:24, 0], broken[:24, 1]), 1)
        y = made(padded, inference_params=params)
        plan = made.plan(padded, inference_params=params)
        assert [s.name for s in plan.forward if s.name.startswith("attention")] == [f"attention_{provider}"] * bool(
            provider
        )
        assert_close(y[:, 0], want[:24, 0])
        assert_close(y[:9, 1], want[:9, 1])
        for at in range(3):
            params.pre_step({"new": 1, "later": 1})
            y = made(torch.stack((x[24 + at, 0], x[9 + at, 1]))[None], inference_params=params)
            assert_close(y[0], torch.stack((want[24 + at, 0], want[9 + at, 1])))


@torch.no_grad()
def test_nan_in_a_captured_step_reaches_no_later_sequence() -> None:
    made, x, want = attention_and_text()
    params, token = te_fuser.InferenceParams(2, 64), x[:1].clone()
    params.pre_step({0: 1, 1: 1})
    made(token, inference_params=params)
    params.pre_step({0: 1, 1: 1})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = made(token, inference_params=params)
    for value in (torch.nan, torch.inf, None):
        params.reset()
        for at in range(12):
            params.pre_step({0: 1, 1: 1})
            token.copy_(x[at : at + 1] if value is None else torch.full_like(token, value))
            graph.replay()
            if value is None:
                assert_close(y, want[at : at + 1])


@torch.no_grad()
def test_nothing_waits_for_the_device_where_sequences_end() -> None:
    made, x, _ = attention_and_text()
    params = te_fuser.InferenceParams(2, 64)
    for step in ({"a": 1, "b": 1}, {"b": 1}, {"b": 1, "c": 1}):
        params.pre_step(step)
        made(x[:1, : len(step)], inference_params=params)
    with nothing_waits():
        params.pre_step({"c": 1, "d": 1})  # one has ended, one moves
        made(x[:1], inference_params=params)
        params.reset()
        params.pre_step({"e": 1, "f": 1})
        made(x[:1], inference_params=params)
