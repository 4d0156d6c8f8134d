"""Gradients of which each rank has a term: added up once, by lists or by the engine that trains, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.fuser.steps import function_tasks
from te_fuser.parallel import ShardingRule, leave_sums_to_engine
from te_fuser.sharding.rules import RowRule
from tests.parallel.cutting import EXACT, assert_as_whole, own, part, run
from tests.parallel.models import BY_TORCH
from tests.parallel.ranks import WORLD, on_ranks
from tests.parallel.test_presets import CASES, B, F, S, ends, inputs, pair
from tests.twins import sequential, tensor

LAYER = "TransformerLayer"
TERMS = {
    "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.proj.bias",
    "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.layer_norm_bias",
    "layernorm_mlp.fc2_bias",
}


@pytest.mark.parametrize("way", ["call", "reference"])
@on_ranks
def test_left_to_the_engine(way: str) -> None:
    """Marked parameters have their terms, whose sum is the gradient; all others are as before. So are copies."""
    case = CASES[LAYER]
    cut, whole = pair(case, True)
    assert not any(getattr(p, "sequence_parallel", False) for p in cut.parameters())
    assert set(leave_sums_to_engine(cut)) == TERMS
    twin = copy.deepcopy(cut).to(torch.float32).to(torch.float64)
    for model in (cut, twin):
        assert {name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)} == TERMS
    dy = tensor(S, B, F, grad=False, seed=9)
    _, want = run(whole, inputs(case), lambda _: dy)
    called = cut if way == "call" else mock.Mock(side_effect=cut.reference, zero_grad=cut.zero_grad)
    called.named_parameters = cut.named_parameters
    _, got = run(called, {"x": part(inputs(case)["x"], 0)}, lambda _: part(dy, 0))
    for name, gradient in got.items():
        if name in TERMS:
            assert not torch.allclose(gradient, want[name])
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, own(want[name], gradient), **EXACT)


@on_ranks
def test_norms_of_heads_are_terms_without_a_cut_sequence() -> None:
    cut, _ = pair(CASES["MultiheadAttention RMSNorm"], False)
    assert set(leave_sums_to_engine(cut)) == {"q_norm.weight", "k_norm.weight"}
    assert leave_sums_to_engine(pair(CASES[LAYER], False)[0]) == []


@on_ranks
def test_one_collective_for_all_of_a_segment() -> None:
    calls: list[int] = []

    def counted(gradients: Any, group: Any) -> Any:
        calls.append(len(gradients))
        return start_sums(gradients, group)

    start_sums = function_tasks.start_sums
    cut, whole = pair(CASES[LAYER], True)
    with mock.patch.object(function_tasks, "start_sums", counted):
        assert_as_whole(cut, whole, inputs(CASES[LAYER]), {}, ends(CASES[LAYER], 0))
    assert calls == [len(TERMS)]
    shown = str(cut.explain(part(inputs(CASES[LAYER])["x"], 0), details=True))
    assert "fc2_bias are added up over 2 ranks" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["Linear row", "LayerNormMLP", "MultiheadAttention"])
@on_ranks
def test_a_bias_that_is_returned(name: str) -> None:
    """A caller that adds it to rows that ranks cut gets the sum of the terms, too."""
    case = CASES[name]
    cut, whole = pair(case, True, return_bias=True)

    class Added(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, bias = self.inner(x)
            return y + bias  # type: ignore[no-any-return]

    assert_as_whole(Added(cut), Added(whole), inputs(case), case.blocks, ends(case, 0))
    left = leave_sums_to_engine(Added(cut))
    assert any(found.endswith("bias") and "layer_norm" not in found for found in left)


class Micro(torch.nn.Module):
    """Micro-batches, one after the other."""

    def __init__(self, layer: torch.nn.Module, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(B // 2, 1)
        made = [self.layer(x) if self.call is None else self.call(self.layer, x) for x in parts]
        return torch.cat(made, 1)


class Twice(torch.nn.Module):
    """One layer, called twice."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))  # type: ignore[no-any-return]


AROUND: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "micro-batches": Micro,
    "checkpoint": lambda layer: Micro(layer, te_fuser.checkpoint),
    "checkpoint of torch": lambda layer: Micro(layer, BY_TORCH),
    "twice": Twice,
    "a list": lambda layer: te_fuser.Sequential(layer, kernels="reference"),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("around", AROUND)
@on_ranks
def test_called_in_other_ways(around: str, sequence_parallel: bool) -> None:
    case = CASES["TransformerLayer main_grad" if around == "micro-batches" else LAYER]
    cut, whole = pair(case, sequence_parallel)
    wrap = AROUND[around]
    assert_as_whole(wrap(cut), wrap(whole), inputs(case), case.blocks, ends(case, 0 if sequence_parallel else None))


@pytest.mark.parametrize("rule", [RowRule, ShardingRule])
@on_ranks
def test_a_sum_left_out_is_seen(rule: type) -> None:
    """Comparisons fail without the sum: of norms and biases, and of norms of heads."""
    rows = rule is RowRule
    case = CASES[LAYER if rows else "MultiheadAttention RMSNorm"]
    cut, whole = pair(case, rows)
    with mock.patch.object(rule, "partial_gradients", lambda *_: ()), pytest.raises(AssertionError, match="not close"):
        assert_as_whole(cut, whole, inputs(case), case.blocks, ends(case, 0 if rows else None))


@on_ranks
def test_a_whole_weight_beside_cut_rows_and_main_grad() -> None:
    """Its terms would be added to those of earlier calls: refused, unless the engine adds up main_grad."""
    group = ops.Group.of("a test", dist.group.WORLD)
    product = ops.MatMul(F, F, accumulate_into_main_grad=True)
    product.group, product.sequence_parallel = group, True
    model, x = sequential(product), tensor(S // WORLD, B, F)
    weight = model[0].weight
    weight.main_grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match=r"gradient goes to main_grad: call te_fuser.parallel.leave_sums_to_engine"):
        model(x)
    assert leave_sums_to_engine(model) == ["0.weight"]
    model(x).sum().backward()
    torch.testing.assert_close(weight.main_grad, x.detach().sum((0, 1)).expand(F, F), **EXACT)


@on_ranks
def test_verify_where_gradients_alone_are_added_up() -> None:
    group = ops.Group.of("a test", dist.group.WORLD)
    norm = ops.LayerNorm(F)
    norm.group, norm.sequence_parallel = group, True
    for model in (sequential(norm), pair(CASES["LayerNormMLP"], True)[0]):
        assert te_fuser.verify(model, tensor(S // WORLD, B, F)).passed
